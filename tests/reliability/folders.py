"""Hostile folders reach nothing outside of themselves, and run nothing (P1 to P3)."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import socket
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.reliability import samples
from tests.reliability.campaign import Family, Run
from tests.reliability.forks import BROKE, Ended, command, run
from tests.reliability.jobs import at_operation

ROOT = Path(__file__).resolve().parents[2]
INDEX, FIRST, SECOND = (
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)
#: What a command may open beside the model, the text and its output: Python, its packages, the system's facts.
ALLOWED = (sys.prefix, sys.base_prefix, str(ROOT), "/proc", "/sys", "/usr", "/lib", "/etc/localtime", "/etc/mime.types")
DEVICES = ("/dev/null", "/dev/urandom")
#: Events of Python's audit that run something, or reach out.
RUNS = (
    "pickle.find_class",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
    "socket.getaddrinfo",
)
CODE_FILES = (".py", ".pyc", ".pkl")
#: The exit code of a fork in which something forbidden happened.
CAUGHT = 71
Change = Callable[[Path], object]


def watched(work: Callable[[], int | None], model: Path, places: tuple[Path, ...], where: Path | None = None) -> Any:
    """Return work that ends with CAUGHT at once if it opens a path outside of `places`, or runs code of the model."""

    def watch() -> int | None:
        allowed = (*ALLOWED, *(str(path.resolve()) for path in places))
        busy = False

        def caught(what: str) -> None:
            os.write(2, f"\nCAUGHT: {what}\n".encode())
            os._exit(CAUGHT)

        def hook(event: str, values: tuple[Any, ...]) -> None:
            nonlocal busy
            if busy:
                return
            busy = True
            try:
                if event in RUNS:
                    caught(f"{event} {values!r}")
                if event in ("open", "exec", "compile") and values:
                    first = values[-1 if event == "compile" else 0]
                    name = getattr(first, "co_filename", first)
                    if isinstance(name, (str, bytes, os.PathLike)):
                        path = os.path.realpath(os.fsdecode(name))
                        if event == "open" and path not in DEVICES and not path.startswith(allowed):
                            caught(f"open {path}")
                        if path.startswith(str(model.resolve())) and path.endswith(CODE_FILES) and os.path.exists(path):
                            caught(f"{event} {path}")
            finally:
                busy = False

        if where is not None:
            os.chdir(where)
        sys.addaudithook(hook)
        return work()

    return watch


def index(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / INDEX).read_text())
    return found


def renamed(name: str) -> Change:
    """Let the index place the first tensor in a file of another name."""

    def change(model: Path) -> None:
        found = index(model)
        found["weight_map"][next(iter(found["weight_map"]))] = name
        (model / INDEX).write_text(json.dumps(found))

    return change


def unlisted(model: Path) -> None:
    found = index(model)
    del found["weight_map"][next(iter(found["weight_map"]))]
    (model / INDEX).write_text(json.dumps(found))


def written(name: str, text: str | bytes) -> Change:
    def change(model: Path) -> None:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def entered(name: str, **entries: Any) -> Change:
    """Add entries to a JSON file of the model."""

    def change(model: Path) -> None:
        path = model / name
        stated = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(stated | entries))

    return change


def in_place_of(make: Callable[[Path, Path], object]) -> Change:
    """Replace the first shard by what `make` makes of its path and of its old content outside of the model."""

    def change(model: Path) -> None:
        outside = model.parent / "outside.safetensors"
        (model / FIRST).rename(outside)
        make(model / FIRST, outside)

    return change


def listening(path: Path, outside: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def zipped(path: Path, outside: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", PICKLE)


def in_both(added: int) -> Change:
    """Store the first tensor of the first shard in the second too, with something added."""

    def change(model: Path) -> None:
        first, second = load_file(model / FIRST), load_file(model / SECOND)
        name = min(first)
        save_file(second | {name: first[name] + added}, model / SECOND, metadata={"format": "pt"})

    return change


def in_none(model: Path) -> None:
    first = load_file(model / FIRST)
    del first[min(first)]
    save_file(first, model / FIRST, metadata={"format": "pt"})


def copied(name: str) -> Change:
    """Let the model have its first shard under another name too."""
    return lambda model: shutil.copy(model / FIRST, model / name)


def as_text(name: str, pattern: str, text: str) -> Change:
    """Replace a part of a file's text, which JSON's writer would not write."""

    def change(model: Path) -> None:
        new, count = re.subn(pattern, lambda _: text, (model / name).read_text(), count=1)
        assert count == 1
        (model / name).write_text(new)

    return change


def cached(model: Path) -> None:
    """Make the folder a snapshot of the hub's cache, with links into `blobs`."""
    blobs = model.parent.parent / "blobs"
    blobs.mkdir()
    for path in list(model.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")


def removed(*names: str) -> Change:
    def change(model: Path) -> None:
        for path in (path for name in names for path in model.glob(name)):
            path.unlink()

    return change


def both(*changes: Change) -> Change:
    def change(model: Path) -> None:
        for each in changes:
            each(model)

    return change


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


PICKLE = pickle.dumps(Evil())
CODE = "import os\nos.system('touch pwned')\nclass Model: pass\nclass Tokenizer: pass\n"
#: Cases of RELIABILITY 2, with whether a folder is refused (None: by some commands). tests/io and tests/checkpoint have
#: every kind of name, link and JSON.
FOLDERS: dict[str, tuple[Change, bool | None]] = {
    "a shard of a name that leads outside": (renamed("../x.safetensors"), True),
    "a link to outside": (in_place_of(lambda path, outside: path.symlink_to(outside)), True),
    "a hard link": (in_place_of(lambda path, outside: path.hardlink_to(outside)), False),
    "a pipe": (in_place_of(lambda path, outside: os.mkfifo(path)), True),
    "a socket": (in_place_of(listening), True),
    "a shard that nobody may read": (lambda model: (model / FIRST).chmod(0), os.geteuid() != 0),  # root may
    "a shard that is not listed": (copied("more.safetensors"), False),
    "a tensor that is listed and absent": (in_none, None),
    "a tensor that is not listed": (unlisted, False),
    "a tensor in two shards": (in_both(0), False),
    "a tensor in two shards, unequal": (in_both(1), False),
    "a weight_map that is a list": (entered(INDEX, weight_map=[]), True),
    "an index of more than 100 MB": (lambda model: os.truncate(model / INDEX, 101 * 2**20), True),
    "an index of depth 10^5": (written(INDEX, '{"weight_map":' + "[" * 10**5 + "]" * 10**5 + "}"), True),
    "NaN in the index": (as_text(INDEX, r'"total_size": \d+', '"total_size": NaN'), True),
    "a wrong total_size": (as_text(INDEX, r'"total_size": \d+', '"total_size": 1'), False),
    "one file and an index": (copied("model.safetensors"), True),
    "pickled weights beside": (written("pytorch_model.bin", PICKLE), False),
    "pickled weights alone": (both(removed("*.safetensors*"), written("pytorch_model.bin", PICKLE)), True),
    "the hub's cache": (cached, False),
    "an adapter alone": (both(removed("*.safetensors*", "config.json"), entered("adapter_config.json", a=1)), True),
    "a consolidated twin": (copied("consolidated.safetensors"), False),
}


def attacked(found: Run, name: str, change: Change, lines: Sequence[str], refused: bool | None) -> None:
    """Count a case: commands on a changed model reach nothing and run nothing, whether refused or not (None: either).

    They work in the model's folder, where Python would find its modules.
    """
    place = found.folder / f"{found.cases}"
    model, out, words = place / "snapshots/abc", place / "outputs/out", place / "text.txt"
    with found.case(name):
        for folder in (model, out):
            folder.parent.mkdir(parents=True)
        samples.text(words)
        change(samples.model(model, blocks=1))
        for line in lines:
            work = command(*line.format(model=model, out=out, text=words).split(), "-q")
            ended = run(
                watched(work, model, (model, words, out.parent, place / "blobs"), model), found.folder, limit=60
            )
            harmless(ended, model)
            if ended.code or refused:
                assert refused is not False, ended.stderr
                assert ended.stderr.strip().splitlines()[-1].startswith("Error: "), ended.stderr
            if refused:
                samples.one_line(ended)
                assert not any(out.parent.iterdir()), "something was written"
        assert not list(out.rglob("*.py")), "code went along"
    shutil.rmtree(place)


PLAN, INSPECT = "plan {model} --method rtn", "inspect {model}"
EVALUATE = "eval ppl {model} --data {text} --window 64 --tokens 256"


def attack_folders(found: Run) -> None:
    lines = (INSPECT, "quantize {model} --method rtn -o {out}", EVALUATE)
    if found.column != "pr":  # it reads what `quantize` reads before its work
        lines += (PLAN,)
    for name, (change, refused) in FOLDERS.items():
        attacked(found, name, change, lines, refused)
    with found.case("a shard that is replaced during the run"):
        model, out = samples.model(found.folder / "replaced", 1), found.folder / "out"

        def replace() -> None:
            shutil.copy(model / FIRST, found.folder / "other")
            (found.folder / "other").rename(model / FIRST)

        work = at_operation(3, replace, command("quantize", model, "--method", "rtn", "-o", out, "-q"))
        samples.one_line(run(work, found.folder, limit=60), "changed while it was in use")
        assert not out.exists()


def harmless(ended: Ended, model: Path) -> None:
    """Ask for no traceback, no hang, nothing that was caught, and no trace of code that ran."""
    assert ended.code not in (CAUGHT, BROKE) and "Traceback" not in ended.stderr, ended.stderr
    assert ended.code >= 0, f"signal {-ended.code}: {ended.stderr}"
    assert not list(model.rglob("pwned"))


AUTO = {
    "AutoConfig": "evil.Model",
    "AutoModelForCausalLM": "evil.Model",
    "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"],
}
ATTENTION = "_attn_implementation_internal"
KERNEL = "org/evil-kernel"
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
GLOBALS = "{{ cycler.__init__.__globals__.os.system('touch pwned') }}"
#: Folders that try to run code.
CODES: dict[str, Change] = {
    **{
        f"a pickle as {name}": written(name, PICKLE)
        for name in ("training_args.bin", "optimizer.pt", "rng.pth", "x.ckpt", "tokenizer.pkl")
    },
    "a pickle as a shard": written(FIRST, PICKLE),
    "a pickle as tokenizer.json": written("tokenizer.json", PICKLE),
    "a pickle as tokenizer.model": both(removed("tokenizer.json"), written("tokenizer.model", PICKLE)),
    "a pickle of another name": written("x.bin", PICKLE),
    "a zip as a shard": in_place_of(zipped),
    "auto_map of a known family": entered("config.json", auto_map=AUTO),
    "auto_map of an unknown family": entered("config.json", auto_map=AUTO, model_type="evil"),
    "auto_map in a nested config": entered("config.json", text_config={"auto_map": AUTO, "model_type": "evil"}),
    "auto_map of the tokenizer": entered("tokenizer_config.json", auto_map=AUTO, tokenizer_class="EvilTokenizer"),
    "a tokenizer class in a module": entered("tokenizer_config.json", tokenizer_class="evil.Tokenizer"),
    "a tokenizer file outside": entered(
        "tokenizer_config.json", tokenizer_file="/etc/passwd", vocab_file="/etc/passwd"
    ),
    "trust_remote_code in the config": entered("config.json", trust_remote_code=True),
    "an attention kernel": entered("config.json", **{ATTENTION: KERNEL}),
    "an attention kernel, nested": entered("config.json", text_config={ATTENTION: KERNEL}),
    "an attention kernel, nested twice": entered("config.json", a={"b": [{ATTENTION: KERNEL}]}),
    "an attention kernel by its public name": entered("config.json", attn_implementation=KERNEL),
    "an expert kernel": entered("config.json", _experts_implementation=KERNEL),
    "kernels of the hub": entered("config.json", use_kernels=True, kernel_config={"RMSNorm": KERNEL}),
    "custom generate": written("custom_generate/generate.py", CODE),
    "custom generate by name": entered("generation_config.json", custom_generate=KERNEL, trust_remote_code=True),
    "a template that escapes": written("chat_template.jinja", ESCAPE),
    "a template that calls the system": written("chat_template.jinja", GLOBALS),
    "a template without an end": written("chat_template.jinja", "{% for i in range(10**12) %}{{ i }}{% endfor %}"),
    "a template of a huge text": written("chat_template.jinja", "{{ 'x' * 10**8 * 10**10 }}"),
    "a processor with code": entered("preprocessor_config.json", auto_map=AUTO, image_processor_type="Evil"),
    "a quantizer with code": entered("config.json", quantization_config={"quant_method": "evil", "modules": "evil"}),
    "a model type that is a path": entered("config.json", model_type="../../evil"),
    "modules that shadow libraries": both(
        *(written(f"{name}.py", CODE) for name in ("json", "torch", "sitecustomize", "tokenizers"))
    ),
    "a package": written("quantkit/__init__.py", CODE),
}


def attack_with_code(found: Run) -> None:
    calibrated = " ".join(map(str, ("quantize {model} --calib {text} -o {out}", *samples.SHORT)))
    lines = (INSPECT, calibrated, "generate {model} Hi --chat --max-new-tokens 2")
    if found.column != "pr":  # they read no more than those above
        lines += (PLAN, EVALUATE)
    for name, change in CODES.items():
        attacked(found, name, both(written("evil.py", CODE), change), lines, None)


def attack_outputs(found: Run) -> None:
    """Give `-o` every odd path; the source must not change, and nothing else may be made."""
    folder = found.folder
    source = samples.model(folder / "source", blocks=1)
    made = folder / "made"
    samples.quantkit(folder, "quantize", source, "--method", "rtn", "-o", made, "-q")
    file = folder / "file"
    file.write_text("x")
    (folder / "link").symlink_to(made)
    (folder / "dangling").symlink_to(folder / "nothing")
    (folder / "other").mkdir()
    (folder / "other" / "thesis.txt").write_text("years of work")
    os.mkfifo(folder / "pipe")
    for name in ("empty", "inside"):
        (folder / name).mkdir()
    (folder / "up").symlink_to(source)
    (folder / partial_name(folder, "taken")).symlink_to(made)
    refused: dict[str, tuple[Any, ...]] = {
        "exists": (made,),
        "a link": (folder / "link",),
        "a link, to be overwritten": (folder / "link", "--overwrite"),
        "a dangling link": (folder / "dangling",),
        "a file": (file,),
        "a file, to be overwritten": (file, "--overwrite"),
        "a pipe": (folder / "pipe", "--overwrite"),
        "inside the source": (source / "out",),
        "inside the source, through a link": (folder / "up" / "out",),
        "the source": (source, "--overwrite"),
        "around the source": (folder, "--overwrite"),
        "no parent": (folder / "no" / "parent",),
        "a parent that is a file": (file / "out",),
        "the root": ("/",),
        "the root, to be overwritten": ("/", "--overwrite"),
        "here": (".", "--overwrite"),
        "no name": ("",),
        "above": ("..", "--overwrite"),
        "other things, to be overwritten": (folder / "other", "--overwrite"),
        "work in a link": (folder / "taken",),
        "a proc folder": ("/proc/out",),
        "a long name": (folder / ("x" * 300),),
    }
    accepted: dict[str, tuple[Any, ...]] = {
        "a trailing slash": (f"{folder}/new/",),
        "an empty folder, to be overwritten": (folder / "empty", "--overwrite"),
        "a name with spaces and letters of other alphabets": (folder / "a b \u00e9 \u4e2d",),
        "a relative path": ("../relative",),
    }
    before, whole = tree(folder), samples.digests(made)
    for name, words in (refused | accepted).items():
        with found.case(name):
            line = ("quantize", source, "--method", "rtn", "-q", "-o", *words)
            ended = run(watched(command(*line), source, (folder,), where=folder / "inside"), folder, limit=60)
            harmless(ended, source)
            if name in refused:
                samples.one_line(ended)
                assert tree(folder) == before
            else:
                assert ended.code == 0, ended.stderr
                assert samples.digests((folder / "inside" / words[0]).resolve()) == whole
    with found.case("the source is as it was"):
        assert tree(source) == {
            path.removeprefix("source/"): held for path, held in before.items() if path.startswith("source/")
        }


def partial_name(folder: Path, name: str) -> str:
    """Return the name of the folder in which a run for the output `name` works."""
    from quantkit.io.staging import staging

    noted = folder / "noted"

    def work() -> int | None:
        with staging(folder / name) as partial:
            noted.write_text(partial.name)
        return 0

    run(work, folder)
    found = noted.read_text()
    noted.unlink()
    return found


def tree(folder: Path) -> dict[str, Any]:
    """Return what a folder holds, links not followed, without the streams of forks."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
        if path.suffix not in (".out", ".err")
    }


FAMILIES = [
    Family("P1", "hostile indexes and folders, with every open() watched", (22, 22, 22), attack_folders),
    Family(
        "P2", "folders that try to run code, with every import, exec and socket watched", (30, 30, 30), attack_with_code
    ),
    Family("P3", "outputs in odd places", (20, 20, 20), attack_outputs),
]
