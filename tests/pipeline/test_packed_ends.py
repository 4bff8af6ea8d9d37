"""Packed heads and embeddings in each layout: values stay, configs state them, misfits are refused in a line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import LAYOUTS
from tests.command_line import call, refused
from tests.folders import edit, stored
from tests.inference.samples import decoded, logits
from tests.layouts.samples import record, tame

#: Layout -> schemes of the linears and of a head that differs from them.
HEADS = {
    "compressed-tensors": ("int4:g128", "int8:channel"),
    "gptq": ("int4:g128", "int4:g64"),
    "gptq-v2": ("int4:g128", "int4:channel:asym"),
    "awq": ("int4:g128", "int4:g64"),
    "humming": ("int4:g128", "int6:g64"),
    "tcfpx": ("fp6:channel", "fp5:channel"),
    "marlin": ("int4:g128", "int4:channel"),
}
#: Those whose public config has a place for the head's scheme.
STATED = ("compressed-tensors", "gptq", "gptq-v2", "humming")
#: Layout, family, and schemes of linears and embeddings.
TABLES = [
    ("compressed-tensors", "llama", "int4:g128", "fp6:channel"),
    ("humming", "qwen2", "fp6:channel", "int8:g32"),
    ("humming", "gemma", "fp6:channel", "int3:g32:asym"),  # padded to 288 rows
]


ASKED_FOR = ("vLLM asked for quantkit[vllm]",)  # for tied ones


def made(source: Path, out: Path, layout: str, label: str, **options: Any) -> Any:
    scheme = Scheme.parse(label)
    asked = {"format": scheme.format.name, "group_size": scheme.group_size or "channel", "layout": layout}
    return quantkit.quantize(source, out, method="rtn", clip="none", **asked, **options)


def values(folder: Path) -> dict[str, torch.Tensor]:
    src = Checkpoint(folder)
    return {name: src.dense(name, torch.float32) for name in src.logical()}


def same_values(one: Path, other: Path) -> bool:
    a, b = values(one), values(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def changed(folder: Path, out: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]) -> Path:
    """Copy a folder with other tensors or another config, as another program could write them."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("quantkit_report.json"))
    config = json.loads((folder / "config.json").read_text())
    edit(out, lambda found: change(found, config))
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("layout", HEADS)
def test_a_head_in_a_scheme_of_its_own_is_stated_and_read_back(
    layout: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    usual, label = HEADS[layout]
    made(folders["llama"], tmp_path / "out", layout, usual, override={"lm_head": label}, pad=True)
    src = Checkpoint(tmp_path / "out")
    assert src.scheme("lm_head").label == label and src.true_size("lm_head") == (257, 128)
    assert src.scheme("model.layers.0.mlp.up_proj").label == usual
    assert quantkit.verify(tmp_path / "out").ok
    assert torch.equal(logits(quantkit.load(tmp_path / "out", device="cpu")), decoded(tmp_path / "out"))
    config = src.config["quantization_config"]
    for name in ("lm_head", ".lm_head", "language_model.lm_head") if layout.startswith("gptq") else ():  # vLLM's names
        (entry,) = [found for key, found in config["dynamic"].items() if re.match(key.removeprefix("+:"), name)]
        assert config["lm_head"] is True and entry["group_size"] == (src.scheme("lm_head").group_size or -1)
    if layout == "awq":
        assert config["lm_head"] is True
    if layout == "compressed-tensors":  # by the names that engines match, since a head is no linear there
        (group,) = [each for each in config["config_groups"].values() if any("lm_head" in t for t in each["targets"])]
        patterns = [target.removeprefix("re:") for target in group["targets"]]
        for name in ("lm_head", "language_model.lm_head", "model.my_lm_head"):
            assert any(re.match(pattern, name) for pattern in patterns) is ("my" not in name)
    if layout in STATED:
        foreign = changed(tmp_path / "out", tmp_path / "f", lambda _, c: c["quantization_config"].pop("quantkit"))
        assert Checkpoint(foreign).scheme("lm_head").label == label


@pytest.mark.parametrize(("layout", "family", "usual", "label"), TABLES)
def test_embeddings_in_any_format_are_read_back(
    layout: str, family: str, usual: str, label: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    out, foreign = tmp_path / "out", tmp_path / "foreign"
    report = made(folders[family], out, layout, usual, override={"embed_tokens": label}, pad=True)
    assert {line for line in report["readers"] if "vLLM" in line} == set(ASKED_FOR if family == "qwen2" else ())
    assert Checkpoint(out).scheme("model.embed_tokens").label == label and quantkit.verify(out).ok
    expected = decoded(out)
    assert torch.equal(logits(quantkit.load(out, device="cpu")), expected)
    if family == "qwen2":  # the others need the key: for FP6 in FP8, and for their padding
        changed(out, foreign, lambda _, config: config["quantization_config"].pop("quantkit"))
        assert Checkpoint(foreign).scheme("model.embed_tokens").label == label
        assert torch.equal(logits(quantkit.load(foreign, device="cpu", check=False)), expected)


@pytest.mark.parametrize(("family", "dense"), [("qwen2", []), ("llama", ["lm_head"])])
def test_a_head_that_is_the_embeddings_is_not_said_to_be_dense(
    family: str, dense: list[str], folders: dict[str, Path], tmp_path: Path
) -> None:
    report = made(folders[family], tmp_path / "out", "compressed-tensors", "int4:g32", embeddings="int8")
    packed = quantkit.pack(tmp_path / "out", tmp_path / "humming", layout="humming").report
    plain = made(folders[family], tmp_path / "plain", "compressed-tensors", "int4:g32")
    pruned = quantkit.prune(folders[family], tmp_path / "pruned", method="magnitude").report
    for found in (report, packed, plain, pruned):
        assert found["dense"] == dense
    assert plain["totals"]["tied_head"] == (not dense)
    assert f"14 quantized, {len(dense)} left dense" in call("plan", folders[family], "--group-size", 32).stdout
    assert Checkpoint(tmp_path / "out").is_tied == (not dense)


def test_conversions_keep_packed_heads_and_embeddings(folders: dict[str, Path], tmp_path: Path) -> None:
    a, b, c, d, e = (tmp_path / name for name in "abcde")
    e.mkdir()
    both = {"embed_tokens": "int3:channel", "lm_head": "int6:g64"}
    made(folders["llama"], a, "compressed-tensors", "int4:g128", override=both)
    call("convert", "compressed-tensors-to-humming", a, "-o", b)
    call("convert", "humming-to-compressed-tensors", b, "-o", c)
    assert same_values(a, b) and quantkit.verify(b).ok and quantkit.verify(c).ok
    before, after = stored(a), stored(c)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(quantkit.load(b, device="cpu")), decoded(a))
    assert Checkpoint(c).schemes == Checkpoint(a).schemes
    for folder in (a, b):
        said = refused("pack", folder, "--layout", "gptq", out=d, lines=2)
        assert "no place for embeddings: model.embed_tokens is [257, 128]" in said
    made(folders["llama"], d, "compressed-tensors", "int4:g128", head="int4:g128")
    source = d
    for layout in ("gptq", "marlin", "humming", "awq", "compressed-tensors"):
        quantkit.pack(source, e / layout, layout=layout, pad=True)
        source = e / layout
        assert same_values(d, source) and quantkit.verify(source).ok
    assert {n: t.shape for n, t in stored(source).items()} == {n: t.shape for n, t in stored(d).items()}


def test_embeddings_that_a_layout_does_not_hold_are_offered_another_layout(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(LayoutError, match=r'use layout="humming", or leave out the override of embeddings'):
        made(folders["llama"], tmp_path / "not", "tcfpx", "fp6:channel", override={"embed_tokens": "fp6:channel"})
    made(folders["llama"], tmp_path / "a", "compressed-tensors", "int4:g128", override={"embed_tokens": "int4:g128"})
    with pytest.raises(LayoutError, match=r'\[257, 128\]: use layout="humming"$'):
        quantkit.pack(tmp_path / "a", tmp_path / "not", layout="marlin")


def test_names_that_another_program_states_by_class_or_not_at_all_are_written(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Else vLLM looks for no packed embeddings, or for codes of a head that has none."""
    a, b = tmp_path / "a", tmp_path / "b"
    made(folders["qwen2"], a, "compressed-tensors", "int4:g128", embeddings="int8:channel")

    def by_class(_: Any, config: dict[str, Any]) -> None:
        del (stated := config["quantization_config"])["quantkit"]
        stated["ignore"] = []
        for group in stated["config_groups"].values():
            group["targets"] = [target for target in group["targets"] if "." not in target]

    foreign = changed(a, b, by_class)
    quantkit.pack(foreign, tmp_path / "c", layout="compressed-tensors")
    stated = Checkpoint(tmp_path / "c").config["quantization_config"]
    (group,) = [each for each in stated["config_groups"].values() if each["weights"]["num_bits"] == 8]
    assert group["targets"] == ["Embedding", "model.embed_tokens"] and stated["ignore"] == ["lm_head"]
    made(folders["qwen2"], tmp_path / "d", "compressed-tensors", "int4:g128")
    quantkit.pack(changed(tmp_path / "d", tmp_path / "e", by_class), tmp_path / "f", layout="gptq")
    assert Checkpoint(tmp_path / "f").config["quantization_config"]["lm_head"] is False
    assert torch.equal(logits(quantkit.load(tmp_path / "c", device="cpu")), decoded(a))


def resized(found: dict[str, torch.Tensor], _: Any) -> None:
    found["model.embed_tokens.weight_shape"][0] = 256


def doubled(found: dict[str, torch.Tensor], _: Any) -> None:
    found["model.embed_tokens.weight"] = torch.zeros(257, 128, dtype=torch.float16)


@pytest.mark.parametrize("damage", [resized, doubled])
def test_embeddings_that_contradict_their_own_tensors_are_not_loaded(
    damage: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    made(folders["llama"], tmp_path / "a", "compressed-tensors", "int4:g128", override={"embed_tokens": "int8:channel"})
    bad = changed(tmp_path / "a", tmp_path / "bad", damage)
    with pytest.raises((CheckpointError, LayoutError), match=r"model\.embed_tokens: [^\n]*$"):
        quantkit.load(bad, device="cpu", check=False)
    refused("pack", bad, "--layout", "humming", out=tmp_path / "out")


def test_a_layout_that_gathers_no_rows_is_not_loaded_as_embeddings(folders: dict[str, Path], tmp_path: Path) -> None:
    """Another program's GPTQ folder may have `embed_tokens.qweight`."""
    source = changed(folders["llama"], tmp_path / "s", lambda found, _: None)
    made(source, tmp_path / "a", "gptq", "int4:g128")

    def pack_table(found: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        packed = LAYOUTS["gptq"].pack(tame(record(Scheme.parse("int4:g128"), 288, 128), torch.float16))
        found |= {f"model.embed_tokens.{suffix}": tensor for suffix, tensor in packed.items()}
        found["lm_head.weight"] = torch.zeros(288, 128, dtype=torch.float16)
        del found["model.embed_tokens.weight"], config["quantization_config"]["quantkit"]
        config["vocab_size"] = 288

    bad = changed(tmp_path / "a", tmp_path / "bad", pack_table)
    for found in (
        call("generate", bad, "a", code=1),
        call("pack", bad, "--layout", "marlin", "-o", tmp_path / "x", code=1),
    ):
        assert "model.embed_tokens is packed, and the GPTQ layout has no place for embeddings" in found.stderr
    assert not [*tmp_path.glob("x*")]
