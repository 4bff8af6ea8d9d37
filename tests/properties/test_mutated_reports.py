"""A report of unknown origin is refused in one line, or all that is made from it can be read again."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT, load
from quantkit.errors import CheckpointError
from quantkit.reporting.html import page
from quantkit.reporting.model_card import model_card
from quantkit.reporting.summary import line, rows, summary
from tests.command_line import call, refused
from tests.reporting.samples import HOSTILE, example

ODD: list[Any] = [5, -1, 2**63, 1e308, -0.0, True, None, "", "x" * 5000, HOSTILE, [], {}, [[]], [5], ["x"], [None]]
ODD += [{"name": 5}, {"": {"": []}}, [{"name": "x"}], {"a": "b"}, {"a": 1e308}, [{"share": "x"}], list(range(5000))]
ODD += [json.loads("[" * 50 + "]" * 50)]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each entry of a JSON value, at every depth."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def mutated(report: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(report)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


RICH = {
    **example(),
    "base": {"name": "some/base", "revision": None},
    "same_values": 2,
    "opened_by": ["quantkit.load"],
    "not_opened_by": {"x": "y"},
    "not_tried": {"x": "y"},
    "layout_notices": ["x"],
    "device": "cpu",
    "compute_dtype": "float32",
    "environment": {"python": "3.11", "threads": 1},
    "ranks": [2, 1],
    "fit": {
        **{"target_bits": 4.5, "chosen": "mixed", "best_uniform": "int4:g32", "kld": {"mixed": 0.1}},
        **{"predicted": {"mixed": 0.1, "int4:g32": 0.2}, "held_out": {"source": "x", "tokens": 9}},
        "curve": [{"scheme": "int4:g32", "layout": "marlin", "bytes": 9, "bits": 4.5, "harm": 0.2, "fits": True}],
    },
    "profile": {"floors": {"solve": 0.1}, "speeds": {"dtype": 1e12}, "idle_seconds": 2.0},
    "evaluation": {"before": 9.0, "after": 9.5, "kld": 0.1, "top1": 0.9, "data": "x", "windows": 3, "weights": "y"},
}
RICH["calibration"] |= {"sources": [{"source": "a", "share": 0.5, "sha256": "0" * 64}, {"source": "b", "share": 0.5}]}


def test_a_report_with_every_entry_can_be_read(tmp_path: Path) -> None:
    """Else each change of it would be refused, and show nothing."""
    (tmp_path / REPORT).write_text(json.dumps(RICH))
    found = load(tmp_path)
    assert "2, then 1" in summary(found)


@settings(max_examples=120)
@given(st.sampled_from(list(places(RICH))), st.sampled_from(ODD))
def test_a_mutated_report_is_refused_or_drawn(tmp_path_factory: Any, place: tuple[Any, ...], value: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    report = mutated(RICH, place, value)
    (folder / REPORT).write_text(json.dumps(report))
    try:
        found = load(folder)
    except CheckpointError as error:
        assert REPORT in str(error) and "\n" not in str(error)
        return
    assert summary(found) and line(found) and model_card(found)
    assert len([*rows(found)]) == len(found.get("layers", []))
    assert "<script>alert" not in page(found, {"ok": False, "failures": [HOSTILE], **found})


#: Of each entry that a conversion copies: a value of another kind, and one that only its readers would refuse.
COPIED: list[tuple[tuple[Any, ...], Any]] = [
    *((("recipe_sha256",), value) for value in (["x"], HOSTILE)),
    (("recipe",), {"a": {"": [[[]]]}}),
    *((("calibration",), value) for value in ({"sources": 5}, {"tokens": {"a": []}})),
    (("device",), HOSTILE),
    *((("base",), value) for value in ([], {"name": HOSTILE, "revision": {}})),
    *((("notices",), value) for value in ([5], [HOSTILE])),
    *((("layers", 0, key), {"a": [1]}) for key in ("digest", "shape", "method", "new")),
    *((("layers", 0, key), None) for key in ("requantized_error", "scale_error", "zeros")),
]


@pytest.mark.parametrize(("path", "value"), COPIED, ids=repr)
def test_pack_of_a_mutated_report_is_refused_or_writes_what_can_be_opened(
    path: tuple[Any, ...], value: Any, int4: Path, tmp_path: Path
) -> None:
    source, out = shutil.copytree(int4, tmp_path / "source"), tmp_path / "out"
    report = mutated(json.loads((source / REPORT).read_text()), path, value)
    (source / REPORT).write_text(json.dumps(report))
    try:
        load(source)
    except CheckpointError:
        assert REPORT in refused("pack", source, "--layout", "gptq", out=out)
        return
    result = call("pack", source, "--layout", "gptq", "-o", out, "-q", code=None)
    if result.exit_code:  # a digest of another weight
        assert len(result.stderr.splitlines()) == 1 and not out.exists()
        return
    Checkpoint(out)
    load(out)
    call("verify", out, "-q")
    call("report", out, "--html", tmp_path / "page.html", "-q")


@pytest.mark.parametrize(
    "text", ["[]", "", "NaN", '{"layers": NaN}', '{"totals": {"bytes": Infinity}}', "[" * 10**5, '{"a": 1, "a": 2}']
)
def test_a_report_that_is_no_report_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / REPORT).write_text(text)
    assert REPORT in refused("report", tmp_path, "--html", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_verification_that_is_none_is_drawn_or_one_line(int4: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(int4, tmp_path / "folder")
    for value in ODD[::2]:
        (folder / "verify.json").write_text(json.dumps({"ok": True, "hashes": value, "linears": value, "note": value}))
        result = call("report", folder, "--html", tmp_path / "page.html", "-q", code=None)
        assert result.exit_code == 0 or len(result.stderr.splitlines()) == 1
