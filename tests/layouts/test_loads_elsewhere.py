"""Folders loaded by a process without quantkit: exact weights or an error, never random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.layouts.schemes import Schemes
from tests.layouts.samples import write_folder
from tests.tiny_models import write_model

pytest.importorskip("compressed_tensors", reason="needs the compressed-tensors library, which is not installed")

# Runs elsewhere: argv is a list of folders, "dense:" before one asks for dequantize=True.
LOADER = """
import json, sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
torch.set_num_threads(1)
results = {}
for argument in sys.argv[1:]:
    folder = argument.removeprefix("dense:")
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if folder != argument else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype="auto", **options)
        with torch.no_grad():
            logits = model(torch.arange(8).unsqueeze(0)).logits
        weights = {name + ".weight": m.weight.detach().clone() for name, m in model.named_modules()
                   if isinstance(m, torch.nn.Linear)}
        save_file(weights | {"logits": logits}, folder + "/loaded.safetensors")
        results[argument] = "loaded"
    except Exception as error:
        results[argument] = f"{type(error).__name__}: {error}"
assert not [m for m in sys.modules if m.split(".")[0] == "quantkit"]
print(json.dumps(results))
"""

INT4, CHANNEL, FP6, FP5 = (Scheme.parse(label) for label in ("int4:g128", "int4:channel", "fp6", "fp5"))
E2, ASYM = ("fp6-e2m3", "fp5-e2m2"), Scheme.parse("int4:g64:asym")
SPARSE = Scheme.parse("int4:g128:24")
HEAD = ("lm_head",)
MIXED = Schemes(
    INT4,
    (
        (r"model\.layers\.0\.self_attn\.k_proj", CHANNEL),
        (r".*\.v_proj", CHANNEL),
        (r".*\.[vq]_proj", Scheme.parse("int4:g32")),
        (r"model\.layers\.1\..*", CHANNEL),
    ),
    HEAD,
)
LOADS = {
    **{
        f"{dtype}-{scheme.label}": (dtype, "llama", "", Schemes(scheme, ignore=HEAD))
        for dtype, scheme in (("float16", INT4), ("float16", FP5), ("bfloat16", CHANNEL), ("bfloat16", FP6))
    },
    "tied embeddings and biases": ("bfloat16", "qwen2", "", Schemes(INT4, ignore=HEAD)),
    "asymmetric": ("float16", "llama", "dense:", Schemes(Scheme.parse("int4:g64:asym"), ignore=HEAD)),
    "asymmetric rows": ("bfloat16", "llama", "dense:", Schemes(Scheme.parse("int4:channel:asym"), ignore=HEAD)),
    "mixed groups, first override wins": ("float16", "llama", "", MIXED),
    **{
        label: ("bfloat16", "llama", "", Schemes(Scheme.parse(label), ignore=HEAD))
        for label in (*E2, "int3:g64", "int5:channel", "int8:channel", "nvfp4", "mxfp4")
    },
    **{
        label: ("bfloat16", "llama", "dense:", Schemes(Scheme.parse(label), ignore=HEAD))
        for label in ("int2:g32:asym", "int3:channel:asym", "int5:g64:asym", "int6:g64:asym", "int8:channel:asym")
    },
    "mixed formats": ("float16", "llama", "", Schemes(INT4, ((r".*\.down_proj", FP6), (r".*\.o_proj", FP5)), HEAD)),
    "mixed with FP4": ("bfloat16", "llama", "", Schemes(INT4, ((r".*\.down_proj", Scheme.parse("nvfp4")),), HEAD)),
    "mixed widths": (
        "float16",
        "llama",
        "",
        Schemes(INT4, ((r".*\.down_proj", Scheme.parse("int6:g64")), (r".*\.o_proj", Scheme.parse("int8"))), HEAD),
    ),
}
#: What they are refused for is their name, not the scheme.
RAISES = {
    f"{layout} {scheme.label}": (layout, scheme)
    for layouts, scheme in (
        (("marlin", "gptq", "gptq-v2", "quick"), INT4),
        (("awq",), ASYM),
        (("marlin24", "marlin24-ct"), SPARSE),
        (("humming",), FP6),
        (("tcfpx",), FP5),
    )
    for layout in layouts
}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path, dict[str, QuantizedTensor]]]:
    """Load every folder in one process without quantkit; give the result, the folder and the records of each."""
    root = tmp_path_factory.mktemp("elsewhere")
    sources: dict[tuple[str, str], Path] = {}
    folders, arguments = {}, {}
    cases = {name: (*case, "compressed-tensors") for name, case in LOADS.items()}
    cases |= {name: ("float16", "llama", "", Schemes(s, ignore=HEAD), layout) for name, (layout, s) in RAISES.items()}
    for i, (name, (dtype, family, how, schemes, layout)) in enumerate(cases.items()):
        if (dtype, family) not in sources:
            folder = root / f"{family}-{dtype}"
            sources[dtype, family] = write_model(family, folder, getattr(torch, dtype))
        out = root / str(i)
        folders[name] = (out, write_folder(sources[dtype, family], out, layout, schemes))
        arguments[name] = f"{how}{out}"
    run = subprocess.run(
        [sys.executable, "-c", LOADER, *arguments.values()], capture_output=True, text=True, timeout=300, cwd=root
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout.splitlines()[-1])
    return {name: (results[arguments[name]], *folders[name]) for name in cases}


@pytest.mark.parametrize("name", LOADS)
def test_transformers_reads_the_exact_weights(name: str, elsewhere: dict) -> None:
    outcome, folder, records = elsewhere[name]
    assert outcome == "loaded"
    found = load_file(folder / "loaded.safetensors")
    dtype = getattr(torch, LOADS[name][0])
    # dequantize=True computes in the dtype of the stored scales and casts afterwards.
    first = torch.float16 if LOADS[name][2] else dtype
    assert len(records) == 14
    for module, q in records.items():
        weight = found[f"{module}.weight"]
        assert weight.dtype == dtype
        assert torch.equal(weight.view(torch.int16), q.dequantize(first).to(dtype).view(torch.int16)), module
    assert torch.isfinite(found["logits"]).all()


@pytest.mark.parametrize("name", RAISES)
def test_transformers_refuses_layouts_that_it_does_not_know(name: str, elsewhere: dict) -> None:
    outcome, folder, _ = elsewhere[name]
    assert outcome != "loaded"
    assert not (folder / "loaded.safetensors").exists()


def test_transformers_refuses_quick_for_its_version(elsewhere: dict) -> None:
    assert "Invalid format 'quick'" in elsewhere["quick int4:g128"][0]
    awq = elsewhere["awq int4:g64:asym"][0]
    assert awq.startswith("ImportError") and "gptqmodel" in awq
