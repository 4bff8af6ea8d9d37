"""Folders opened by a process without quantkit: exact weights or an error, never random weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.layouts.schemes import Schemes
from tests.folders import NEWEST
from tests.layouts.samples import write_folder
from tests.tiny_models import write_model

pytest.importorskip("compressed_tensors", reason="needs the compressed-tensors library, which is not installed")

LIBRARY = "compressed-tensors"
CACHE = Path(__file__).parents[2] / "build/test-cache"
#: vLLM 0.26 to 0.33 pin the first; transformers takes any, and loads folders by the one that is installed.
VERSIONS = ("0.17.0", "0.18.0", "0.19.0", "0.20.0")

# Runs elsewhere: argv has the folders of the library's versions, then "--", then model folders, "dense:" before one
# asks for dequantize=True. A child imports each version, because they share their name.
LOADER = """
import glob, json, os, sys, torch
import transformers.modeling_utils
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
split = sys.argv.index("--")
results = {}

def decompress(folder):
    if not os.path.exists(folder + "/expected"):
        return
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    stated = json.load(open(folder + "/config.json"))["quantization_config"]
    config = QuantizationConfig.model_validate({k: v for k, v in stated.items() if k != "quantkit"})
    tensors, expected = load_file(*glob.glob(folder + "/*.safetensors")), load_file(folder + "/expected")
    model = torch.nn.Module()
    for name in [*expected, "lm_head"]:
        *path, leaf = name.split(".")
        place = model
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        n, k = expected[name].shape if name in expected else (8, 128)
        if leaf == "embed_tokens":
            place.add_module(leaf, torch.nn.Embedding(n, k, device="meta"))
        elif not hasattr(place, leaf):
            place.add_module(leaf, torch.nn.Linear(k, n, device="meta"))
    apply_quantization_config(model, config)
    schemes = {n: m.quantization_scheme for n, m in model.named_modules() if getattr(m, "quantization_scheme", None)}
    assert schemes.keys() == expected.keys(), sorted(schemes.keys() ^ expected.keys())
    for name, scheme in schemes.items():
        parts = {k.rpartition(".")[2]: t for k, t in tensors.items() if k.rpartition(".")[0] == name}
        kind = getattr(scheme.format or config.format, "value", scheme.format or config.format)
        found = BaseCompressor.get_value_from_registry(kind).decompress(parts, scheme)["weight"]
        assert found.shape == expected[name].shape, "other shapes"
        assert torch.equal(found.float(), expected[name].to(found.dtype).float()), name

def load(folder, **options):
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype="auto", **options)
    with torch.no_grad():
        logits = model(torch.arange(8).unsqueeze(0)).logits
    weights = {name + ".weight": m.weight.detach().clone() for name, m in model.named_modules()
               if isinstance(m, torch.nn.Linear)}
    save_file(weights | {"logits": logits}, folder + "/loaded")

def attempt(argument, function, *args, **options):
    try:
        function(*args, **options)
        results[argument] = "loaded"
    except Exception as error:
        results[argument] = f"{type(error).__name__}: {error}"

for library in sys.argv[1:split]:
    if not os.fork():
        sys.path.insert(0, library)
        for argument in sys.argv[split + 1:]:
            attempt(argument, decompress, argument.removeprefix("dense:"))
        import compressed_tensors
        assert compressed_tensors.__file__.startswith(library)
        print(json.dumps(results), flush=True)
        os._exit(0)
    os.wait()
from transformers import CompressedTensorsConfig
for argument in sys.argv[split + 1:]:
    folder = argument.removeprefix("dense:")
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if folder != argument else {}
    attempt(argument, load, folder, **options)
assert not [m for m in sys.modules if m.split(".")[0] == "quantkit"]
print(json.dumps(results))
"""


@dataclass(frozen=True)
class Case:
    """A folder of random packed weights. With `how` "dense:", transformers dequantizes them as it loads."""

    schemes: Schemes
    dtype: str = "bfloat16"
    family: str = "llama"
    how: str = ""
    layout: str = LIBRARY


def one(label: str, **others: str) -> Schemes:
    """Give all linears a scheme, but for those whose name ends as a keyword."""
    overrides = tuple((rf".*\.{name}", Scheme.parse(other)) for name, other in others.items())
    return Schemes(Scheme.parse(label), overrides, ("lm_head",))


FIRST_WINS = (
    (r"model\.layers\.0\.self_attn\.k_proj", Scheme.parse("int4:channel")),
    (r".*\.v_proj", Scheme.parse("int4:channel")),
    (r".*\.[vq]_proj", Scheme.parse("int4:g32")),
    (r"model\.layers\.1\..*_proj", Scheme.parse("int4:channel")),
)
ALONE = ("int4:channel", "int4:g128:24", "int3:g64", "int5:channel", "int8:channel", "nvfp4", "mxfp4")
LOADS = {
    **{label: Case(one(label)) for label in (*ALONE, "fp6", "fp6-e2m3", "fp5-e2m2")},
    **{f"float16 {label}": Case(one(label), "float16") for label in ("int4:g128", "fp5")},
    "tied embeddings and biases": Case(one("int4:g128"), family="qwen2"),
    "asymmetric": Case(one("int4:g64:asym"), "float16", how="dense:"),
    **{
        label: Case(one(label), how="dense:")
        for label in (
            *("int4:channel:asym", "int2:g32:asym", "int3:channel:asym", "int5:g64:asym", "int6:g64:asym"),
            *("int8:channel:asym",),
        )
    },
    "mixed groups, first override wins": Case(Schemes(Scheme.parse("int4:g128"), FIRST_WINS, ("lm_head",)), "float16"),
    "mixed formats": Case(one("int4:g128", down_proj="fp6", o_proj="fp5"), "float16"),
    "mixed with FP4": Case(one("int4:g128", down_proj="nvfp4")),
    "mixed widths": Case(one("int4:g128", down_proj="int6:g64", o_proj="int8"), "float16"),
}
#: What they are refused for is their name, not the scheme.
RAISES = {
    layout: Case(one(label), "float16", layout=layout)
    for label, layouts in {
        "int4:g128": ("marlin", "gptq", "gptq-v2", "quick"),
        "int4:g64:asym": ("awq",),
        "int4:g128:24": ("marlin24", "marlin24-ct"),
        "fp6": ("humming",),
        "fp5": ("tcfpx",),
    }.items()
    for layout in layouts
}


def library(version: str) -> Path:
    """Give a folder with the Python code of a version; skip if it is neither here nor to be had."""
    place = CACHE / f"{LIBRARY}-{version}"
    if not place.is_dir():
        made = CACHE / f"{LIBRARY}-{version}.{os.getpid()}"
        command = ("pip", "install", "-q", "--no-deps", "--no-compile", "--target", made, f"{LIBRARY}=={version}")
        if subprocess.run([sys.executable, "-m", *command], capture_output=True).returncode:
            shutil.rmtree(made, ignore_errors=True)
            return made
        made.rename(place)
    return place


@dataclass
class Elsewhere:
    """The folders, and the outcomes of a process without quantkit that opened them."""

    folders: dict[str, Path]
    records: dict[str, dict[str, QuantizedTensor]]
    #: Version -> folder -> "loaded", or the error; None is transformers, by the version that is installed.
    outcomes: dict[str | None, dict[str, str]]


@pytest.fixture(scope="module")
def elsewhere(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    root = tmp_path_factory.mktemp("elsewhere")
    sources: dict[tuple[str, str], Path] = {}
    folders, records, arguments = {}, {}, {}
    for i, (name, case) in enumerate((LOADS | RAISES).items()):
        if (case.dtype, case.family) not in sources:
            written = write_model(case.family, root / f"{case.family}-{case.dtype}", getattr(torch, case.dtype))
            sources[case.dtype, case.family] = written
        folders[name] = root / str(i)
        source = sources[case.dtype, case.family]
        records[name] = write_folder(source, folders[name], case.layout, case.schemes)
        arguments[name] = f"{case.how}{folders[name]}"
    folders["experts"], folders["ends"] = root / "experts", root / "ends"
    write_folder(write_model("qwen3_moe", root / "dense"), folders["experts"], LIBRARY, one("int4:g32"))
    ends = {"embed_tokens": "int8:channel", "lm_head": "int4:g64"}
    quantkit.quantize(tiny_llama, folders["ends"], method="rtn", group_size=64, override=ends)
    for name in [*LOADS, "experts", "ends"]:
        src = Checkpoint(folders[name])
        weights = {module: src.dense(f"{module}.weight", torch.float32) for module in src.modules()}
        save_file(weights, folders[name] / "expected")
        arguments.setdefault(name, str(folders[name]))
    libraries = {version: place for version in VERSIONS if (place := library(version)).is_dir()}
    command = [sys.executable, "-c", LOADER, *libraries.values(), "--", *arguments.values()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    found = [{name: line[argument] for name, argument in arguments.items()} for line in lines]
    return Elsewhere(folders, records, dict(zip((*libraries, None), found, strict=True)))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[NEWEST] if "asym" in name else []) for name in LOADS])
def test_transformers_reads_the_exact_weights(name: str, elsewhere: Elsewhere) -> None:
    assert elsewhere.outcomes[None][name] == "loaded"
    found, dtype = load_file(elsewhere.folders[name] / "loaded"), getattr(torch, LOADS[name].dtype)
    # dequantize=True computes in the dtype of the stored scales and casts afterwards.
    first = torch.float16 if LOADS[name].how else dtype
    assert len(elsewhere.records[name]) == 14
    for module, q in elsewhere.records[name].items():
        weight = found[f"{module}.weight"]
        assert weight.dtype == dtype
        assert torch.equal(weight.view(torch.int16), q.dequantize(first).to(dtype).view(torch.int16)), module
    assert torch.isfinite(found["logits"]).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_of_the_library_has_the_same_values(version: str, elsewhere: Elsewhere) -> None:
    if version not in elsewhere.outcomes:
        pytest.skip(f"no {LIBRARY} {version} here, and no network")
    wrong = {name: said for name, said in elsewhere.outcomes[version].items() if said != "loaded"}
    # 0.17 has whole codes in a word, so it sees other shapes here and says so (docs/layouts.md 9).
    straddling = {
        name
        for name, case in LOADS.items()
        for scheme in (case.schemes.default, *dict(case.schemes.overrides).values())
        if scheme.format.name in ("int3", "int5", "int6")
    }
    assert wrong.keys() == (straddling if version == "0.17.0" else set()), str(wrong)
    assert all("other shapes" in said or "size of tensor" in said for said in wrong.values()), wrong


@pytest.mark.parametrize("layout", RAISES)
def test_transformers_refuses_layouts_that_it_does_not_know(layout: str, elsewhere: Elsewhere) -> None:
    said = elsewhere.outcomes[None][layout]
    assert said != "loaded" and not (elsewhere.folders[layout] / "loaded").exists()
    if layout == "quick":
        assert "Invalid format 'quick'" in said
    if layout == "awq":
        assert said.startswith("ImportError") and "gptqmodel" in said
