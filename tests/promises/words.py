"""Help texts, printed recipes, and the error text and exit code of every mistake that users make."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import huggingface_hub
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.keys import keys_of
from quantkit.recipes.schema import RecipeKeys
from tests.promises.model import write_json
from tests.promises.outputs import CALIB, RECIPES, RTN
from tests.promises.running import REPORT, Work, group, inside

TO = "-o out -q"
#: Commands that fail, in the folder that `spoil` fills. The text and the code of each are in errors.txt.
ERRORS = (
    # Wrong usage.
    "no-such-command",
    "quantize",
    "quantize model",
    "quantize model --nonsense",
    f"quantize model --format int9 {TO}",
    f"quantize model --format fp6 --asym {TO}",
    f"quantize model --group-size many {TO}",
    f"quantize model --group-size 0 --method rtn {TO}",
    f"quantize model --method awq {TO}",
    f"quantize model --layout exl3 {TO}",
    f"quantize model --set clip=hard {TO}",
    f"quantize model --samples 0 {TO}",
    f"quantize model --override k_proj {TO}",
    f"quantize model --override k_proj=int4:g0 {TO}",
    f"quantize model --override k_proj=int7 {TO}",
    f"quantize model --skip ( {TO}",
    f"quantize model --skip .* --method rtn {TO}",
    f"quantize model --skip dwn_proj {RTN} -o out",
    f"quantize model --skip v_proj --override v_proj=int4:g64 {RTN} -o out",
    f"plan model --override v_prj=int4:g64 {RTN}",
    f"plan model --gpu h100 {RTN}",
    f"plan model --gpu-memory 1GB --device cpu {RTN}",
    f"plan model --gpu-memory 1kB {CALIB} -q",
    f"quantize model --set gptq.damp=-1 {TO}",
    f"quantize model --set gptq.damp=2 {TO}",
    f"quantize model --set calibration.seed=-1 {TO}",
    f"quantize model --act-budget lots {TO}",
    f"quantize model --device abacus --method rtn {TO}",
    f"quantize model --set prune=magnitude {TO}",
    f"quantize model --set gptq.descent=2 --method rtn {TO}",
    f"quantize model --set tune=2 --method rtn {TO}",
    f"quantize model --set output_aware=true {TO}",
    f"quantize model --set tune=2 --calib calib.txt --samples 7 --max-length 32 {TO}",
    f"quantize model --set signed=true --format fp6 {TO}",
    f"quantize model --recipe no-such-recipe {TO}",
    f"quantize model --recipe strange.yaml {TO}",
    f"quantize model --recipe twice.yaml {TO}",
    f"quantize model --recipe list.yaml {TO}",
    "run int4-rtn model -o out",
    "quantize model --dry-run",
    f"quantize model --damp 0.02 {TO}",
    f"prune model --no-true-sequential {TO}",
    f"quantize model --set gptq.dmp=0.02 {TO}",
    f"quantize model --set tune {TO}",
    f"quantize model --set gptq.refit=perhaps {TO}",
    f"quantize model --recipe columns.yaml {TO}",
    f"pack int4 {TO}",
    f"pack int4 --layout exl3 {TO}",
    "convert",
    "convert gptq-to-marlin",
    f"convert gptq-to-gold int4 {TO}",
    f"convert marlin int4 {TO}",
    f"convert marlin-to-marlin int4 {TO}",
    f"prune model --method random {TO}",
    "eval",
    "eval ppl",
    "eval kld int4 --data calib.txt",
    "eval ppl model --window 100000 --data calib.txt -q",
    "eval ppl model --window 0 --data calib.txt -q",
    "eval tasks model -q",
    "eval tasks model --tasks piqqa --data empty -q",
    "eval tasks model --tasks piqa --data empty -q",
    "compare model -o table",
    "compare model -o table --recipes int4-gptk,int4:g64:rtn -q",
    "compare model -o table --recipes int4:g64:rtn --text a=calib.txt,a=none.txt -q",
    "generate model",
    "generate model abc --max-new-tokens 0",
    "report int4 --html report.txt",
    "report int4 --png report.jpg",
    "verify",
    "inspect",
    "plan",
    # Folders that are no model.
    *(f"{command} {bad}" for command in ("inspect", "plan") for bad in ("missing", "empty", "page", "calib.txt")),
    *(f"{command} {bad} -q" for command in ("verify", "report") for bad in ("missing", "empty", "model", "calib.txt")),
    *(f"quantize {bad} --method rtn {TO}" for bad in ("missing", "empty", "page")),
    f"prune empty --method magnitude {TO}",
    f"pack missing --layout marlin {TO}",
    f"pack empty --layout marlin {TO}",
    f"pack model --layout marlin {TO}",
    f"convert gptq-to-marlin model {TO}",
    "eval ppl missing --data calib.txt -q",
    "generate missing abc -q",
    # Damaged models.
    f"quantize cut {RTN} -o out",
    f"quantize lost {RTN} -o out",
    f"quantize garbled {RTN} -o out",
    f"quantize nan {RTN} -o out",
    f"quantize nan {CALIB} {TO}",
    f"quantize outside {RTN} -o out",
    f"quantize pointer {RTN} -o out",
    f"quantize bad-json {RTN} -o out",
    f"quantize other-shape {RTN} -o out",
    f"quantize unknown-type {CALIB} {TO}",
    f"quantize unscaled {RTN} -o out",
    "plan unscaled",
    f"quantize other-method {RTN} -o out",
    "inspect other-method",
    f"pack wide-scales --layout marlin {TO}",
    "plan cut",
    "inspect cut",
    "inspect garbled",
    "verify damaged -q",
    "verify cut-int4 -q",
    "verify bad-report -q",
    "report bad-report -q",
    f"pack damaged --layout gptq {TO}",
    f"pack cut-int4 --layout gptq {TO}",
    f"pack lost-int4 --layout gptq {TO}",
    "verify int4 --against g64 -q",
    "verify int4 --against model -q",
    "verify int4 --against missing -q",
    # Quantized already, or in another layout.
    f"quantize int4 {RTN} -o out",
    f"prune int4 --method magnitude {TO}",
    "plan int4",
    f"convert gptq-to-marlin int4 {TO}",
    # What a layout cannot hold.
    *(f"pack int4 --layout {layout} {TO}" for layout in ("tcfpx",)),
    f"pack dense-int4 --layout marlin24 {TO}",
    f"convert compressed-tensors-to-marlin24-ct dense-int4 {TO}",
    f"pack asym --layout marlin {TO}",
    f"pack g64 --layout marlin {TO}",
    f"pack fp6 --layout awq {TO}",
    f"pack act-order --layout marlin {TO}",
    f"convert gptq-to-awq act-order {TO}",
    f"pack odd-int4 --layout marlin {TO}",
    f"quantize odd --group-size channel --layout marlin {RTN} -o out",
    f"quantize odd --group-size 128 {RTN} -o out",
    "plan odd --group-size channel --layout tcfpx --method rtn",
    f"quantize model --group-size 96 {RTN} -o out",
    f"quantize model --layout marlin --group-size 64 {RTN} -o out",
    f"quantize model --layout marlin --asym {RTN} -o out",
    f"quantize model --layout tcfpx {RTN} -o out",
    f"quantize model --layout gptq --format fp6 {TO}",
    f"quantize model --layout marlin24 {RTN} -o out",
    # Calibration and evaluation texts.
    f"quantize model --calib missing.txt {TO}",
    f"quantize model --calib blank.txt {TO}",
    f"quantize model --calib calib.txt --samples 1000 {TO}",
    f"quantize model --calib calib.txt --set calibration.lengths=fixed --samples 1000 {TO}",
    f"quantize model --calib calib.md {TO}",
    f"quantize untold {CALIB} {TO}",
    "eval ppl model --data missing.txt -q",
    "eval ppl model --data blank.txt -q",
    # Output folders and files.
    f"quantize model {RTN} -o there",
    f"plan model {RTN} -o there",
    "pack int4 --layout gptq -o there -q",
    "prune model --method magnitude -o there -q",
    "pack int4 --layout gptq -o calib.txt -q",
    "pack int4 --layout gptq -o missing/deep/out -q",
    "pack int4 --layout gptq -o int4 -q",
    "pack int4 --layout gptq -o int4 --overwrite -q",
    "pack int4 --layout gptq -o int4/inner -q",
    "demo -o there -q",
    "report int4 --html missing/report.html -q",
    f"quantize model --resume {RTN} -o there",
    "pack int4 --layout gptq --max-shard-size none -o out -q",
    # Thresholds.
    "eval ppl int4 --data calib.txt --window 256 --max-perplexity 1 -q",
    "eval kld int4 --against model --data calib.txt --window 256 --max-kld 0 -q",
)
#: Parts of error texts that depend on the machine's arithmetic, or on other libraries, and what stands there instead.
FOREIGN = (
    (r"(?<=perplexity )\d[\d.]+|(?<=divergence )\d[\d.]+", "#"),
    (r"(?<=the hub does not give it )\(.*\)", "(...)"),
    (r"(?<=transformers can read )\(.*\)", "(...)"),
)


def helps(work: Work) -> dict[str, str]:
    """Return the help text of every command, every shipped recipe as it is printed, and a few other outputs."""
    found = {}
    helped = [f"{path} --help".strip() for path in ["", *(" ".join(path) for path in commands(group()))]]
    for line in [*helped, "quantize --help-all", "prune --help-all"]:
        found[line] = work.done(line).stdout.rstrip()
    for name in RECIPES:
        line = f"quantize --recipe {name} --print-recipe"
        found[line] = work.done(line).stdout.rstrip()
    work.make("int4", f"quantize pruned -o int4 {RTN}")
    for line in ("convert --list", "inspect model", "inspect int4"):
        found[line] = work.done(line).stdout.rstrip().replace(str(work.folder), "WORK")
    return found


def commands(parent: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in sorted(parent.commands.items()):
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def spoil(work: Work) -> None:
    """Write the models, checkpoints, texts and recipes of which something is wrong."""
    for name, line in {
        "int4": f"quantize pruned -o int4 {RTN}",
        "dense-int4": f"quantize model -o dense-int4 {RTN}",
        "asym": f"quantize model -o asym --asym {RTN}",
        "g64": f"quantize model -o g64 --group-size 64 {RTN}",
        "fp6": "quantize model -o fp6 --format fp6 --layout compressed-tensors --method rtn -q",
        "odd-int4": f"quantize odd -o odd-int4 --group-size channel {RTN}",
        "act-order": "pack dense-int4 --layout gptq -o act-order -q",
        "wide-scales": "pack dense-int4 --layout gptq -o wide-scales -q",
    }.items():
        work.make(name, line)
    (work / "empty").mkdir()
    (work / "there").mkdir()
    (work / "there" / "mine.txt").write_text("keep")
    (work / "page").mkdir()
    write_json(work / "page" / "config.json", {"name": "a web page"})
    (work / "blank.txt").write_text("  \n\n ")
    (work / "calib.md").write_text("text")
    (work / "strange.yaml").write_text("method: rtn\nflavour: vanilla\n")
    (work / "columns.yaml").write_text("method: rtn\nscheme: {group_size: 96}\n")
    (work / "twice.yaml").write_text("method: rtn\nmethod: gptq\n")
    (work / "list.yaml").write_text("- method\n")
    for source, name, damage in (
        ("model", "cut", cut),
        ("model", "lost", Path.unlink),
        ("model", "garbled", garble),
        ("model", "nan", poison),
        ("model", "pointer", leave_pointer),
        ("model", "unscaled", lose_scales),
        ("wide-scales", "wide-scales", widen),
        ("int4", "cut-int4", cut),
        ("int4", "lost-int4", Path.unlink),
        ("int4", "damaged", flip),
        ("act-order", "act-order", reorder),
    ):
        if name != source:
            shutil.copytree(work / source, work / name)
        damage(sorted((work / name).glob("*.safetensors"))[-1])
    for name, file, change in (
        ("outside", "model.safetensors.index.json", lead_outside),
        ("other-shape", "config.json", lambda c: c.update(hidden_size=64)),
        ("other-method", "config.json", lambda c: c.update(quantization_config={"quant_method": "torchao"})),
        ("unknown-type", "config.json", lambda c: c.update(model_type="abacus", architectures=["Abacus"])),
    ):
        changed(Path(shutil.copytree(work / "model", work / name)) / file, change)
    (Path(shutil.copytree(work / "model", work / "bad-json")) / "config.json").write_text("{")
    changed(work / "unscaled" / "config.json", lambda c: c.update(quantization_config={"quant_method": "fp8"}))
    for path in Path(shutil.copytree(work / "model", work / "untold")).glob("*token*.json"):
        path.unlink()
    (work / "act-order" / REPORT).unlink()
    (work / "wide-scales" / REPORT).unlink()
    write_json(Path(shutil.copytree(work / "int4", work / "bad-report")) / REPORT, {"layers": "many"})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def garble(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\xff" * 40 + data[48:])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)


def poison(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_proj.weight"][3, 5] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


def lose_scales(path: Path) -> None:
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, path, metadata={"format": "pt"})


def widen(path: Path) -> None:
    tensors = load_file(path)
    tensors.update({name: 1.0003 * t.float() for name, t in tensors.items() if name.endswith(".scales")})
    save_file(tensors, path, metadata={"format": "pt"})


def reorder(path: Path) -> None:
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith("down_proj.g_idx"))
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def changed(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    write_json(path, value)


def lead_outside(index: dict[str, object]) -> None:
    weights = index["weight_map"]
    assert isinstance(weights, dict)
    weights["model.norm.weight"] = "../model/model-00002-of-00002.safetensors"


def leave_pointer(path: Path) -> None:
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4460000\n")


def errors(work: Work) -> dict[str, str]:
    """Return the exit code and the error text of each wrong command; none of them may leave a folder behind."""
    if not (work / "empty").exists():
        spoil(work)
    before, found = sorted(work.folder.iterdir()), {}
    with patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True):
        for line in ERRORS:
            result = work.run(line)
            text = result.stderr.rstrip().replace(str(work.folder), "WORK")
            for pattern, instead in FOREIGN:
                text = re.sub(pattern, instead, text)
            found[line] = f"[{result.exit_code}]\n{text}"
            assert sorted(work.folder.iterdir()) == before, f"quantkit {line}"
    return found


def errors_in_python(work: Work) -> dict[str, Exception]:
    """Collect the exceptions of the Python API for the wrong commands. None may leave a folder behind.

    Commands that Python does not have are left out, and thresholds, which Python compares itself.
    """
    if not (work / "empty").exists():
        spoil(work)
    before, found = sorted(work.folder.iterdir()), {}
    with patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True), inside(work.folder):
        for line in ERRORS:
            call = None if "--max-perplexity" in line or "--max-kld" in line else in_python(line)
            if call is None:
                continue
            function, arguments, keywords = call
            try:
                made = getattr(quantkit, function)(*arguments, **keywords)
            except (QuantkitError, TypeError) as error:
                found[line] = error
            else:
                if function == "plan" and made.refusal is not None:
                    found[line] = made.refusal
                elif function == "verify" and not made.ok:
                    found[line] = CheckpointError("; ".join(made.failures))
                else:
                    raise AssertionError(f"{line}: nothing was raised")
            assert sorted(work.folder.iterdir()) == before, line
    return found


def in_python(line: str) -> tuple[str, list[Any], dict[str, Any]] | None:
    """Translate a command line into a public function, its arguments and its keywords; None without such a function."""
    command: click.Command = group()
    words, path = line.split(), []
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    function = "_".join(path)
    if function not in quantkit.__all__:
        return None
    context = click.Context(command, info_name=" ".join(path))
    try:
        options, arguments, _ = command.make_parser(context).parse_args(words)
    except click.NoSuchOption as error:
        return function, [], {error.option_name.lstrip("-"): True}
    given = {name: options[name] for name in (param.name for param in command.params) if options.get(name) is not None}
    positional = [given.pop(param.name) for param in command.params if param.name in given and is_argument(param)]
    keywords = {name: python_value(name, value) for name, value in given.items() if name not in ("quiet", "as_json")}
    for name, _, value in (pair.partition("=") for pair in keywords.pop("settings", ())):
        keyword = next((key.keyword for key in keys_of(RecipeKeys) if key.name == name), name.replace(".", "_"))
        keywords[keyword] = {"true": True, "false": False}.get(value, python_value(keyword, value))
    if function not in ("plan", "verify") and "out" in keywords and len(positional) == (1 + (function == "convert")):
        positional.append(keywords.pop("out"))
    return function, [*positional, *arguments], keywords


def is_argument(param: click.Parameter) -> bool:
    return isinstance(param, click.Argument)


def python_value(name: str, value: Any) -> Any:
    """Return the value of an option as a Python program has it."""
    if name == "override":
        return dict(text.split("=") if "=" in text else (text, "") for text in value)
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    return value
