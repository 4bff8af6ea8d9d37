"""What is measured for a solver: sums of Hessians, and sums of rows that a kernel of vLLM holds in float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.hessian import CHUNK, LONG_CHUNK, Hessian
from quantkit.calibration import budget
from quantkit.calibration.run import Run
from quantkit.calibration.stages import statistics
from quantkit.calibration.stages.base import Group, Task, find_groups, tasks
from quantkit.calibration.stages.statistics import LEAST, Hessians, collect, sum_once, token_weights
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import ROW_SUM
from quantkit.checkpoint.writer import Item
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.engines.readers import sums_in_float16
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.convert import pack
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.recipe import from_mapping
from quantkit.reporting.summary import summary
from tests.calibration.runs import (
    COARSE,
    GROUPS,
    PLAIN_SUM,
    digests,
    distance,
    plain_hessian,
    quantized,
    sequences,
    start,
)
from tests.folders import TEXT, edit
from tests.tiny_models import write_model

#: The row and the input channel of a linear where a model has its outlier.
LAST, ROW, CHANNEL = "model.layers.0.mlp.down_proj", 3, 5


def test_the_first_token_weighs_more_where_a_norm_returns_the_input(folders: dict[str, Path], tmp_path: Path) -> None:
    block, flat = (start(folders["llama"], from_mapping(recipe), tmp_path) for recipe in (COARSE, PLAIN_SUM))
    groups = find_groups(block, list(block.goals))
    assert [group.normalised for group in groups] == [True, False, True, False]  # q k v, o, gate up, down
    for group, found, plain in zip(groups, collect(block, groups), collect(flat, groups), strict=True):
        assert torch.equal(found.matrix(), plain.matrix()) != group.normalised, group
    weights = token_weights(block, [0])
    tokens = len(sequences()[0])
    assert weights.shape == (1, tokens) and weights[0, 0] == max(1, 0.1 * tokens) and (weights[0, 1:] == 1).all()


def test_sums_that_are_checked_in_the_end_are_those_that_are_checked_at_once(three: Path, tmp_path: Path) -> None:
    block = start(three, from_mapping(COARSE), tmp_path)
    groups = find_groups(block, list(block.goals))
    late, at_once = (sum_once(block, groups, checks) or [] for checks in (False, True))
    for a, b in zip(late, at_once, strict=True):
        assert torch.equal(a.matrix(), b.matrix()) and not a.may_be_broken()
    block.stream.activations.get(1).hidden[5, 7] = torch.nan
    broken = sum_once(block, groups, False) or []
    assert len(broken) == len(late) == 4 and all(each.may_be_broken() for each in broken)


@pytest.mark.gpu
def test_experts_on_a_gpu_have_short_chunks_in_any_number_of_passes(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = set[tuple[bool, int]]()
    new = statistics.new_hessian

    def recorded(run: Run, group: Group, checks: bool = True) -> Hessian:
        made = new(run, group, checks)
        chunks.add((group.linears[0] in run.model.experts, made.chunk))
        return made

    monkeypatch.setattr(statistics, "new_hessian", recorded)
    at_once, _ = quantized(folders["qwen3_moe"], from_mapping(COARSE), tmp_path, "cuda")
    assert chunks == {(True, CHUNK), (False, LONG_CHUNK)}
    monkeypatch.setattr(budget, "HESSIAN_BYTES", 1)
    one_by_one, _ = quantized(folders["qwen3_moe"], from_mapping(COARSE), tmp_path, "cuda")
    assert digests(at_once) == digests(one_by_one)


@pytest.mark.parametrize("family", GROUPS)
def test_groups_and_hessians_are_those_of_plain_forwards(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    block = start(folders[family], from_mapping(PLAIN_SUM), tmp_path)
    model, reference = block.run.model, load_dense_model(block.run.model.src)
    for index in (0, 1):
        if index:
            block.stream.forward(0)
            model.weights.unload_block(0)
            model.weights.load_block(1)
            block.index = 1
        groups = find_groups(block, model.targets(index))
        assert [" ".join(sorted(n.split(".")[-1] for n in g.linears)) for g in groups] == [
            " ".join(sorted(g.split())) for g in GROUPS[family]
        ]
        assert all(g.once for g in groups)
        together = collect(block, groups)
        for group, hessian in zip(groups, together, strict=True):
            h = hessian.matrix()
            assert torch.equal(h, collect(block, [group])[0].matrix())  # stopping early changes nothing
            assert hessian.tokens == sum(len(s) for s in sequences())
            for linear in group.linears:
                assert distance(h, plain_hessian(reference, model.paths[linear], sequences())) < 1e-6


def test_experts_are_grouped_after_a_token_has_chosen_them(three: Path, tmp_path: Path) -> None:
    """One linear is called for some documents only, and one is called twice."""
    block = start(three, from_mapping(COARSE), tmp_path)
    mlp = block.run.model.module.get_submodule("model.layers.0").mlp
    plain = mlp.forward

    def routed(x: Tensor) -> Tensor:
        if x.shape[1] == 17:  # only the third document reaches the expert
            return plain(x) + mlp.gate_proj(x[:, :4]).sum()
        return x

    mlp.forward = routed
    groups = find_groups(block, list(block.goals))
    by_name = {g.linears[0].split(".")[-1]: g for g in groups}
    tokens = {name: collect(block, [group])[0].tokens for name, group in by_name.items()}
    assert by_name["gate_proj"] == Group(("model.layers.0.mlp.gate_proj",), once=False)
    assert by_name["up_proj"].once and by_name["down_proj"].once
    assert (tokens["gate_proj"], tokens["up_proj"], tokens["down_proj"]) == (17 + 4, 17, 17)
    mlp.forward = lambda x: x
    block.stream.waiting.close()
    unreached = find_groups(block, list(block.goals))[2:]
    assert [len(g.linears) for g in unreached] == [1, 1, 1]
    assert all(collect(block, [g])[0].tokens == 0 for g in unreached)


def test_experts_are_calibrated_on_their_own_tokens_or_on_all_of_the_layer(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    block = start(folders["mixtral"], from_mapping(PLAIN_SUM), tmp_path)
    model, reference = block.run.model, load_dense_model(block.run.model.src)
    experts = "model.layers.0.block_sparse_moe.experts"
    pairs = [Group((f"{experts}.{e}.w1", f"{experts}.{e}.w3")) for e in range(4)]
    downs = [Group((f"{experts}.{e}.w2",)) for e in range(4)]
    offered, found = list[set[Group]](), dict[Group, Task]()
    for some in tasks(block):
        offered.append({task.group for task in some})
        Hessians().work(block, some)
        found |= {task.group: task for task in some}
    assert [len(groups) for groups in offered[:2]] == [1, 1]
    assert set(pairs) in offered and set(downs) in offered
    again = [groups for groups in offered[2:] if groups not in (set(pairs), set(downs))]
    assert {name for groups in again for group in groups for name in group.linears} == block.starved.keys()
    everything = sum(len(s) for s in sequences())
    for group, task in found.items():
        facts = task.facts[group.linears[0]]
        assert task.hessian is not None
        if facts.get("moe") == "routed":
            assert 128 <= task.hessian.tokens < everything
            expected = plain_hessian(reference, model.paths[group.linears[0]], sequences())
            assert distance(task.hessian.matrix(), expected) < 1e-6
        else:
            assert task.hessian.tokens == everything and ("few_routed" in facts) == (group.linears[0] in block.starved)


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose `down_proj` have huge inputs, and a `k_proj` a huge bias, which no scale multiplies."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor *= 3e5 if name.endswith("up_proj.weight") else 1
            if name.endswith("k_proj.bias"):
                tensor[0] = 1e6

    return edit(write_model("qwen2", tmp_path_factory.mktemp("outlier") / "model", torch.float32), change)


def fp6(layout: str, **more: Any) -> dict[str, Any]:
    return {"scheme": {"format": "fp6", "group_size": "channel"}, "layout": layout, **more}


def sums(folder: Path, items: dict[str, Item]) -> dict[str, float]:
    """Measure the largest sum of each linear in float64, while the quantized model runs as a whole."""
    reference = load_dense_model(Checkpoint(folder))
    records = {n.removesuffix(".weight"): i.value for n, i in items.items() if isinstance(i.value, QuantizedTensor)}
    found = dict.fromkeys(records, 0.0)

    def see(linear: str, x: Tensor) -> None:
        record = records[linear]
        codes = record.dequantize(torch.float64) / record.scales.double()
        found[linear] = max(found[linear], float((x.flatten(0, -2).double() @ codes.T).abs().max()))

    for linear, record in records.items():
        module = reference.get_submodule(linear)
        module.weight.data = record.dequantize(torch.float32)
        module.register_forward_pre_hook(lambda _m, args, linear=linear: see(linear, args[0]))
    with torch.no_grad():
        for tokens in sequences():
            reference(tokens[None], use_cache=False)
    return found


def facts(items: dict[str, Item], fact: str) -> dict[str, Any]:
    """List a fact of the linears that have it, and it is not 0."""
    found = {name.removesuffix(".weight"): (item.facts or {}).get(fact) for name, item in items.items()}
    return {name: value for name, value in found.items() if value}


def test_the_largest_sum_of_all_documents_is_reported_in_the_last_block_too(outlier: Path, tmp_path: Path) -> None:
    items, _ = quantized(outlier, from_mapping(fp6("humming")), tmp_path)
    near = {linear: largest for linear, largest in sums(outlier, items).items() if largest > LEAST}
    assert sorted(near) == [f"model.layers.{block}.mlp.down_proj" for block in (0, 1)]
    assert facts(items, ROW_SUM) == pytest.approx(near, rel=1e-3)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model in which one row of a `down_proj` sums to some 100,000 in steps of its scale."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    folder = write_model("qwen2", tmp_path_factory.mktemp("planted") / "model", torch.float32, **sizes)
    model, seen = load_dense_model(Checkpoint(folder)), list[Tensor]()
    model.get_submodule(LAST).register_forward_pre_hook(lambda _m, args: seen.append(args[0][..., CHANNEL].abs().max()))
    for tokens in sequences():
        model(tokens[None], use_cache=False)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAST}.weight"][:, CHANNEL] = 0
        tensors[f"{LAST}.weight"][ROW, CHANNEL] = tensors[f"{LAST}.weight"].abs().max()
        tensors[LAST.replace("down", "up") + ".weight"][CHANNEL] *= 4000 / float(max(seen))

    return edit(folder, change)


def test_scales_are_raised_where_sums_would_overflow_and_nowhere_else(planted: Path, tmp_path: Path) -> None:
    """The layout tcfpx, which quantkit's own kernels read, shows the codes that no scale is raised for."""
    recipes = [from_mapping(fp6(layout)) for layout in ("humming", "tcfpx")]
    items, plain = (quantized(planted, recipe, tmp_path)[0] for recipe in recipes)
    assert sums(planted, plain)[LAST] > 65504 > 4 * max(sums(planted, items).values())
    assert facts(items, "raised_scales") == {LAST: 1}
    assert facts(items, ROW_SUM) == facts(plain, "raised_scales") == {}
    for linear, item in items.items():
        value, other = item.value, plain[linear].value
        if not isinstance(value, QuantizedTensor) or not isinstance(other, QuantizedTensor):
            continue
        kept = torch.tensor([linear != f"{LAST}.weight" or row != ROW for row in range(len(value.codes))])
        if "layers.0." in linear:  # the inputs of the next block are others
            assert torch.equal(value.codes[kept], other.codes[kept]) and torch.equal(
                value.scales[kept], other.scales[kept]
            )
            assert (value.scales[~kept] / other.scales[~kept]).tolist() in ([], [[8.0]])


def test_scales_of_integers_are_not_raised(planted: Path, tmp_path: Path) -> None:
    recipe = from_mapping({"scheme": {"format": "int6", "group_size": "channel"}, "clip": "none"})
    items, _ = quantized(planted, recipe, tmp_path)
    assert list(facts(items, ROW_SUM)) == [LAST] and not facts(items, "raised_scales")


def test_who_loads_the_folder_decides_whether_the_closing_table_warns(outlier: Path, tmp_path: Path) -> None:
    """A conversion takes the warning along only into a layout whose kernel overflows."""
    (tmp_path / "text.txt").write_text(TEXT)
    short = {"calibration": {"data": str(tmp_path / "text.txt"), "samples": 4, "max_length": 64}}
    humming = quantize(outlier, tmp_path / "humming", from_mapping(fp6("humming", **short)))
    tcfpx = quantize(outlier, tmp_path / "tcfpx", from_mapping(fp6("tcfpx", **short)))
    to_tcfpx, to_fp8 = (pack(tmp_path / "humming", tmp_path / f"to-{to}", to) for to in ("tcfpx", "compressed-tensors"))
    for report, warned in ((humming, True), (tcfpx, False), (to_tcfpx, False), (to_fp8, True)):
        text = " ".join(summary(report).split())
        assert ("65504" in text) == warned
        assert ("2 of 14 linears sum to" in text and "down_proj); vLLM's Humming kernels" in text) == warned
        assert ("serve it with vLLM's --quantization quantkit or use --layout tcfpx" in text) == warned
        assert [layer["name"] for layer in report["layers"] if ROW_SUM in layer] == (
            [f"model.layers.{block}.mlp.down_proj" for block in (0, 1)] if warned else []
        )


@pytest.mark.parametrize(
    ("layout", "scheme", "experts", "overflows"),
    [
        ("humming", "fp5:channel", False, True),
        ("humming", "int6:channel", False, True),
        ("humming", "int6:g64", False, False),
        ("compressed-tensors", "int3:channel", False, True),
        ("compressed-tensors", "int4:channel", False, False),
        ("tcfpx", "fp6:channel", False, False),
        ("humming", "fp6:channel", True, False),
    ],
)
def test_only_rows_that_humming_multiplies_overflow(layout: str, scheme: str, experts: bool, overflows: bool) -> None:
    assert sums_in_float16(layout, Scheme.parse(scheme), 512, 512, experts) == overflows


def test_integers_are_told_to_take_groups() -> None:
    """TC-FPx holds no integers, and no kernel of quantkit's plug-in those of six bits."""
    layers = [
        {"name": name, "scheme": "int6:channel", ROW_SUM: size} for name, size in (("a", 2e4), ("b", 9e4), ("c", 0.0))
    ]
    text = " ".join(summary({"command": "quantize", "layers": layers}).split())
    assert "2 of 3 linears sum to 90000 before a row's scale is applied (worst b)" in text
    assert "quantize in groups, like --group-size 64" in text and "tcfpx" not in text
