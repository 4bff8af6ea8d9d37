"""`fused_alike`: engines get one treatment for each group that they join, and the report says what changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Goal, Scheme
from quantkit.engines.joined import changes, treat_alike
from quantkit.pipeline import quantize
from quantkit.planning.survey import plan
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from tests.tiny_models import write_model


def goals(**labels: str | None) -> dict[str, Goal | None]:
    return {f"a.{name}": None if text is None else Scheme.parse(text) for name, text in labels.items()}


@pytest.mark.parametrize(
    ("labels", "widest"),
    [
        (("int4:g128", None, "int4:g64"), None),
        (("int4:g128", "int4:channel", "int4:g64"), "int4:g64"),
        (("int4:g128", "fp6", "fp5"), "fp6"),
        (("int4:g128", "int4:g128:asym", "int4:g128"), "int4:g128:asym"),
        (("int4:g64:24", "int4:g128", "int4:g64:24"), "int4:g128"),
        (("fp6", "fp6-e2m3", "fp5"), "fp6"),
    ],
)
def test_a_group_takes_its_widest_treatment(labels: tuple[str | None, ...], widest: str | None) -> None:
    before = goals(**dict(zip(("q_proj", "k_proj", "v_proj"), labels, strict=True)), o_proj="int4:g128")
    after = treat_alike(before)
    assert after == goals(**dict.fromkeys(("q_proj", "k_proj", "v_proj"), widest), o_proj="int4:g128")
    assert sum(int(line.split()[0]) for line in changes(before, after)) == sum(after[m] != before[m] for m in after)


def test_one_dense_expert_leaves_its_layer_dense() -> None:
    experts: dict[str, Goal | None] = {
        f"l.{i}.experts.{e}.{p}_proj": Scheme.parse("int4:g128") for i in (0, 1) for e in (0, 1) for p in ("up", "down")
    }
    experts["l.1.experts.0.down_proj"] = None
    assert [name for name, goal in treat_alike(experts).items() if goal is None] == [n for n in experts if "l.1." in n]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256}
    return write_model("llama", tmp_path_factory.mktemp("source") / "llama", **small)


def test_the_output_has_one_treatment_a_group(source: Path, tmp_path: Path) -> None:
    asked = {"method": "rtn", "skip": ["lm_head", "k_proj"], "overrides": {"up_proj": "int4:g64"}}
    apart = plan(source, from_mapping(asked))
    assert "vLLM" not in apart.output.readers and "--set fused_alike=true" in "\n".join(apart.notices)
    recipe = from_mapping({**asked, "fused_alike": True})
    assert from_mapping(recipe.to_mapping()) == recipe
    planned = plan(source, recipe)
    assert "vLLM" in planned.output.readers
    report = quantize.quantize(source, tmp_path / "out", recipe, run=RunOptions(device="cpu", min_share=0.5))
    out = Checkpoint(tmp_path / "out")
    found = {module.rpartition(".")[2]: out.scheme(module).label for module in out.modules()}
    assert found == {"o_proj": "int4:g128", "down_proj": "int4:g128", "gate_proj": "int4:g64", "up_proj": "int4:g64"}
    assert report["readers"] == list(planned.output.readers) and len(report["dense"]) == 4
    lines = [line for line in report["notices"] if "engines join" in line]
    assert [line.split(",")[0] for line in lines] == [
        "2 linears are dense instead of int4:g128",
        "1 linears are int4:g64 instead of int4:g128",
    ]
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert "model.layers.0.mlp.gate_up_proj" in groups["group_1"]["targets"]
