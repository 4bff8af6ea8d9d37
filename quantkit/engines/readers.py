"""Which programs open a folder: a table of readers, with the properties of a folder that each refuses.

`plan`, `inspect`, report and model card ask this one table. Each row names its source and date.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.core.scheme import Scheme
from quantkit.layouts.fused_groups import fused_groups, is_expert

#: Sources of the rows.
LOADER = "the loader of vLLM 0.26.0, run on a CPU, 2026-11-23"
ELSEWHERE = "tests/layouts/test_loads_elsewhere.py, transformers 5.23 and compressed-tensors 0.20, 2026-11-23"
PUBLISHED = "docs/layouts.md 10, from the programs' published documentation; not tried here"
OWN = "quantkit's own tests"


@dataclass(frozen=True)
class Folder:
    """The facts of a quantized folder on which its readers depend.

    `linears` has the scheme and the stored shape `[n, k]` of each quantized linear. `dense` names the other linears, or
    has patterns `re:...`. `padded` tells whether weights are filled up with zeros. `config` is config.json.
    """

    layout: str
    linears: Mapping[str, tuple[Scheme, tuple[int, int]]]
    dense: Collection[str] = ()
    padded: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def schemes(self) -> set[Scheme]:
        """The different schemes."""
        return {scheme for scheme, _ in self.linears.values()}


@dataclass(frozen=True)
class Trait:
    """A property of a folder that some readers refuse: in words, how to avoid it, and its test."""

    words: str
    way_out: str
    holds: Callable[[Folder], bool]


def _mixed_groups(folder: Folder) -> list[tuple[str, set[str]]]:
    """List the groups of linears that engines join, and that are treated differently: members and treatments."""
    found = []
    for joined, members in fused_groups({**folder.linears, **dict.fromkeys(folder.dense)}).items():
        labels = {folder.linears[member][0].label if member in folder.linears else "dense" for member in members}
        if len(labels) > 1:
            parent = joined.rpartition(".")[0]
            parts = "its linears" if is_expert(members[0]) else ", ".join(m.removeprefix(f"{parent}.") for m in members)
            found.append((f"{joined if is_expert(members[0]) else parent}: {parts}", labels))
    return found


def _lacks_topk_method(folder: Folder) -> bool:
    return folder.config.get("model_type") == "deepseek_v3" and folder.config.get("topk_method") != "noaux_tc"


def _packs(part: str, *families: str) -> Callable[[Folder], bool]:
    """Make the test whether a model of `families` has quantized linears with `part` in their names."""

    def holds(folder: Folder) -> bool:
        text = folder.config.get("text_config")
        kinds = {folder.config.get("model_type"), text.get("model_type") if isinstance(text, Mapping) else None}
        return not kinds.isdisjoint(families) and any(part in module.split(".") for module in folder.linears)

    return holds


def _part_of_a_name(folder: Folder) -> bool:
    names = "\n".join(folder.linears)
    return any(module in names for module in folder.dense)


TRAITS = {
    "asymmetric": Trait(
        "zero points (asymmetric weights)",
        "quantize with --sym, or use --layout compressed-tensors or awq",
        lambda f: any(not s.symmetric for s in f.schemes),
    ),
    "zeros": Trait(
        "zero points, as long as weights stay compressed",
        "load it with CompressedTensorsConfig(dequantize=True)",
        lambda f: any(not s.symmetric for s in f.schemes),
    ),
    "sizes": Trait(
        "several group sizes with zero points",
        "quantize with one group size, or with --sym",
        lambda f: len({s.group_size for s in f.schemes}) > 1,
    ),
    "mixed": Trait(
        "linears with a scheme of their own, for which the public config has no place",
        "quantize without --override, or use --layout compressed-tensors",
        lambda f: len({(s.format, s.group_size) for s in f.schemes}) > 1,
    ),
    "dense": Trait(
        "dense linears besides lm_head, for which the public config has no place",
        "quantize without --skip",
        lambda f: any(module != "lm_head" for module in f.dense),
    ),
    "split": Trait(
        "linears of one group that are treated differently",
        "quantize with --fused-alike",
        lambda f: bool(_mixed_groups(f)),
    ),
    "wrapped": Trait(
        "several schemes in a wrapper model, whose linears the engine calls by other names",
        "use --layout compressed-tensors",
        lambda f: isinstance(f.config.get("text_config"), Mapping) and len(f.schemes) > 1,
    ),
    "padded": Trait("weights padded with zeros", "leave out --pad", lambda f: f.padded),
    "channel": Trait(
        "one scale per row",
        "quantize with --group-size 128",
        lambda f: any(scheme.group_size is None for scheme in f.schemes),
    ),
    "experts": Trait(
        "experts in a floating format",
        "quantize with --format int4",
        lambda f: any(scheme.format.is_float and is_expert(m) for m, (scheme, _) in f.linears.items()),
    ),
    "topk": Trait(
        "a config.json without topk_method, from which vLLM infers no e_score_correction_bias",
        'add "topk_method": "noaux_tc" to config.json',
        _lacks_topk_method,
    ),
    "part": Trait(
        "a dense linear whose name is a part of a quantized one's, which the public config cannot tell apart",
        "use --layout compressed-tensors",
        _part_of_a_name,
    ),
    "by heads": Trait(
        "joined queries, keys and values, whose rows vLLM's class of this model reorders",
        "leave them dense with --skip '.*query_key_value'",
        _packs("query_key_value", "bloom", "gpt_neox"),
    ),
    "mixers": Trait(
        "Mamba-1 mixers, which vLLM keeps dense",
        "leave them dense too with --skip '.*\\.(mamba|mixer)\\..*'",
        lambda f: _packs("mamba", "jamba")(f) or _packs("mixer", "mamba", "falcon_mamba")(f),
    ),
    "convolutions": Trait(
        "short convolutions, whose projections vLLM's class of this model keeps dense",
        "leave them dense too with --skip '.*\\.conv\\..*'",
        _packs("conv", "lfm2_moe"),
    ),
    "dense experts": Trait(
        "experts, which vLLM's class of this model keeps dense",
        "leave them dense too with --skip '.*\\.experts\\..*'",
        _packs("experts", "flex_olmo"),
    ),
    "own experts": Trait(
        "experts whose packed tensors vLLM's class of this model does not take",
        "load it with quantkit.load",
        _packs("experts", "gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid"),
    ),
    "own linears": Trait(
        "linears that vLLM's class of this model keeps dense, or a dense tower that it takes for quantized",
        "load it with quantkit.load",
        lambda f: (
            f.config.get("model_type") == "blip-2"
            or (f.config.get("model_type") == "hrm_text" and f.layout != "compressed-tensors")
        ),
    ),
    "odd n": Trait(
        "weights whose n is neither 128 nor a multiple of 256",
        "use --layout compressed-tensors",
        lambda f: any(n != 128 and n % 256 for _, (n, _) in f.linears.values()),
    ),
}


@dataclass(frozen=True)
class Reader:
    """A program that opens folders of some layouts, unless they have one of the traits `refuses`.

    `only` is a trait without which the row says nothing.
    """

    name: str
    layouts: tuple[str, ...]
    refuses: tuple[str, ...]
    source: str
    only: str | None = None

    def concerns(self, folder: Folder) -> bool:
        """Return True if this row is about folders such as this one."""
        return folder.layout in self.layouts and (self.only is None or TRAITS[self.only].holds(folder))

    def reasons(self, folder: Folder) -> list[str]:
        """List the traits for which this program does not open a folder of its layouts."""
        return [trait for trait in self.refuses if TRAITS[trait].holds(folder)]


_SHARED = ("split", "padded")
#: what vLLM's class of a model does not open, asked with docs/models.md; the layout makes no difference
_CLASSES = ("topk", "by heads", "mixers", "convolutions", "dense experts", "own experts", "own linears")
_PUBLIC_MARLIN = ("mixed", "dense", "padded")
READERS = (
    Reader("vLLM", ("compressed-tensors",), (*_SHARED, "experts", *_CLASSES), LOADER),
    Reader("vLLM", ("gptq", "gptq-v2"), ("asymmetric", "wrapped", *_SHARED, *_CLASSES), LOADER),
    Reader("vLLM", ("awq",), ("mixed", "part", *_SHARED, *_CLASSES), LOADER),
    Reader("vLLM", ("humming",), ("wrapped", *_SHARED, "experts", *_CLASSES), LOADER),
    Reader("SGLang", ("compressed-tensors",), (*_SHARED, "experts", "topk"), PUBLISHED),
    Reader("SGLang", ("gptq",), ("asymmetric", "wrapped", *_SHARED), PUBLISHED),
    Reader("SGLang", ("humming",), ("mixed", *_SHARED, "experts"), PUBLISHED),
    Reader("transformers (with compressed-tensors)", ("compressed-tensors",), ("zeros", "padded"), ELSEWHERE),
    Reader(
        "transformers (with CompressedTensorsConfig(dequantize=True))",
        ("compressed-tensors",),
        ("sizes", "padded"),
        ELSEWHERE,
        only="asymmetric",
    ),
    Reader("GPTQModel", ("gptq", "gptq-v2"), ("padded",), PUBLISHED),
    Reader("GPTQModel", ("awq",), ("mixed", "part", "channel", "padded"), PUBLISHED),
    Reader("transformers (through gptqmodel)", ("gptq",), ("padded",), PUBLISHED),
    Reader("transformers (through gptqmodel)", ("awq",), ("mixed", "part", "channel", "padded"), PUBLISHED),
    Reader("transformers (after quantkit.register())", ("humming", "tcfpx"), (), OWN),
    Reader("SqueezeBits' fork of AutoAWQ", ("quick",), ("mixed", "part", "padded", "odd n"), PUBLISHED),
    Reader("GPTQModel", ("marlin",), _PUBLIC_MARLIN, PUBLISHED),
    Reader("vLLM up to 0.10.1", ("marlin",), _PUBLIC_MARLIN, PUBLISHED),
    Reader("vLLM up to 0.14", ("marlin24", "marlin24-ct"), _PUBLIC_MARLIN, PUBLISHED),
    Reader(
        "quantkit.load",
        (
            "compressed-tensors",
            "humming",
            "tcfpx",
            "gptq",
            "gptq-v2",
            "awq",
            "quick",
            "marlin",
            "marlin24",
            "marlin24-ct",
        ),
        (),
        OWN,
    ),
)


def opened_by(folder: Folder) -> list[str]:
    """Name the programs that open this folder."""
    return [reader.name for reader in READERS if reader.concerns(folder) and not reader.reasons(folder)]


def refusals(folder: Folder) -> list[str]:
    """Say in one line for each trait which programs read the layout but do not open this folder, and the way out."""
    found: dict[str, list[str]] = {}
    for reader in READERS:
        if reader.concerns(folder):
            for trait in reader.reasons(folder):
                found.setdefault(trait, []).append(reader.name)
    lines = [
        f"{_list(names)} will not open this folder because of {TRAITS[trait].words}: {TRAITS[trait].way_out}"
        for trait, names in found.items()
        if trait not in ("split", "padded")  # the former follows, a plan names the padded weights
    ]
    mixed = _mixed_groups(folder)
    if mixed:
        where, labels = mixed[0]
        more = f" (and {len(mixed) - 1} more such groups)" if len(mixed) > 1 else ""
        lines.append(
            f"{where} mix {_list(sorted(labels))}{more}; engines that join them, such as vLLM, will not open this "
            f"folder: {TRAITS['split'].way_out}"
        )
    return lines


def _list(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
