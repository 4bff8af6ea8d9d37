"""Write the packaged calibration text, `quantkit/calibration_text`, from Python's documentation; needs no network.

The text is a part of the demo model's training text: pydoc's topics and the standard library's documentation strings.
It shares no 8 successive words with the text that `quantkit demo` evaluates on. The same version of Python gives the
same bytes. One minute.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from train_demo_model import training_text

#: The least characters of a piece. It gives the 256 documents that are drawn by default, and the million characters of
#: 128 windows of 2048 tokens.
PIECE = 3500
CARD = """\
# The packaged calibration text

`quantkit quantize` and `quantkit prune` calibrate with this text if no `--calib` is given and the hub cannot be
reached. They say so. `--calib packaged` asks for it. `benchmarks/make_calibration_text.py` wrote this folder, this page
included.

| | |
| --- | --- |
| file | `text.jsonl.gz`, one piece a line under the key `text` |
| pieces | {pieces}, of {shortest:,} to {longest:,} characters |
| characters | {characters:,} |
| language | English about Python, with code |
| source | pydoc's topics and documentation strings of the standard library, Python {python} |
| licence | PSF-2.0, in `LICENSE-PYTHON.txt` |

The pieces follow paragraphs of the source; spaces at line ends are as they were. The text is a fallback: text like
the model's use calibrates better. It shares no 8 successive words with the text that `quantkit demo` evaluates on.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=Path("quantkit/calibration_text"), help="folder to write to")
    args = parser.parse_args()

    corpus = training_text()
    pieces = [piece for name in ("pydoc topics", "standard library") for text in corpus[name] for piece in cut(text)]
    args.out.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"text": piece}, ensure_ascii=False) + "\n" for piece in pieces)
    (args.out / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 9, mtime=0))
    shutil.copy(Path(sysconfig.get_path("stdlib"), "LICENSE.txt"), args.out / "LICENSE-PYTHON.txt")
    sizes = sorted(map(len, pieces))
    card = CARD.format(
        pieces=len(pieces),
        shortest=sizes[0],
        longest=sizes[-1],
        characters=sum(sizes),
        python=platform.python_version(),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(f"{len(pieces)} pieces, {sum(sizes)} characters, {(args.out / 'text.jsonl.gz').stat().st_size} bytes")


def cut(text: str) -> Iterator[str]:
    """Yield successive paragraphs in pieces of at least `PIECE` characters; a shorter remainder is dropped."""
    piece: list[str] = []
    for paragraph in text.split("\n\n"):
        piece.append(paragraph)
        if sum(map(len, piece)) >= PIECE:
            yield "\n\n".join(piece)
            piece = []


if __name__ == "__main__":
    main()
