"""The loop over blocks: Hessians, groups found by identity, and the same bytes after any stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.hessian import CHUNK, LONG_CHUNK, Hessian
from quantkit.calibration import budget
from quantkit.calibration.budget import SAVED_BLOCKS
from quantkit.calibration.groups import find_groups, tasks
from quantkit.calibration.loop import calibrated, new_run
from quantkit.calibration.run import Run, embedded
from quantkit.calibration.stages import hessians
from quantkit.calibration.stages.base import Group, LoadedBlock, Task
from quantkit.calibration.stages.hessians import Hessians, collect, sum_once
from quantkit.calibration.stages.solve import solve
from quantkit.checkpoint.items import Commit, Item
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.errors import CheckpointError, NumericError, QuantkitError, RecipeError
from quantkit.layouts import LAYOUTS
from quantkit.models import block_runner
from quantkit.models.block_runner import BlockRunner
from quantkit.models.passing import State
from quantkit.models.whole_model import load_dense_model
from quantkit.progress import Clock as Phases
from quantkit.progress import Progress
from quantkit.recipes.recipe import Recipe, from_mapping
from quantkit.text.sequences import draw_calibration
from quantkit.text.tokenizer import load_tokenizer
from tests.calibration.runs import digests, distance, interrupted, resumed, sequences
from tests.census import families
from tests.tiny_models import FAMILIES, write_model

COARSE: dict[str, Any] = {"scheme": {"group_size": "channel"}, "clip": "none"}
PLAIN_SUM: dict[str, Any] = {**COARSE, "gptq": {"cap_tokens": False}}  # its Hessians can be computed in one line

#: The groups that share an input, by the last part of the names, in the order in which a block calls them.
GROUPS = {
    "llama": ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"],
    "mistral": ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"],
    "qwen2": ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"],
    "gemma": ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"],
    "gemma2": ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"],
    "opt": ["q_proj k_proj v_proj", "out_proj", "fc1", "fc2"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama of three small blocks."""
    changes = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 256}
    return write_model("llama", tmp_path_factory.mktemp("three") / "model", **changes)


@pytest.fixture(scope="module")
def whole(three: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Item]:
    """All that an undisturbed run on `three` yields."""
    return quantized(three, from_mapping(COARSE), tmp_path_factory.mktemp("whole"))[0]


def start(folder: Path, recipe: Recipe, work: Path, docs: list[Tensor] | None = None) -> LoadedBlock:
    """Load the first block of a run, with its input activations."""
    src = Checkpoint(folder)
    model = BlockRunner(src, device="cpu")
    run = new_run(src, recipe, model, docs or sequences(), work, Progress(quiet=True))
    stream = embedded(run)
    model.load_block(0)
    return LoadedBlock(run, stream, 0, run.goals(model.targets(0)), {})


def quantized(
    folder: Path, recipe: Recipe, work: Path, device: str = "cpu", **options: Any
) -> tuple[dict[str, Item], list[dict[str, Any]]]:
    """Return all that a whole run yields: items by name, and the facts of its commits."""
    src = Checkpoint(folder)
    items: dict[str, Item] = {}
    commits: list[dict[str, Any]] = []
    for item in calibrated(src, recipe, BlockRunner(src, device=device), sequences(), work, [], **options):
        if isinstance(item, Commit):
            commits.append(item.facts)
        else:
            assert item.name not in items
            items[item.name] = item
    assert sorted(items) == sorted(src.names())
    return items, commits


def plain_hessian(reference: Any, linear: str, docs: list[Tensor]) -> Tensor:
    """Return `2/T sum x^T x` of a linear's input in float64, from forwards of the whole model."""
    seen: list[Tensor] = []
    hook = reference.get_submodule(linear).register_forward_pre_hook(
        lambda _m, args: seen.append(args[0].flatten(0, -2).double())
    )
    with torch.no_grad():
        for tokens in docs:
            reference(tokens[None], use_cache=False)
    hook.remove()
    x = torch.cat(seen)
    return 2 / len(x) * x.T @ x


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_and_hessians_are_those_of_plain_forwards(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    block = start(folders[family], from_mapping(PLAIN_SUM), tmp_path)
    model, reference = block.run.model, load_dense_model(block.run.src)
    for index in (0, 1):
        if index:
            block.stream.forward(0)
            model.unload_block(0)
            model.load_block(1)
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


def test_tokens_of_extreme_norm_are_capped_unless_the_recipe_says_otherwise(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.algorithms.hessian._EXTREME", 5.0)  # a tiny model has no token beyond 10
    output = Group(("model.layers.0.self_attn.o_proj",))  # random attention averages all values but the first token's
    blocks = [start(folders["llama"], from_mapping(recipe), tmp_path) for recipe in (COARSE, PLAIN_SUM)]
    capped, plain = (collect(block, [output])[0] for block in blocks)
    assert plain.capped_tokens == 0 < capped.capped_tokens <= 2 * len(sequences())
    assert capped.matrix().trace() < plain.matrix().trace()


@pytest.mark.parametrize(
    ("family", "sequential"),
    [("llama", True), ("opt", True), ("gpt_neox", True), ("gemma2", True), ("llama", False), ("gpt_neox", False)],
)
def test_each_group_is_calibrated_on_quantized_earlier_ones(
    family: str, sequential: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    recipe = from_mapping({**PLAIN_SUM, "true_sequential": sequential})
    items, _ = quantized(folders[family], recipe, tmp_path)
    src = Checkpoint(folders[family])
    model, reference = BlockRunner(src, device="cpu"), load_dense_model(src)
    for block in (0, 1):
        run_order = [[n for n in model.targets(block) if n.split(".")[-1] in g.split()] for g in GROUPS[family]]
        known: dict[str, Tensor] = {}
        if not sequential:
            known = {g[0]: plain_hessian(reference, g[0], sequences()) for g in run_order}
        for group in run_order:
            h = known[group[0]] if group[0] in known else plain_hessian(reference, group[0], sequences())
            for linear in group:
                item = items[f"{linear}.weight"]
                assert item.facts is not None and isinstance(item.value, QuantizedTensor)
                w = src.get(f"{linear}.weight").double()
                d = w - item.value.dequantize().double()
                for name, x, within in (("norm", w, 1e-6), ("loss", d, 1e-4)):
                    expected = float(((x @ h) * x).sum())
                    assert item.facts[name] == pytest.approx(expected, rel=within), (linear, name)
            for linear in group:
                value = items[f"{linear}.weight"].value
                assert isinstance(value, QuantizedTensor)
                reference.get_submodule(linear).weight.data = value.dequantize()


@pytest.mark.parametrize("family", FAMILIES)
def test_only_linears_of_blocks_change(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    items, commits = quantized(folders[family], from_mapping(COARSE), tmp_path)
    src = Checkpoint(folders[family])
    model = BlockRunner(src, device="cpu")
    expected = {f"{linear}.weight" for block in (0, 1) for linear in model.targets(block)}
    assert set(digests(items)) == expected
    for name, item in items.items():
        if name not in expected:
            assert isinstance(item.value, Tensor) and torch.equal(item.value, src.get(name))
            assert item.value.dtype == src.dtype(name)
    assert [facts["block"] for facts in commits] == [0, 1, "rest"]
    assert all(facts["loss"] <= facts["rtn_loss"] for facts in (items[name].facts or {} for name in expected))
    assert {"load", "forward", "hessian", "solve"} <= set(commits[0]["phases"])


def test_skipped_and_overridden_members_of_a_group(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = from_mapping({**COARSE, "skip": ["lm_head", "k_proj"], "overrides": {"v_proj": "int4:g64:asym"}})
    items, _ = quantized(folders["llama"], recipe, tmp_path)
    prefix = "model.layers.0.self_attn"
    assert isinstance(items[f"{prefix}.k_proj.weight"].value, Tensor)
    found = {n: items[f"{prefix}.{n}.weight"].value for n in ("q_proj", "v_proj")}
    labels = {n: value.scheme.label for n, value in found.items() if isinstance(value, QuantizedTensor)}
    assert labels == {"q_proj": "int4:channel", "v_proj": "int4:g64:asym"}


def test_a_linear_solved_in_a_group_equals_one_solved_by_itself(folders: dict[str, Path], tmp_path: Path) -> None:
    block = start(folders["llama"], from_mapping(COARSE), tmp_path)
    run, group = block.run, find_groups(block, list(block.goals))[0]
    hessian = collect(block, [group])[0]
    weights = {name: run.src.get(f"{name}.weight") for name in group.linears}
    schemes = dict.fromkeys(weights, run.recipe.scheme)
    together = solve(weights, schemes, hessian, run.recipe, run.progress)
    for item, (name, weight) in zip(together, weights.items(), strict=True):
        (single,) = solve({name: weight}, {name: schemes[name]}, hessian, run.recipe, run.progress)
        assert isinstance(item.value, QuantizedTensor) and isinstance(single.value, QuantizedTensor)
        same = (item.value.codes == single.value.codes).float().mean()
        assert item.name == single.name == f"{name}.weight" and same >= 0.999


def test_the_head_is_rounded_only_on_request(folders: dict[str, Path], tmp_path: Path) -> None:
    items, _ = quantized(folders["llama"], from_mapping({**COARSE, "skip": []}), tmp_path)
    head = items["lm_head.weight"]
    assert isinstance(head.value, QuantizedTensor) and head.facts is not None
    assert (head.facts["method"], head.facts["reason"]) == ("rtn", "it is outside the blocks")
    items, _ = quantized(folders["gpt_neox"], from_mapping(COARSE), tmp_path)
    assert isinstance(items["embed_out.weight"].value, Tensor)  # its published name for the head
    with pytest.raises(RecipeError, match="lm_head shares its weight"):
        quantized(folders["qwen2"], from_mapping({**COARSE, "skip": []}), tmp_path)


def test_rtn_with_a_hessian_runs_in_the_loop(folders: dict[str, Path], tmp_path: Path) -> None:
    losses = {}
    for metric in ("diag", "block"):
        recipe = from_mapping({"method": "rtn", "clip": "search", "metric": metric})
        items, _ = quantized(folders["llama"], recipe, tmp_path)
        facts = [item.facts for item in items.values() if item.facts]
        assert {f["method"] for f in facts} == {"rtn"}
        losses[metric] = sum(f["loss"] for f in facts[:3])  # the first group, whose input is not quantized
    assert losses["block"] < losses["diag"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_that_is_called_alone_gives_the_same_bits(
    family: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: batches, and from the second pass on calls of the block with the arguments of the first pass."""
    monkeypatch.setitem(budget.TOKENS_AT_ONCE, "cpu", 40)
    recipe, docs = from_mapping(COARSE), [*sequences((20, 20, 20, 7)), torch.arange(20) * 3]
    src, found, forwards = Checkpoint(folders[family]), [], []
    for kept in (0, 2**20):
        monkeypatch.setitem(block_runner.CALLS_BYTES, "cpu", kept)
        model = BlockRunner(src, device="cpu")
        calls = []
        model.text.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        items = calibrated(src, recipe, model, docs, tmp_path, [])
        found.append(digests({item.name: item for item in items if isinstance(item, Item)}))
        forwards.append(len(calls))
    assert found[0] == found[1] and len(found[0]) > 4
    assert forwards[1] < forwards[0] / 2


def test_sums_that_are_checked_in_the_end_are_those_that_are_checked_at_once(three: Path, tmp_path: Path) -> None:
    block = start(three, from_mapping(COARSE), tmp_path)
    groups = find_groups(block, list(block.goals))
    late, at_once = (sum_once(block, groups, checks) or [] for checks in (False, True))
    for a, b in zip(late, at_once, strict=True):
        assert torch.equal(a.matrix(), b.matrix()) and not a.may_be_broken()
    block.stream.activations.get(1).hidden[5, 7] = torch.nan
    broken = sum_once(block, groups, False) or []
    assert len(broken) == len(late) == 4 and all(each.may_be_broken() for each in broken)


def test_a_gpu_without_memory_takes_fewer_documents_at_a_time_and_says_so(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first pass over each block fails in its second batch, and the last pass of the first block too."""
    monkeypatch.setitem(budget.TOKENS_AT_ONCE, "cpu", 160)
    src, recipe, docs = Checkpoint(three), from_mapping(COARSE), sequences((20,) * 9)
    run, calls = BlockRunner.run, list[int]()

    def fits(most: int) -> None:
        def refused(model: BlockRunner, index: int, tokens: Tensor, state: State, key: Any = None) -> Any:
            calls.append(tokens.numel())
            if key is not None and tokens.numel() > most and len(calls) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(model, index, tokens, state, key)

        calls.clear()
        monkeypatch.setattr(BlockRunner, "run", refused)

    found = []
    for most in (160, 40):
        fits(most)
        items = calibrated(src, recipe, BlockRunner(src, device="cpu"), docs, tmp_path, [], progress=Progress())
        found.append(digests({item.name: item for item in items if isinstance(item, Item)}))
    said = capsys.readouterr().err
    assert found[0] == found[1]
    assert "for 160 tokens at a time, 80 are tried" in said and "for 80 tokens at a time, 40 are tried" in said
    fits(10)
    with pytest.raises(QuantkitError, match=r"layers\.0: .* a document of 20 tokens: use a smaller --max-length"):
        list(calibrated(src, recipe, BlockRunner(src, device="cpu"), docs, tmp_path, []))


@pytest.mark.parametrize(
    ("blocks", "damage"),
    [
        *((blocks, damage) for blocks in (1, 2) for damage in ("none", "flipped", "short", "gone")),
        (3, "gone"),
        (4, "gone"),
    ],
)
def test_a_stopped_run_continues_with_the_same_bits(
    blocks: int,
    damage: str,
    three: Path,
    whole: dict[str, Item],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    src = Checkpoint(three)
    recipe = from_mapping(COARSE)
    partial = tmp_path / "partial"
    partial.mkdir()
    first = interrupted(src, recipe, partial, blocks)
    for path in partial.glob("activations-*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= damage == "flipped"
        path.write_bytes(data[:-1] if damage == "short" else data)
        if damage == "gone":
            path.unlink()
    second = resumed(src, recipe, partial, Progress())
    assert not first.keys() & second.keys()
    assert digests(first) | digests(second) == digests(whole)
    assert first.keys() | second.keys() == whole.keys()
    warned = "computed again" in capsys.readouterr().err
    assert warned == (damage != "none" and blocks < 3)  # after the last block nothing needs activations


def test_a_stop_between_snapshot_and_commit_loses_one_block_only(
    three: Path, whole: dict[str, Item], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = Checkpoint(three)
    recipe = from_mapping(COARSE)
    partial = tmp_path / "partial"
    partial.mkdir()
    writer = CheckpointWriter(partial, src, LAYOUTS[recipe.layout])
    writer.identify({"recipe": recipe.sha256()}, lambda before, now: None)
    for item in calibrated(src, recipe, BlockRunner(src, device="cpu"), sequences(), partial, writer.done):
        if isinstance(item, Item):
            writer.add(item)
        elif item.facts["block"] == 1:  # its snapshot is written, its commit is not
            break
        else:
            writer.commit(item.facts)
    second = resumed(src, recipe, partial, Progress())
    assert "computed again" not in capsys.readouterr().err  # the snapshot of the last commit was not overwritten
    assert {n: d for n, d in digests(whole).items() if ".layers.0." not in n} == digests(second)


def test_activations_beyond_the_budget_give_the_same_bits(three: Path, tmp_path: Path) -> None:
    recipe = from_mapping(COARSE)
    inside, commits = quantized(three, recipe, tmp_path)
    outside, mapped = quantized(three, recipe, tmp_path, act_budget=0)
    assert (tmp_path / "activations-live.bin").stat().st_size == sum(len(s) for s in sequences()) * 128 * 4
    assert digests(inside) == digests(outside)
    assert [c.get("activations") for c in commits] == [c.get("activations") for c in mapped]


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "mixtral", "gpt_oss", "llama4_text"])
def test_a_batch_of_documents_gives_the_hessians_and_states_of_single_ones(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(family, tmp_path / "model")
    docs = sequences((16, 16, 16, 9, 16, 2, 2))
    found: list[list[Tensor]] = []
    for tokens in (0, 40):
        monkeypatch.setitem(budget.TOKENS_AT_ONCE, "cpu", tokens)
        block = start(folder, from_mapping(PLAIN_SUM), tmp_path, docs)
        model, stream = block.run.model, block.stream
        taken = [len(numbers) for numbers in stream.forwards(0)]
        found.append([])
        for block.index in range(len(model.blocks)):
            if block.index:
                model.load_block(block.index)
            groups = find_groups(block, model.targets(block.index))
            found[-1] += [hessian.matrix() for hessian in collect(block, groups) if hessian.tokens]
            stream.forward(block.index)
            found[-1].append(stream.activations.hidden.clone())
        assert taken == ([2, 1, 1, 1, 2] if tokens else [1] * 7)
    assert all(distance(batch, single) < 1e-5 for single, batch in zip(*found, strict=True))


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_blocks_without_a_snapshot_are_computed_again_with_the_same_bits(
    blocks: int,
    three: Path,
    whole: dict[str, Item],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(SAVED_BLOCKS, "cpu", 2)
    src, recipe, partial = Checkpoint(three), from_mapping(COARSE), tmp_path / "partial"
    partial.mkdir()
    first = interrupted(src, recipe, partial, blocks)
    assert len(list(partial.glob("activations-*"))) == (blocks > 1)
    second = resumed(src, recipe, partial, Progress())
    assert not first.keys() & second.keys()
    assert digests(first) | digests(second) == digests(whole)
    assert "computed again" not in capsys.readouterr().err  # that is said of snapshots that should be there


@pytest.mark.gpu
@pytest.mark.parametrize(("blocks", "every"), [(1, 8), (2, 8), (2, 1), (3, 2)])
def test_a_stopped_run_on_a_gpu_continues_with_the_same_bits(
    blocks: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SAVED_BLOCKS, "cuda", every)
    changes = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024}
    folder, recipe = write_model("llama", tmp_path / "model", **changes), from_mapping({})
    docs = [torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)) for n in (500, 500, 500, 7, 500, 500)]
    partials = [tmp_path / "whole", tmp_path / "stopped"]
    for partial in partials:
        partial.mkdir()
    src = Checkpoint(folder)
    whole = interrupted(src, recipe, partials[0], 5, docs, "cuda")
    first = interrupted(src, recipe, partials[1], blocks, docs, "cuda")
    second = resumed(src, recipe, partials[1], Progress(), docs, "cuda")
    assert digests(first) | digests(second) == digests(whole) and not first.keys() & second.keys()
    assert bool(list(partials[1].glob("activations-*"))) == (every < 4)


@pytest.mark.gpu
def test_activations_on_a_gpu_that_is_nearly_full_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.calibration import activations

    folder, recipe = write_model("llama", tmp_path / "model"), from_mapping({})
    here, _ = quantized(folder, recipe, tmp_path, "cuda")
    monkeypatch.setattr(activations, "stays_on_gpu", lambda size, free: False)
    there, _ = quantized(folder, recipe, tmp_path, "cuda")
    outside, _ = quantized(folder, recipe, tmp_path, "cuda", act_budget=0)
    assert digests(here) == digests(there) == digests(outside)


@pytest.mark.gpu
def test_experts_on_a_gpu_have_short_chunks_in_any_number_of_passes(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = set[tuple[bool, int]]()
    new = hessians.new_hessian

    def recorded(run: Run, group: Group, checks: bool = True) -> Hessian:
        made = new(run, group, checks)
        chunks.add((group.linears[0] in run.model.experts, made.chunk))
        return made

    monkeypatch.setattr(hessians, "new_hessian", recorded)
    at_once, _ = quantized(folders["qwen3_moe"], from_mapping(COARSE), tmp_path, "cuda")
    assert chunks == {(True, CHUNK), (False, LONG_CHUNK)}
    monkeypatch.setattr(budget, "HESSIAN_BYTES", 1)
    one_by_one, _ = quantized(folders["qwen3_moe"], from_mapping(COARSE), tmp_path, "cuda")
    assert digests(at_once) == digests(one_by_one)


def broken(folder: Path, work: Path, name: str, index: tuple[int, ...], value: float) -> Path:
    from safetensors.torch import save_file

    src = Checkpoint(folder)
    tensors = {n: src.get(n) for n in src.names()}
    tensors[name][index] = value
    work.mkdir(exist_ok=True)
    save_file(tensors, work / "model.safetensors")
    (work / "config.json").write_bytes((folder / "config.json").read_bytes())
    return work


def test_values_that_are_not_finite_stop_the_run_with_a_name(three: Path, tmp_path: Path) -> None:
    recipe = from_mapping(COARSE)
    token = int(sequences()[1][50])
    with pytest.raises(NumericError, match=r"layers\.0\.self_attn\.q_proj, calibration document \d: 128 of"):
        embedding = broken(three, tmp_path / "a", "model.embed_tokens.weight", (token,), float("inf"))
        quantized(embedding, recipe, tmp_path)
    with pytest.raises(NumericError, match=r"layers\.1\.self_attn\.q_proj, calibration document 0: "):
        quantized(
            broken(three, tmp_path / "b", "model.layers.1.input_layernorm.weight", (3,), float("nan")), recipe, tmp_path
        )
    with pytest.raises(NumericError, match=r"layers\.0\.self_attn\.v_proj: 1 of 16384 weights.*\[2, 5\]"):
        name = "model.layers.0.self_attn.v_proj.weight"
        quantized(broken(three, tmp_path / "c", name, (2, 5), float("nan")), recipe, tmp_path)


def test_the_seconds_of_phases_are_each_counted_once() -> None:
    clock, started = Phases(torch.device("cpu")), time.perf_counter()
    with clock.phase("forward"):
        time.sleep(0.02)
        with clock.phase("hessian"):
            time.sleep(0.03)
        time.sleep(0.02)
    whole, found = time.perf_counter() - started, clock.take()
    assert found["forward"] >= 0.04 and found["hessian"] >= 0.03 and sum(found.values()) <= whole
    assert clock.take() == {}


def test_sequences_that_the_model_cannot_take_are_refused(three: Path, tmp_path: Path) -> None:
    src = Checkpoint(three)
    for bad, says in (
        ([], "no calibration"),
        ([torch.zeros(513, dtype=torch.int64)], "513 tokens, the model takes 512"),
    ):
        with pytest.raises(RecipeError, match=says):
            list(calibrated(src, from_mapping(COARSE), BlockRunner(src, device="cpu"), bad, tmp_path, []))


def test_a_model_that_cannot_run_block_by_block_is_refused(three: Path, tmp_path: Path) -> None:
    folder = broken(three, tmp_path / "a", "model.norm.weight", (0,), 1.0)
    config = (folder / "config.json").read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4')
    (folder / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"layers\.3\..* is not in the checkpoint \(9 missing in all\)"):
        src = Checkpoint(folder)
        list(calibrated(src, from_mapping(COARSE), BlockRunner(src, device="cpu"), sequences(), tmp_path, []))


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
    unreached = find_groups(block, list(block.goals))[2:]
    assert [len(g.linears) for g in unreached] == [1, 1, 1]
    assert all(collect(block, [g])[0].tokens == 0 for g in unreached)


def test_experts_are_calibrated_on_their_own_tokens_or_on_all_of_the_layer(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    block = start(folders["mixtral"], from_mapping(PLAIN_SUM), tmp_path)
    model, reference = block.run.model, load_dense_model(block.run.src)
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


def test_a_stopped_run_of_experts_continues_with_the_same_bits(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = from_mapping(COARSE)
    whole, _ = quantized(folders["gpt_oss"], recipe, tmp_path)
    partial = tmp_path / "partial"
    partial.mkdir()
    first = interrupted(Checkpoint(folders["gpt_oss"]), recipe, partial, 1)
    for path in partial.glob("activations-*"):
        path.unlink()  # finished experts are put back and run again
    second = resumed(Checkpoint(folders["gpt_oss"]), recipe, partial, Progress(quiet=True))
    assert first and second and digests(first) | digests(second) == digests(whole)


@pytest.mark.parametrize("family", ["gemma3n_text", "glm_moe_dsa", "cpmant"])
def test_a_stopped_run_of_blocks_that_pass_tensors_on_continues_with_the_same_bits(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, recipe = families.write(family, tmp_path / "m"), from_mapping(COARSE)
    whole, commits = quantized(folder, recipe, tmp_path)
    src, last = Checkpoint(folder), len(commits) - 2
    for damage in ("none", "gone"):
        partial = tmp_path / damage
        partial.mkdir()
        first = interrupted(src, recipe, partial, last)
        saved = partial / f"activations-passed-{(last - 1) % 2}.bin"
        if damage == "gone" and saved.exists():
            saved.unlink()
        second = resumed(src, recipe, partial, Progress())
        assert not first.keys() & second.keys() and digests(first) | digests(second) == digests(whole)
        assert ("computed again" in capsys.readouterr().err) == (damage == "gone" and family != "cpmant")
    spilled, mapped = quantized(folder, recipe, tmp_path, act_budget=0)
    assert digests(spilled) == digests(whole)
    assert [c.get("activations") for c in mapped] == [c.get("activations") for c in commits]
    assert any(tmp_path.glob("activations-passed-0-*.bin")) == (family != "cpmant")


def test_cross_attention_is_rounded_and_the_report_says_why(folders: dict[str, Path], tmp_path: Path) -> None:
    items, _ = quantized(folders["bart"], from_mapping(COARSE), tmp_path)
    facts = {name: item.facts for name, item in items.items() if item.facts}
    cross = {name for name in facts if ".encoder_attn." in name}
    assert len(cross) == 4 and len(facts) == 10
    assert {facts[name].get("reason") for name in cross} == {"text alone never calls cross attention"}
    assert {facts[name]["method"] for name in facts.keys() - cross} == {"gptq"}


def test_experts_for_images_are_rounded_and_the_report_says_why(tmp_path: Path) -> None:
    source = families.write("ernie4_5_vl_moe", tmp_path / "model")
    items, _ = quantized(source, from_mapping(COARSE), tmp_path)
    reasons = {name: item.facts["reason"] for name, item in items.items() if item.facts and "reason" in item.facts}
    assert set(reasons.values()) == {"text alone never calls vision experts"}
    assert sorted({int(name.split(".")[5]) for name in reasons}) == [4, 5, 6, 7] and len(reasons) == 12


@pytest.mark.parametrize("moe", ["routed", "all"])
def test_the_number_of_passes_over_experts_changes_no_byte(
    moe: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = from_mapping({**COARSE, "calibration": {"moe": moe}})
    at_once, _ = quantized(folders["qwen3_moe"], recipe, tmp_path)
    monkeypatch.setattr(budget, "HESSIAN_BYTES", 1)
    monkeypatch.setattr(budget, "SOLVED_WEIGHTS", 1)
    one_by_one, _ = quantized(folders["qwen3_moe"], recipe, tmp_path)
    assert digests(at_once) == digests(one_by_one)
    experts = [item.facts for name, item in at_once.items() if ".experts." in name and item.facts]
    assert len(experts) == 24 and {facts["method"] for facts in experts} == {"gptq"}
    assert all(facts["moe"] == moe or facts["moe"] == "all" for facts in experts)
    assert all(isinstance(item.value, Tensor) for name, item in at_once.items() if name.endswith("mlp.gate.weight"))
    if moe == "all":
        assert {facts["tokens"] for facts in experts} == {sum(len(s) for s in sequences())}


def test_gptq_beats_rounding_on_a_trained_model(shared: Path, tmp_path: Path) -> None:
    folder = shared / "models" / "tiny-llama-1m"
    text = str(shared / "data" / "wikitext2" / "valid.txt")
    drawn = draw_calibration(text, load_tokenizer(folder), samples=8, max_length=256, seed=0).sequences
    found: dict[str, list[dict[str, Any]]] = {}
    for method in ("gptq", "rtn"):
        src = Checkpoint(folder)
        recipe = from_mapping({"method": method, "clip": "search", "metric": "block"})
        run = calibrated(src, recipe, BlockRunner(src, device="cpu"), drawn, tmp_path, [])
        found[method] = [item.facts for item in run if isinstance(item, Item) and item.facts]
    total = {method: sum(facts["loss"] for facts in layers) for method, layers in found.items()}
    assert total["gptq"] < 0.85 * total["rtn"]
    for facts in found["gptq"]:
        assert facts["loss"] <= facts["rtn_loss"] <= facts["norm"]
        assert 0.05 < facts["relative_error"] < 0.2 and facts["tokens"] > 1000
