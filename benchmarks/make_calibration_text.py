"""Write the packaged calibration text, `quantkit/calibration_text`: encyclopedia, conversations and documentation.

Two fifths are the beginnings of articles of WikiText-2's training part, two fifths small talk of two people, one fifth
Python's documentation: the best mixture that may be passed on, of those that were tried on real models (the table in
`benchmarks/README.md`). The documentation is a part of the demo model's training text; it shares no 8 successive words
with the text that `quantkit demo` evaluates on. The same files and the same version of Python give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from train_demo_model import training_text

from quantkit.text.sources import HEADING

#: The least characters of a piece, and the pieces of each kind. They give the 256 documents that are drawn by default,
#: and the million characters of 128 windows of 2048 tokens.
PIECE, ARTICLES, TALKS, DOCUMENTATION = 3500, 104, 104, 52
#: The fewest turns of a talk that is taken, and words that no taken talk has.
TURNS = 4
UNWANTED = re.compile(
    r"\b(nsfw|sex\w*|porn\w*|nude|fuck\w*|shit\w*|bitch\w*|damn\w*|hell|ass|crap|suicid\w*|rape\w*|nigg\w*|whore|slut\w*|"
    r"nazi\w*|racis\w*|terroris\w*|kill\w*|murder\w*|gun|guns|drugs?|drunk\w*)\b|@|https?:|www\.|\d{5}",
    re.IGNORECASE,
)
CARD = """\
# The packaged calibration text

`quantkit quantize` and `quantkit prune` calibrate with this text if no `--calib` is given, and say so.
`benchmarks/make_calibration_text.py` wrote this folder, this page included.

| | |
| --- | --- |
| file | `text.jsonl.gz`, one piece a line under the key `text` |
| pieces | {pieces}, of {shortest:,} to {longest:,} characters |
| characters | {characters:,} |
| language | English |

| pieces | source | licence |
| --- | --- | --- |
| {articles} | beginnings of articles of WikiText-2's training part | CC BY-SA 3.0 (creativecommons.org) |
| {talks} | small talk of chitchat-dataset 0.9.0 | MIT, in `LICENSE-CHITCHAT.txt` |
| {documentation} | pydoc's topics, documentation strings of Python {python} | PSF-2.0, in `LICENSE-PYTHON.txt` |

WikiText-2 (Merity and others, 2016, arXiv 1609.07843) are articles of the English Wikipedia by its contributors, as
tokenized there. Names and times of the talks are left out, `User` and `Assistant` stand before the turns, and talks
with some words, links or long numbers are not there.

Text like the model's use calibrates better. The text shares no 8 successive words with the text that `quantkit demo`
evaluates on.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wikitext", type=Path, required=True, help="train.txt of WikiText-2")
    parser.add_argument("--talks", type=Path, required=True, help="the package chitchat-dataset 0.9.0, unpacked")
    parser.add_argument("-o", "--out", type=Path, default=Path("quantkit/calibration_text"), help="folder to write to")
    args = parser.parse_args()

    text = args.wikitext.read_text(encoding="utf-8")
    starts = [match.start(1) for match in HEADING.finditer(text)]
    whole = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    articles = [piece for article in whole if (piece := next(cut(article.split("\n"), "\n"), None)) is not None]
    (data,) = args.talks.glob("**/dataset.json")
    talks = list(cut(clean_talks(json.loads(data.read_text(encoding="utf-8"))), "\n\n\n"))
    corpus = training_text()
    documentation = [
        piece
        for name in ("pydoc topics", "standard library")
        for text in corpus[name]
        for piece in cut(text.split("\n\n"), "\n\n")
    ]

    pieces = [*spread(articles, ARTICLES), *spread(talks, TALKS), *spread(documentation, DOCUMENTATION)]
    args.out.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"text": piece}, ensure_ascii=False) + "\n" for piece in pieces)
    (args.out / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 9, mtime=0))
    shutil.copy(Path(sysconfig.get_path("stdlib"), "LICENSE.txt"), args.out / "LICENSE-PYTHON.txt")
    (licence,) = args.talks.glob("**/LICENSE")
    shutil.copy(licence, args.out / "LICENSE-CHITCHAT.txt")
    sizes = sorted(map(len, pieces))
    card = CARD.format(
        pieces=len(pieces),
        shortest=sizes[0],
        longest=sizes[-1],
        characters=sum(sizes),
        articles=ARTICLES,
        talks=TALKS,
        documentation=DOCUMENTATION,
        python=platform.python_version(),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(f"{len(pieces)} pieces, {sum(sizes)} characters, {(args.out / 'text.jsonl.gz').stat().st_size} bytes")


def clean_talks(found: dict[str, dict[str, list[list[dict[str, str]]]]]) -> Iterator[str]:
    """Yield talks as plain text, in an order that hangs on their names alone."""
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        turns: list[str] = []
        speakers: list[str] = []
        for turn in found[name]["messages"]:
            said = " ".join(message["text"].strip() for message in turn).strip()
            if said:
                speakers += [turn[0]["sender"]] * (turn[0]["sender"] not in speakers)
                turns.append(f"{'User' if turn[0]['sender'] == speakers[0] else 'Assistant'}: {said}")
        talk = "\n\n".join(turns)
        if len(turns) >= TURNS and not UNWANTED.search(talk):
            yield talk


def cut(parts: Iterable[str], between: str) -> Iterator[str]:
    """Yield successive parts, joined to pieces of at least `PIECE` characters; a shorter remainder is dropped."""
    piece: list[str] = []
    for part in parts:
        piece.append(part)
        if sum(map(len, piece)) >= PIECE:
            yield between.join(piece)
            piece = []


def spread(pieces: list[str], count: int) -> list[str]:
    """Take `count` pieces at equal distances."""
    return [pieces[i * len(pieces) // count] for i in range(count)]


if __name__ == "__main__":
    main()
