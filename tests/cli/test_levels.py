"""`-q` prints one line, and `-v` more than the usual text, in every command that works on a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result

from quantkit.cli.demo import format_demo
from quantkit.progress import Progress
from tests import command_line
from tests.command_line import call

calib, int4 = command_line.calib, command_line.int4


REPORT = {"layers", "totals", "layout", "recipe_sha256"}


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("quantize {model} --recipe int4-rtn -o {out}", REPORT),
        ("prune {model} -o {out} --method magnitude", REPORT),
        ("pack {int4} --layout gptq -o {out}", REPORT),
        ("convert compressed-tensors-to-marlin {int4} -o {out}", REPORT),
        ("plan {model} --method rtn", {"bytes", "misfits", "peak_memory", "linears"}),
        ("verify {int4}", {"ok", "rows", "hashes", "note"}),
        ("inspect {int4}", {"layout", "bits_per_weight", "shapes"}),
        ("inspect {model}", {"layout", "shapes"}),
        ("report {int4}", REPORT),
        ("eval ppl {int4} --data {calib} --window 32", {"perplexity", "tokens", "windows", "window", "bos", "data"}),
        ("eval kld {int4} --against {model} --data {calib} --window 32", {"kld", "top1", "tokens", "window", "data"}),
    ],
)
def test_quiet_is_one_line_verbose_says_more_and_json_is_one_object(
    command: str, keys: set[str], tiny_llama: Path, int4: Path, calib: Path, tmp_path: Path
) -> None:
    def printed(*flags: str) -> Result:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        args = command.format(model=tiny_llama, int4=int4, calib=calib, out=tmp_path / "out").split()
        result = call(*args, *flags)
        assert result.stdout and ("-q" not in flags or result.stderr == "")
        return result

    found = (printed(*flags).output for flags in (["-q"], [], ["-v"]))
    line, text, more = ([row for row in output.splitlines() if row.strip()] for output in found)
    assert len(line) == 1 < len(text) < len(more)
    # The seconds of two runs differ.
    assert [row for row in text if row in more or row.startswith(("time", "memory", "disk free"))] == text
    assert keys <= json.loads(printed("--json", "-q").stdout).keys()


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("convert --list", {"conversions"}),
        ("doctor", {"checks", "fixes"}),
        ("generate {int4} abc --max-new-tokens 3", {"prompt", "text", "tokens", "seconds", "weights"}),
    ],
)
def test_json_is_one_object(command: str, keys: set[str], int4: Path) -> None:
    assert keys <= json.loads(call(*command.format(int4=int4).split(), "--json", "-q").stdout).keys()


def test_the_demo_is_one_line_too() -> None:
    first = {"format": "float16", "method": "as it is", "layout": "-", "bits_per_weight": 16.0, "bytes": 9}
    second = {**first, "format": "int4:g128", "method": "gptq", "perplexity": 20.5, "change": 0.025}
    found = {"rows": [{**first, "perplexity": 20.0, "change": None}, second], "protocol": "on a text"}
    assert format_demo(found, Progress(quiet=True)) == "verified; perplexity 20.000, int4:g128 gptq 20.500 (+2.50 %)"
    assert len(format_demo(found, Progress()).splitlines()) > 3
