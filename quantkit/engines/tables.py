"""Support of packed folders by other programs: dated tables, one entry an engine.

Each row names its source, and the behaviour seen or published for some layouts, schemes and shapes.
A case without a row is unknown. No torch is imported here, because the command line takes its
choices from this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from quantkit.engines.joined import NEVER_QUANTIZED, NeverQuantized, is_expert
from quantkit.engines.rows import PUBLISHED, Engine, Folder, Kernel, Limit, Reader, Trait
from quantkit.errors import Setting, Words
from quantkit.models.families import HEAD_PARTS
from quantkit.names import KERNELS

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


def _packs(part: str, *families: str) -> Callable[[Folder], bool]:
    """Make the test whether a model of `families` has quantized linears with `part` in
    their names.
    """

    def holds(folder: Folder) -> bool:
        return not folder.model_types.isdisjoint(families) and any(
            part in module.split(".") for module in folder.linears
        )

    return holds


def _matches(never: NeverQuantized) -> Callable[[Folder], bool]:
    """Make the test whether linears that vLLM never quantizes are quantized."""
    pattern = re.compile(never.pattern)
    return lambda f: (
        not f.model_types.isdisjoint(never.families) and any(map(pattern.fullmatch, f.linears))
    )


def _part_of_a_name(folder: Folder) -> bool:
    names = "\n".join(folder.linears)
    return any(module in names for module in folder.dense)


def _lacks_topk_method(folder: Folder) -> bool:
    routed = folder.config.get("model_type") in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
    return routed and folder.config.get("topk_method") != "noaux_tc"


#: Families with draft layers whose class in vLLM 0.26.0 passes over them, by its sources of draft
#: classes, 2026-11-25.
_DRAFTED = (
    *(
        "deepseek_v3",
        "deepseek_v32",
        "ernie4_5_moe",
        "exaone4_5",
        "exaone_moe",
        "glm4_moe",
        "glm4_moe_lite",
    ),
    *(
        "glm_moe_dsa",
        "glm_ocr",
        "glm_ocr_text",
        "hy_v3",
        "longcat_flash",
        "mimo",
        "mimo_v2_flash",
        "minimax_m3_vl",
    ),
    *("nemotron_h", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
)


def _unknown_outside(folder: Folder) -> bool:
    drafted = not folder.model_types.isdisjoint(_DRAFTED)
    return any(not drafted or HEAD_PARTS.match(f"{module}.") for module in folder.outside)


#: Model types without a class in vLLM 0.26.0, by its own answer (benchmarks/census.json).
_NO_CLASS = """
apertus1p5 apertus1p5_text aria_text axk2 aya_vision bailing_hybrid bamba bart beam bert
bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small blip blt
camembert codegen cohere_compass cohere_compass_text cosmos3_omni cpmant ctrl data2vec-text
deepseek_ocr2 deepseek_vl deepseek_vl_hybrid diffllama doge dory dots1 dots3_note dots3_note_text
electra ernie exaone exaone_moe fast_vlm flint fuyu git glm46v glm5_next glmga got_ocr2 gpt_neo
gpt_neox_japanese granite_docling granite_swa granitemoe_swa helium hy_v4 hy_v4_vl
hyperclovax_vision_v2 idefics idefics2 inkling2 inkling2_loop inkling2_loop_text inkling2_text
instructblip instructblipvideo internlm3 iquestcoder janus jetmoe kimi_k25 kolibri1 kosmos-2
kosmos-2.5 lara_mini lfm3 lfm3_vl lighton_ocr marian mbart megatron-bert minicpm_ocr minicpmv4_7
minimax minimax_m3_vl_text ministral mistral4 mistral_large4 mllama modernbert-decoder molmo2 moshi
muse_glimmer muse_spark mvp nanochat nemotron_h_omni openai-gpt ovis2 pegasus perception_lm
persimmon phi4_multimodal phimoe pi0 plbart pp_chart2table prophetnet qwen2_5_omni_thinker
qwen3_omni_moe_thinker qwen4_exp qwen4_exp_text recurrent_gemma reformer rembert roberta
roberta-prelayernorm roc_bert roformer rwkv sarvam_mla sarvam_moe solar_open trocr unlimited_ocr
vaultgemma video_llama_3 video_llava vipllava xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod
youtu zamba zaya
"""


def _has_encoder(folder: Folder) -> bool:
    return folder.config.get("is_encoder_decoder") is True


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
    "sizes": Trait(
        "several group sizes with zero points",
        Words("quantize with one group size, or with", Setting("asym", False)),
        lambda f: len({s.group_size for s in f.schemes}) > 1,
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
            scheme.format.is_float and is_expert(m) for m, (scheme, _) in f.linears.items()
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
    "rows by heads": Trait(
        "joined queries, keys and values, whose rows vLLM's class of this model reorders while "
        "loading",
        Words("leave them dense with", Setting("skip", ".*query_key_value")),
        _packs("query_key_value", "falcon"),
    ),
    "packed head": Trait(
        "a packed output head, which vLLM does not take in this layout",
        Words("leave it dense with", Setting("skip", ".*lm_head")),
        lambda f: any(module.rpartition(".")[2] == "lm_head" for module in f.linears),
    ),
    "topk": Trait(
        "a config.json without topk_method, from which vLLM infers no e_score_correction_bias",
        'add "topk_method": "noaux_tc" to config.json',
        _lacks_topk_method,
    ),
    "part": Trait(
        "a dense linear whose name is a part of a quantized one's, which the public config cannot "
        "tell apart",
        Words("use", Setting("layout", "compressed-tensors")),
        _part_of_a_name,
    ),
    "by heads": Trait(
        "joined queries, keys and values, whose rows vLLM's class of this model reorders",
        Words("leave them dense with", Setting("skip", ".*query_key_value")),
        _packs("query_key_value", "bloom", "gpt_neox"),
    ),
    **{
        each.words: Trait(
            f"{each.words}, which vLLM's class of this model keeps dense",
            Words("leave them dense too with", Setting("skip", each.pattern)),
            _matches(each),
        )
        for each in NEVER_QUANTIZED
    },
    "own experts": Trait(
        "experts whose packed tensors vLLM's class of this model does not take",
        "load it with quantkit.load",
        _packs("experts", "gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid"),
    ),
    "own linears": Trait(
        "linears that vLLM's class of this model keeps dense, or a dense tower that it takes for "
        "quantized",
        "load it with quantkit.load",
        lambda f: (
            f.config.get("model_type") == "blip-2"
            or (f.config.get("model_type") == "hrm_text" and f.layout != "compressed-tensors")
        ),
    ),
    "no class": Trait(
        "its model type, which vLLM 0.26.0 or its transformers does not know",
        "load it with another reader",
        lambda f: f.config.get("model_type") in _NO_CLASS.split() and not _has_encoder(f),
    ),
    "encoder": Trait(
        "an encoder-decoder", "load it with another reader", _has_encoder, is_unknown=True
    ),
    "no gate": Trait(
        "experts without a gate, whose place vLLM leaves without values in this layout",
        Words("use", Setting("layout", "compressed-tensors")),
        lambda f: (
            {m.rpartition(".")[2] for m in f.linears if is_expert(m)} == {"up_proj", "down_proj"}
        ),
    ),
    "outside": Trait(
        "tensors outside the model, which vLLM's class does not pass over",
        "save the model without them, or load it with quantkit.load",
        _unknown_outside,
    ),
    "odd n": Trait(
        "weights whose n is neither 128 nor a multiple of 256",
        Words("use", Setting("layout", "compressed-tensors")),
        lambda f: any(n != 128 and n % 256 for _, (n, _) in f.linears.values()),
    ),
}


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
#: Traits that vLLM's class of a model refuses in every layout, asked for docs/models.md.
_CLASSES = (
    "topk",
    "by heads",
    *(each.words for each in NEVER_QUANTIZED),
    "own experts",
    "own linears",
    "outside",
    "no class",
    "encoder",
)
_OF_WIDTHS = ("zeros of other widths", "experts of other widths", "zeros of INT8 experts")
HOPPER, AMPERE, ADA = (9, 0), (8, 0), (8, 9)
#: GPUs that were asked about fewer schemes.
_OTHERS = ((7, 5), (8, 6), (10, 0), (12, 0))
#: vLLM with quantkit's plug-in, in the layouts of quantkit's kernels.
PLUGIN = "vLLM with quantkit[vllm]"
_OF_PLUGIN = ("split", "packed head", "rows by heads", *_CLASSES)
_PLUGIN = "quantkit's plug-in in vLLM 0.26.0 and 0.33.0, run on a CPU, 2026-11-26"
VLLM = Engine(
    "vllm",
    readers=(
        Reader(
            "vLLM",
            ("compressed-tensors",),
            (*_SHARED, "experts", *_OF_WIDTHS, "packed head", *_CLASSES),
            _LOADER,
        ),
        Reader(
            "vLLM",
            ("gptq", "gptq-v2"),
            ("asymmetric", "wrapped", "no gate", *_SHARED, *_CLASSES),
            _LOADER,
        ),
        Reader("vLLM", ("awq",), ("mixed", "part", "no gate", *_SHARED, *_CLASSES), _LOADER),
        Reader(
            "vLLM",
            ("humming",),
            ("wrapped", *_SHARED, "experts", "experts of integers", *_CLASSES),
            _LOADER,
        ),
        Reader(PLUGIN, tuple(KERNELS), _OF_PLUGIN, _PLUGIN, is_own=True),
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
    ),
    uses={
        "vLLM": ("vLLM", "sh", "vllm serve FOLDER"),
        PLUGIN: (
            "vLLM, on quantkit's kernels",
            "sh",
            "pip install 'quantkit[vllm]'\nvllm serve FOLDER",
        ),
    },
    joins=True,
    signed=Limit(
        ("compressed-tensors", "gptq", "gptq-v2"),
        "scales may be negative, which Marlin reads as large positive ones if "
        "VLLM_MARLIN_INPUT_DTYPE=int8 is set",
        Words("for W4A8 quantize with", Setting("signed", False)),
        "https://github.com/vllm-project/vllm/issues/48905, open; vLLM 0.26.0's scales are as it "
        "says, 2026-11-25",
    ),
)

_EXPERTS_PULL = "https://github.com/sgl-project/sglang/pull/17137, 2026-01-15"
_HUMMING_KERNELS = "docs/layouts.md 9b, humming-kernels 0.1.19, 2026-11-23"
SGLANG = Engine(
    "sglang",
    readers=(
        Reader(
            "SGLang", ("compressed-tensors",), (*_SHARED, "experts", "topk", "encoder"), PUBLISHED
        ),
        Reader("SGLang", ("gptq",), ("asymmetric", "wrapped", "encoder", *_SHARED), PUBLISHED),
        Reader(
            "SGLang",
            ("humming",),
            ("mixed", "encoder", *_SHARED, "experts", "experts of integers"),
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
        Reader(_PLAIN, ("compressed-tensors",), ("zeros", "padded"), _ELSEWHERE),
        Reader(
            _DEQUANTIZED,
            ("compressed-tensors",),
            ("zeros of experts", "sizes", "padded"),
            _ELSEWHERE,
            only="asymmetric",
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
        for is_float, groups in ((False, (128, 64, 32, None)), (True, (None,)))
    ),
    uses={
        _PLAIN: ("transformers (`pip install compressed-tensors`)", "python", _transformers()),
        _DEQUANTIZED: (
            "transformers (`pip install compressed-tensors`), with dense weights in memory",
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


def _odd_rows(folder: Folder) -> str | None:
    odd = [(module, shape) for module, (_, shape) in folder.linears.items() if shape[0] % 256]
    if not odd:
        return None
    (module, shape), *_ = odd
    return (
        f"{len(odd)} weights have n % 256 != 0 (first {module} {list(shape)}): the published "
        "MARLIN kernel does not "
        "take them, readers that ask n % 64 do"
    )


_HALF_ONLY = "run float16 only: load this model with dtype float16"
#: Layouts, and what to say of a folder that readers open, but not in every case (LAYOUTS 3.1, 3.5
#: and 10).
CAUTIONS: tuple[tuple[tuple[str, ...], Callable[[Folder], str | None]], ...] = (
    (("marlin",), _odd_rows),
    (("marlin",), lambda f: None if f.is_half else f"published MARLIN readers {_HALF_ONLY}"),
    (
        ("gptq", "gptq-v2"),
        lambda f: None if f.is_half else f"GPTQ kernels other than MARLIN's {_HALF_ONLY} there",
    ),
)
