"""Charts show every layer and escape every name."""

from __future__ import annotations

import html.parser
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import CheckpointError, RecipeError
from quantkit.reporting.plots import draw
from tests.reporting.samples import HOSTILE, example, layer


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_charts_show_every_layer(suffix: str, tmp_path: Path) -> None:
    if suffix == ".png":
        pytest.importorskip("matplotlib", reason="PNG drawings need the extra `plot`")
    report = example()
    report["layers"] = [layer(f"model.layers.{i}.mlp.up_proj", relative_error=i / 100) for i in range(40)]
    path = tmp_path / f"report{suffix}"
    draw(report, path)
    data = path.read_bytes()
    if suffix == ".png":
        assert data.startswith(b"\x89PNG")
    else:
        text = data.decode()
        assert all(f"model.layers.{i}.mlp.up_proj" in text for i in range(40))
        for title in ("Relative weight error", "Time", "Size"):
            assert title in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "the page must stand alone"
    draw(report, tmp_path / f"again{suffix}")
    assert (tmp_path / f"again{suffix}").read_bytes() == data


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)


def test_names_are_escaped_in_html(tmp_path: Path) -> None:
    report = example()
    report["source"]["name"] = report["scheme"] = HOSTILE
    report["layers"][0]["name"] = HOSTILE
    report["phases"] = {HOSTILE: 1.0}
    draw(report, tmp_path / "r.html")
    tags = Tags()
    tags.feed((tmp_path / "r.html").read_text())
    assert "script" not in tags.seen


def test_charts_of_an_empty_and_of_a_perfect_run(tmp_path: Path) -> None:
    perfect = example()
    perfect["layers"] = [layer("x", relative_error=0.0, loss=0.0, rtn_loss=0.0)]
    for number, report in enumerate(({}, perfect)):
        draw(report, tmp_path / f"{number}.html")
        if pytest.importorskip("matplotlib"):
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
