"""compressed-tensors folders parse, match their linears and decompress alike under each version that engines pin."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.layouts.schemes import Schemes
from tests.layouts.samples import write_folder
from tests.serving.engines import INT4 as RTN
from tests.tiny_models import write_model

CACHE = Path(__file__).parents[2] / "build/test-cache"
#: vLLM 0.26 to 0.33 pin 0.17, and transformers takes any of them.
VERSIONS = ("0.17.0", "0.18.0", "0.19.0", "0.20.0")
NAME = "compressed-tensors"
MIXED = (
    (r"model\.layers\.0\.self_attn\.k_proj", Scheme.parse("int4:channel")),
    (r".*\.[vq]_proj", Scheme.parse("int8:g32")),
    (r".*\.down_proj", Scheme.parse("fp6:channel")),
)
DENSE = ("lm_head",)
LABELS = (
    "int4:g128",
    "int4:channel:asym",
    "int8:g32:asym",
    "int2:g64",
    "int4:g128:24",
    "fp6:channel",
    "fp5:channel",
    "nvfp4",
    "mxfp4",
)
#: 0.17 has whole codes in a word, so it sees other shapes here and says so (docs/layouts.md 9).
STRADDLING = ("int3:g32:asym", "int5:g64", "int6:channel")
KINDS = {label: Schemes(Scheme.parse(label), ignore=DENSE) for label in (*LABELS, *STRADDLING)}
KINDS["mixed"] = Schemes(Scheme.parse("int4:g32"), MIXED, DENSE)

# Runs elsewhere: argv has the folders of the library, then "--", then the model folders. A child imports each
# version, because they share their name; torch and transformers are imported once.
PARSER = """
import glob, json, os, sys, torch
import transformers.modeling_utils
from safetensors.torch import load_file
torch.set_num_threads(1)
split = sys.argv.index("--")

def check(folder):
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

for library in sys.argv[1:split]:
    if not os.fork():
        sys.path.insert(0, library)
        found = {}
        for folder in sys.argv[split + 1:]:
            try:
                check(folder)
                found[folder] = None
            except Exception as error:
                found[folder] = f"{type(error).__name__}: {error}"
        import compressed_tensors
        assert compressed_tensors.__file__.startswith(library)
        print(json.dumps({library: found}), flush=True)
        os._exit(0)
    os.wait()
"""


def library(version: str) -> Path:
    """Give a folder with the Python code of a version; skip if it is neither here nor to be had."""
    place = CACHE / f"{NAME}-{version}"
    if not place.is_dir():
        made = CACHE / f"{NAME}-{version}.{os.getpid()}"
        command = ("pip", "install", "-q", "--no-deps", "--no-compile", "--target", made, f"{NAME}=={version}")
        if subprocess.run([sys.executable, "-m", *command], capture_output=True).returncode:
            shutil.rmtree(made, ignore_errors=True)
            pytest.skip(f"no {NAME} {version} here, and no network")
        made.rename(place)
    return place


def test_each_kind_of_folder_has_the_same_values_under_each_version(tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip(NAME.replace("-", "_"))
    libraries = [library(version) for version in VERSIONS]
    for kind, schemes in KINDS.items():
        write_folder(tiny_llama, tmp_path / kind, NAME, schemes)
    experts = write_model("qwen3_moe", tmp_path / "dense")
    write_folder(experts, tmp_path / "experts", NAME, Schemes(Scheme.parse("int4:g32"), ignore=DENSE))
    ends = {"embed_tokens": "int8:channel", "lm_head": "int4:g64"}
    quantkit.quantize(tiny_llama, tmp_path / "ends", **{**RTN, "group_size": 64}, override=ends)
    folders = [tmp_path / kind for kind in (*KINDS, "experts", "ends")]
    for folder in folders:
        src = Checkpoint(folder)
        weights = {module: src.dense(f"{module}.weight", torch.float32) for module in src.modules()}
        save_file(weights, folder / "expected")
    run = subprocess.run(
        [sys.executable, "-c", PARSER, *libraries, "--", *folders], capture_output=True, text=True, timeout=300
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(VERSIONS), run.stderr[-2000:]
    wrong = {
        (Path(library).name.rpartition("-")[2], Path(folder).name): error
        for line in lines
        for library, found in line.items()
        for folder, error in found.items()
        if error is not None
    }
    known = {("0.17.0", kind) for kind in STRADDLING}
    assert {case: error for case, error in wrong.items() if case not in known} == {}
    assert wrong.keys() == known and all("other shapes" in e or "size of tensor" in e for e in wrong.values())
