"""An output that its readers cannot open, or open with random weights, is never published, and the run says why."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quantkit
from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT
from quantkit.checkpoint.writer import CheckpointWriter, Item
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError
from quantkit.io.json_files import load_json
from quantkit.layouts import LAYOUTS, read_config
from quantkit.layouts.schemes import Schemes
from quantkit.pipeline.inspection import OURS, THEIRS, TRIED, Opening, describe, open_folder
from quantkit.reporting import facts
from tests.command_line import RTN, call, refused
from tests.folders import NEWEST, edit
from tests.layouts.samples import HELD, write_folder
from tests.tiny_models import write_model

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
NORM, HEAD = "model.norm.weight", "lm_head.weight"
Tensors = dict[str, Tensor]


def opened(folder: Path, source: Path, **changes: Any) -> Opening:
    """Open a folder as if its config.json had these `changes` and were not written yet."""
    return open_folder(folder, {**load_json(folder / "config.json"), **changes}, Checkpoint(source))


def edited(folder: Path, out: Path, change: Callable[[Tensors], object]) -> Path:
    """Copy a folder with other tensors in one file."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("config.json"))
    return edit(out, change)


def _renamed(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def _cast(name: str, dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


WRONG: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a dense tensor is missing": (lambda t: t.pop(NORM), f"{NORM} is missing"),
    "a packed tensor is missing": (lambda t: t.pop(f"{Q}.weight_scale"), f"{Q}.weight_scale is missing"),
    "a shape tensor is missing": (lambda t: t.pop(f"{DOWN}.weight_shape"), f"{DOWN}.weight_shape is absent"),
    "a dense tensor is renamed": (_renamed(HEAD, "head.weight"), "head.weight is not a tensor of the source"),
    "one too many": (lambda t: t.update({f"{Q}.bias": torch.zeros(128)}), f"{Q}.bias is not a tensor of the source"),
    "a dense shape": (lambda t: t.update({NORM: torch.ones(64).half()}), f"{NORM} is float16 [64], and should be"),
    "a packed shape": (lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 1).half()}), "must have shape [128, 1]"),
    "a dense dtype": (_cast(NORM, torch.float32), f"{NORM} is float32 [128], and should be float16 [128]"),
    "a packed dtype": (_cast(f"{Q}.weight_scale", torch.bfloat16), f"{Q}.weight_scale is bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_tensor_that_is_not_as_the_source_and_the_layout_say(
    case: str, int4: Path, small_llama: Path, tmp_path: Path
) -> None:
    change, says = WRONG[case]
    bad = edited(int4, tmp_path / "bad", change)
    config = load_json(int4 / "config.json")
    with pytest.raises(CheckpointError, match=re.escape(says)) as caught:
        open_folder(bad, config, Checkpoint(small_llama))
    assert "\n" not in str(caught.value)


def test_a_config_of_another_model_is_seen_by_our_reader(int4: Path, small_llama: Path, tmp_path: Path) -> None:
    """The tensors are those of the source; its config.json lies."""
    source = shutil.copytree(small_llama, tmp_path / "source")
    for change, says in (
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.\S+ is missing"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.\S+ is packed"),
        ({"hidden_size": 256}, r"\S+ is \[257, 128\], config.json asks for \[257, 256\]"),
        ({"attention_bias": True}, r"self_attn\.\S_proj\.bias is missing"),
    ):
        (source / "config.json").write_text(json.dumps({**load_json(small_llama / "config.json"), **change}))
        with pytest.raises(CheckpointError, match=says) as caught:
            opened(int4, source, **change)
        assert OURS in str(caught.value)


@pytest.mark.parametrize("left_out", [("lm_head",), (Q,)])
def test_transformers_would_fill_a_linear_that_is_not_ignored(
    left_out: tuple[str, ...], small_llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the compressed-tensors library, which is not installed")
    out = tmp_path / "out"
    quantkit.quantize(small_llama, out, method="rtn", skip=[re.escape(Q)])
    assert opened(out, small_llama) == Opening((OURS, THEIRS), {}, {})
    stated = load_json(out / "config.json")["quantization_config"]
    stated["ignore"] = [name for name in stated["ignore"] if name not in left_out]
    stated["quantkit"]["ignore"] = stated["ignore"]
    with pytest.raises(CheckpointError, match=rf"transformers \S+ would open the output and .* {left_out[0]}\.weight"):
        opened(out, small_llama, quantization_config=stated)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_opens_in_ours_and_theirs_refuses_loudly_or_opens(
    layout: str, small_llama: Path, tmp_path: Path
) -> None:
    for label in HELD[layout][0][::4]:
        schemes = Schemes(Scheme.parse(label), ignore=("lm_head",))
        if layout != "quick" or schemes.default.symmetric:
            write_folder(small_llama, tmp_path / label, layout, schemes)
            found = opened(tmp_path / label, small_llama)
            assert OURS in found.readers and {*found.readers, *found.refused, *found.untried} == {OURS, THEIRS}, label


def test_a_pruned_model_opens_in_both(small_llama: Path, tmp_path: Path) -> None:
    report = quantkit.prune(small_llama, tmp_path / "out", method="magnitude")
    assert report["opened_by"] == [OURS, THEIRS] and report["not_opened_by"] == {}
    bad = edited(tmp_path / "out", tmp_path / "bad", _cast(f"{Q}.weight", torch.float32))
    with pytest.raises(CheckpointError, match=re.escape(f"{Q}.weight is float32")):
        open_folder(bad, load_json(tmp_path / "out" / "config.json"), Checkpoint(small_llama))


def _spoil(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensors], Tensors]) -> None:
    tensors = CheckpointWriter.pack

    def spoiled(self: CheckpointWriter, item: Item) -> Tensors:
        return spoil(tensors(self, item))

    monkeypatch.setattr(CheckpointWriter, "pack", spoiled)


def test_a_writer_that_drops_a_tensor_publishes_nothing(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _spoil(patch, lambda found: {k: v for k, v in found.items() if k != f"{Q}.weight_scale"})
        line = call("quantize", small_llama, "-o", tmp_path / "out", *RTN, "-q", code=1).stderr
    assert f"{Q}.weight_scale is missing" in line and line.count("\n") == 1
    (partial,) = tmp_path.glob("out*")
    assert partial.name.startswith("out.partial-") and not (partial / "config.json").exists()
    assert "weight_scale is missing" in load_json(partial / REPORT)["failed"]
    again = call("quantize", small_llama, "-o", tmp_path / "out", *RTN, "-q", "--resume", code=1).stderr
    assert again == line and partial.exists(), "what was written stays wrong"
    call("quantize", small_llama, "-o", tmp_path / "out", *RTN, "-q", "--overwrite")
    assert not partial.exists()


def test_a_conversion_that_casts_a_tensor_leaves_nothing(
    int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil(monkeypatch, lambda found: {k: v.float() if k == NORM else v for k, v in found.items()})
    assert f"{NORM} is float32" in refused("pack", int4, "--layout", "marlin", out=tmp_path / "out")


def test_a_source_that_is_not_complete_is_refused_before_work(
    small_llama: Path, int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter, "add", None)  # no work is done
    for name, source, command in (
        ("dense", small_llama, ("quantize", *RTN)),
        ("dense", small_llama, ("prune", "--method", "magnitude")),
        ("packed", int4, ("pack", "--layout", "marlin")),
    ):
        bad = tmp_path / name
        if not bad.exists():
            edited(source, bad, lambda tensors: tensors.pop(NORM))
            shutil.copy(source / "config.json", bad)
            (bad / REPORT).unlink(missing_ok=True)
        error = refused(command[0], bad, *command[1:], out=tmp_path / "out")
        assert f"{NORM} is missing from the checkpoint (1 in all)" in error and "bug" not in error


def test_a_conversion_of_a_family_that_transformers_does_not_know(int4: Path, tmp_path: Path) -> None:
    source = shutil.copytree(int4, tmp_path / "abacus")
    (source / "config.json").write_text(
        json.dumps({**load_json(int4 / "config.json"), "model_type": "abacus", "architectures": ["Abacus"]})
    )
    (source / REPORT).unlink()
    printed = call("pack", source, "--layout", "marlin", "-o", tmp_path / "out").stdout
    assert "none was tried on this folder, see the notes" in printed
    assert "'abacus' is unknown to transformers" in printed
    report: Mapping[str, Any] = load_json(tmp_path / "out" / REPORT)
    assert report["opened_by"] == [] and set(report["not_tried"]) == {OURS, THEIRS}
    layout, _ = read_config(load_json(tmp_path / "out" / "config.json")["quantization_config"], "config.json")
    assert layout.NAME == "marlin"


@NEWEST
def test_a_reader_that_refuses_is_not_on_the_card(tmp_path: Path) -> None:
    """Falcon's linears are a class of its own, which transformers' quantizer does not expect."""
    pytest.importorskip("compressed_tensors", reason="needs the compressed-tensors library, which is not installed")
    model = write_model("falcon", tmp_path / "model")
    report = quantkit.quantize(model, tmp_path / "out", method="rtn", clip="none", group_size=32)
    assert report["opened_by"] == [OURS] and THEIRS in report["not_opened_by"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert TRIED not in card and "vLLM" in card


def test_an_indexer_stays_dense_where_engines_join_it(tmp_path: Path) -> None:
    model = families.write("deepseek_v32", tmp_path / "model")
    found = quantkit.plan(model, method="rtn", clip="none", group_size=64)
    wk = "model.layers.0.self_attn.indexer.wk"
    assert wk not in {row.module for row in found.output.quantized} and "vLLM" in found.to_dict()["readers"]
    assert any(line.startswith(f"{wk}: left dense, engines join it") for line in found.notices)
    forced = quantkit.plan(model, method="rtn", clip="none", group_size=64, override={".*wk": "int4:g32"})
    assert wk in {row.module for row in forced.output.quantized}


def test_report_table_and_card_name_the_readers_and_count_dense_parameters(int4: Path, tiny_llama: Path) -> None:
    dense, packed = Checkpoint(tiny_llama), describe(Checkpoint(int4))
    assert packed["parameters"] == sum(prod(dense.shape(name)) for name in dense.names())
    assert 0 < packed["quantized_weights"] < packed["parameters"]
    report = load_json(int4 / REPORT)
    assert report["opened_by"][0] == OURS and report["totals"]["share"] == 1
    loads = facts.readers(report)[0][1]
    assert loads.startswith(f"{OURS}") and "tried on this folder; vLLM" in loads
    card = (int4 / "README.md").read_text()
    assert f"loads in      {loads}\n" in call("report", int4).stdout and f"| loads in | {loads} |" in card
    assert "| share | 100.00 % of the decoder's weights |" in card


def test_codes_that_no_config_explains_are_not_called_a_dense_model(int4: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(int4, tmp_path / "bare"))
    config = load_json(bare / "config.json")
    del config["quantization_config"]
    (bare / "config.json").write_text(json.dumps(config))
    (bare / REPORT).unlink()
    rule = "is stored in place of a weight, and no quantization_config explains it"
    assert re.search(rf"loads in +nothing that is known: \S+weight_packed {rule}", call("inspect", bare).stdout)
    assert rule in refused("verify", bare) and rule in refused("plan", bare)


def test_a_plan_and_its_run_state_the_same_sizes(small_llama: Path, tmp_path: Path) -> None:
    planned = call("plan", small_llama, *RTN, "-q").stdout
    made = call("quantize", small_llama, *RTN, "-q", "-o", tmp_path / "out").stdout
    sizes = re.compile("[^;]* before, [^;,]* after")
    found = [sizes.search(text) for text in (planned, made)]
    assert found[0] and found[1] and found[0][0] == found[1][0]
