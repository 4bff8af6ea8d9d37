"""Every conversion, shipped recipe and format writes the bytes that it wrote when they were frozen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

import quantkit
from tests.folders import NEWEST
from tests.promises.outputs import ALONE, CALIBRATED, CONVERTED, RECIPES, UNFROZEN, arithmetic, converted, made
from tests.promises.running import Work, differences, digests, frozen, inside, weights_alone

OUTPUTS = frozen()["outputs"]


def with_readers(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters; the cards of zero points name the newest transformers as a reader."""
    return [pytest.param(name, marks=[NEWEST] if "asym" in name else []) for name in names]


@pytest.mark.parametrize("name", with_readers(CONVERTED))
def test_conversions_write_the_frozen_bytes(name: str, work: Work) -> None:
    expected = {key: found for key, found in OUTPUTS.items() if key.startswith(f"{name}: ")}
    assert differences(converted(work, name), expected) == {}


@pytest.mark.parametrize("name", with_readers(ALONE))
def test_rounding_writes_the_frozen_bytes(name: str, work: Work) -> None:
    assert differences(made(work, ALONE[name]), OUTPUTS[name]) == {}


@pytest.mark.parametrize("name", CALIBRATED)
def test_calibrated_runs_write_the_frozen_bytes(name: str, work: Work) -> None:
    """Their weights depend on matrix products, and so do the figures of report and card, which other tests look at."""
    found, expected = weights_alone(made(work, CALIBRATED[name])), OUTPUTS[name]
    here = differences(arithmetic(), frozen()["arithmetic"])
    if not here:
        assert differences(found, expected) == {}
        return
    assert differences(found | {"tensors": {}}, expected | {"tensors": {}}) == {}
    pytest.skip(f"weights not compared, they were frozen with another arithmetic (here, there): {here}")


def test_every_shipped_recipe_is_frozen() -> None:
    assert {f"recipe {name}" for name in RECIPES if name not in UNFROZEN} <= OUTPUTS.keys()
    assert OUTPUTS.keys() - {key for key in OUTPUTS if ": " in key} == ALONE.keys() | CALIBRATED.keys()


def test_python_writes_what_the_command_line_writes(work: Work) -> None:
    with inside(work.folder):
        quantkit.quantize("pruned", "by-python", method="rtn")
        quantkit.pack("by-python", "packed", "marlin")
        quantkit.prune("model", "thin", method="magnitude")
        assert quantkit.verify("packed").ok
    for name, key in (("by-python", "int4: compressed-tensors"), ("thin", "prune magnitude")):
        assert differences(digests(work / name, work / "model"), OUTPUTS[key]) == {}
    assert (
        digests(work / "packed", work / "model")["tensors"] == OUTPUTS["int4: compressed-tensors-to-marlin"]["tensors"]
    )
