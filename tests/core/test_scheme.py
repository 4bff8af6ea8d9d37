"""Schemes: labels are read back, and contradictions are refused."""

from __future__ import annotations

import pytest

from quantkit.core.formats import FORMATS, FP6, INT4
from quantkit.core.scheme import Scheme
from quantkit.errors import LayoutError, QuantkitError, RecipeError, about

LABELS = ["int4:g128", "int4:channel", "int4:g32:asym", "int4:channel:asym", "int4:g128:24", "fp6:channel", "fp5:g64"]


@pytest.mark.parametrize("label", LABELS)
def test_labels_are_read_back(label: str) -> None:
    assert Scheme.parse(label).label == label
    assert Scheme.parse(Scheme.parse(label).label) == Scheme.parse(label)


@pytest.mark.parametrize(
    "label",
    [
        *("", "int7", "int4:", "int4:g", "int4:g0", "int4:g-1", "int4:g1.5", "int4:g²", "int4:g٣", "fp6:asym", "INT4"),
        *("int4:g" + "9" * 5000, "int4:g128:sym", " int4", "int4:g 64", ":", "int4:g128\n"),
    ],
)
def test_invalid_labels_are_refused(label: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        Scheme.parse(label)
    assert refusal.value.exit_code == 2


def test_a_short_label_means_one_scale_per_row() -> None:
    assert Scheme.parse("fp6") == Scheme(FP6) and Scheme.parse("int4").group_size is None


def test_groups_must_divide_the_columns() -> None:
    assert Scheme(INT4, 128).groups(384) == 3 and Scheme(INT4).groups(7) == 1
    for k in (64, 129, 200):
        with pytest.raises(LayoutError, match=f"128 does not divide k = {k}"):
            Scheme(INT4, 128).groups(k)
    assert Scheme(INT4, 1).groups(7) == 7
    for size in (0, -128):
        with pytest.raises(RecipeError):
            Scheme(INT4, size)
    with pytest.raises(RecipeError, match="symmetric only"):
        Scheme(FP6, symmetric=False)


def test_errors_name_the_weight_they_are_about() -> None:
    with pytest.raises(LayoutError, match=r"^model\.x: group size 3 does not divide"), about("model.x"):
        Scheme(INT4, 3).groups(8)
    assert all(issubclass(kind, QuantkitError) for kind in (LayoutError, RecipeError)) and set(FORMATS)
