"""Every changed bit of a source, an output or a file beside them is found (H3 to H5)."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.origin import checked, source_hashes
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT, SEAL, load as load_report
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.evaluation.options import VerifyOptions
from quantkit.evaluation.verify import verify, verify_files
from quantkit.io.files import hash_of_file
from quantkit.io.json_files import load_json
from quantkit.io.safetensors_files import SafetensorsWriter, damaged_tensors, read_header
from quantkit.io.staging import append_journal, read_journal
from quantkit.pipeline.inspection import describe
from quantkit.recipes import files as recipe_files
from quantkit.recipes.recipe import from_mapping
from quantkit.reporting.html import page
from tests.reliability import samples
from tests.reliability.campaign import Family, Run
from tests.reliability.samples import changed, flipped, mutated, opened, refused, weights

#: Of so many flips, one goes through a command or a whole `load`, and the others through the functions under them.
WHOLE = 25
#: Pieces that replace others in a JSON file.
ODD = b'null true -1 0 9223372036854775808 1e308 1e999 "" "../x" [] {} [[]] {"a":[]} [null] " , : } ]'.split()
ODD += [b'"%s"' % (b"x" * 2000), b'"\\u0000"', b"[" * 70 + b"]" * 70]
RTN = ("--method", "rtn")
LAYOUTS = ("compressed-tensors", "gptq", "marlin", "awq", "quick")


def place(path: Path, rng: random.Random) -> tuple[int, int, str]:
    """Draw a bit of a weight file's tensors; returns its byte, its place there, and the tensor's name."""
    tensors, _ = read_header(path.resolve())
    first = min(info.start for info in tensors.values())
    at = rng.randrange(first, path.stat().st_size)
    return at, rng.randrange(8), next(name for name, info in tensors.items() if info.start <= at < info.end)


def sources(folder: Path) -> dict[str, Path]:
    """Make one model whose hashes are known in each of the three ways."""
    listed = samples.model(folder / "listed", blocks=1)
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in weights(listed))
    (listed / "SHA256SUMS").write_text("".join(sums))
    repository = folder / "models--org--name"
    snapshot = repository / "snapshots/abc"
    samples.model(folder / "plain", blocks=1)
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in (folder / "plain").iterdir():
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    quantkit.prune(folder / "plain", folder / "reported", method="magnitude")
    return {"SHA256SUMS": listed, "the hub's cache": snapshot, "a report": folder / "reported"}


def attack_sources(found: Run) -> None:
    known = sources(found.folder)
    for name, folder in known.items():
        with found.case(f"{name}: intact"):
            source_hashes(Checkpoint(folder))
    for i, rng in found.draws("H3"):
        name, folder = rng.choice(list(known.items()))
        path = rng.choice(weights(folder))
        at, bit, _ = place(path, rng)
        with found.case(f"{name}: {path.name} byte {at} bit {bit}"), changed(path, flipped(path.read_bytes(), at, bit)):
            refused(partial(source_hashes, Checkpoint(folder)), path.name)
            if i % WHOLE == 0:
                words = ("prune", folder, "--method", "magnitude") if name == "a report" else ("quantize", folder, *RTN)
                out = found.folder / "out"
                samples.one_line(samples.quantkit(found.folder, *words, "-o", out, "-q", code=1))
                assert not out.exists()


def outputs(folder: Path) -> list[Path]:
    """Quantize one model into several layouts, with their reports, and the last without: its digests are left."""
    source = samples.model(folder / "source", blocks=1)
    quantkit.quantize(source, folder / "fp6", format="fp6", method="rtn")
    quantkit.quantize(source, folder / "thin", prune="2:4", prune_method="magnitude", method="rtn", layout="marlin24")
    quantkit.quantize(source, folder / LAYOUTS[0], method="rtn", group_size=128)
    for layout in LAYOUTS[1:]:
        quantkit.pack(folder / LAYOUTS[0], folder / layout, layout)
    lost = shutil.copytree(folder / "gptq", folder / "lost report")
    (lost / REPORT).unlink()
    return [folder / name for name in ("fp6", "thin", *LAYOUTS, "lost report")]


def attack_outputs(found: Run) -> None:
    found.facts = rates(found.folder / "large.safetensors")
    made = outputs(found.folder)
    for folder in made:
        with found.case(f"{folder.name}: intact"), checked(Checkpoint(folder)):
            assert verify(folder, asked=VerifyOptions(device="cpu")).ok and verify_files(folder)[0] == []
            quantkit.load(folder, device="cpu")
    for i, rng in found.draws("H4"):
        folder = rng.choice(made)
        path = rng.choice(weights(folder))
        at, bit, tensor = place(path, rng)
        data = flipped(path.read_bytes(), at, bit)
        with found.case(f"{folder.name}: {path.name} byte {at} bit {bit}"), changed(path, data):
            seen_in_an_output(folder, tensor, i % WHOLE == 0)
    for i in range(found.least // 4):  # the header, its padding and its digests: found by the report's hash
        rng = found.random("H4 header", i)
        folder = rng.choice(made[:-1])
        path = rng.choice(weights(folder))
        data = path.read_bytes()
        at, bit = rng.randrange(8 + int.from_bytes(data[:8], "little")), rng.randrange(8)
        case = found.case(f"{folder.name}: {path.name} header byte {at} bit {bit}")
        with case, changed(path, flipped(data, at, bit)):
            assert verify_files(folder)[0]
            refused(partial(opened, folder), path.name)


def rates(path: Path) -> dict[str, float]:
    """Measure what a check costs: GB that one core hashes in a second, by a recorded hash and by digests."""
    file = SafetensorsWriter(path)
    file.add("weight", torch.arange(2**26, dtype=torch.int32))
    file.close()
    gigabytes, measured = path.stat().st_size / 1e9, {}
    for name, work in (("hash", hash_of_file), ("digests", damaged_tensors)):
        began = time.process_time()
        work(path)  # type: ignore[operator]
        measured[f"{name}_gb_per_core_second"] = round(gigabytes / (time.process_time() - began), 2)
    path.unlink()
    return measured


def seen_in_an_output(folder: Path, tensor: str, whole: bool) -> None:
    """Ask `verify`, `inspect --check` and `load` for the name of the tensor."""
    proof = verify(folder, asked=VerifyOptions(device="cpu")) if whole else None
    assert proof is None or (not proof.ok and any(tensor in line for line in proof.failures)), proof
    assert any(tensor in line for line in verify_files(folder)[0]), tensor
    refused(partial(opened, folder), tensor)
    if whole:
        refused(lambda: quantkit.load(folder, device="cpu"), tensor)


def attack_texts(found: Run) -> None:
    """Attack the texts of an output with its report, of a folder without hashes, a recipe, a journal and a proof."""
    folder = found.folder
    source = samples.model(folder / "source", blocks=1)
    ours, report = folder / "ours", folder / "ours" / REPORT
    quantkit.quantize(source, folder / "int4", method="rtn", group_size=128)
    quantkit.pack(folder / "int4", ours, "gptq")
    foreign = shutil.copytree(ours, folder / "foreign")
    (foreign / REPORT).unlink()
    for path in weights(foreign):
        save_file(load_file(path), path, metadata={"format": "pt"})
    (folder / "recipe.yaml").write_bytes((folder / "int4/quantkit_recipe.yaml").read_bytes())
    journal = folder / "journal.jsonl"
    for i in range(4):
        append_journal(journal, {"items": [f"a{i}"], "files": {}, "facts": {"loss": 0.5}, "bytes": i})
    lines = read_journal(journal)
    (ours / "verify.json").write_text(json.dumps(verify(ours, asked=VerifyOptions(device="cpu")).to_dict()))
    listed = [ours / name for name in load_report(ours)["files"] if not name.endswith(".safetensors")]
    recorded = load_report(ours)

    def sealed(path: Path) -> None:
        if path.suffix in (".json", ".jinja") and not (path == report and only_the_seal(path)):
            refused(partial(opened, ours), "")
        try:
            assert verify_files(ours)[0], f"{path.name} passed inspect --check"
        except CheckpointError as error:
            assert "\n" not in str(error)

    def only_the_seal(path: Path) -> bool:
        """Without its seal a report is as good as one without, except to `verify`."""
        try:
            left = json.loads(path.read_bytes())
        except ValueError:
            return False
        return SEAL not in left and all(left.get(key) == recorded[key] for key in recorded if key != SEAL)

    def unfinished(path: Path) -> None:
        try:
            left = read_journal(path)
        except CheckpointError as error:
            assert path.name in str(error)
        else:
            assert left == lines[: len(left)] and len(left) >= len(lines) - 1

    # Nothing knows what is right in these: all that can be asked is one line, or an answer.
    unlisted = answers(lambda path: describe(Checkpoint(path.parent)))
    recipe = answers(lambda path: from_mapping(recipe_files.load(path)).to_yaml())
    proof = answers(lambda path: page(recorded, load_json(path)))
    texts = [path for path in sorted(foreign.glob("*.json")) if "config" in path.name or "index" in path.name]
    targets: list[tuple[Path, Callable[[Path], None]]] = [(path, sealed) for path in (*listed, report)]
    targets += [(path, unlisted) for path in texts]
    targets += [(folder / "recipe.yaml", recipe), (journal, unfinished), (ours / "verify.json", proof)]
    with found.case("intact"):
        assert verify_files(ours)[0] == []
        opened(ours)
    with found.case("a recipe with an unknown key names it"):
        stated = yaml.safe_load((folder / "recipe.yaml").read_text())
        refused(partial(from_mapping, {**stated, "grup_size": 64}), "grup_size")
    for i, rng in found.draws("H5"):
        path, ask = rng.choice(targets)
        data = path.read_bytes()
        entries = path.suffix == ".json" and rng.random() < 0.5
        bit = rng.randrange(8 * len(data))
        other = mutated(data, rng, ODD) if entries else flipped(data, bit // 8, bit % 8)
        if other == data or (ask is sealed and _same_json(data, other) and path == report):
            found.passed(1)
            continue
        with found.case(f"{path.parent.name}/{path.name} case {i}"), changed(path, other):
            ask(path)
            if i % (20 * WHOLE) == 0:
                command = ("inspect", path.parent, "-q", *(["--check"] if ask is sealed else []))
                samples.quantkit(folder, *command, code=None)


def _same_json(a: bytes, b: bytes) -> bool:
    """Return whether two texts are one JSON object: a seal holds whatever the spaces are."""
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


def answers(work: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return the question to a file whether work ends well or in an error of one line."""

    def ask(path: Path) -> None:
        try:
            work(path)
        except QuantkitError as error:
            assert "\n" not in str(error), str(error)

    return ask


FAMILIES = [
    Family("H3", "a flipped bit of a source whose hash is known", (200, 10_000, 10_000), attack_sources),
    Family(
        "H4", "a flipped bit of an output, by verify, inspect --check and load", (200, 10_000, 10_000), attack_outputs
    ),
    Family(
        "H5", "changed configs, indexes, tokenizers, recipes, journals, proofs", (1_000, 100_000, 10**6), attack_texts
    ),
]
