"""The figures of the four papers as data: shapes, tokens, models, and what is measured for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.random_model import CONFIGS

#: Linears `NxK` of a block, query, key and value and gate and up joined.
SHAPES = {
    "llama-7b": ("12288x4096", "4096x4096", "22016x4096", "4096x11008"),
    "llama-13b": ("15360x5120", "5120x5120", "27648x5120", "5120x13824"),
    "llama-33b": ("19968x6656", "6656x6656", "35840x6656", "6656x17920"),
    "llama-65b": ("24576x8192", "8192x8192", "44032x8192", "8192x22016"),
    "llama3-8b": ("6144x4096", "4096x4096", "28672x4096", "4096x14336"),
    "llama2-70b": ("10240x8192", "8192x8192", "57344x8192", "8192x28672"),
    "opt-30b": ("21504x7168", "7168x7168", "28672x7168", "7168x28672"),
    "large": ("73728x18432",),
}
PUBLISHED_SHAPES = SHAPES["llama3-8b"] + SHAPES["llama2-70b"] + SHAPES["large"]
SQUARES = tuple(f"{size}x{size}" for size in (4096, 8192, 16384, 32768))
FEW = (1, 2, 4, 8, 16, 32, 64, 128)

_LLAMA = CONFIGS["llama2-70b"] | {"max_position_embeddings": 4096, "vocab_size": 32000}


def _llama(hidden: int, inner: int, blocks: int, heads: int, shared: int | None = None) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": blocks}
    return _LLAMA | sizes | {"num_attention_heads": heads, "num_key_value_heads": shared or heads}


#: Model -> config.json. Mistral 7B as a Llama: prompts are shorter than its window.
MODELS: dict[str, dict[str, Any]] = CONFIGS | {
    "mistral-7b": _llama(4096, 14336, 32, 32, 8),
    "llama-13b": _llama(5120, 13824, 40, 40),
    "vicuna-13b": _llama(5120, 13824, 40, 40),
    "llama-33b": _llama(6656, 17920, 60, 52),
    "opt-30b": {
        "model_type": "opt",
        "hidden_size": 7168,
        "word_embed_proj_dim": 7168,
        "ffn_dim": 28672,
        "num_hidden_layers": 48,
        "num_attention_heads": 56,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "activation_function": "relu",
    },
}


@dataclass(frozen=True)
class Kernels:
    """Products by bench_kernels.py: speed-up over cuBLAS for schemes of ours (layout, scheme) and published kernels.

    Panels are of a shape each, over tokens; if `by_layer`, of a number of tokens each, over shapes. `value` is the
    column that is drawn. A figure of TFLOP/s also has a line of cuBLAS.
    """

    title: str
    ours: tuple[tuple[str, str], ...]
    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    peers: tuple[str, ...] = ()
    by_layer: bool = False
    value: str = "speedup_vs_cublas"


@dataclass(frozen=True)
class Roofline:
    """FLOP/s over operations for each byte that is read and written."""

    title: str
    ours: tuple[tuple[str, str], ...]
    shapes: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Sustained:
    """A busy loop of each product for `seconds`, with clock and power."""

    title: str
    ours: tuple[tuple[str, str], ...]
    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    seconds: float = 1.5


@dataclass(frozen=True)
class Counters:
    """Hardware counters of single products beside cuBLAS, by Nsight Compute: columns of counters.py."""

    title: str
    layouts: tuple[str, ...]
    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Bias:
    """FP6 with the exponent shifted once, beside FP6 with each weight converted, by bias_shift.py."""

    title: str
    shapes: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Models:
    """Whole models by bench_generate.py, in growing batches until the memory ends; `layouts` beside the dense model.

    `files` have rows of earlier runs. Tokens per GPU second are `batch * new / (prompt + new * step)`.
    """

    title: str
    models: tuple[str, ...]
    layouts: tuple[str, ...]
    batches: tuple[int, ...]
    prompt: int
    new: int
    files: tuple[str, ...] = ()


Kind = Kernels | Roofline | Sustained | Counters | Bias | Models
_INT4, _ROW = ("marlin", "int4:g128"), ("marlin", "int4:channel")
_SPARSE, _QUICK = ("marlin24", "int4:g128:24"), ("quick", "int4:g128:asym")
_FP6, _FP5 = ("tcfpx", "fp6:channel"), ("tcfpx", "fp5:channel")
_INT4_PEERS = ("marlin_int4_g128", "humming_int4_g128", "torch_int4pack_g128_bf16")
_FP6_PEERS = ("fp6_llm_e3m2_per_channel", "humming_fp6_e3m2_per_channel")
_UNTIL = (1, 2, 4, 8, 16, 32, 64, 128, 256)

FIGURES: dict[str, Kind] = {
    "marlin-1": Kernels("MARLIN, Figure 1", (_INT4,), SHAPES["large"], FEW, _INT4_PEERS),
    "marlin-9": Kernels(
        "MARLIN, Figure 9",
        (_INT4, _ROW),
        (*PUBLISHED_SHAPES, *(shape for name in list(SHAPES)[:4] for shape in SHAPES[name])),
        (16,),
        (*_INT4_PEERS[:2], "marlin_int4_per_channel"),
        by_layer=True,
    ),
    "marlin-10": Sustained("MARLIN, Figure 10", (_INT4, _SPARSE), ("57344x8192", "28672x4096"), (1, 8, 16, 64, 256)),
    "marlin-11": Roofline("MARLIN, Figure 11", (_INT4,), SQUARES, (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)),
    "marlin-12": Kernels(
        "MARLIN, Figure 12",
        (_SPARSE, _INT4),
        ("73728x18432", "57344x8192"),
        (*FEW, 256, 1024),
        ("sparse_marlin_int4_2:4_g128", "marlin_int4_g128"),
    ),
    "marlin-table": Models(
        "MARLIN, end to end",
        ("llama3-8b", "llama2-70b"),
        ("marlin", "marlin24"),
        (1, 2, 4, 8, 16, 32, 64),
        64,
        64,
        ("generate_llama3-8b", "generate_llama3-8b_128"),
    ),
    "fp6-1": Kernels("FP6-LLM, Figure 1", (_FP6,), SHAPES["llama2-70b"], FEW, _FP6_PEERS),
    "fp6-9": Kernels(
        "FP6-LLM, Figure 9",
        (_FP6, _FP5),
        (*PUBLISHED_SHAPES, *SHAPES["llama-7b"], *SHAPES["llama-13b"], *SHAPES["opt-30b"]),
        (8, 16, 32),
        (*_FP6_PEERS, "humming_fp5_e3m1_per_channel"),
        by_layer=True,
    ),
    "fp6-10": Counters(
        "FP6-LLM, Figure 10",
        ("tcfpx",),
        ("57344x8192", "8192x28672"),
        (1, 16, 64, 256, 1024),
        ("dram_pct", "tensor_pct", "alu_pct", "issue_pct"),
    ),
    "fp6-11": Kernels(
        "FP6-LLM, Figure 11",
        (_FP6, _INT4),
        ("57344x8192", "28672x4096"),
        (*FEW, 256, 1024),
        (_FP6_PEERS[0], "torch_int4pack_g128_bf16"),
    ),
    "fp6-12": Models("FP6-LLM, Figure 12", ("llama-13b",), ("tcfpx", "marlin"), _UNTIL, 512, 1536),
    "fp6-13": Models("FP6-LLM, Figure 13", ("opt-30b",), ("tcfpx", "marlin"), _UNTIL, 512, 1536),
    "fp6-14": Models(
        "FP6-LLM, Figure 14", ("llama2-70b",), ("tcfpx", "marlin"), _UNTIL, 512, 1536, ("generate_llama2-70b",)
    ),
    "zeroquant-2": Bias(
        "ZeroQuant(4+2), Figure 2",
        ("4096x4096", "28672x4096", "4096x14336", "8192x8192", "57344x8192", "8192x28672"),
        (1, 4, 8, 16, 32, 64, 128),
    ),
    "zeroquant-int4": Kernels(
        "ZeroQuant(4+2), FP6 beside fine-grained INT4",
        (_FP6, _INT4, _QUICK),
        ("4096x4096", "28672x4096", "4096x14336", "8192x8192", "57344x8192", "8192x28672"),
        (1, 8, 16, 32, 64, 128),
        ("fp6_llm_e3m2_per_channel", "quick_int4_g128"),
    ),
    "quick-3": Counters(
        "QUICK, Figure 3",
        ("quick", "marlin"),
        ("8192x8192",),
        (64,),
        ("conflicts", "conflicts_read", "conflicts_write", "shared_wavefronts"),
    ),
    "quick-7": Kernels(
        "QUICK, Figure 7",
        (_QUICK, _INT4),
        ("8192x8192",),
        (*FEW, 256),
        ("quick_int4_g128", "marlin_int4_g128"),
        value="tflops",
    ),
    "quick-8": Models(
        "QUICK, Figure 8",
        ("mistral-7b", "vicuna-13b", "llama-33b", "llama2-70b"),
        ("quick", "marlin"),
        _UNTIL,
        128,
        128,
        ("generate_llama3-8b",),
    ),
    "kernels": Kernels(
        "All kernels, by layer shape",
        (_INT4, _ROW, _SPARSE, ("marlin24", "int4:channel:24"), _QUICK, _FP6, _FP5),
        PUBLISHED_SHAPES,
        (1, 8, 16, 32, 64, 128, 256, 1024),
    ),
}
