"""Where a model comes from: its folder, given its path or its hub id, the facts that its outputs
inherit, and its files against the hashes recorded of them.

Three places record hashes: a quantkit report, a list by `sha256sum`, and the hub's cache, which
names a large file by its SHA-256. A file is hashed by the same algorithm, and the new report lists
that hash. Weight files of ours also state a digest of each tensor, which is compared if no hash is
recorded. A damaged model is refused.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantkit.algorithms.numerics import check_finite, is_finite
from quantkit.checkpoint.gguf_source import ENDING, PART, add_tokenizer, open_gguf
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import CARD_KEYS, REPORT, load as load_report
from quantkit.core.formats import FLOATS
from quantkit.errors import CheckpointError, Option, Words, about, reason
from quantkit.io import files, hub, model_folder
from quantkit.io.json_files import AGAIN, dump_json
from quantkit.io.model_folder import SUMS
from quantkit.io.safetensors_files import damaged_tensors
from quantkit.keys import at_home
from quantkit.layouts import LAYOUTS
from quantkit.names import Json

#: A GGUF file of a hub repository.
HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+):([^:]+\.gguf)", re.IGNORECASE)


def resolve(
    model: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    described: bool = False,
) -> Path:
    """Find the folder of a model: `model` itself, or a hub id's snapshot in the cache, downloaded
    if need be.

    For a GGUF file (`FILE.gguf`, of a hub repository `ORG/NAME:FILE.gguf`), or a folder with one
    and no safetensors, it is a temporary folder (`open_gguf`, which describes `described`). Of a
    hub id only safetensors files and files of data at the top are downloaded, and Python files if
    they are trusted; of a GGUF model only its files. A name that looks like a path never reaches
    the network. CheckpointError if there is no such folder and the hub does not give it.
    """
    model = at_home(model)
    folder = Path(model)
    named = None if folder.exists() else HUB_FILE.fullmatch(model)
    if named is not None:
        found = hub.snapshot(
            named[1], revision, trust_remote_code, only=PART.sub(r"\1-*-of-\3.gguf", named[2])
        )
        return open_gguf(found / named[2], described)
    if model and (folder.is_dir() or (folder.is_file() and folder.suffix.lower() == ENDING)):
        if revision is not None:
            what = "folder" if folder.is_dir() else "file"
            raise CheckpointError(
                f"{model} is a {what}, which has no revisions", Words("drop", Option("revision"))
            )
        file = _gguf_of(folder) if folder.is_dir() else folder
        return folder if file is None else open_gguf(file, described)
    if (
        folder.exists()
        or model.startswith((".", "/", "~"))
        or model.lower().endswith(ENDING)
        or model.count("/") > 1
        or "\\" in model
    ):
        what, ways = "no such file or folder", ["check the path"]
        if folder.is_file():
            what, ways = "a file, not a folder", [*ways, f"call it *{ENDING} if it is GGUF"]
        elif "://" in model or model.startswith(("huggingface.co/", "hf.co/")):
            ways = ["write a model of the hub as org/name"]
        raise CheckpointError(what, *ways, subject=model)
    return hub.snapshot(model, revision, trust_remote_code)


def _gguf_of(folder: Path) -> Path | None:
    """Find the GGUF file of a folder. None if the folder has other weights; CheckpointError for
    several GGUF files.
    """
    with files.guarded(folder):
        listing = sorted(path.name for path in folder.iterdir())
    found = [each for each in listing if each.lower().endswith(ENDING)]
    if not found or any(
        each.endswith((".safetensors", ".safetensors.index.json")) for each in listing
    ):
        return None
    models = {part[1] if (part := PART.fullmatch(each)) else each for each in found}
    if len(models) > 1:
        raise CheckpointError(
            f"holds several GGUF files ({', '.join(found)})",
            f"give the path of one, like {folder / found[0]}",
            subject=folder,
        )
    return folder / found[0]


#: Keys under which transformers writes the folder that a config or tokenizer was read from.
PATHS = ("_name_or_path", "name_or_path")
#: A path in a machine's folders, as trainers and merging tools write in files beside the weights. A
#: lone backslash begins a pattern of a tokenizer, and no path.
LOCAL = re.compile(
    r"""(?<![^\s"'=])((~|[A-Za-z]:)[\\/]+|(file:/)?/+|\\{2,})"""
    r"[\w.@+-][\w .@+-]*([\\/]+[\w.@+-][\w .@+-]*)+[\\/]?"
)
#: Keys that name files, folders, models or data: no other key loses a path, since a token, a label
#: or a chat template may look like one.
_NAMES_FILES = re.compile(
    "(path|file|filename|dir|directory|folder|root|cache|checkpoint|ckpt|config|model|tokenizer"
    "|adapter|data|dataset|source|output|repo|home|url|uri|location|from)s?$",
    re.IGNORECASE,
)
#: Keys of tokens, below which nothing is a path, whatever its key.
_TOKENS = re.compile("token(?!iz)", re.IGNORECASE)
#: A path in somebody's home, in a text that may name other paths as examples.
_HOME = re.compile(r"(/(home|root|Users)/|[A-Za-z]:\\+Users\\+)[\w.@-]")
#: Files in which such paths are not taken out: with one, the file stays behind.
_BEHIND = {
    re.compile(r".*\.(jsonl|toml|ya?ml)"): LOCAL,
    re.compile(r"(?!vocab|merges)([^.]+|.*\.(csv|md|rst|tsv|txt|xml))"): _HOME,
}


def name_of(model: str | Path) -> str:
    """Name a model for a report: by its hub id, also of a snapshot in the hub's cache, or a folder
    by its last name.
    """
    folder = Path(model)
    if not folder.is_dir():
        return folder.name if folder.is_file() else str(model)
    real = folder.resolve()
    return model_folder.cached_id(real) or real.name


def origin(src: Checkpoint, model: str | Path, revision: str | None) -> tuple[Json, list[str]]:
    """Collect the facts about a source that its outputs hand on: name, revision, hub id, licence,
    language, tags.

    `base_model` is the hub id if it is known. `relation` is "quantized" if the id is the source's
    own. A folder may also name the model that it was trained from. Facts that the source does not
    state are absent. An unreadable model card leads to a notice.
    """
    stated, notice = model_folder.front_matter(src.path)
    found: Json = {"name": name_of(model), "revision": revision}
    cached = model_folder.cached_id(src.path)
    ours = cached or (None if Path(model).exists() else HUB_FILE.sub(r"\1", str(model)))
    theirs = (
        _first_id(stated.get("base_model"), src),
        _first_id(src.config.get("_name_or_path"), src),
    )
    if src.layout is not None:  # the source was quantized from the model that its card names
        found |= (
            {"base_model": theirs[0], "relation": "quantized"}
            if theirs[0]
            else {"base_model": ours}
        )
    elif ours:
        found |= {"base_model": ours, "relation": "quantized"}
    else:
        found["base_model"] = theirs[1] or theirs[0]
    found |= {key: words for key in CARD_KEYS if (words := _words(stated.get(key)))}
    if isinstance(tags := found.get("tags"), list):
        found["tags"] = [tag for tag in tags if tag not in LAYOUTS]
    known = {
        key: value
        for key, value in found.items()
        if value is not None or key in ("name", "revision")
    }
    return known, [notice] if notice else []


def without_paths(value: Any, folder: Path, key: str = "") -> Any:
    """Copy a config without the local paths that transformers left in it; hub ids stay.

    `key` is that of `value`, or of the list that holds it.
    """

    def is_path(name: str, child: Any) -> bool:
        return isinstance(child, str) and bool(
            (_NAMES_FILES.search(name) and LOCAL.fullmatch(child))
            or (name in PATHS and model_folder.is_local(child, folder))
        )

    if isinstance(value, list):
        return [without_paths(each, folder, key) for each in value if not is_path(key, each)]
    if not isinstance(value, Mapping) or _TOKENS.search(key):
        return value
    return {
        name: without_paths(child, folder, name)
        for name, child in value.items()
        if not is_path(name, child)
    }


def without_local_paths(folder: Path, name: str) -> bytes | None:
    """Return the text of a config without its local paths; None if it has no local path."""
    if not name.endswith(".json") or name in ("tokenizer.json", "vocab.json"):
        return None
    path, text = _read(folder, name)
    if 'name_or_path"' not in text and LOCAL.search(text) is None:
        return None
    try:  # not by load_json: tokenizers state their longest length as 10^30
        stated = json.loads(text)
        clean = without_paths(stated, folder)
        return None if clean == stated else dump_json(clean, special_floats=True)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"not the JSON it should be ({reason(error)})", AGAIN, subject=path
        ) from error


def _read(folder: Path, name: str) -> tuple[Path, str]:
    path = model_folder.inside(folder, name)
    with files.open_regular(path) as file, files.guarded(path):
        return path, file.readall().decode(errors="replace")


def companions_of(src: Checkpoint) -> tuple[dict[str, bytes | None], list[str]]:
    """Return the files of a source that go along with new weights, each with its new text, None if
    it is unchanged; and the names of those left out. CheckpointError for a link out of the folder.
    """
    add_tokenizer(src.path)
    names, left_out = model_folder.companions(
        src.path, [path.name for path in src.files()], src.trusted
    )
    local = [
        name
        for files_, path in _BEHIND.items()
        for name in names
        if files_.fullmatch(name.lower()) and path.search(_read(src.path, name)[1])
    ]
    going = [name for name in names if name not in local]
    return {name: without_local_paths(src.path, name) for name in going}, [*left_out, *local]


def _first_id(stated: Any, src: Checkpoint) -> str | None:
    names = stated if isinstance(stated, list) else [stated]
    ids = [
        name
        for name in names
        if isinstance(name, str) and not model_folder.is_local(name, src.path)
    ]
    return ids[0] if ids and len(names) == 1 else None


def _words(stated: Any) -> str | list[str] | None:
    """Return a value of the front matter if it is a word or a list of words, else None."""
    if isinstance(stated, list) and all(isinstance(word, str) for word in stated):
        return [_printable(word) for word in stated[:40]]
    return _printable(stated) if isinstance(stated, str) else None


def _printable(word: str) -> str:
    return re.sub(r"[^\x20-\x7e\xa0-\uffff]", " ", word)[:100]


#: The most bytes that are read of that list.
_LIMIT = 2**20
#: Files that are hashed at a time while a model is loaded.
READERS = 2
_LINE = re.compile(rb"([0-9a-fA-F]{64}) [ *](?:\./)?([^\r\n]+)")


class Recorded(NamedTuple):
    """Hold a recorded hash, the place that records it, and the remedy if the file has another."""

    digest: object
    by: str
    remedy: str


def recorded_hashes(src: Checkpoint) -> dict[str, Recorded]:
    """Look up file name -> recorded hash, for the files that have one; the report comes before the
    others.

    Only existing files that quantkit or a library opens are looked up.
    """
    found = {
        name: Recorded(path.name, "its name in the hub's cache says", "download it again")
        for name, path in src.sources().items()
        if path.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", path.name)
    }
    found |= {
        name: Recorded(digest, f"{SUMS} lists", f"restore it, or mend {SUMS} if that was meant")
        for name, digest in _sums(src.path).items()
    }
    found |= {  # weight files state their tensors' digests too, which stay when the report goes
        name: Recorded(listed, f"{REPORT} lists", f"restore it{meant}")
        for name, listed in load_report(src.path).get("files", {}).items()
        for meant in [
            "" if name.endswith(".safetensors") else ", or remove the report if that was meant"
        ]
    }
    there = {*src.sources(), *model_folder.opened(src.path)}
    return {name: entry for name, entry in found.items() if name in there}


def require_unchanged(
    src: Checkpoint, sources: Mapping[str, str], known: Mapping[str, Recorded]
) -> list[str]:
    """Raise CheckpointError for a weight file with another hash than recorded; `sources` has the
    files' hashes.

    A weight file without a recorded hash must have the digests that its own metadata states. Other
    files may have been edited on purpose: returns a line for each that changed.
    """
    for name, found in sources.items():
        if name.endswith(".safetensors"):
            _require_whole(src, name, known.get(name), found)
    return [
        f"{name}: its hash is not the one that {entry.by}: the changed file was taken"
        for name, entry in known.items()
        if not name.endswith(".safetensors")
        and files.hash_of_file(src.locate(name), entry.digest) != entry.digest
    ]


def source_hashes(
    src: Checkpoint,
    readers: int = 1,
    finite: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[str, str], list[str]]:
    """Hash a source's files; returns the hashes and the lines of `require_unchanged`, with its
    CheckpointError.

    `readers` files are hashed at a time; `check` is called between pieces, and may raise. With
    `finite`, the same pass raises NumericError at the first tensor with NaN or infinity.
    """
    known = recorded_hashes(src)
    unfit = set[str]()
    plain = {
        file: {name: info for name, info in found.items() if finite and info.dtype in FLOATS}
        for file, found in src.plain().items()
    }

    def hash_file(name: str) -> str:
        floats = plain[name]
        starts, names = [info.start for info in floats.values()], list(floats)

        def see(start: int, piece: memoryview) -> None:
            check()
            at = bisect_right(starts, start) - 1
            if at >= 0 and start < (info := floats[names[at]]).end:
                whole = (
                    (start - info.start) % info.dtype.itemsize
                    == len(piece) % info.dtype.itemsize
                    == 0
                )
                if not whole or not is_finite(torch.frombuffer(piece, dtype=info.dtype)):
                    unfit.add(names[at])  # or perhaps so: it is looked at below

        borders = sorted({border for info in floats.values() for border in (info.start, info.end)})
        like = known[name].digest if name in known else None
        return files.hash_of_file(src.sources()[name], like, see, borders)

    # Otherwise each reader would start as many threads of torch again.
    pool = ThreadPoolExecutor(readers, "quantkit-hash", torch.set_num_threads, (1,))
    try:
        hashes = dict(zip(src.sources(), pool.map(hash_file, src.sources()), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)
    edited = require_unchanged(src, hashes, known)
    fit = {name for found in plain.values() for name in found} - unfit
    for name in src.names() if finite else ():
        if name not in fit and src.dtype(name).is_floating_point:  # a computed tensor can overflow
            check()
            with about(name):
                check_finite(src.get(name))
    return hashes, edited


class SourceHashes:
    """Hash a source's files beside the work that reads them, so that the disk reads each once: a
    file when its tensors are due, and the next ones ahead, as many as a quarter of torch's threads.

    `check` is called between pieces, and may raise. A weight file with another hash than recorded
    is refused as `require_unchanged` does.
    """

    def __init__(self, src: Checkpoint, check: Callable[[], None]) -> None:
        self._src, self._check, self._known = src, check, recorded_hashes(src)
        self._ahead = max(1, torch.get_num_threads() // 4)
        self._pool = ThreadPoolExecutor(self._ahead, "quantkit-hash")
        self._found: dict[str, Future[str]] = {}
        self._is_over = False

    def close(self) -> None:
        """End the threads, also before all files are hashed."""
        self._is_over = True
        self._pool.shutdown(cancel_futures=True)

    def first(self, used: Collection[str]) -> tuple[dict[str, str], list[str]]:
        """Return the hashes of the weight files that a stopped run has `used`, and of all other
        files; no lines yet. The next weight files are begun.
        """
        weights = [path.name for path in self._src.files() if path.name not in used]
        names = [name for name in self._src.sources() if name not in weights]
        found = {name: self._started(name) for name in (*names, *weights[: self._ahead])}
        return {name: found[name].result() for name in names}, []

    def start(self) -> None:
        """Begin to hash all files, in their order: the page cache then has what is read next."""
        for name in self._src.sources():
            self._started(name)

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Return the hashes of the files that tensors are read from, by file name."""
        due, order = self._src.files_of(names), [*self._src.sources()]
        started = {name: self._started(name) for name in due}
        for name in order[order.index(due[-1]) + 1 :][: self._ahead] if due else ():
            self._started(name)
        return {name: found.result() for name, found in started.items()}

    def all(self) -> tuple[dict[str, str], list[str]]:
        """Return the hashes of all files, and a line for each other file that changed."""
        self.start()
        hashes = {name: self._found[name].result() for name in self._src.sources()}
        return hashes, require_unchanged(self._src, {}, self._known)  # weight files were compared

    def _started(self, name: str) -> Future[str]:
        if name not in self._found:
            self._found[name] = self._pool.submit(self._hash, name)
        return self._found[name]

    def _hash(self, name: str) -> str:
        entry = self._known.get(name)
        like = None if entry is None else entry.digest
        found = files.hash_of_file(self._src.sources()[name], like, self._see)
        self._src.require_unchanged()  # so this is the hash of the bytes that were read
        if name.endswith(".safetensors"):
            _require_whole(self._src, name, entry, found)
        return found

    def _see(self, start: int, piece: memoryview) -> None:
        self._check()
        if self._is_over:
            raise CancelledError


@contextmanager
def checked(src: Checkpoint, check: bool = True) -> Iterator[None]:
    """Check a model's files while the block reads them; without `check`, do nothing.

    Every file with a recorded hash must have it, and every other weight file the digests that it
    states. If a file has another hash, the block ends with a CheckpointError that replaces its own
    error.
    """
    if not check:
        yield
        return
    known = recorded_hashes(src)
    weights = [name for name in src.sources() if name.endswith(".safetensors")]
    with ThreadPoolExecutor(READERS, "quantkit-check") as pool:
        running = [
            pool.submit(_check, src, name, known.get(name))
            for name in dict.fromkeys([*weights, *known])
        ]
        try:
            yield
        except Exception:
            for each in running:
                each.result()  # damage is the cause of the other error
            raise
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        for each in running:
            each.result()


def damage(name: str, path: Path, by: str) -> str:
    """Describe a file with another hash than the recorded one, and name the tensors whose digests
    changed.
    """
    tensors = None
    if name.endswith(".safetensors"):
        with suppress(CheckpointError):  # then its header is damaged
            tensors = damaged_tensors(path)
    what = (
        "the file"
        if not tensors
        else tensors[0]
        if len(tensors) == 1
        else f"{tensors[0]} ({len(tensors)} tensors)"
    )
    return f"{name}: its hash is not the one that {by}, {what} was changed"


def _require_whole(src: Checkpoint, name: str, entry: Recorded | None, found: str | None) -> None:
    """Raise CheckpointError if the hash `found` of a file is not the recorded one. Without a
    record, the file must have the digests that its metadata states.
    """
    path = src.locate(name)
    if entry is not None and found != entry.digest:
        raise CheckpointError(damage(name, path, entry.by), entry.remedy)
    if entry is None and (tensors := damaged_tensors(path)):
        more = f" ({len(tensors)} tensors)" if len(tensors) > 1 else ""
        raise CheckpointError(
            f"{tensors[0]}{more} does not have the digest that the file states, it was changed",
            "restore it",
            subject=name,
        )


def _check(src: Checkpoint, name: str, entry: Recorded | None) -> None:
    try:
        with about(str(src.path)):
            found = entry and files.hash_of_file(src.locate(name), entry.digest)
            _require_whole(src, name, entry, found)
    except CheckpointError as error:
        error.ways_out += (Words("use it as it is with", Option("check", False)),)
        raise


def _sums(folder: Path) -> dict[str, str]:
    path = folder / SUMS
    if not path.exists() and not path.is_symlink():
        return {}
    with files.open_regular(model_folder.inside(folder, SUMS)) as file, files.guarded(path):
        return {
            found[2].decode(errors="replace"): found[1].decode().lower()
            for found in map(_LINE.fullmatch, file.read(_LIMIT).splitlines())
            if found
        }
