"""`verify` finds every flipped bit and every planted fault, names the weight, and raises no false alarm."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantkit.checkpoint.report import REPORT
from quantkit.errors import CheckpointError
from quantkit.evaluation.options import VerifyOptions
from quantkit.evaluation.verify import verify, write
from quantkit.io.files import hash_of_file
from quantkit.names import VERIFICATION
from quantkit.pipeline import convert, quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from tests.command_line import call
from tests.evaluation.folders import edit, recorded
from tests.reporting.samples import write_report
from tests.tiny_models import write_model

SCHEMES = {
    "ct": ("compressed-tensors", {"format": "int4"}),
    "ct-asym": ("compressed-tensors", {"format": "int4", "group_size": 32, "symmetric": False}),
    "humming": ("humming", {"format": "fp6"}),
    "gptq": ("gptq", {"format": "int4", "group_size": 64}),
    "gptq-v2-asym": ("gptq-v2", {"format": "int4", "group_size": "channel", "symmetric": False}),
    "marlin": ("marlin", {"format": "int4"}),
    "marlin-channel": ("marlin", {"format": "int4", "group_size": "channel"}),
}
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A one-block model quantized into every kind of layout."""
    folder = tmp_path_factory.mktemp("outputs")
    model = write_model("llama", folder / "model", num_hidden_layers=1)
    for name, (layout, scheme) in SCHEMES.items():
        recipe = from_mapping({"scheme": scheme, "method": "rtn", "clip": "none", "layout": layout})
        quantize.quantize(model, folder / name, recipe, run=RunOptions(device="cpu"))
    return {path.name: path for path in folder.iterdir()}


def test_a_proof_of_a_folder_that_is_read_only_is_no_failure(outputs: dict[str, Path], monkeypatch: Any) -> None:
    monkeypatch.setattr("os.access", lambda _, mode, **__: not mode & os.W_OK)
    done = call("verify", outputs["humming"])
    assert "verified: 7 linears" in done.stdout and "is not writable: verify.json is not written" in done.stderr
    assert not (outputs["humming"] / VERIFICATION).exists()


@pytest.fixture
def copy(outputs: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, to: str = "copy", foreign: bool = False) -> Path:
        """Copy an output; a foreign copy has no report, only the tensors and the public config."""
        out = Path(shutil.copytree(outputs[name], tmp_path / to))
        if foreign:
            (out / REPORT).unlink()
        return out

    return make


@pytest.mark.parametrize("name", SCHEMES)
def test_no_false_alarm_on_a_good_checkpoint(name: str, outputs: dict[str, Path], copy: Any) -> None:
    before = sorted(outputs[name].iterdir())
    found = verify(outputs[name], against=outputs[name])
    assert found.ok, found.failures
    assert len(found.rows) == 7
    assert found.weights == 4 * 128 * 128 + 3 * 128 * 256
    assert all((row.repack, row.digest, row.against) == (True, True, True) for row in found.rows)
    assert sum(row.bytes for row in found.rows) > 0
    assert sorted(outputs[name].iterdir()) == before, "verify wrote into the folder"
    listed = recorded(outputs[name])["files"]
    assert {path.name for path in before} - {REPORT, "README.md"} <= listed.keys()  # users edit the model card
    assert found.to_dict()["kernel"] is None
    assert "no kernel ran" in found.to_dict()["note"]
    assert found.files == listed
    foreign = verify(copy(name, foreign=True))
    assert foreign.ok and all((row.repack, row.digest) == (True, None) for row in foreign.rows), foreign.failures
    assert any(REPORT in notice for notice in foreign.notices) and "config.json" in foreign.files


@pytest.mark.parametrize("name", SCHEMES)
def test_a_flipped_bit_in_a_packed_tensor_is_found_by_the_digest_alone(name: str, copy: Any) -> None:
    """The fault comes before the files are hashed, so the list of hashes agrees with the damaged files."""
    random.seed(2)
    folder = copy(name)
    module = "model.layers.0.mlp.down_proj"
    for suffix in sorted(p for path in folder.glob("*.safetensors") for p in load_file(path) if module in p):
        broken = copy(name, to=suffix)

        def change(part: dict[str, Tensor], suffix: str = suffix) -> None:
            tensor = part[suffix.removeprefix(f"{module}.")]
            data = tensor.view(torch.uint8).view(-1)
            data[random.randrange(data.numel())] ^= 1 << random.randrange(8)

        edit(broken, module, change)
        report = recorded(broken)
        report["files"] |= {p.name: hash_of_file(p) for p in broken.glob("*.safetensors")}
        write_report(broken, report)
        found = verify(broken)
        assert not found.ok, suffix
        assert [row.module for row in found.rows if row.problem] == [module]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_scales_that_are_not_finite_are_found_and_zeros_give_a_notice(value: float, copy: Any) -> None:
    folder = copy("marlin", foreign=True)
    edit(folder, UP, lambda part: part["s"].view(-1)[5:7].fill_(value))
    found = verify(folder, asked=VerifyOptions(unsealed=True))
    assert found.ok == (value == 0)
    if found.ok:
        assert f"{UP}: 2 scales are zero" in found.notices
    else:
        assert UP in found.failures[0] and str(value) in found.failures[0]


def test_a_missing_and_an_extra_weight_are_found(copy: Any) -> None:
    folder = copy("marlin")
    report = recorded(folder)
    dropped = report["layers"].pop()
    write_report(folder, report)
    assert any(dropped["name"] in failure for failure in verify(folder).failures)
    report["layers"] += [dropped, {**dropped, "name": "model.layers.7.mlp.up_proj"}]
    write_report(folder, report)
    assert any("model.layers.7" in failure for failure in verify(folder).failures)


@pytest.mark.parametrize(
    ("fmt", "size", "layout", "to", "recast_to"),
    [
        ("fp5-e2m2", "channel", "tcfpx", "humming", "fp6:channel"),
        ("int4", 256, "compressed-tensors", "marlin", "int4:g128"),
        ("int4", "channel", "gptq", "quick", "int4:g128"),
    ],
)
def test_a_lossless_conversion_that_recast_the_weights_is_no_difference(
    fmt: str, size: int | str, layout: str, to: str, recast_to: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = write_model("llama", tmp_path / "model", num_hidden_layers=1, **sizes)
    scheme = {"format": fmt, "group_size": size}
    recipe = from_mapping({"scheme": scheme, "method": "rtn", "clip": "none", "layout": layout})
    quantize.quantize(model, tmp_path / "source", recipe, run=RunOptions(device="cpu"))
    convert.pack(tmp_path / "source", tmp_path / "packed", to)
    for folder, other in (("packed", "source"), ("source", "packed")):
        found = verify(tmp_path / folder, against=tmp_path / other)
        assert found.ok, found.failures
        assert all(row.against for row in found.rows)
        (notice,) = (line for line in found.notices if "have the values of" in line)
        assert f"{fmt}:" in notice and recast_to in notice

    def change(part: dict[str, Tensor]) -> None:
        part[next(name for name in ("weight", "B", "qweight") if name in part)][0, 0] ^= 1

    edit(tmp_path / "packed", UP, change)
    damaged = verify(tmp_path / "packed", against=tmp_path / "source")
    assert [row.module for row in damaged.rows if row.against is False] == [UP]


def test_against_counts_the_differences(outputs: dict[str, Path], copy: Any) -> None:
    folder = copy("ct", foreign=True)

    def change(part: dict[str, Tensor]) -> None:
        part["weight_packed"][0, :3] ^= 1
        part["weight_scale"][1, 0] *= 2

    edit(folder, UP, change)
    found = verify(folder, against=outputs["ct"])
    assert [row.module for row in found.rows if not row.against] == [UP]
    (failure,) = found.failures
    assert "3 of 32768 codes" in failure and "1 of 256 scales" in failure
    other = verify(outputs["marlin-channel"], against=outputs["marlin"])
    # With k = 128, one scale per row is one per group of 128: the values are the same.
    assert [row.module for row in other.rows if row.against is False] == ["model.layers.0.mlp.down_proj"]
    assert "int4:channel" in other.failures[0] and "int4:g128" in other.failures[0]


def test_another_dtype_of_scales_gives_a_notice(copy: Any) -> None:
    bfloat = copy("ct", to="bfloat", foreign=True)

    def recast(part: dict[str, Tensor]) -> None:
        part["weight_scale"] = torch.full_like(part["weight_scale"], 0.5).bfloat16()

    edit(bfloat, UP, recast)
    found = verify(bfloat, asked=VerifyOptions(unsealed=True))
    assert found.ok and any("bfloat16" in notice for notice in found.notices)


@pytest.mark.parametrize(
    "files",
    [
        *({name: "0"} for name in ("../model/config.json", "/etc/passwd", ".", "no-such-file")),
        {"model-00001-of-00001.safetensors": 5},
        {},
        [],
        "model.safetensors",
        None,
    ],
)
def test_a_hostile_list_of_files_is_not_followed(files: Any, copy: Any) -> None:
    folder = copy("marlin")
    report = recorded(folder)
    report["files"] = files
    write_report(folder, report)
    try:
        found = verify(folder)
    except CheckpointError as error:
        assert str(folder) in str(error)
    else:
        assert not found.ok and not any("passwd" in name or ".." in name for name in found.files)


def test_writing_verify_json_keeps_the_checkpoint_valid(copy: Any) -> None:
    folder = copy("marlin")
    path = write(verify(folder), folder)
    assert path == folder / VERIFICATION
    stated = json.loads(path.read_text())
    assert stated["ok"] and stated["kernel"] is None and stated["bound"] is None and stated["errors"] == []
    assert stated["hashes"] == recorded(folder)["files"]
    assert len(stated["rows"]) == stated["linears"] == 7
    again = verify(folder)
    assert again.ok
    assert {**again.to_dict(), "seconds": 0} == {**verify(folder).to_dict(), "seconds": 0}


@pytest.mark.parametrize("pattern", ["tokenizer.json", "*.safetensors"])
def test_a_missing_file_is_named_with_the_way_out(pattern: str, copy: Any) -> None:
    folder = copy("gptq")
    path = next(folder.glob(pattern))
    path.unlink()
    assert verify(folder).failures[0] == f"{path.name}: is missing, {REPORT} lists it: restore it"


def test_extra_files_are_named_and_fail_if_a_program_may_load_them(copy: Any) -> None:
    folder = copy("gptq")
    harmless = ["additional_chat_templates/tool.jinja", "docs/", "notes.txt"]
    (folder / "docs").mkdir()
    (folder / "additional_chat_templates").mkdir()
    for name in (harmless[0], harmless[2], ".gitattributes"):
        (folder / name).write_text("x")
    found = verify(folder)
    assert found.ok
    assert [n for n in found.notices if "lists" in n] == [f"{n}: is not a file that {REPORT} lists" for n in harmless]
    for name in ("adapter_model.safetensors", "modeling_x.py", "pytorch_model.bin"):
        (folder / name).write_bytes(b"x")
        assert verify(folder).failures == (f"{name}: is not a file that {REPORT} lists",)
        (folder / name).unlink()
