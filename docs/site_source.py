"""Copy the pages of the site: README.md, and each page and file that links lead to from there.

The copies keep their places, so links that work on a code host work on the site. `make site` builds them by mkdocs.yml.

    python docs/site_source.py build/pages
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def linked(page: Path) -> list[Path]:
    """List the files that a page links to."""
    return [(page.parent / target).resolve() for target in LINK.findall(page.read_text(encoding="utf-8"))]


def copy_pages(folder: Path) -> None:
    """Replace the content of a folder by the pages. Raises FileNotFoundError for a link that leads to no file."""
    shutil.rmtree(folder, ignore_errors=True)
    waiting, found = [ROOT / "README.md"], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        waiting += linked(path) if path.suffix == ".md" else []


if __name__ == "__main__":
    copy_pages(Path(sys.argv[1]))
