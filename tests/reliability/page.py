"""Write the table of docs/reliability.md: `python -m tests.reliability.page benchmarks/reliability.json PAGE`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAD = "| id | attack | cases on each change | cases at night | failures | seconds |\n|---|---|---|---|---|---|\n"
PLACE = re.compile(re.escape(HEAD) + r"(\|.*\n)*")


def table(result: Mapping[str, Any]) -> str:
    """Return the table of a nightly campaign, and the least cases of the same families on each change."""
    from tests.reliability.campaign import families

    known = families()
    rows = [
        f"| {name} | {entry['title']} | {known[name].least('pr'):,} | {entry['cases']:,} | {entry['failures']} "
        f"| {entry['seconds']:.0f} |\n"
        for name, entry in sorted(result["families"].items())
    ]
    return HEAD + "".join(rows)


def main() -> None:
    source, page = map(Path, sys.argv[1:])
    new = table(json.loads(source.read_text()))
    text, count = PLACE.subn(lambda _: new, page.read_text(encoding="utf-8"))
    assert count == 1, f"{page} has {count} tables of the campaign"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
