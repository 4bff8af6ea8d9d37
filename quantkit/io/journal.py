"""The journal of a run: one line for each committed unit of work, each with its own digest."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, Option, Words
from quantkit.io import files

JOURNAL = "journal.jsonl"


def append_journal(path: Path, line: dict[str, Any]) -> None:
    """Append one line to a journal and make it durable; first cut off an unfinished line that a
    crash left.
    """
    text = json.dumps(line)
    data = f'{{"sha256": "{hashlib.sha256(text.encode()).hexdigest()}", "line": {text}}}\n'.encode()
    with files.guarded(path, needed=len(data)), files.open_for_update(path) as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            files.fault("write", path)
            file.truncate(whole)
        file.seek(whole)
        files.write(file, memoryview(data), path)
        files.sync(file, path)
        if not whole:
            files.sync_folder(path.parent)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read a journal's lines, [] if there is none, without an unfinished last line; CheckpointError
    if damaged.
    """
    if not os.path.lexists(path):
        return []
    with files.open_regular(path) as file, files.guarded(path):
        *lines, _torn = file.read().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode())
            good = (
                record["sha256"] == hashlib.sha256(json.dumps(record["line"]).encode()).hexdigest()
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good or not isinstance(record["line"], dict):
            raise CheckpointError(
                f"line {number} is damaged",
                Words("start over with", Option("overwrite", True)),
                subject=path,
            )
        found.append(record["line"])
    return found
