"""`-q` prints one line, and `-v` more than the usual text, in every command that works on a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.command_line import call


@pytest.mark.parametrize(
    "command",
    [
        "quantize {model} --recipe int4-rtn -o {out}",
        "prune {model} -o {out} --method magnitude",
        "pack {int4} --layout gptq -o {out}",
        "plan {model} --method rtn",
        "verify {int4}",
        "inspect {int4}",
        "report {int4}",
        "eval ppl {int4} --data {calib} --window 32 --tokens 256",
        "eval kld {int4} --against {model} --data {calib} --window 32 --tokens 256",
    ],
)
def test_quiet_is_one_line_and_verbose_says_more(
    command: str, tiny_llama: Path, int4: Path, calib: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(int4, tmp_path / "int4") if "{int4}" in command else None  # verify leaves its proof

    def printed(*flags: str) -> list[str]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        args = command.format(model=tiny_llama, int4=copy, calib=calib, out=tmp_path / "out").split()
        result = call(*args, *flags)
        assert result.stdout and ("-q" not in flags or result.stderr == "")
        return [line for line in result.output.splitlines() if line.strip()]

    line, text, more = printed("-q"), printed(), printed("-v")
    assert len(line) == 1 < len(text) < len(more)
    # The seconds of two runs differ.
    assert [row for row in text if row in more or row.startswith(("time", "memory", "disk free"))] == text
