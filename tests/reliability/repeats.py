"""The same bytes from run to run, whatever surrounds them (R1, R3)."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.reliability import samples
from tests.reliability.campaign import Family, Run

ROOT = Path(__file__).resolve().parents[2]
#: Runs several command lines in one new process: `umask threads [[arguments], ...]`. OMP_NUM_THREADS above the number
#: of cores has no effect, so torch is told.
SCRIPT = """
import json, os, sys, torch
from quantkit.cli import main
os.umask(int(sys.argv[1], 8))
torch.set_num_threads(int(sys.argv[2]))
for arguments in json.loads(sys.argv[3]):
    try:
        main(arguments)
    except SystemExit as ended:
        if ended.code:
            raise
"""
#: Commands whose bytes depend on nothing around them; the last one reads the first one's output.
ROUNDED = {
    "int4": ("quantize", "{model}", "--method", "rtn", "--set", "clip=search"),
    "asym": ("quantize", "{model}", "--method", "rtn", "--asym", "--group-size", "32", "--layout", "awq"),
    "fp6": ("quantize", "{model}", "--format", "fp6", "--method", "rtn", "--set", "clip=none"),
    "pruned": ("prune", "{model}", "--method", "magnitude"),
    "marlin": ("pack", "{out}/int4", "--layout", "marlin"),
    "back": ("convert", "marlin-to-gptq", "{out}/marlin"),
}
#: These may depend on the number of threads, by the model's forward alone (docs/reliability.md 1.4).
CALIBRATED = {
    "gptq": ("quantize", "{model}", "--calib", "{text}", *map(str, samples.FEW), "--set", "clip=none"),
    "thin": ("prune", "{model}", "--calib", "{text}", *map(str, samples.FEW)),
}


def lines(out: Path, **places: Path) -> dict[str, list[str]]:
    """Return the arguments of each command for outputs in `out`."""
    words = {name: [word.format(out=out, **places) for word in line] for name, line in (ROUNDED | CALIBRATED).items()}
    return {name: [*line, "-o", str(out / name), "-q"] for name, line in words.items()}


def process(
    commands: list[list[str]], threads: str, folder: Path, umask: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run commands in a new process, in an empty working folder of its own."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"} | variables
    command_ = [sys.executable, "-c", SCRIPT, umask, threads, json.dumps(commands)]
    return subprocess.run(command_, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)


def reordered(source: Path, target: Path, rng: random.Random) -> Path:
    """Copy a folder whose files are made in another order, so that the system lists them in another."""
    target.mkdir()
    paths = sorted(source.iterdir())
    rng.shuffle(paths)
    for path in paths:
        shutil.copy(path, target)
    return target


def surroundings(rng: random.Random) -> dict[str, str]:
    return {
        "LC_ALL": rng.choice(("C", "C.UTF-8", "tr_TR.UTF-8", "POSIX")),
        "TZ": rng.choice(("UTC", "Asia/Kathmandu", "America/St_Johns")),
        "PYTHONHASHSEED": str(rng.randrange(2**16)),
        "COLUMNS": rng.choice(("20", "80", "400")),
    }


def outcome(folder: Path) -> tuple[dict[str, str], Any]:
    return samples.digests(folder), samples.report(folder)


def attack_surroundings(found: Run) -> None:
    model, text = samples.model(found.folder / "model", blocks=1), samples.text(found.folder / "text.txt")
    known: dict[tuple[str, str], Any] = {}
    number, counts = 0, "14" if found.column == "pr" else "124"
    while found.cases < found.least or number < len(counts):
        rng = found.random("R1", number)
        place = found.folder / f"{number}"
        place.mkdir()
        around, threads = surroundings(rng), counts[number] if number < len(counts) else rng.choice(counts)
        work = lines(place, model=reordered(model, place / "model", rng), text=text)
        done = process(list(work.values()), threads, place / "here", rng.choice(("022", "077", "002")), **around)
        for name in work:
            with found.case(f"process {number}: {name} with {threads} threads under {around}"):
                assert done.returncode == 0 and not any((place / "here").iterdir()), done.stderr
                made = outcome(place / name)
                assert known.setdefault((name, "any" if name in ROUNDED else threads), made) == made
        if number:
            shutil.rmtree(place)
        number += 1
    same = sum(known["gptq", "1"][0] == known["gptq", other][0] for other in counts[1:])
    found.facts = {"processes": number, "calibrated runs equal to that of one thread": f"{same} of {len(counts) - 1}"}


def attack_budgets(found: Run) -> None:
    """Vary the bytes of activations that a run may hold."""
    folder, words = found.folder, samples.text(found.folder / "text.txt")
    model = samples.model(folder / "model", blocks=2)
    samples.quantkit(folder, *samples.calibrated(model, words, folder / "whole"))
    for budget in ("0", "1B", "1KB", "64KB", "100KB", "1GB")[:: 3 if found.column == "pr" else 1]:
        with found.case(f"--act-budget {budget}"):
            samples.quantkit(folder, *samples.calibrated(model, words, folder / budget, "--act-budget", budget))
            assert outcome(folder / budget) == outcome(folder / "whole")


FAMILIES = [
    Family("R1", "threads, locale, time zone, hash seed, umask, order of files", (12, 60, 60), attack_surroundings),
    Family("R3", "budgets of activations", (2, 6, 6), attack_budgets),
]
