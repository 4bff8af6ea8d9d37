"""Support of packed folders by other programs: dated tables, one entry an engine.

Each row names its source, and the behaviour seen or published for some layouts, schemes and shapes.
A case without a row is unknown. These tables ignore model families: docs/models.md has the engines'
answers for families. No torch is imported here, because the command line takes its choices from
this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantkit.errors import Setting, Words
from quantkit.names import KERNELS, install

if TYPE_CHECKING:
    from quantkit.core.quantized_tensor import Scheme

#: The source of rows about programs that nobody ran, and the remark behind their names.
PUBLISHED = "docs/layouts.md 10, from the programs' published documentation; not tried here"
UNTRIED = " (by its documentation, not tried)"
#: GPU -> its compute capability: NVIDIA's list, https://developer.nvidia.com/cuda-gpus, 2026-11-23.
GPUS = {
    "t4": (7, 5),
    "a100": (8, 0),
    "a10": (8, 6),
    "rtx3090": (8, 6),
    "l4": (8, 9),
    "l40s": (8, 9),
    "rtx4090": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "rtx5090": (12, 0),
}


@dataclass(frozen=True)
class Reader:
    """A program that opens folders of some layouts, unless they have one of the traits `refuses`.

    Traits are identified by name. No `layouts` stand for all. `only` is a trait without which the
    row says nothing. If `is_own`, the linears in memory are quantkit's.
    """

    name: str
    layouts: tuple[str, ...]
    refuses: tuple[str, ...]
    source: str
    only: str | None = None
    is_own: bool = False

    @property
    def label(self) -> str:
        """The name, and whether the program was not asked."""
        return f"{self.name}{UNTRIED}" if self.source == PUBLISHED else self.name


@dataclass(frozen=True)
class Kernel:
    """The kernel that an engine chooses for these weights; None if the engine has none.

    `capabilities` are compute capabilities of GPUs, None for any. `bits` are widths of integers; a
    row with `zeros` is about zero points only. `n_unit` and `k_unit` divide the shape of the joined
    weight. `why` describes the engine without a kernel.
    """

    layouts: tuple[str, ...]
    kernel: str | None
    source: str
    capabilities: tuple[tuple[int, int], ...] | None = None
    is_float: bool = False
    bits: tuple[int, ...] = (4,)
    zeros: bool = False
    groups: tuple[int | None, ...] = (128, 64, 32, None)  # None: one scale per row
    experts: bool = False
    n_unit: int = 1
    k_unit: int = 1
    why: str | None = None

    def covers(
        self,
        layout: str,
        capability: tuple[int, int],
        scheme: Scheme,
        n: int,
        k: int,
        experts: bool,
    ) -> bool:
        """Return True if this row is about an `[n, k]` weight of a layout and a scheme on such a
        GPU.
        """
        here = self.capabilities is None or capability in self.capabilities
        alike = (self.is_float, self.experts) == (scheme.format.is_float, experts)
        fits = scheme.group_size in self.groups and not n % self.n_unit and not k % self.k_unit
        fits &= self.is_float or scheme.format.bits in self.bits
        fits &= not (self.zeros and scheme.symmetric)
        return alike and here and fits and layout in self.layouts and scheme.sparsity is None


@dataclass(frozen=True)
class Engine:
    """A program that runs packed models. The first row of `kernels` that covers a weight is the
    answer.

    `target` is its name for `plan --target`, None if it has none. `uses` maps names of readers to a
    title, a language and the commands that open FOLDER. `joins` tells whether it joins linears.
    `signed` maps a layout to the use in which the engine misreads negative scales, and the way out.
    """

    target: str | None
    readers: tuple[Reader, ...]
    kernels: tuple[Kernel, ...] = ()
    uses: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    joins: bool = False
    signed: Mapping[str, Words] = field(default_factory=dict)


OWN = "quantkit's own tests"
#: Layouts whose INT4 weights engines treat alike.
INTEGER = ("compressed-tensors", "gptq", "awq")
_SHARED, _PUBLIC_MARLIN = ("split", "padded"), ("mixed", "dense", "padded", "encoder")

_LOADER = "the loader of vLLM 0.26.0, run on a CPU, 2026-11-23"
_ASKED = (
    "vLLM 0.26.0's own choice for tiny models, asked on a CPU as if this GPU were there, 2026-11-23"
)
_WNA16 = ("compressed-tensors",)
_WIDTHS = (
    "vLLM 0.26.0's own choice for tiny models of each width, asked on a CPU as if this GPU were "
    "there, 2026-11-26"
)
_OF_WIDTHS = ("zeros of other widths", "experts of other widths", "zeros of INT8 experts")
_FP4 = "vLLM 0.26.0's source, read on 2026-11-29, and its loader for an H200, run on a CPU"
HOPPER, AMPERE, ADA = (9, 0), (8, 0), (8, 9)
_FP4_GPUS = (HOPPER, AMPERE, ADA, (8, 6))
_FP4_ON_HOPPER = "vLLM 0.33.0, run on an H200, 2026-11-29; 0.26.0 has Marlin there"
#: GPUs that were asked about fewer schemes.
_OTHERS = ((7, 5), (8, 6), (10, 0), (12, 0))
#: vLLM with quantkit's plug-in, in the layouts of quantkit's kernels.
PLUGIN = "vLLM with quantkit[vllm]"
#: The plug-in again, for layouts that vLLM reads by itself: the user asks for quantkit.
ASKED_FOR = "vLLM asked for quantkit[vllm]"
_OF_PLUGIN = ("split", "head in vLLM", "embeddings in vLLM", "encoder")
_PLUGIN = "quantkit's plug-in in vLLM 0.26.0 and 0.33.0, run on a CPU, 2026-11-26"
_TIED = "quantkit's plug-in in vLLM 0.26.0, run on one and two H200, 2026-11-28"
VLLM = Engine(
    "vllm",
    readers=(
        Reader(
            "vLLM",
            ("compressed-tensors",),
            (
                *_SHARED,
                "experts",
                *_OF_WIDTHS,
                "head in vLLM",
                "tied embeddings",
                "form of embeddings",
                "embeddings in vLLM",
                "encoder",
                "family",
            ),
            _LOADER,
        ),
        Reader(
            "vLLM",
            ("gptq", "gptq-v2"),
            ("asymmetric", "wrapped", "no gate", *_SHARED, "head in vLLM", "encoder", "family"),
            _LOADER,
        ),
        Reader(
            "vLLM",
            ("awq",),
            ("mixed", "part", "no gate", *_SHARED, "packed head", "encoder", "family"),
            _LOADER,
        ),
        Reader(
            "vLLM",
            ("humming",),
            (
                "wrapped",
                *_SHARED,
                "experts",
                "experts of integers",
                "packed embeddings",
                "packed head",
                "encoder",
                "family",
            ),
            _LOADER,
        ),
        Reader(PLUGIN, tuple(KERNELS), _OF_PLUGIN, _PLUGIN, is_own=True),
        Reader(
            ASKED_FOR,
            ("compressed-tensors", "humming"),
            (*_OF_PLUGIN, "widths"),
            _TIED,
            only="tied embeddings",
            is_own=True,
        ),
    ),
    kernels=(
        Kernel(
            (*INTEGER, "gptq-v2"),
            "Machete",
            _ASKED,
            (HOPPER,),
            groups=(128, 64, None),
            n_unit=128,
            k_unit=64,
        ),
        Kernel((*INTEGER, "gptq-v2"), "Marlin", _ASKED, (HOPPER,)),
        Kernel(INTEGER, "Marlin", _ASKED, (AMPERE, ADA)),
        Kernel(("compressed-tensors",), "Marlin", _ASKED, _OTHERS, groups=(128, 32, None)),
        Kernel(("gptq", "awq"), "Marlin", _ASKED, _OTHERS, groups=(128,)),
        Kernel(
            ("awq",),
            None,
            _ASKED,
            (HOPPER,),
            groups=(None,),
            experts=True,
            why="its loader fails on them",
        ),
        Kernel(INTEGER, "Marlin for fused experts", _ASKED, (HOPPER,), experts=True),
        Kernel(
            INTEGER,
            "Marlin for fused experts",
            _ASKED,
            (AMPERE, ADA, *_OTHERS),
            groups=(128,),
            experts=True,
        ),
        Kernel(_WNA16, "Humming", _WIDTHS, (HOPPER, AMPERE, ADA, *_OTHERS), bits=(2, 3, 5, 6)),
        Kernel(("humming",), "Humming", _WIDTHS, (HOPPER,), bits=(2, 3, 4, 5, 6, 8)),
        Kernel(
            _WNA16,
            "Machete",
            _WIDTHS,
            (HOPPER,),
            bits=(8,),
            groups=(128, 64, None),
            n_unit=128,
            k_unit=64,
        ),
        Kernel(_WNA16, "Humming", _WIDTHS, (HOPPER,), bits=(8,), groups=(32,), zeros=True),
        Kernel(_WNA16, "Humming", _WIDTHS, (AMPERE, ADA, *_OTHERS), bits=(8,), zeros=True),
        Kernel(_WNA16, "AllSpark", _WIDTHS, (AMPERE, ADA, (8, 6)), bits=(8,), groups=(None,)),
        Kernel(_WNA16, "Marlin", _WIDTHS, (HOPPER,), bits=(8,), groups=(32,)),
        Kernel(_WNA16, "Marlin", _WIDTHS, (AMPERE, ADA, *_OTHERS), bits=(8,)),
        Kernel(
            _WNA16,
            "Marlin for fused experts",
            _WIDTHS,
            (HOPPER,),
            bits=(8,),
            groups=(128, None),
            experts=True,
        ),
        *(
            Kernel(
                (layout,),
                kernel,
                _ASKED,
                (HOPPER, AMPERE, ADA, *_OTHERS),
                is_float=True,
                groups=(None,),
            )
            for layout, kernel in (
                ("compressed-tensors", "Humming for FP8"),
                ("humming", "Humming"),
            )
        ),
        Kernel(_WNA16, "Humming", _FP4_ON_HOPPER, (HOPPER,), is_float=True, groups=(16,)),
        Kernel(
            _WNA16,
            "Humming, which rounds activations to FP8 too",
            _FP4_ON_HOPPER,
            (HOPPER,),
            is_float=True,
            groups=(32,),
        ),
        Kernel(_WNA16, "Marlin for FP4", _FP4, _FP4_GPUS, is_float=True, groups=(16, 32)),
        Kernel(_WNA16, "Marlin for FP4", _FP4, is_float=True, groups=(16,)),
        Kernel(
            _WNA16,
            "FlashInfer, which rounds activations to MXFP4 too",
            _FP4,
            ((10, 0), (12, 0)),
            is_float=True,
            groups=(32,),
        ),
        Kernel(
            _WNA16,
            "Marlin for fused experts in FP4",
            _FP4,
            _FP4_GPUS,
            is_float=True,
            groups=(16, 32),
            experts=True,
        ),
    ),
    uses={
        "vLLM": ("vLLM", "sh", "vllm serve FOLDER"),
        PLUGIN: (
            "vLLM, on quantkit's kernels",
            "sh",
            f"{install('vllm', 'cupy-cuda13x')}\nvllm serve FOLDER",
        ),
        ASKED_FOR: (
            "vLLM, on quantkit's kernels",
            "sh",
            f"{install('vllm', 'cupy-cuda13x')}\nvllm serve FOLDER --quantization quantkit",
        ),
    },
    joins=True,
    signed=dict.fromkeys(
        ("compressed-tensors", "gptq", "gptq-v2"),
        Words(
            "scales may be negative, which Marlin reads as large positive ones if "
            "VLLM_MARLIN_INPUT_DTYPE=int8 is set:",
            Words("for W4A8 quantize with", Setting("signed", False)),
            "(https://github.com/vllm-project/vllm/issues/48905, open; vLLM 0.26.0's scales are as "
            "it says, 2026-11-25)",
        ),
    ),
)

_EXPERTS_PULL = "https://github.com/sgl-project/sglang/pull/17137, 2026-01-15"
_HUMMING_KERNELS = "docs/layouts.md 9b, humming-kernels 0.1.19, 2026-11-23"
_SGLANG = "SGLang 0.5.23, run on an H200 with Llama, Qwen2 and Phi-3, 2026-11-29"
SGLANG = Engine(
    "sglang",
    readers=(
        Reader(
            "SGLang",
            ("compressed-tensors", "gptq", "awq"),
            (*_SHARED, "untried in SGLang", "head in SGLang", "packed embeddings", "encoder"),
            _SGLANG,
        ),
        Reader(
            "SGLang",
            ("compressed-tensors",),
            (
                *_SHARED,
                "experts",
                "widths in SGLang",
                "linears in MXFP4",
                "head in SGLang",
                "packed embeddings",
                "encoder",
            ),
            PUBLISHED,
            only="untried in SGLang",
        ),
        Reader(
            "SGLang",
            ("gptq",),
            ("asymmetric", "wrapped", "head in SGLang", "encoder", *_SHARED),
            PUBLISHED,
            only="untried in SGLang",
        ),
        Reader(
            "SGLang",
            ("humming",),
            (
                "mixed",
                "encoder",
                *_SHARED,
                "experts",
                "experts of integers",
                "packed head",
                "packed embeddings",
            ),
            PUBLISHED,
        ),
    ),
    kernels=(
        Kernel(("compressed-tensors",), "Marlin for fused experts", _EXPERTS_PULL, experts=True),
        Kernel(("humming",), "Humming", _HUMMING_KERNELS, is_float=True, groups=(None,)),
    ),
    uses={"SGLang": ("SGLang", "sh", "python -m sglang.launch_server --model-path FOLDER")},
    joins=True,
)

#: Programs that plan cannot be asked about: forks, old releases, and libraries.
GPTQMODEL = Engine(
    None,
    readers=(
        Reader("GPTQModel", ("gptq", "gptq-v2"), ("padded", "encoder"), PUBLISHED),
        Reader("GPTQModel", ("awq",), ("mixed", "part", "channel", "padded", "encoder"), PUBLISHED),
        Reader("GPTQModel", ("marlin",), _PUBLIC_MARLIN, PUBLISHED),
    ),
)
OTHERS = Engine(
    None,
    readers=(
        Reader(
            "SqueezeBits' fork of AutoAWQ",
            ("quick",),
            ("mixed", "part", "padded", "odd n", "encoder"),
            PUBLISHED,
        ),
        Reader("vLLM up to 0.10.1", ("marlin",), _PUBLIC_MARLIN, PUBLISHED),
        Reader("vLLM up to 0.14", ("marlin24", "marlin24-ct"), _PUBLIC_MARLIN, PUBLISHED),
    ),
)

_ELSEWHERE = (
    "tests/layouts/test_loads_elsewhere.py, transformers 5.23 and compressed-tensors 0.20, "
    "2026-11-23"
)
_DECODES = (
    "transformers 5.23 with compressed-tensors 0.20, tests/layouts/test_loads_elsewhere.py, "
    "2026-11-23"
)
_PLAIN, _DEQUANTIZED, _THROUGH, _REGISTERED = (
    f"transformers ({how})"
    for how in (
        "with compressed-tensors",
        "with CompressedTensorsConfig(dequantize=True)",
        "through gptqmodel",
        "after quantkit.register()",
    )
)
#: Python lines that make a prompt: of plain text, and by a chat template.
TEXT_PROMPT = 'prompt = tokenizer("The capital of France is", return_tensors="pt").to(model.device)'
CHAT_PROMPT = (
    'messages = [{"role": "user", "content": "What is the capital of France?"}]\n'
    "prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
    'return_dict=True, return_tensors="pt")\n'
    "prompt = prompt.to(model.device)"
)
PROMPT = f"""tokenizer = AutoTokenizer.from_pretrained("FOLDER")
{TEXT_PROMPT}
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=32)[0]))"""


def _transformers(names: str = "", before: str = "", options: str = "") -> str:
    """Write the Python that opens FOLDER."""
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer{names}

{before}model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto"{options})
{PROMPT}"""


TRANSFORMERS = Engine(
    "transformers",
    readers=(
        Reader(
            _PLAIN,
            ("compressed-tensors",),
            ("zeros", "packed embeddings", "padded", "FP4 in float16"),
            _ELSEWHERE,
        ),
        Reader(
            _DEQUANTIZED,
            ("compressed-tensors",),
            ("zeros of experts", "one of several", "padded"),
            _ELSEWHERE,
            only="decoded whole",
        ),
        Reader(_THROUGH, ("gptq",), ("padded", "encoder"), PUBLISHED),
        Reader(_THROUGH, ("awq",), ("mixed", "part", "channel", "padded", "encoder"), PUBLISHED),
        Reader(_REGISTERED, ("humming", "tcfpx"), (), OWN, is_own=True),
    ),
    kernels=tuple(
        Kernel(
            ("compressed-tensors",),
            None,
            _DECODES,
            is_float=is_float,
            bits=(2, 3, 4, 5, 6, 8),
            groups=groups,
            why="the first call decodes the weight for good",
        )
        for is_float, groups in ((False, (128, 64, 32, None)), (True, (16, 32, None)))
    ),
    uses={
        _PLAIN: (
            "transformers (`pip install 'compressed-tensors>=0.18'`)",
            "python",
            _transformers(),
        ),
        _DEQUANTIZED: (
            "transformers (`pip install 'compressed-tensors>=0.18'`), with dense weights in memory",
            "python",
            _transformers(
                ", CompressedTensorsConfig",
                "",
                ", quantization_config=CompressedTensorsConfig(dequantize=True)",
            ),
        ),
        _THROUGH: ("transformers (`pip install gptqmodel`)", "python", _transformers()),
        _REGISTERED: (
            "transformers",
            "python",
            "import quantkit\n" + _transformers(before="quantkit.register()\n"),
        ),
    },
)

_QUANTKIT = f"""import quantkit
from transformers import AutoTokenizer

model = quantkit.load("FOLDER")
{PROMPT}"""
QUANTKIT = Engine(
    "quantkit",
    readers=(Reader("quantkit.load", (), (), OWN, is_own=True),),
    uses={"quantkit.load": ("quantkit", "python", _QUANTKIT)},
)

#: Ordered as readers are named.
ENGINES = (VLLM, SGLANG, GPTQMODEL, TRANSFORMERS, OTHERS, QUANTKIT)
#: The option of vLLM by which quantkit's kernels serve the public layouts.
BY_QUANTKIT = "--quantization quantkit"
#: Values of `plan --target`.
TARGETS = {engine.target: engine for engine in ENGINES if engine.target is not None}
