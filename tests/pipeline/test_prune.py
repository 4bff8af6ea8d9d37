"""2:4 pruning: the sweep against a slow loop, its laws, the published order of the rules, and whole models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.algorithms import gptq, rtn, sparsegpt
from quantkit.algorithms.cholesky import factorize
from quantkit.algorithms.hessian import row_losses
from quantkit.algorithms.masks import fixed_mask
from quantkit.algorithms.options import Options
from quantkit.algorithms.scale_search import choose_scales, group_errors
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.scheme import Scheme
from quantkit.core.sparsity import check, weight_mask
from quantkit.errors import LayoutError, NumericError, RecipeError
from quantkit.io import files
from quantkit.pipeline import quantize
from quantkit.pipeline.recipe import from_mapping, pruning_from_mapping
from quantkit.reporting import report
from quantkit.reporting.summary import summary
from tests import command_line, synthetic
from tests.algorithms.test_gptq import broken_hessians, hostile, loss
from tests.algorithms.test_hessian import damped
from tests.algorithms.test_rtn import correlated, gauss
from tests.command_line import call, refused
from tests.faults import Killed, count, faults, killer, memory_path
from tests.pipeline.test_quantize import hashes, tensors
from tests.tiny_models import write_model

calib, tmp_path = command_line.calib, memory_path

RULES = ("magnitude", "wanda", "sparsegpt")
SPARSE = Scheme.parse("int4:g32:24")
TEXT = ("--samples", 8, "--max-length", 128)


def dense_loss(weight: Tensor, pruned: Tensor, h: Tensor) -> Tensor:
    d = weight.double() - pruned.double()
    return ((d @ h.double()) * d).sum(1)


def is_24(weight: Tensor) -> bool:
    return bool(((weight != 0).view(len(weight), -1, 4).sum(-1) <= 2).all())


# The sweep ------------------------------------------------------------------------------------------------------------


def slow_sweep(w: Tensor, h: Tensor, order: Tensor, fixed: Tensor | None, scales: Tensor | None) -> Tensor:
    """Right-looking, with the inverse Cholesky factor as published; a quad's mask is chosen as the quad begins."""
    size = 0 if scales is None else w.shape[1] // scales.shape[1]
    w, result = w[:, order].clone(), torch.zeros_like(w)
    u = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h[order][:, order])), upper=True)
    for j, column in enumerate(order.tolist()):
        if j % 4 == 0:
            quad = slice(j, j + 4)
            scores = (w[:, quad] / u.diagonal()[quad]).square()
            kept = weight_mask(scores) if fixed is None else fixed[:, order[quad]]
        q = w[:, j] * kept[:, j % 4]
        if scales is not None:
            s = scales[:, column // size].double()
            q = s * (q / s).round().clamp(-8, 7)
        result[:, column] = q
        w[:, j:] -= torch.outer((w[:, j] - q) / u[j, j], u[j, j:])
    return result


@pytest.mark.parametrize("rule", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("order", ["static", "off"])
@pytest.mark.parametrize("kind", ["own", "mean"])
@pytest.mark.parametrize("block", [7, 128])
def test_sweeps_are_the_slow_loop_entry_for_entry(rule: Any, order: Any, kind: Any, block: int) -> None:
    w, h = gauss(96, 160), correlated(160)
    options = Options(prune=rule, act_order=order, damp_kind=kind, block=block)
    columns = factorize(h, options, sparse=True).order
    fixed = fixed_mask(w, "wanda", h) if rule == "wanda" else None
    solution = gptq.quantize(w, SPARSE, h, options)
    expected = slow_sweep(w, damped(h, options), columns, fixed, solution.tensor.scales)
    mine = ~solution.guard_rows
    assert mine.sum() > 0.8 * len(mine)
    assert torch.equal(solution.tensor.dequantize(torch.float64)[mine], expected[mine])
    first = slow_sweep(w, damped(h, options), columns, fixed, None)
    if rule == "sparsegpt":
        found = sparsegpt.prune(w, h, options)
        assert torch.equal(found != 0, first != 0)
        assert torch.allclose(found, first, rtol=1e-9, atol=1e-12)
        assert not torch.equal(found != 0, weight_mask(w))
    scales = choose_scales(first, SPARSE, "search", _errors(h, options)).scales
    assert torch.equal(solution.tensor.scales[mine], scales[mine])


def _errors(h: Tensor, options: Options) -> Any:
    diagonal = factorize(h, options, sparse=True).diagonal
    return group_errors(h, diagonal, h.shape[0] // 32, "block", torch.float64)


def test_order_sorts_quads_by_their_sum_and_never_columns() -> None:
    h = torch.diag(torch.tensor([1.0, 1, 1, 9, 4, 4, 4, 4, 3, 3, 3, 3]))
    order = factorize(h, Options(), sparse=True).order
    assert order.tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11]  # 16, 12 and 12: the lower of equal ones first
    assert factorize(h, Options(act_order="off"), sparse=True).order.tolist() == list(range(12))
    with pytest.raises(LayoutError, match="multiple of 4"):
        factorize(h[:10, :10], Options(), sparse=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", ["static", "off"])
@pytest.mark.parametrize("name", ["rank 1", "rank k/4", "duplicates", "massive channel", "dead column"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_hostile_hessians_give_2_4_and_never_lose_to_rounding(
    rule: Any, order: Any, name: str, dtype: torch.dtype
) -> None:
    w, h = gauss(32, 128).to(dtype), hostile(name, 128)
    options = Options(prune=rule, act_order=order)
    values = sparsegpt.prune(w, h, options)
    assert is_24(values) and values.dtype == dtype and bool(values.isfinite().all())
    solution = gptq.quantize(w, SPARSE, h, options)
    tensor = solution.tensor
    check(tensor.codes != 8)
    assert (solution.loss <= solution.rtn_loss).all()
    assert torch.allclose(solution.loss, loss(w, tensor, h).clamp(min=0), rtol=1e-6, atol=1e-9 * float(h.max()))
    assert solution.facts["prune"] == rule and solution.facts["kept"] == int((tensor.codes != 8).sum())
    assert solution.facts["zeros"] + solution.facts["kept"] == w.numel()


def test_the_guard_compares_with_rounding_under_the_same_mask() -> None:
    h = torch.eye(128, dtype=torch.float64) + 0.02 * correlated(128) / correlated(128).diagonal().mean()
    w, options = gauss(300, 128), Options(act_order="off", clip="none", prune="magnitude")
    solution = gptq.quantize(w, SPARSE, h, options)
    plain, _ = rtn.quantize(w, SPARSE)
    assert torch.equal(solution.rtn_loss, row_losses(w, plain, h))
    kept = solution.guard_rows
    assert 0 < kept.sum() < 300 and torch.equal(solution.tensor.codes[kept], plain.codes[kept])


@pytest.mark.parametrize("h", [torch.eye(64, dtype=torch.float64), torch.exp(gauss(64, seed=9)).diag()], ids=["I", "d"])
def test_with_independent_inputs_sparsegpt_is_wanda_and_nothing_moves(h: Tensor) -> None:
    w = gauss(32, 64)
    found = sparsegpt.prune(w, h, Options())
    assert torch.equal(found, sparsegpt.prune(w, h, Options(prune="wanda")))
    assert torch.equal(found, w * fixed_mask(w, "wanda", h))
    joint = gptq.quantize(w, SPARSE, h, Options())
    plain, _ = rtn.quantize(w, SPARSE, clip="search", metric="block", hessian=h, prune="wanda")
    assert torch.equal(joint.tensor.codes, plain.codes)


def test_what_is_2_4_already_keeps_its_zeros_by_magnitude() -> None:
    h = correlated(128)
    before = sparsegpt.prune(gauss(64, 128).half(), h, Options())
    assert torch.equal(sparsegpt.prune(before, h, Options(prune="magnitude")), before)
    for tensor in (
        rtn.quantize(before, SPARSE)[0],
        gptq.quantize(before, SPARSE, h, Options(prune="magnitude")).tensor,
    ):
        assert bool((tensor.codes[before == 0] == 8).all())


def test_rules_that_cannot_be_followed_are_refused() -> None:
    w, h = gauss(4, 64), correlated(64)
    with pytest.raises(RecipeError, match="rounding does not"):
        rtn.quantize(w, SPARSE, prune="sparsegpt")
    with pytest.raises(RecipeError, match="calibration"):
        rtn.quantize(w, SPARSE, prune="wanda")
    with pytest.raises(NumericError, match="ever moved"):
        sparsegpt.prune(w, torch.zeros(64, 64), Options(prune="wanda"))
    w[1, 2] = torch.nan
    for rule in RULES:
        with pytest.raises(NumericError, match=r"\[1, 2\]"):
            sparsegpt.prune(w, h, Options(prune=rule))
    with pytest.raises(LayoutError, match="multiple of 4"):
        sparsegpt.prune(gauss(4, 62), correlated(62), Options())


def test_a_survivor_that_overflows_half_precision_is_refused_or_left_to_the_guard() -> None:
    w = torch.full((1, 4), 60000.0).half()
    h = torch.ones(4, 4, dtype=torch.float64) + 1e-3 * torch.eye(4)
    with pytest.raises(NumericError, match="overflow float16"):
        sparsegpt.prune(w, h, Options())
    solution = gptq.quantize(w, Scheme.parse("int4:channel:24"), h, Options())
    assert (solution.loss <= solution.rtn_loss).all() and bool(solution.tensor.dequantize(torch.half).isfinite().all())
    with pytest.raises(NumericError, match="row 0"):
        gptq.quantize(torch.full_like(w, 65504), Scheme.parse("int4:channel:24"), h, Options())


@pytest.mark.parametrize("words", ["NaN", "infinite", "diagonal allows", "damping 1", "negative", "ever moved"])
def test_broken_hessians_stop_the_run_or_mean_magnitude_if_allowed(words: str) -> None:
    w, h = gauss(8, 64), broken_hessians(64).get(words, torch.zeros(64, 64))
    for solve in (lambda: sparsegpt.prune(w, h, Options()), lambda: gptq.quantize(w, SPARSE, h, Options())):
        with pytest.raises(NumericError, match=words):
            solve()
    solution = gptq.quantize(w, SPARSE, h, Options(on_unsolvable="rtn"))
    assert solution.facts["fallback"] == "rtn" and solution.facts["prune"] == "magnitude"
    assert solution.tensor.equal(rtn.quantize(w, SPARSE, clip="search")[0])


# The synthetic layer (ALGORITHMS 9) -----------------------------------------------------------------------------------


def test_synthetic_layer_ranks_rules_and_ways_to_join_them_with_int4() -> None:
    layer = synthetic.layer(0)
    w, h, scheme = layer.weight, layer.h, Scheme.parse("int4:g128:24")
    norm = float(((w @ layer.held_out) * w).sum())
    natural = Options(act_order="off")

    def after(values: Tensor) -> float:
        return float(dense_loss(w, values, layer.held_out).sum()) / norm

    def joint(options: Options) -> float:
        return layer.loss(gptq.quantize(w, scheme, h, options).tensor) / norm

    dense = {rule: sparsegpt.prune(w, h, Options(prune=rule)) for rule in RULES}
    rounded, _ = rtn.quantize(dense["sparsegpt"], scheme, clip="search", metric="block", hessian=h)
    found = {rule: after(values) for rule, values in dense.items()}
    found["sparsegpt, natural"] = after(sparsegpt.prune(w, h, natural))
    found["then rtn block"] = layer.loss(rounded) / norm
    found["joint"] = joint(Options())
    found["joint, natural"] = joint(natural)
    found["joint, diag"] = joint(Options(metric="diag"))
    found["joint, mse"] = joint(Options(metric="mse"))
    expected = {"magnitude": 0.269, "wanda": 0.021, "sparsegpt": 0.0094, "sparsegpt, natural": 0.0102}
    expected |= {"then rtn block": 0.016, "joint": 0.0122, "joint, natural": 0.0133}
    expected |= {"joint, diag": 0.0122, "joint, mse": 0.0237}
    for name, figure in expected.items():
        assert figure / 1.5 < found[name] < figure * 1.5, (name, found)
    order = ["sparsegpt", "sparsegpt, natural", "joint", "joint, natural", "then rtn block", "wanda", "magnitude"]
    assert sorted(order, key=found.__getitem__) == order, found
    kept_mask = layer.loss(gptq.quantize(dense["sparsegpt"], scheme, h, Options(prune="magnitude")).tensor) / norm
    assert found["joint"] < kept_mask < found["then rtn block"]


# Whole models ---------------------------------------------------------------------------------------------------------


def blocks_only(name: str) -> bool:
    return name.endswith("_proj.weight")


def values(folder: Path) -> Mapping[str, Tensor]:
    src = Checkpoint(folder)
    return {name: src.get(name) for name in src.names()}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_pruned_model_is_its_source_but_for_zeros(
    rule: str, family: str, folders: dict[str, Path], calib: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = call("prune", folders[family], "-o", out, "--method", rule, "--calib", calib, *TEXT)
    assert "fine-tuning" in result.stderr and "--skip" in result.stderr and f"linears by {rule}" in result.stdout
    before, after = values(folders[family]), values(out)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        if not blocks_only(name):
            assert torch.equal(tensor, before[name])  # biases, norms and tied embeddings among them
            continue
        assert is_24(tensor) and 0.49 < (tensor == 0).float().mean() < 0.51
        if rule == "magnitude":
            assert torch.equal(tensor, before[name] * weight_mask(before[name]))
        moved = bool((tensor[tensor != 0] != before[name][tensor != 0]).any())
        assert moved == (rule == "sparsegpt")
    assert Checkpoint(out).config == Checkpoint(folders[family]).config
    assert (out / "tokenizer.json").is_file()
    found = report.load(out)
    assert found["command"] == "prune" and found["layout"] == "dense" and len(found["layers"]) == 14
    assert all(layer["zeros"] >= layer["kept"] > 0 for layer in found["layers"])
    assert any("fine-tuning" in notice for notice in found["notices"])
    card = (out / "README.md").read_text()
    assert "Pruned from" in card and "quantized" not in card.split("---")[1] and f"linears by {rule}" in card
    assert "perplexity" in call("eval", "ppl", out, "--data", calib, "--window", 32, "-q").stdout
    assert "2:4" in call("report", out).stdout


def test_later_blocks_see_what_earlier_ones_lost(small_llama: Path, calib: Path, tmp_path: Path) -> None:
    first = ("--skip", ".*layers.0.*")
    call("prune", small_llama, "-o", tmp_path / "all", "--calib", calib, *TEXT, "-q")
    call("prune", small_llama, "-o", tmp_path / "late", "--calib", calib, *TEXT, *first, "-q")
    whole, late = values(tmp_path / "all"), values(tmp_path / "late")
    name = "model.layers.1.mlp.up_proj.weight"
    assert is_24(whole[name]) and is_24(late[name]) and not torch.equal(whole[name], late[name])
    assert not is_24(late[name.replace(".1.", ".0.")])


def test_rules_rank_on_a_whole_model_and_quantizing_goes_on_from_the_mask(
    tiny_llama: Path, calib: Path, tmp_path: Path
) -> None:
    text = {"calib": str(calib), "samples": 8, "max_length": 128}
    lost = {}
    for rule in RULES:
        made = quantkit.prune(tiny_llama, tmp_path / rule, method=rule, **text)
        lost[rule] = sum(layer.get("loss", 0) for layer in made["layers"])
    assert lost["magnitude"] == 0 and lost["sparsegpt"] < lost["wanda"]
    joint = quantkit.quantize(tiny_llama, tmp_path / "joint", prune="2:4", **text)
    in_turn = quantkit.quantize(
        tmp_path / "sparsegpt", tmp_path / "gptq", prune="2:4", prune_method="magnitude", **text
    )
    assert joint["scheme"] == in_turn["scheme"] == "int4:g128:24"
    assert {layer["prune"] for layer in joint["layers"]} == {"sparsegpt"}
    assert {layer["prune"] for layer in in_turn["layers"]} == {"magnitude"}
    dense = values(tmp_path / "sparsegpt")
    for folder in ("joint", "gptq"):
        src = Checkpoint(tmp_path / folder)
        for module in src.modules():
            codes = src.quantized(module).codes
            check(codes != 8)
            assert folder == "joint" or bool((codes[dense[f"{module}.weight"] == 0] == 8).all())
        assert quantkit.verify(tmp_path / folder).ok


@pytest.mark.parametrize("options", [("--method", "rtn"), ("--method", "rtn", "--prune-method", "wanda"), ()])
def test_sparse_codes_survive_packing(options: tuple[str, ...], small_llama: Path, calib: Path, tmp_path: Path) -> None:
    call("quantize", small_llama, "-o", tmp_path / "ct", "--prune", "2:4", "--calib", calib, *TEXT, *options, "-q")
    assert report.load(tmp_path / "ct")["scheme"] == "int4:g128:24"
    call("pack", tmp_path / "ct", "--layout", "marlin", "-o", tmp_path / "marlin", "-q")
    call("pack", tmp_path / "marlin", "--layout", "compressed-tensors", "-o", tmp_path / "back", "-q")
    assert tensors(tmp_path / "back") == tensors(tmp_path / "ct")
    src = Checkpoint(tmp_path / "marlin")
    for module in src.modules():
        assert src.scheme(module).label == "int4:g128:24"
        check(src.quantized(module).codes != 8)


@pytest.mark.parametrize("command", ["prune", "magnitude", "joint"])
def test_killed_anywhere_and_resumed_gives_the_same_bytes(
    command: str, small_llama: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "COMMIT_BYTES", 200_000)
    text: dict[str, Any] = {"data": str(calib), "samples": 4, "max_length": 64}
    joint = from_mapping({"scheme": {"sparsity": "2:4"}, "calibration": text})
    rule = "sparsegpt" if command == "prune" else "magnitude"
    recipe: Any = joint if command == "joint" else pruning_from_mapping({"method": rule, "calibration": text})
    work = quantize.quantize if command == "joint" else quantize.prune
    whole, out = tmp_path / "whole", tmp_path / "out"
    operations = count(lambda: work(small_llama, whole, recipe) and None)
    expected, resumed = hashes(whole), 0
    for stop in range(1, operations, max(1, operations // 6)):
        with faults(killer(stop)), pytest.raises(Killed):
            work(small_llama, out, recipe)
        for activations in tmp_path.glob("out.partial-*/activations-*"):
            activations.unlink()  # so that finished blocks are read back from their files
        if not out.exists():
            resumable = any(tmp_path.glob("out.partial-*"))
            resumed += resumable
            work(small_llama, out, recipe, resume=resumable)
        assert hashes(out) == expected, stop
        files.remove(out)
    assert resumed > 2


def test_a_head_that_is_not_skipped_is_pruned_by_magnitude_and_said(
    small_llama: Path, calib: Path, tmp_path: Path
) -> None:
    recipe = replace(
        pruning_from_mapping({"calibration": {"data": str(calib), "samples": 4, "max_length": 64}}), skip=()
    )
    made = quantize.prune(small_llama, tmp_path / "out", recipe)
    (head,) = [layer for layer in made["layers"] if layer["name"] == "lm_head"]
    assert head["method"] == "magnitude" and head["by_magnitude"] == "it is outside the blocks"
    assert "pruned by magnitude although" in summary(made)
    assert is_24(values(tmp_path / "out")["lm_head.weight"])


def test_what_cannot_be_pruned_is_one_line_and_writes_nothing(small_llama: Path, calib: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    odd = write_model("llama", tmp_path / "odd", hidden_size=128, intermediate_size=130, num_hidden_layers=1)
    for command in (("prune",), ("quantize", "--prune", "2:4", "--group-size", "channel")):
        error = refused(command[0], odd, *command[1:], "--calib", calib, out=out)
        assert "multiple of 4" in error and "--skip 'down_proj'" in error
    for wrong in (("--asym",), ("--format", "fp6"), ("--method", "rtn", "--prune-method", "sparsegpt")):
        refused("quantize", small_llama, "--prune", "2:4", *wrong, out=out, code=2)
    assert "add --prune 2:4" in refused("quantize", small_llama, "--prune-method", "wanda", out=out, code=2)
    dense = refused("quantize", small_llama, "--layout", "marlin24", "--method", "rtn", out=out)
    assert "add --prune 2:4" in dense
    assert "--prune" not in refused("quantize", small_llama, "--layout", "marlin24", "--format", "fp6", out=out)
    assert "nothing to prune" in refused("prune", small_llama, "--skip", ".*", out=out, code=2)
    call("quantize", small_llama, "-o", tmp_path / "int4", "--method", "rtn", "-q")
    assert "quantized already" in refused("prune", tmp_path / "int4", out=out)


def test_recipes_of_2_4_round_trip_and_slips_are_named() -> None:
    recipe = from_mapping({"scheme": {"sparsity": "2:4"}})
    assert (recipe.scheme.label, recipe.prune, recipe.gptq.prune) == ("int4:g128:24", "sparsegpt", "sparsegpt")
    assert from_mapping(recipe.to_mapping()) == recipe
    wanda = from_mapping({"overrides": {"up_proj": "int4:g64:24"}, "method": "rtn", "prune": "wanda"})
    assert wanda.calibrated and from_mapping(wanda.to_mapping()) == wanda
    assert not from_mapping({"scheme": {"sparsity": "2:4"}, "method": "rtn"}).calibrated
    with pytest.raises(RecipeError, match="quoted"):
        from_mapping({"scheme": {"sparsity": 124}})  # what YAML makes of 2:4
    for slip in ({"method": "taylor"}, {"gptq": {"damp": 0.0}}, {"gptq": {"descent": 1}}, {"layout": "marlin"}):
        with pytest.raises(RecipeError):
            pruning_from_mapping(slip)
    asked = pruning_from_mapping({"method": "wanda", "gptq": {"act_order": "off"}, "skip": []})
    assert pruning_from_mapping(asked.to_mapping()) == asked
