"""Padding, rounding again, and bad input: what `pack` changes is said, what it refuses leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import broken_rule
from quantkit.layouts.schemes import Schemes
from quantkit.pipeline import convert
from tests.command_line import call, refused
from tests.folders import edit, restate, tensors
from tests.layouts.samples import record, write_folder
from tests.tiny_models import write_model

INT4 = Schemes(Scheme.parse("int4:g128"))


def packed(source: Path, out: Path, layout: str, label: str, *, key: bool = True) -> dict[str, QuantizedTensor]:
    """Pack random records for all linears but the head, and return them."""
    return write_folder(source, out, layout, Schemes(Scheme.parse(label), ignore=("lm_head",)), key=key)


def folder(source: Path, out: Path, layout: str, schemes: Schemes, *, key: bool = False) -> Path:
    packed(source, out, layout, schemes.default.label, key=key)
    return out


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model whose linears no kernel layout takes as they are: [160, 160], [224, 160] and [160, 224]."""
    sizes = {"hidden_size": 160, "intermediate_size": 224, "num_attention_heads": 4, "num_hidden_layers": 1}
    return write_model("llama", tmp_path_factory.mktemp("odd") / "model", **sizes)


@pytest.mark.parametrize(("layout", "scheme"), [("quick", "int4:g32:asym"), ("marlin24", "int4:channel:24")])
def test_padded_weights_are_right_for_us_and_lose_the_padding_again(
    layout: str, scheme: str, odd: Path, tmp_path: Path
) -> None:
    records = packed(odd, tmp_path / "a", "compressed-tensors", scheme)
    assert "add --pad" in call("pack", tmp_path / "a", "--layout", layout, "-o", tmp_path / "b", code=1).stderr
    printed = call("pack", tmp_path / "a", "--layout", layout, "--pad", "-o", tmp_path / "b")
    assert "only quantkit reads their true shapes" in printed.stderr and "padded with zeros" in printed.stdout
    out = Checkpoint(tmp_path / "b")
    for module, q in records.items():
        assert out.true_size(module) == q.shape
        assert broken_rule(LAYOUTS[layout], out.scheme(module), *out.size(module)) is None
        weight = out.dense(f"{module}.weight", torch.float32)
        assert weight.shape == q.shape and torch.equal(weight, q.dequantize())
    shown = call("inspect", tmp_path / "b").stdout
    assert "[160, 224] in [" in shown and "[160, 160] in [" in shown
    assert "padded with zeros to" in call("verify", tmp_path / "b", "--against", tmp_path / "a").stdout
    call("pack", tmp_path / "b", "--layout", "compressed-tensors", "-o", tmp_path / "c", "-q")
    assert tensors(tmp_path / "c") == tensors(tmp_path / "a")
    assert Checkpoint(tmp_path / "c").schemes == Checkpoint(tmp_path / "a").schemes


def test_a_width_that_headers_know_only_roughly_is_padded_from_its_true_one(tmp_path: Path) -> None:
    """compressed-tensors stores k = 100 in 13 words, which is room for 104."""
    heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "num_hidden_layers": 1}
    model = write_model("llama", tmp_path / "model", hidden_size=100, intermediate_size=60, **heads)
    q = packed(model, tmp_path / "a", "compressed-tensors", "int4:channel")[GATE]
    call("pack", tmp_path / "a", "--layout", "marlin", "--pad", "-o", tmp_path / "b", "-q")
    out = Checkpoint(tmp_path / "b")
    assert (out.size(GATE), out.true_size(GATE)) == ((64, 128), (60, 100)) and out.unpadded(GATE).equal(q)
    call("pack", tmp_path / "b", "--layout", "compressed-tensors", "-o", tmp_path / "c", "-q")
    assert tensors(tmp_path / "c") == tensors(tmp_path / "a")
    ids = torch.arange(8)[None]
    assert torch.equal(*(quantkit.load(tmp_path / name, device="cpu")(ids).logits for name in "bc"))
    call("verify", tmp_path / "c", "--against", tmp_path / "a", "-q")
    call("verify", tmp_path / "a", "--against", tmp_path / "b", "-q")


@pytest.fixture(scope="module")
def padded(odd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert `odd` to a layout that pads it; the folder has no report."""
    folder = tmp_path_factory.mktemp("padded")
    packed(odd, folder / "a", "compressed-tensors", "int4:channel")
    call("pack", folder / "a", "--layout", "marlin", "--pad", "-o", folder / "b", "-q")
    (folder / "b" / REPORT).unlink()
    return folder / "b"


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([160], "padded["),
        ([True, 160], "padded["),
        ([0, 160], "padded["),
        ([2**62, 160], "stored as"),
        ([160, 257], "stored as"),
        ([100, 160], "config.json asks for [160, 160]"),
        (None, "no packed module"),
    ],
)
def test_hostile_true_shapes(shape: object, words: str, padded: Path, tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    shutil.copytree(padded, tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    key = config["quantization_config"]["quantkit"]
    assert key["padded"][module] == [160, 160]
    key["padded"]["no.such" if shape is None else module] = [1, 1] if shape is None else shape
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    error = refused("pack", tmp_path / "b", "--layout", "gptq", out=tmp_path / "c")
    named = "no.such" if shape is None else module
    assert words in error and (named in error or "config.json" in error)


@pytest.mark.parametrize(
    ("layout", "scheme", "to", "now"),
    [("marlin", "int4:g128", "marlin24", "int4:g128:24"), ("humming", "fp6:channel", "marlin", "int4:g128")],
)
def test_rounding_again_is_asked_for_and_said(
    layout: str, scheme: str, to: str, now: str, small_llama: Path, tmp_path: Path
) -> None:
    records = packed(small_llama, tmp_path / "a", layout, scheme)
    assert "--requantize to round again (lossy)" in refused("pack", tmp_path / "a", "--layout", to, out=tmp_path / "b")
    printed = call("pack", tmp_path / "a", "--layout", to, "--requantize", "-o", tmp_path / "b")
    assert f"Warning: {len(records)} of {len(records)} linears were rounded again" in printed.stderr
    assert f"were rounded a second time, which is lossy, from: {scheme}" in printed.stdout
    call("verify", tmp_path / "b", "-q")
    out = Checkpoint(tmp_path / "b")
    layers = {layer["name"]: layer for layer in json.loads((tmp_path / "b" / REPORT).read_text())["layers"]}
    for module, q in records.items():
        found, before = out.quantized(module), q.dequantize()
        error = float((found.dequantize() - before).norm() / before.norm())
        assert found.scheme.label == now and layers[module]["requantized_from"] == scheme
        assert 0 < error < 0.8 and layers[module]["requantized_error"] == pytest.approx(error, rel=1e-3)
        assert "relative_error" not in layers[module]
    later = call("pack", tmp_path / "b", "--layout", "compressed-tensors", "-o", tmp_path / "c")
    assert "Warning" not in later.stderr and "a second time" in later.stdout, "it happened before, and it still did"


def test_only_what_has_no_lossless_way_is_rounded_again(small_llama: Path, tmp_path: Path) -> None:
    schemes = Schemes(INT4.default, ((r".*\.down_proj", Scheme.parse("int4:g64")),), ignore=("lm_head",))
    records = write_folder(small_llama, tmp_path / "a", "gptq", schemes)
    done = call("pack", tmp_path / "a", "--layout", "marlin", "--requantize", "-o", tmp_path / "b")
    assert "lossy         12 of 14 tensors represent the same values" in done.stdout
    out = Checkpoint(tmp_path / "b")
    assert {m for m, q in records.items() if not out.quantized(m).equal(q)} == {m for m in records if "down" in m}


LAST = "model.layers.1.mlp.down_proj"
GATE = "model.layers.0.mlp.gate_proj"


def test_tensors_of_another_layout_under_the_same_names(small_llama: Path, tmp_path: Path) -> None:
    """AWQ and GPTQ call their tensors alike; read as the other, the shapes do not fit together."""
    for stated, other, words in (
        ("gptq", "awq", "must have shape"),
        ("awq", "gptq-v2", "g_idx is packed and no part of the awq layout"),
        ("quick", "awq", "are not those of the layout"),
    ):
        bad = folder(small_llama, tmp_path / f"{stated}-{other}", stated, INT4)
        q = LAYOUTS[other].pack(record(INT4.default, 256, 256))
        edit(bad, lambda found, q=q: found.update({f"{LAST}.{suffix}": tensor for suffix, tensor in q.items()}))
        for command in (("pack", bad, "--layout", "marlin", "--pad"), ("convert", f"{stated}-to-gptq", bad)):
            assert LAST in refused(*command, out=tmp_path / "out")
        error = refused("inspect", bad)  # which reads headers alone
        assert LAST in error and words in error


@pytest.mark.parametrize("out", ["", "."])
def test_the_folder_that_it_runs_in_is_no_output(
    out: str, small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, here = folder(small_llama, tmp_path / "a", "gptq", INT4), folder(small_llama, tmp_path / "b", "awq", INT4)
    monkeypatch.chdir(here)
    error = refused("pack", source, "--layout", "awq", "--overwrite", "-o", out)
    assert str(here) in error and sorted(tmp_path.iterdir()) == [source, here]


def put(found: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    assert name in found
    found[name] = tensor


@pytest.mark.parametrize(
    ("layout", "scheme", "suffix", "make", "words"),
    [
        ("gptq", "int4:g128", "qweight", lambda t: t.to(torch.int64), "int32, it is int64: the checkpoint is damaged"),
        ("compressed-tensors", "int4:g128", "weight_scale", lambda t: t * torch.nan, "nan"),
        ("gptq", "int4:g128", "scales", lambda t: t * 0, "scales are 0 over codes"),
        ("gptq", "int4:g128:asym", "qzeros", lambda t: torch.full_like(t, -1), "format to gptq_v2"),
        ("gptq", "int4:g128", "g_idx", lambda t: t.flip(0), "act-order"),
        ("compressed-tensors", "int4:g128", "weight_shape", lambda t: t * -1, "'weight_shape' says [-"),
    ],
)  # fmt: skip
def test_one_damaged_tensor_in_the_last_module_leaves_nothing(
    layout: str,
    scheme: str,
    suffix: str,
    make: Callable[[Tensor], Tensor],
    words: str,
    small_llama: Path,
    tmp_path: Path,
) -> None:
    bad = folder(small_llama, tmp_path / "bad", layout, Schemes(Scheme.parse(scheme)), key=True)
    name = f"{LAST}.{suffix}"
    edit(bad, lambda found: put(found, name, make(found[name])))
    error = refused("pack", bad, "--layout", "gptq", out=tmp_path / "out")
    assert LAST in error and words in error, error
    assert "--skip" not in error and "--group-size" not in error, "pack has no such option"


def test_shards_of_no_bytes(small_llama: Path, tmp_path: Path) -> None:
    source = folder(small_llama, tmp_path / "a", "gptq", INT4)
    for size in ("0", "0.5"):
        error = refused("pack", source, "--layout", "awq", "--max-shard-size", size, out=tmp_path / "out", code=2)
        assert "max_shard_size" in error and "2GiB" in error


def test_zero_scales_of_rows_of_zeros_are_no_damage(small_llama: Path, tmp_path: Path) -> None:
    good = folder(small_llama, tmp_path / "good", "compressed-tensors", INT4)

    def emptied(found: dict[str, Tensor]) -> None:
        found[f"{LAST}.weight_packed"][3] = 0x88888888 - 2**32
        found[f"{LAST}.weight_scale"][3] = 0

    edit(good, emptied)
    call("pack", good, "--layout", "marlin", "-o", tmp_path / "out", "-q")


def test_zero_points_of_the_other_gptq_version_are_told_once(small_llama: Path, tmp_path: Path) -> None:
    source = folder(small_llama, tmp_path / "a", "gptq-v2", INT4)
    stated = LAYOUTS["gptq"].write_config(Schemes(INT4.default, ignore=("lm_head",)))
    restate(source / "config.json", quantization_config=stated)
    line = "labelled gptq, stored as gptq-v2: the data was trusted"
    printed = call("pack", source, "--layout", "marlin", "-o", tmp_path / "b")
    assert printed.stderr.count(line) == 1 and line in printed.stdout
    assert json.loads((tmp_path / "b" / REPORT).read_text())["notices"].count(line) == 1
    assert call("verify", source, "--unsealed").stdout.count(line) == 1


def test_asymmetric_zero_points_that_only_a_label_explains_are_told(small_llama: Path, tmp_path: Path) -> None:
    packed(small_llama, source := tmp_path / "a", "gptq", "int4:g64:asym", key=False)
    line = "zero points are read as the label gptq says"
    printed = call("convert", "gptq-to-awq", source, "-o", tmp_path / "b")
    assert printed.stderr.count(line) == 1 and line in printed.stdout
    call("convert", "awq-to-gptq-v2", tmp_path / "b", "-o", tmp_path / "c", "-q")
    assert line not in call("convert", "gptq-to-awq", tmp_path / "c", "-o", tmp_path / "d").stderr  # a report says it


ROW_BY_ROW = [
    ("compressed-tensors", "fp6:channel", "humming"),
    ("compressed-tensors", "int4:g32:asym", "awq"),
    ("gptq", "int4:channel", "compressed-tensors"),
]


@pytest.mark.parametrize(("source", "scheme", "target"), ROW_BY_ROW)
def test_a_weight_that_passes_some_rows_at_a_time_is_the_same(
    source: str, scheme: str, target: str, odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """224 rows are 128 and 96."""
    packed(odd, tmp_path / "a", source, scheme)
    call("pack", tmp_path / "a", "--layout", target, "-o", tmp_path / "b", "-q")
    monkeypatch.setattr(convert, "CODES", 1)
    with monkeypatch.context() as patch:
        patch.delattr(Checkpoint, "record")  # which takes all rows
        call("pack", tmp_path / "a", "--layout", target, "-o", tmp_path / "c", "-q")
    monkeypatch.setattr(convert.Repacker, "by_rows", lambda *args: None)
    call("pack", tmp_path / "a", "--layout", target, "-o", tmp_path / "d", "-q")
    assert tensors(tmp_path / "b") == tensors(tmp_path / "c") == tensors(tmp_path / "d")
    texts = [json.loads((tmp_path / name / REPORT).read_text())["layers"] for name in "bcd"]
    assert texts[0] == texts[1] == texts[2] and all("digest" in layer for layer in texts[0])


def test_what_is_wrong_behind_the_first_rows_is_told_as_of_all(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(odd, tmp_path / "a", "compressed-tensors", "fp6:channel")
    up = "model.layers.0.mlp.up_proj.weight"
    edit(tmp_path / "a", lambda found: found[up].view(torch.uint8)[200, 3].fill_(1))  # 2**-9, no value of FP6
    monkeypatch.setattr(convert, "CODES", 1)
    error = refused("pack", tmp_path / "a", "--layout", "humming", out=tmp_path / "b")
    assert "mlp.up_proj" in error and "holds 0.001953125 at [200, 3], which is no fp6 value" in error


def widened(source: Path, out: Path, layout: str, suffix: str, dtype: torch.dtype, factor: float) -> list[Tensor]:
    """Write a folder and a copy of it, `out`-half, whose scales are rounded to float16; return the first's scales."""
    folder(source, out, layout, INT4)
    wide: list[Tensor] = []

    def widen(found: dict[str, Tensor]) -> None:
        for name in [name for name in found if name.endswith(f".{suffix}")]:
            found[name] = (found[name].float() * factor).to(dtype)
            wide.append(found[name])

    def rounded(found: dict[str, Tensor]) -> None:
        found.update({name: t.half() for name, t in found.items() if name.endswith(f".{suffix}")})

    edit(out, widen)
    half = out.with_name(f"{out.name}-half")
    shutil.copytree(out, half)
    edit(half, rounded)
    return wide


@pytest.mark.parametrize(
    ("layout", "suffix", "to", "dtype", "factor"),
    [
        ("gptq", "scales", "marlin", torch.float32, 1.0003),
        ("compressed-tensors", "weight_scale", "awq", torch.bfloat16, 2.0**-11),
    ],
)
def test_wide_scales_are_rounded_if_asked_and_their_cost_is_told(
    layout: str, suffix: str, to: str, dtype: torch.dtype, factor: float, small_llama: Path, tmp_path: Path
) -> None:
    wide = widened(small_llama, tmp_path / "a", layout, suffix, dtype, factor)
    error = refused("pack", tmp_path / "a", "--layout", to, out=tmp_path / "b")
    assert "scales are no float16 values" in error and "by quantkit pack with --requantize-scales" in error
    printed = call("pack", tmp_path / "a", "--layout", to, "--requantize-scales", "-o", tmp_path / "b")
    call("pack", tmp_path / "a-half", "--layout", to, "-o", tmp_path / "c", "-q")
    assert tensors(tmp_path / "b") == tensors(tmp_path / "c"), "codes unchanged, scales the nearest float16"
    errors = [((scale.half().double() - scale.double()) / scale.double()).abs() for scale in wide]
    lossy = [error for error in errors if error.any()]
    worst, mean = max(e.max() for e in lossy), sum(e.mean() for e in lossy) / len(lossy)
    report = json.loads((tmp_path / "b" / REPORT).read_text())
    facts = [layer for layer in report["layers"] if "rounded_scales" in layer]
    assert len(facts) == len(lossy) > 0
    assert sum(layer["rounded_scales"] for layer in facts) == sum(int((error > 0).sum()) for error in errors)
    assert max(layer["scale_error"] for layer in facts) == pytest.approx(float(worst), rel=1e-3)
    assert sum(layer["mean_scale_error"] for layer in facts) / len(facts) == pytest.approx(float(mean), rel=1e-3)
    line = f"{len(lossy)} of {len(wide)} linears had scales that are no float16 values, rounded: relative error of the"
    assert line in printed.stdout and line in printed.stderr and line in str(report["notices"])
    again = call("pack", tmp_path / "b", "--layout", "gptq-v2", "--requantize-scales", "-o", tmp_path / "d")
    assert line not in again.stderr and again.stdout.count(line) == 1, "the cost is told once, and stays in the report"
    call("pack", tmp_path / "b", "--layout", "gptq-v2", "-o", tmp_path / "e", "-q")
    assert tensors(tmp_path / "d") == tensors(tmp_path / "e"), "float16 scales are not touched"


@pytest.mark.parametrize(("value", "words"), [(1e5, "65504"), (1e-10, "scales are 0 over codes"), (torch.inf, "inf")])
def test_scales_beyond_float16_are_refused_even_if_asked_to_round(
    value: float, words: str, small_llama: Path, tmp_path: Path
) -> None:
    widened(small_llama, tmp_path / "a", "gptq", "scales", torch.float32, 1.0003)
    edit(tmp_path / "a", lambda found: found[f"{LAST}.scales"].view(-1)[5:6].fill_(value))
    error = refused("pack", tmp_path / "a", "--layout", "marlin", "--requantize-scales", out=tmp_path / "b")
    assert LAST in error and words in error and "--requantize-scales" not in error


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq-v2"])
def test_routers_that_a_foreign_config_leaves_out_are_stated(layout: str, tmp_path: Path) -> None:
    source = write_model("qwen3_moe", tmp_path / "model")
    packed(source, tmp_path / "gptq", "gptq", "int4:g32", key=False)
    call("pack", tmp_path / "gptq", "--layout", layout, "-o", tmp_path / "out")
    found = Checkpoint(tmp_path / "out").schemes
    routers = [name.removesuffix(".weight") for name in Checkpoint(source).names() if name.endswith("mlp.gate.weight")]
    assert found is not None and set(found.ignore) == {"lm_head", *routers} and routers


def test_zero_biases_of_packed_linears_are_left_out_with_a_notice_and_others_are_refused(
    tiny_llama: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    names = list(packed(tiny_llama, source, "gptq", "int4:g64"))
    biases = {f"{name}.bias": torch.zeros(Checkpoint(source).true_size(name)[0]) for name in names}
    edit(source, lambda found: found.update(biases))
    report = quantkit.pack(source, out, "compressed-tensors")
    assert any("left out, as it is zero" in line for line in report["notices"])
    assert not biases.keys() & set(Checkpoint(out).names())
    assert quantkit.verify(out, against=source).ok
    biases[f"{names[-1]}.bias"][5] = 0.1
    edit(source, lambda found: found.update(biases))
    with pytest.raises(quantkit.QuantkitError, match=rf"leave out {names[-1]}\.bias \(1 in all\)"):
        quantkit.pack(source, tmp_path / "other", "compressed-tensors")
    failures = quantkit.verify(out, against=source).failures
    assert failures == (f"{names[-1]}.bias: is in {source} only",)
