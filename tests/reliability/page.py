"""Write the table of docs/reliability.md: `python -m tests.reliability.page benchmarks/reliability.json PAGE`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Of the cases three are the least that must run, and one is what ran at night.
HEAD = (
    "| id | attack | on each change | at night | before a release | ran at night | failures | seconds |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
PLACE = re.compile(re.escape(HEAD) + r"(\|.*\n)*")


def table(result: Mapping[str, Any]) -> str:
    """Return the table of a nightly campaign, with the cases that each family must run at least."""
    from tests.reliability.campaign import families

    return HEAD + "".join(
        f"| {name} | {family.title} | {' | '.join(f'{least:,}' for least in family.counts)} | "
        f"{entry['cases']:,} | {entry['failures']} | {entry['seconds']:.0f} |\n"
        for name, family in sorted(families().items())
        for entry in [result["families"][name]]
    )


def main() -> None:
    source, page = map(Path, sys.argv[1:])
    new = table(json.loads(source.read_text()))
    text, count = PLACE.subn(lambda _: new, page.read_text(encoding="utf-8"))
    assert count == 1, f"{page} has {count} tables of the campaign"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
