"""Pictures of a report: the same bytes on each run, readable units, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import CheckpointError, RecipeError
from quantkit.reporting.plots import draw
from tests.reporting.samples import HOSTILE, example, layer


def matplotlib() -> Any:
    return pytest.importorskip("matplotlib.figure", reason="PNG drawings need the extra `plot`")


def deep() -> dict[str, Any]:
    report = example()
    kinds = ("self_attn.q_proj", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj")
    report["layers"] = [layer(f"model.layers.{i}.{kind}", relative_error=i / 100) for i in range(8) for kind in kinds]
    return report


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_a_drawing_is_repeatable(suffix: str, tmp_path: Path) -> None:
    if suffix == ".png":
        matplotlib()
    for name in ("a", "b"):
        draw(deep(), tmp_path / f"{name}{suffix}")
    data = (tmp_path / f"a{suffix}").read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == ".png" else b"<!doctype html>")
    assert (tmp_path / f"b{suffix}").read_bytes() == data


def test_the_axes_of_a_picture_are_in_units_that_people_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    save = matplotlib().Figure.savefig

    def savefig(self: Any, *args: Any, **options: Any) -> None:
        drawn.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(matplotlib().Figure, "savefig", savefig)
    draw(deep(), tmp_path / "r.png")
    output, weight, size, time, memory = drawn[0].axes
    assert [axis.get_title(loc="left") for axis in (output, weight)] == [
        "Output error, relative",
        "Weight error, relative",
    ]
    assert output.get_ylabel() == weight.get_ylabel() == "%"
    assert (size.get_xlabel(), time.get_xlabel(), memory.get_xlabel()) == ("MB", "s", "MB")
    assert [bar.get_width() for bar in size.patches] == [4.5, 2.7]
    assert [text.get_text() for text in weight.get_legend().get_texts()] == ["q_proj", "up_proj (experts)"]
    assert list(weight.lines[0].get_ydata()) == pytest.approx([100 * i / 100 for i in range(8)])


def test_pictures_of_an_empty_a_hostile_and_a_perfect_run(tmp_path: Path) -> None:
    matplotlib()
    perfect, hostile = example(), example()
    perfect["layers"] = [layer("x.0.y", relative_error=0.0, loss=0.0, rtn_loss=0.0)]
    hostile["layers"] = [layer(f"l.0.{HOSTILE}")]
    hostile["phases"] = {f"{HOSTILE} $x_$": 1.0}
    for number, report in enumerate(({}, perfect, hostile)):
        draw(report, tmp_path / f"{number}.png")


def test_another_file_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"\.html or \.png"):
        draw(example(), tmp_path / "r.pdf")
    assert not list(tmp_path.iterdir())


def test_a_png_without_matplotlib_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(CheckpointError, match=r"quantkit\[plot\]"):
        draw(example(), tmp_path / "r.png")
    assert not list(tmp_path.iterdir())
