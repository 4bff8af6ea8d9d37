"""Phases of a run on random weights: each second is counted once, and estimates are of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.bench.quantize import _phases, measure
from quantkit.bench.random_model import Outline
from quantkit.bench.source import blocks_of, shortened
from quantkit.errors import RecipeError
from quantkit.recipes.recipe import from_mapping
from tests import ranks
from tests.bench.test_random_model import FAMILIES, LLAMA, tiny

EXPERTS = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
RECIPE: dict[str, Any] = {
    "scheme": {"group_size": "channel"},
    "layout": "marlin",
    "calibration": {"samples": 4, "max_length": 16},
}


@pytest.mark.parametrize("family", ["llama", "llama tied", "opt", "gpt_neox", "mixtral"])
def test_the_phases_of_a_run_add_up_and_nothing_is_left(family: str, tmp_path: Path) -> None:
    others = {"mixtral": LLAMA | EXPERTS, "llama tied": LLAMA | {"tie_word_embeddings": True}}
    config = (FAMILIES | others)[family] | {"num_hidden_layers": 4}
    found = measure(Outline("tiny", Path("tiny"), config), from_mapping(RECIPE), blocks=3, work=tmp_path, device="cpu")
    *rows, total = found.rows()
    assert (found.blocks, found.all_blocks, found.tokens) == (3, 4, 64)
    assert {"forward", "hessian", "solve", "load", "save", "write"} <= {row["phase"] for row in rows}
    for key in ("first_block_s", "block_s", "outside_blocks_s", "run_s", "estimate_all_blocks_s"):
        assert total[key] == pytest.approx(sum(row[key] for row in rows))
    assert all(row["block_s"] > 0 and row["times_floor"] > 0 for row in rows if row["phase"] in ("forward", "solve"))
    assert total["peak_ram"] > 0 and total["planned_ram"] > 0
    assert not list(tmp_path.iterdir())


def test_several_ranks_share_a_run_and_return_the_same_figures(tmp_path: Path) -> None:
    def work() -> None:
        from torch import distributed

        distributed.init_process_group("gloo")
        config = LLAMA | {"num_hidden_layers": 4}
        found = measure(
            Outline("tiny", Path("tiny"), config), from_mapping(RECIPE), blocks=3, work=tmp_path, device="cpu"
        )
        assert found.ranks == 2 and "exchange" in {phase.name for phase in found.phases}
        print(found.rows())

    first, second = ranks.run([work, work], tmp_path)
    assert first.code == second.code == 0 and first.stdout == second.stdout != "", (first, second)
    assert not list(tmp_path.glob("quantkit-bench-*"))


def test_an_estimate_grows_by_blocks_by_bytes_or_by_saved_blocks() -> None:
    blocks = [{"forward": 5.0, "check": 7.0}, {"forward": 2.0, "save": 3.0}, {"forward": 2.0}, {"forward": 1.0}]
    run = {"forward": 10.0, "check": 7.0, "open": 1.0, "save": 3.0}
    found = _phases([{"phases": phases} for phases in blocks], run, 10, 4.0, {"save": 2.0, "forward": 1.0}, 2)
    rows = {phase.name: phase for phase in found}
    assert rows["forward"].block == 2.0 and rows["forward"].estimate == 10.0 + 6 * 2.0
    assert rows["check"].estimate == 4 * 7.0 and (rows["check"].first, rows["check"].outside) == (0.0, 7.0)
    assert rows["open"].estimate == 1.0
    assert rows["save"].estimate == 4 * 3.0 and (rows["save"].block, rows["save"].floor) == (1.5, 1.0)


def test_a_save_that_was_not_measured_is_estimated_by_its_floor() -> None:
    lines = [{"phases": {"forward": 1.0}}] * 3
    rows = {phase.name: phase for phase in _phases(lines, {"forward": 3.0}, 32, 1.0, {"save": 2.0}, 8)}
    assert rows["save"].estimate == 3 * 2.0 and rows["save"].run == 0.0


def test_a_model_is_shortened_with_its_lists_by_block() -> None:
    long = tiny(model_type="qwen2", num_hidden_layers=6, layer_types=["full_attention"] * 6)
    short = shortened(long, 3)
    assert blocks_of(long) == 6 and blocks_of(short) == 3 and len(short.config["layer_types"]) == 3
    assert long.config["num_hidden_layers"] == 6


def test_a_family_whose_tokenizer_takes_no_words_is_refused(tmp_path: Path) -> None:
    model = tiny(model_type="qwen2", num_hidden_layers=3)
    with pytest.raises(RecipeError, match="with model_type llama"):
        measure(model, from_mapping(RECIPE), blocks=3, work=tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("blocks", [2, 7])
def test_too_few_or_too_many_blocks_are_refused(blocks: int, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="use 3 to 6"):
        measure(tiny(num_hidden_layers=6), from_mapping(RECIPE), blocks=blocks, work=tmp_path, device="cpu")
    with pytest.raises(RecipeError, match="no phases by block"):
        measure(tiny(num_hidden_layers=6), from_mapping({"method": "rtn", "clip": "none"}), blocks=3, work=tmp_path)
    assert not list(tmp_path.iterdir())
