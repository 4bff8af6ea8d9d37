"""Which programs open a folder, and which kernels they choose: questions to the tables.

`plan`, `inspect`, report and model card ask here. A folder has traits that some readers refuse.
Traits belong to formats and layouts; docs/models.md has the engines' answers for model families.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.core.quantized_tensor import Scheme
from quantkit.core.threads import grouped
from quantkit.engines.joined import fused_groups, is_expert
from quantkit.engines.tables import (
    CHAT_PROMPT,
    ENGINES,
    GPUS,
    PROMPT,
    TEXT_PROMPT,
    UNTRIED,
    VLLM,
    Engine,
    Reader,
)
from quantkit.errors import Setting, Words
from quantkit.layouts.schemes import is_embedding, is_head
from quantkit.models.families import (
    AUTO_CLASSES,
    DENSE_HEADS_IN_SGLANG,
    EMBEDDINGS_IN_VLLM,
    HEADS_IN_VLLM,
    OTHER_INPUTS,
    REFUSED_BY_VLLM,
)

CAUSAL = AUTO_CLASSES[False][0]


@dataclass(frozen=True)
class Folder:
    """The facts of a quantized folder on which its readers depend.

    `linears` has the scheme and the stored shape `[n, k]` of each quantized linear. `dense` names
    the other linears, or has patterns `re:...`. `padded` tells whether weights are filled up with
    zeros. `config` is config.json. `is_half` tells whether the model is stored in float16, and
    `tied` whether the embeddings are its head.
    """

    layout: str
    linears: Mapping[str, tuple[Scheme, tuple[int, int]]]
    dense: Collection[str] = ()
    padded: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    is_half: bool = True
    tied: bool = False

    @property
    def family(self) -> str:
        """The model type."""
        return str(self.config.get("model_type"))

    @property
    def has_own_code(self) -> bool:
        """True if code beside the weights defines the model, and none of transformers."""
        if "auto_map" not in self.config:
            return False
        from transformers import CONFIG_MAPPING

        return self.family not in CONFIG_MAPPING

    @property
    def embeddings(self) -> list[Scheme]:
        """The schemes of packed embeddings."""
        return [scheme for module, (scheme, _) in self.linears.items() if is_embedding(module)]

    @property
    def has_packed_head(self) -> bool:
        """True if an output head has codes of its own."""
        return any(map(is_head, self.linears))

    @property
    def schemes(self) -> set[Scheme]:
        """The different schemes."""
        return {scheme for scheme, _ in self.linears.values()}

    @property
    def mixed_groups(self) -> list[tuple[str, set[str]]]:
        """Groups of linears that engines join although their treatments differ: members and
        treatments.
        """
        found = []
        for joined, members in fused_groups({**self.linears, **dict.fromkeys(self.dense)}).items():
            labels = {
                self.linears[member][0].label if member in self.linears else "dense"
                for member in members
            }
            if len(labels) > 1:
                parent = joined.rpartition(".")[0]
                names = ", ".join(m.removeprefix(f"{parent}.") for m in members)
                expert = is_expert(members[0])
                found.append((f"{joined}: its linears" if expert else f"{parent}: {names}", labels))
        return found


@dataclass(frozen=True)
class Trait:
    """A property of a folder that some readers refuse: in words, how to avoid it, and its test.

    If it `is_unknown`, they were not asked about it.
    """

    words: str
    way_out: str
    holds: Callable[[Folder], bool]
    is_unknown: bool = False


def _part_of_a_name(folder: Folder) -> bool:
    names = "\n".join(folder.linears)
    return any(module in names for module in folder.dense)


DENSE_HEAD = Words("leave it dense: drop", Setting("head"))
DENSE_EMBEDDINGS = Words("leave them dense: drop", Setting("embeddings"))
#: Name -> trait. A trait belongs to the format or the layout; docs/models.md has the traits of
#: model families.
TRAITS = {
    "asymmetric": Trait(
        "zero points (asymmetric weights)",
        Words(
            "quantize with",
            Setting("asym", False),
            ", or use",
            Setting("layout", "compressed-tensors", "awq"),
        ),
        lambda f: any(not s.symmetric for s in f.schemes),
    ),
    "zeros": Trait(
        "zero points, as long as weights stay compressed",
        "load it with CompressedTensorsConfig(dequantize=True)",
        lambda f: any(not s.symmetric for s in f.schemes),
    ),
    "decoded whole": Trait(
        "weights that transformers does not keep compressed",
        "load it with CompressedTensorsConfig(dequantize=True)",
        lambda f: any(not s.symmetric for s in f.schemes) or bool(f.embeddings),
    ),
    "zeros of other widths": Trait(
        "zero points of other widths than 4 and 8 bits, which vLLM 0.26.0 refuses and 0.33.0 reads",
        Words("quantize with", Setting("asym", False)),
        lambda f: any(not s.symmetric and s.format.bits not in (4, 8) for s in f.schemes),
    ),
    "zeros of experts": Trait(
        "experts with zero points, which transformers' experts do not decode",
        Words("quantize with", Setting("asym", False), ", or use", Setting("layout", "awq")),
        lambda f: any(
            is_expert(module) and not scheme.symmetric for module, (scheme, _) in f.linears.items()
        ),
    ),
    "one of several": Trait(
        "several schemes, all of which its dequantizing decodes as the first",
        Words("quantize all linears in one scheme, or none with", Setting("asym", True)),
        lambda f: len(f.schemes) > 1,
    ),
    "mixed": Trait(
        "linears with a scheme of their own, for which the public config has no place",
        Words(
            "quantize all linears in one scheme, or use", Setting("layout", "compressed-tensors")
        ),
        lambda f: len({(s.format, s.group_size) for s in f.schemes}) > 1,
    ),
    "dense": Trait(
        "dense linears besides lm_head, for which the public config has no place",
        Words("quantize without", Setting("skip")),
        lambda f: any(module != "lm_head" for module in f.dense),
    ),
    "split": Trait(
        "linears of one group that are treated differently",
        Words("quantize with", Setting("fused_alike", True)),
        lambda f: bool(f.mixed_groups),
    ),
    "wrapped": Trait(
        "several schemes in a wrapper model, whose linears the engine calls by other names",
        Words("use", Setting("layout", "compressed-tensors")),
        lambda f: isinstance(f.config.get("text_config"), Mapping) and len(f.schemes) > 1,
    ),
    "padded": Trait(
        "weights padded with zeros", Words("leave out", Setting("pad", True)), lambda f: f.padded
    ),
    "channel": Trait(
        "one scale per row",
        Words("quantize with", Setting("group_size", 128)),
        lambda f: any(scheme.group_size is None for scheme in f.schemes),
    ),
    "experts": Trait(
        "experts in a floating format",
        Words("quantize with", Setting("format", "int4")),
        lambda f: any(
            s.format.is_float and not s.format.is_microscaled and is_expert(m)
            for m, (s, _) in f.linears.items()
        ),
    ),
    "FP4 in float16": Trait(
        "NVFP4 or MXFP4 in a float16 model, which compressed-tensors 0.20 decodes to bfloat16",
        Words("quantize with", Setting("dense_dtype", "bfloat16")),
        lambda f: f.is_half and any(s.format.is_microscaled for s in f.schemes),
    ),
    "untried in SGLang": Trait(
        "another family than Llama, Qwen2 and Phi-3, or other weights than linears in one INT4",
        Words("use", Setting("format", "int4")),
        lambda f: (
            f.family not in ("llama", "qwen2", "phi3")
            or len(f.schemes) > 1
            or (f.layout == "awq" and _part_of_a_name(f))
            or any(
                is_expert(m)
                or (s.format.name, s.sparsity) != ("int4", None)
                or s.symmetric is (f.layout == "awq")
                for m, (s, _) in f.linears.items()
            )
        ),
        is_unknown=True,
    ),
    "widths in SGLang": Trait(
        "integers of other widths than 4 and 8 bits, which SGLang 0.5.23 refuses",
        Words("use", Setting("format", "int4")),
        lambda f: any(not s.format.is_float and s.format.bits not in (4, 8) for s in f.schemes),
    ),
    "linears in MXFP4": Trait(
        "MXFP4 outside of experts, for which SGLang 0.5.23 has no method",
        Words("use", Setting("format", "nvfp4")),
        lambda f: any(
            s.format.name == "mxfp4" and not is_expert(m) for m, (s, _) in f.linears.items()
        ),
    ),
    "experts of integers": Trait(
        "experts of integers in this layout, which was not tried",
        Words("use", Setting("layout", "compressed-tensors")),
        lambda f: any(is_expert(m) and not s.format.is_float for m, (s, _) in f.linears.items()),
    ),
    "experts of other widths": Trait(
        "experts of other widths than 4 and 8 bits",
        Words("quantize them with", Setting("override", ".*experts.*=int8")),
        lambda f: any(
            is_expert(m) and not s.format.is_float and s.format.bits not in (4, 8)
            for m, (s, _) in f.linears.items()
        ),
    ),
    "zeros of INT8 experts": Trait(
        "INT8 experts with zero points",
        Words("quantize with", Setting("asym", False)),
        lambda f: any(
            is_expert(m) and s.format.bits == 8 and not s.symmetric
            for m, (s, _) in f.linears.items()
        ),
    ),
    "packed head": Trait(
        "a packed output head, which it does not take in this layout",
        DENSE_HEAD,
        lambda f: f.has_packed_head,
    ),
    "head in vLLM": Trait(
        "a packed output head, which vLLM 0.26.0 does not take in this family",
        DENSE_HEAD,
        lambda f: f.has_packed_head and f.family not in HEADS_IN_VLLM,
    ),
    "head in SGLang": Trait(
        "a packed output head, which SGLang 0.5.23 does not take in this family",
        DENSE_HEAD,
        lambda f: f.has_packed_head and f.family in DENSE_HEADS_IN_SGLANG,
    ),
    "packed embeddings": Trait("packed embeddings", DENSE_EMBEDDINGS, lambda f: bool(f.embeddings)),
    "tied embeddings": Trait(
        "packed embeddings that are the output head too",
        Words(DENSE_EMBEDDINGS, ", or serve by quantkit's plug-in in vLLM"),
        lambda f: f.tied and bool(f.embeddings),
    ),
    "widths": Trait(
        "integers of other widths than 4 bits, for which quantkit has no kernel",
        Words("use", Setting("format", "int4")),
        lambda f: any(
            not s.format.is_float and s.format.bits != 4 and not is_embedding(module)
            for module, (s, _) in f.linears.items()
        ),
    ),
    "form of embeddings": Trait(
        "packed embeddings that are not symmetric INT2, INT4 or INT8",
        Words("use", Setting("embeddings", "int8:channel")),
        lambda f: any(
            s.format.is_float or not s.symmetric or 32 % s.format.bits for s in f.embeddings
        ),
    ),
    "embeddings in vLLM": Trait(
        "packed embeddings, which vLLM 0.26.0 does not take in this family",
        DENSE_EMBEDDINGS,
        lambda f: bool(f.embeddings) and f.family not in EMBEDDINGS_IN_VLLM,
    ),
    "part": Trait(
        "a dense linear whose name is a part of a quantized one's, which the public config cannot "
        "tell apart",
        Words("use", Setting("layout", "compressed-tensors")),
        _part_of_a_name,
    ),
    "encoder": Trait(
        "an encoder-decoder, or a model with code of its own",
        "load it with another reader",
        lambda f: f.config.get("is_encoder_decoder") is True or f.has_own_code,
        is_unknown=True,
    ),
    "family": Trait(
        "its family, whose packed weights vLLM 0.26.0 has no place for",
        "load it with another reader",
        lambda f: f.family in REFUSED_BY_VLLM,
    ),
    "no gate": Trait(
        "experts without a gate, whose place vLLM leaves without values in this layout",
        Words("use", Setting("layout", "compressed-tensors")),
        lambda f: (
            {m.rpartition(".")[2] for m in f.linears if is_expert(m)} == {"up_proj", "down_proj"}
        ),
    ),
    "odd n": Trait(
        "weights whose n is neither 128 nor a multiple of 256",
        Words("use", Setting("layout", "compressed-tensors")),
        lambda f: any(n != 128 and n % 256 for _, (n, _) in f.linears.values()),
    ),
}


def _odd_rows(folder: Folder) -> str | None:
    odd = [(module, shape) for module, (_, shape) in folder.linears.items() if shape[0] % 256]
    if not odd:
        return None
    (module, shape), *_ = odd
    return (
        f"{len(odd)} weights have n % 256 != 0 (first {module} {list(shape)}): the published "
        "MARLIN kernel does not take them, readers that ask n % 64 do"
    )


_HALF_ONLY = "run float16 only: load this model with dtype float16"
#: Layouts with a remark for folders that readers open only in some cases (LAYOUTS 3.1, 3.5 and 10).
CAUTIONS: tuple[tuple[tuple[str, ...], Callable[[Folder], str | None]], ...] = (
    (("marlin",), _odd_rows),
    (("marlin",), lambda f: None if f.is_half else f"published MARLIN readers {_HALF_ONLY}"),
    (
        ("gptq", "gptq-v2"),
        lambda f: None if f.is_half else f"GPTQ kernels other than MARLIN's {_HALF_ONLY} there",
    ),
)


def readers_of(
    folder: Folder, engines: Iterable[Engine] = ENGINES
) -> Iterator[tuple[Reader, list[str]]]:
    """Yield the table rows that apply to this folder, each with the traits that its program
    refuses.
    """
    for reader in (reader for engine in engines for reader in engine.readers):
        known = not reader.layouts or folder.layout in reader.layouts
        if known and (reader.only is None or TRAITS[reader.only].holds(folder)):
            yield reader, [trait for trait in reader.refuses if TRAITS[trait].holds(folder)]


def opened_by(folder: Folder) -> list[str]:
    """Name the programs that open this folder; untested programs are marked so."""
    return [reader.label for reader, reasons in readers_of(folder) if not reasons]


def use_of(
    reader: str, chats: bool = False, auto_class: str = CAUSAL
) -> tuple[str, str, str] | None:
    """Find how a reader from `opened_by` opens FOLDER: a title, a language and commands.

    The model `chats` if it has a chat template. `auto_class` of transformers builds it.
    """
    engine = engine_of(reader)
    found = None if engine is None else engine.uses[reader.removesuffix(UNTRIED)]
    if found is None:
        return None
    commands = found[2].replace(TEXT_PROMPT, CHAT_PROMPT) if chats else found[2]
    if auto_class in OTHER_INPUTS:
        commands = commands.replace(f"\n{PROMPT}", "").replace(", AutoTokenizer", "")
        commands = commands.replace("from transformers import AutoTokenizer\n", "")
    known = auto_class in {each for kinds in AUTO_CLASSES.values() for each in kinds}
    return *found[:2], commands.replace(CAUSAL, auto_class) if known else commands


def engine_of(reader: str) -> Engine | None:
    """Find the engine of a reader, as `opened_by` names it; None if no commands are
    known for it.
    """
    return next((engine for engine in ENGINES if reader.removesuffix(UNTRIED) in engine.uses), None)


def refusals(folder: Folder) -> list[str]:
    """Describe each trait in a line: the programs that read the layout but refuse this folder, and
    the way out.
    """
    found = grouped(
        (trait, reader.label) for reader, reasons in readers_of(folder) for trait in reasons
    )
    lines: list[str] = [
        Words(
            f"it is not known whether {_list(names)} can open {TRAITS[trait].words}:"
            if TRAITS[trait].is_unknown
            else f"{_list(names)} will not open this folder because of {TRAITS[trait].words}:",
            TRAITS[trait].way_out,
        )
        for trait, names in found.items()
        # The first follows, a plan names padded weights, and the last has a reader of its own.
        if trait not in ("split", "padded", "untried in SGLang")
    ]
    mixed = folder.mixed_groups
    if mixed:
        where, labels = mixed[0]
        more = f" (and {len(mixed) - 1} more such groups)" if len(mixed) > 1 else ""
        lines.append(
            Words(
                f"{where} mix {_list(sorted(labels))}{more}; engines that join them, such as vLLM, "
                "will not open this folder:",
                TRAITS["split"].way_out,
            )
        )
    return lines


def refusal(folder: Folder, engine: Engine) -> tuple[str, str | None] | None:
    """Say why an engine does not open a folder and the way out, None if it opens the folder.

    The way out is None if nobody knows whether it does.
    """
    reasons = [reasons for _, reasons in readers_of(folder, [engine])]
    if not reasons:
        return (
            f"it does not read the layout {folder.layout}",
            Words("use another", Setting("layout")),
        )
    if not all(reasons):
        return None
    first = TRAITS[min(reasons, key=len)[0]]
    if first.is_unknown:
        return f"it was not asked to open {first.words}", None
    return f"it does not open a folder with {first.words}", first.way_out


def engine_kernel(
    engine: Engine,
    layout: str,
    scheme: Scheme,
    n: int,
    k: int,
    capability: tuple[int, int],
    experts: bool,
) -> tuple[str | None, str | None, str | None]:
    """Give the kernel that an engine chooses for an `[n, k]` weight, the reason if it has none, and
    the source.
    """
    asked = (layout, capability, scheme, n, k, experts)
    row = next((row for row in engine.kernels if row.covers(*asked)), None)
    return (None, "not known", None) if row is None else (row.kernel, row.why, row.source)


def sums_in_float16(layout: str, scheme: Scheme, n: int, k: int, experts: bool) -> bool:
    """Return True if vLLM multiplies an `[n, k]` weight by a kernel that rounds sums before a row's
    scale is applied.

    These are Humming's with one scale per row (docs/layouts.md 9b). With groups, scales are applied
    before.
    """
    kernels = {
        engine_kernel(VLLM, layout, scheme, n, k, gpu, experts)[0] or "" for gpu in GPUS.values()
    }
    return scheme.group_size is None and any(kernel.startswith("Humming") for kernel in kernels)


def _list(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
