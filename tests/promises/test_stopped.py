"""A command that is killed or interrupted half-way continues to the same bytes, or left nothing.

Other moments, and other commands, belong to the families K and S of tests/reliability.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.promises import stopping
from tests.promises.outputs import CALIB, RTN
from tests.promises.running import Work, differences, digests
from tests.reliability.forks import Ended

QUANTIZE = f"quantize two -o out {CALIB} --set clip=none --set gptq.descent=0"
PACK = "pack int4 --layout marlin -o out"
#: Name -> (command, signal, share of its changes of the disk, exit code).
CASES = {
    "whole": (QUANTIZE, 0, 0.0, 0),
    "killed": (QUANTIZE, signal.SIGKILL, 0.5, -signal.SIGKILL),
    "interrupted": (QUANTIZE, signal.SIGINT, 0.5, 130),
    "stopped": (QUANTIZE, signal.SIGTERM, 0.5, 75),
    "pack whole": (PACK, 0, 0.0, 0),
    "pack killed": (PACK, signal.SIGKILL, 0.5, -signal.SIGKILL),
    "pack interrupted": (PACK, signal.SIGINT, 0.5, 130),
    "pack stopped": (PACK, signal.SIGTERM, 0.5, 75),
}


@pytest.fixture(scope="module")
def stopped(work: Work) -> dict[str, Ended]:
    """How each case ended; its folder has copies of the sources, and what it left."""
    work.done(f"quantize pruned -o int4 {RTN}")
    found, changes = {}, {}
    for name, (words, number, share, _) in CASES.items():
        folder = work / name
        folder.mkdir()
        for source in ("two", "int4"):
            shutil.copytree(work / source, folder / source)
        shutil.copy(work / "calib.txt", folder)
        found[name], seen = stopping.stopped(folder, words, number, int(share * changes.get(words, 0)))
        if not number:
            changes[words] = seen
            assert seen >= 4, "too few changes of the disk were seen to stop between them"
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_command_that_is_stopped_continues_to_the_same_bytes(
    name: str, work: Work, stopped: dict[str, Ended]
) -> None:
    words, number, _, code = CASES[name]
    here, ended = Work(work / name), stopped[name]
    said = ended.stderr
    assert ended.code == code, said
    assert "Traceback" not in said
    if not number:
        assert (here / "out").is_dir() and not left(here)
        return
    assert not (here / "out").exists() and ended.stdout == ""
    resumed = " --resume" if words == QUANTIZE and left(here) else ""
    if code > 0:
        advice = "--resume" if resumed else "--overwrite" if left(here) else "run the same command again"
        said = said.splitlines()[-1]
        assert said.startswith({130: "Interrupted: ", 75: "Stopped: "}[code]) and advice in said
    if resumed:
        refused = here.run(f"{words} -q")
        assert refused.exit_code == 1 and "--resume" in refused.stderr
    here.done(f"{words}{resumed} -q")
    whole = work / ("whole" if CASES[name][0] == QUANTIZE else "pack whole")
    assert differences(digests(here / "out", here / "two"), digests(whole / "out", whole / "two")) == {}
    assert not left(here)


def left(here: Work) -> list[Path]:
    return [path for path in here.folder.glob("out*") if path.name != "out"]
