"""Photograph the report page for docs/tutorial.md, and check that it fits its window.

Needs Chromium and Pillow. The pictures in docs/screenshots show this folder, drawn after `quantkit verify OUT`:

    quantkit quantize llama-29m -o OUT --calib wikitext2/train.txt --samples 16 --max-length 256
    python docs/screenshots.py OUT
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from quantkit.cli.commands import quantkit

PICTURES = Path(__file__).parent / "screenshots"
#: No profile of a user, nothing from the network.
CHROMIUM = (
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
)
#: A window of Chromium is at least 500 pixels wide; a frame in it can be as narrow as a phone.
FRAME = """<body style="margin:0"><iframe srcdoc="{page}" width="{width}" height="{height}"
 style="border:0;display:block"></iframe><script>onload = () => {{
  const root = frames[0].document.documentElement, closed = root.scrollWidth;
  if ({opened}) frames[0].document.querySelectorAll("details").forEach(details => details.open = true);
  document.title = "widths " + closed + " " + root.scrollWidth;
}}</script>"""


class Shot(NamedTuple):
    """A picture: its name, the window in CSS pixels, pixels for each of them, and Blink's number of the colours."""

    name: str
    width: int
    height: int
    scale: int
    scheme: int


SHOTS = (Shot("report-light", 1280, 1560, 1, 1), Shot("report-dark", 390, 2760, 2, 0))


def main(folder: Path) -> None:
    """Draw the page of a folder, check its width at each size, and write the pictures."""
    with tempfile.TemporaryDirectory() as work:
        drawn = Path(work) / "report.html"
        quantkit(["report", str(folder), "--html", str(drawn), "-q"], standalone_mode=False)
        for shot in SHOTS:
            page = drawn.read_text()
            found = _chromium(Path(work), page, shot, True, "--dump-dom")
            widths = re.search(r"<title>widths (\d+) (\d+)</title>", found)
            if widths is None or max(map(int, widths.groups())) > shot.width:
                raise SystemExit(f"{shot.name}: the page is wider than {shot.width} pixels: {widths and widths[0]}")
            taken = Path(work) / f"{shot.name}.png"
            _chromium(Path(work), page, shot, False, f"--screenshot={taken}")
            _compress(taken, shot)


def _chromium(work: Path, page: str, shot: Shot, opened: bool, *arguments: str) -> str:
    framed = FRAME.format(
        page=html.escape(page), width=shot.width, height=shot.height, opened="true" if opened else "false"
    )
    (work / "frame.html").write_text(framed)
    look = (f"--force-device-scale-factor={shot.scale}", f"--blink-settings=preferredColorScheme={shot.scheme}")
    window = f"--window-size={max(500, shot.width)},{shot.height}"
    command = (*CHROMIUM, f"--user-data-dir={work / 'profile'}", *look, window, *arguments, f"file://{work}/frame.html")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _compress(taken: Path, shot: Shot) -> None:
    PICTURES.mkdir(exist_ok=True)
    with Image.open(taken) as picture:
        box = (0, 0, shot.width * shot.scale, shot.height * shot.scale)
        small = picture.convert("RGB").crop(box).quantize(256, dither=Image.Dither.NONE)
        small.save(PICTURES / f"{shot.name}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
