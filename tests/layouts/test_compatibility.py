"""Every pair of layouts: a possible conversion keeps all bits there and back, and others are refused."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError, RecipeError
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import (
    PRUNED,
    RECENTRED,
    SCHEMES,
    Conversion,
    broken_rule,
    conversions,
    parse,
    recast,
    target,
)
from quantkit.layouts.schemes import Schemes
from tests.command_line import call, refused
from tests.folders import edit
from tests.layouts.samples import record, write_folder

FOUND = {(c.source, c.target): c for c in conversions()}
INT4, SPARSE = Schemes(Scheme.parse("int4:g128")), Schemes(Scheme.parse("int4:g128:24"))


def test_every_ordered_pair_is_listed_and_is_a_command() -> None:
    assert set(FOUND) == {(a, b) for a in LAYOUTS for b in LAYOUTS if a != b}
    for source, to in FOUND:
        assert parse(f"{source}-to-{to}") == (source, to)
    assert parse("marlin24-to-gptq-v2") == ("marlin24", "gptq-v2")
    for wrong in ("gptq", "gptq-to-", "gptq-to-nothing", "-to-gptq", "GPTQ-to-marlin"):
        with pytest.raises(RecipeError, match="A-to-B"):
            parse(wrong)


def test_a_verdict_names_its_conditions_and_the_command_lists_them() -> None:
    """Whether they are true is asked below, cell by cell."""
    assert FOUND["gptq-v2", "gptq"].condition == "g_idx is static (k // group size); no zero point is 0"
    assert FOUND["awq", "quick"].restated == "channel as 128" and "k % 64 == 0" in FOUND["humming", "tcfpx"].verdict
    assert FOUND["tcfpx", "marlin"].verdict == "not possible because MARLIN holds int4, not fp6"
    listed = json.loads(call("convert", "--list", "--json").stdout)["conversions"]
    assert {(c["source"], c["target"]): Conversion(**c) for c in listed} == FOUND
    assert "gptq-v2-to-gptq" in call("convert", "--list").stdout


def excluded(conversion: Conversion, scheme: Scheme) -> bool:
    """Return True if the list itself excludes a scheme from a conversion."""
    parts = (conversion.condition or "").split("; ")
    for start, value in (
        ("the format is ", scheme.format.name),
        ("the group size is ", scheme.group_size or "channel"),
    ):
        listed = [re.split(", | or ", part.removeprefix(start)) for part in parts if part.startswith(start)]
        if listed and str(value) not in listed[0]:
            return True
    return False


def check_cells(records: dict[Scheme, QuantizedTensor], refusals: set[str]) -> None:
    """Do every listed conversion with one record a scheme; collect the conditions that refused some."""

    @cache
    def packed(layout: str, scheme: Scheme) -> dict[str, Tensor]:
        return LAYOUTS[layout].pack(records[scheme])

    @cache
    def arrived(layout: str, scheme: Scheme) -> QuantizedTensor | str:
        """Pack and unpack a record in a layout, or give the reason for a refusal."""
        q = records[scheme]
        place = target(LAYOUTS[layout], scheme, *q.shape)
        if place is None:
            return broken_rule(LAYOUTS[layout], scheme, *q.shape) or ""
        try:
            now = recast(q, *place)
            stored = LAYOUTS[layout].pack(now)
        except LayoutError as error:
            return str(error)
        back = LAYOUTS[layout].unpack(stored, now.scheme)
        assert back.equal(now)
        assert torch.equal(back.dequantize().view(torch.int32), q.dequantize().view(torch.int32))
        return back

    for (source, to), conversion in FOUND.items():
        held = [scheme for scheme in records if not broken_rule(LAYOUTS[source], scheme, *records[scheme].shape)]
        assert held
        for scheme in held:
            if LAYOUTS[source].ZEROS_IF and isinstance(arrived(source, scheme), str):
                continue  # a zero point of 0, which this source cannot hold
            assert arrived(source, scheme).equal(records[scheme])  # type: ignore[union-attr]
            there = arrived(to, scheme)
            if isinstance(there, str):
                assert conversion.lossless is not True, (conversion, there)
                reasons = {RECENTRED: "re-centred", PRUNED: "quads", LAYOUTS["gptq"].ZEROS_IF: "zero point of 0"}
                known = [c for c, words in reasons.items() if words in there and c in conversion.verdict]
                assert known or conversion.lossless is False or excluded(conversion, scheme), (conversion, there)
                refusals.update(known)
                continue
            assert conversion.lossless is not False and not excluded(conversion, scheme), conversion
            if there.scheme == scheme:
                again = LAYOUTS[source].pack(there)
                assert all(torch.equal(again[name], tensor) for name, tensor in packed(source, scheme).items())


def test_every_cell_on_random_weights() -> None:
    refusals: set[str] = set()
    for lowest_zero in (0, 1):
        records = {s: record(s, 128, 256, seed=i, lowest_zero=lowest_zero) for i, s in enumerate(SCHEMES)}
        records = {s: q for s, q in records.items() if any(not broken_rule(x, s, 128, 256) for x in LAYOUTS.values())}
        check_cells(records, refusals)
    assert refusals == {RECENTRED, PRUNED, LAYOUTS["gptq"].ZEROS_IF}


def test_recast_schemes_are_in_the_config_under_exact_names(small_llama: Path, tmp_path: Path) -> None:
    """Some modules are recast and others are not; a pattern of the source can match both."""
    schemes = Schemes(
        Scheme.parse("int4:g32"), ((r".*\.self_attn\..*", Scheme.parse("int4:channel")),), ignore=("lm_head",)
    )
    records = write_folder(small_llama, tmp_path / "a", "compressed-tensors", schemes)
    printed = call("pack", tmp_path / "a", "--layout", "quick", "-o", tmp_path / "b").stderr
    assert "int4:channel restated as int4:g128, the same values" in printed
    out = Checkpoint(tmp_path / "b")
    assert out.schemes is not None and out.schemes.default.group_size == 32
    for module, q in records.items():
        now = out.quantized(module)
        assert now.scheme.label == ("int4:g128" if "self_attn" in module else "int4:g32")
        assert torch.equal(now.dequantize(), q.dequantize())
    layers = json.loads((tmp_path / "b" / REPORT).read_text())["layers"]
    assert {layer.get("restated_from") for layer in layers} == {None, "int4:channel"}


def test_rows_of_zero_scales_are_reported_whoever_wrote_the_folder(small_llama: Path, tmp_path: Path) -> None:
    schemes = Schemes(Scheme.parse("fp6:channel"), ignore=("lm_head",))
    records = write_folder(small_llama, tmp_path / "a", "humming", schemes, key=False)
    module = list(records)[2]
    edit(tmp_path / "a", lambda found: found[f"{module}.weight_scale"][3:5].zero_())
    notice = (
        f"{module}.weight: 2 of {len(records[module].codes)} rows have a stored scale of 0: their weights are zeros"
    )
    printed = call("convert", "humming-to-tcfpx", tmp_path / "a", "-o", tmp_path / "b")
    assert printed.stderr.count(notice) == 1
    assert notice in json.loads((tmp_path / "b" / REPORT).read_text())["notices"]


def test_the_advised_conversion_is_possible(small_llama: Path, tmp_path: Path) -> None:
    schemes = Schemes(Scheme.parse("fp6:channel"), ignore=("lm_head",))
    write_folder(small_llama, tmp_path / "a", "humming", schemes)
    error = refused("convert", "humming-to-gptq", tmp_path / "a", out=tmp_path / "b")
    assert "use quantkit convert humming-to-compressed-tensors" in error and "--layout" not in error
