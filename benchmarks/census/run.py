"""The census: quantize the tiny model of each family, open what came out, and compare logits.

`survey` examines one family in this process. `census` does so for many, each in a process of its own with a time
limit, so that a crash or a hang is a row and not the end.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.census import drafts, families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.cli.commands import quantkit as command_line
from quantkit.core.formats import FLOATS, FORMATS
from quantkit.core.quantized_tensor import Scheme
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import broken_rule
from quantkit.models.block_runner import BlockRunner
from quantkit.models.experts import ROUTER

METHODS = ("rtn", "gptq")
#: seconds for one family
LIMIT = 180
#: modules that every family's process needs, imported once
PRELOADED = ["benchmarks.census.run", "datasets", "compressed_tensors.compressors", "transformers.modeling_utils"]
PRELOADED += ["transformers.quantizers.auto", "transformers.models.auto.modeling_auto", "transformers.generation"]
PRELOADED += ["transformers.models.llama.modeling_llama", "quantkit.calibration.loop", "quantkit.inference.load"]
PRELOADED += ["transformers.integrations.compressed_tensors", "quantkit.inference.transformers_plugin"]
TEXT = "\n\n".join(f"Document {i}: " + "the quick brown fox jumps over the lazy dog. " * (1 + i % 3) for i in range(8))
CALIBRATION = ("--samples", "8", "--max-length", "96")
#: largest difference of logits, in standard deviations of the reference's, that counts as equal; readers that decode
#: to bfloat16 are about 0.002 away
TOLERANCE = 0.01
#: layout -> the scheme with which it is asked whether it holds a weight
SCHEMES = {
    **dict.fromkeys(LAYOUTS, Scheme(FORMATS["int4"], families.GROUP)),
    **dict.fromkeys(("tcfpx", "humming"), Scheme(FORMATS["fp6"], None)),
    "marlin": Scheme(FORMATS["int4"], 128),
    **dict.fromkeys(("marlin24", "marlin24-ct"), Scheme(FORMATS["int4"], 128, sparsity="2:4")),
}
BLOCK = re.compile(r"(^|\.)(layers|layer|h|blocks|block|layers_block|block_list|decoder_layers)\.\d+\.")
#: family -> its blocks, where they have other names
BLOCKS = {"xlm": re.compile(r"\.(attentions|ffns)\.\d+\.")}
#: family -> blocks of its towers whose names do not say so
TOWERS = {
    "cosmos3_omni": re.compile(r"^blocks\."),
    "deepseek_ocr2": re.compile(r"qwen2_model"),
    **dict.fromkeys(("vision-encoder-decoder", "speech-encoder-decoder"), re.compile(r"^encoder\.")),
}
#: family -> matrices of its blocks that do not count for the share
UNCOUNTED = {
    # the router: three layers as wide as the model, which choose the experts
    "zaya": re.compile(r"\.mlp\.gate\."),
    # a block-diagonal linear, as each group of rows has an input of its own: no layout's product computes it
    "deepseek_v4": re.compile(r"\.attn\.wo_a\."),
    # transformers writes weights of experts that hand on the token itself, and reads them nowhere
    "longcat_flash": re.compile(r"\.mlp\.experts\.[45]\."),
}
#: projections of sparse attention's indexers, which engines join and keep dense, and so does quantkit
INDEXER = re.compile(r"\.indexer\.(wk|weights_proj)\.")
#: family -> the part that runs on tokens alone, where the whole model does not
TEXT_PATHS = {"llama4": "language_model"}  # transformers 5.24 asks its output for `image_outputs`, which it lacks
#: what tells an expert's tensor from the same one of the others
EXPERT = re.compile(r"((?<=experts)|(?<=put_linear))\.\d+\.")
#: matrices with less rows or columns do not count for the share
SMALL = 64
TOWER = re.compile(
    r"vision|visual|image|audio|speech|tower|qformer|sam_model|vqmodel|patcher|projector|perceiver|resampler|"
    r"depth_decoder|connector|protein|vit\b|aligner|\bmtp\b"
)


def survey(family: str, folder: Path, methods: Iterable[str] = METHODS) -> dict[str, Any]:
    """Return the row of one family; `folder` is empty and holds what is made."""
    row: dict[str, Any] = {"family": family, "class": families.model_class(family)}
    if family in families.UNBUILDABLE:
        return {**row, "outcome": "not built", "reason": families.UNBUILDABLE[family]}
    try:
        model = families.build(family)
        row |= _anatomy(family, model)
        del model
        source = families.write(family, folder / "model", draft=True)
        row["experts_on_disk"] = _expert_names(source)
    except Exception as error:
        return {**row, "outcome": "not built", "reason": _line(error), "at": _place(error)}
    for method in methods:
        row[method] = quantized(source, folder / method, method)
    made = [folder / method for method in methods if row[method]["exit"] == 0]
    if made:
        row["layouts"] = _layouts(made[0])
    return row


def quantized(source: Path, out: Path, method: str, ask_transformers: bool = True) -> dict[str, Any]:
    """Quantize the folder `source` at `out`; return how that ended and who opens the result.

    The layout is compressed-tensors, or awq where transformers would fill that with random weights.
    """
    text = out.with_suffix(".txt")
    text.write_text(TEXT)
    calibration = ("--calib", str(text), *CALIBRATION) if method == "gptq" else ()
    options = ("--method", method, "--group-size", str(families.GROUP), "--min-share", "0", *calibration)
    # The search of scales and the descent take long, and are the same for every family.
    options += ("--set", "clip=none", "--set", "gptq.descent=0")
    for layout in ("compressed-tensors", "awq"):
        command = ["quantize", str(source), "-o", str(out), *options, "--layout", layout, "-q"]
        result = CliRunner().invoke(command_line, command)
        if "fill with random values" not in result.stderr:
            break
    row: dict[str, Any] = {"exit": result.exit_code, "layout": layout}
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return {**row, "traceback": _line(result.exception), "at": _place(result.exception)}
    if result.exit_code:
        return {**row, "error": _last_error(result.stderr).replace(str(source.parent), "")}
    row |= _share(out)
    report = json.loads((out / "quantkit_report.json").read_text())
    row |= {"named": report["readers"], "outside": report.get("outside", 0)}
    row["why_dense"] = [note for note in report["notices"] if "left dense, " in note and ROUTER not in note]
    reference = out.with_name(f"{out.name}-dense")
    runner = BlockRunner(Checkpoint(source), device="cpu")
    text = TEXT_PATHS.get(str(runner.src.config["model_type"]), runner.text_path)  # as it is calibrated
    expected = _try(lambda: _logits(_open_plain(_dense_copy(out, source, reference)), text))
    if isinstance(expected, str):
        return {**row, "reference": expected}
    if ask_transformers:
        row["transformers"] = _compare(lambda: _open_plain(out), text, expected)
    row["load"] = _compare(lambda: _open_ours(out), text, expected)
    return row


def _compare(open_model: Callable[[], nn.Module], text: str, expected: Tensor) -> str:
    """Return "equal", or how a model that `open_model` gives differs."""
    found = _try(lambda: _logits(open_model(), text))
    if isinstance(found, str):
        return re.sub(r"/\S+/(rtn|gptq): ", "", found)
    difference = float((found - expected).abs().max() / expected.std())
    return "equal" if difference < TOLERANCE else f"differs by {difference:.2g} deviations"


def _open_plain(folder: Path) -> nn.Module:
    """Open a folder by transformers alone; ValueError if a weight has no value or no place."""
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    cls: Any = getattr(transformers, name)
    model, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        stated = json.loads((folder / "config.json").read_text())
        if found := sorted(str(name) for name in info.get(kind) or () if not drafts.is_draft(str(name), stated)):
            raise ValueError(f"{len(found)} {kind.replace('_', ' ')}, first {found[0]}")
    return model.eval()


def _open_ours(folder: Path) -> nn.Module:
    import quantkit

    return quantkit.load(folder, device="cpu", dtype=torch.float32)  # processors with AMX would take bfloat16


def _logits(model: nn.Module, text: str) -> Tensor:
    """Return the logits of the module at the path `text` for some tokens; without a head, its last hidden state."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(97, 123, (1, 24), generator=generator)
    for hook in list(model._forward_pre_hooks.values()) if text else ():
        hook(model, ())  # compressed-tensors decodes the weights before the first forward of the whole model
    with torch.no_grad():
        output = model.get_submodule(text)(**_inputs(model, tokens), use_cache=False)
        logits: Tensor = output.get("logits", output.get("last_hidden_state"))
        logits = logits.float().clamp(min=-1e4)  # masked tokens
    if not logits.isfinite().all() or logits.std() < 1e-3:
        raise ValueError(f"the logits are degenerate, with a deviation of {logits.std():.2g}")
    return logits


def _inputs(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return tokens int64 `[1, t]` as a model takes them; for an encoder-decoder also what its encoder reads."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": tokens}
    config, made = model.config, torch.Generator().manual_seed(3)
    kind = model.main_input_name
    sound = 2 * getattr(config, "max_source_positions", 16), getattr(config, "num_mel_bins", 80)
    shapes = {
        "input_features": sound[::-1] if model.config.model_type == "whisper" else sound,
        "input_values": (400 * 16,),
        "flattened_patches": (8, 2 + families.HIDDEN),
        "pixel_values": (3, 56, 56),
    }
    found = {kind: tokens.flip(1) if kind == "input_ids" else torch.randn(1, *shapes[kind], generator=made)}
    if config.model_type == "udop":
        found["bbox"] = torch.zeros(*tokens.shape, 4)
    return {**found, "decoder_input_ids": tokens}


def _dense_copy(packed: Path, source: Path, out: Path) -> Path:
    """Write the folder of `packed` with every weight decoded to float32, under the names of `source`."""
    src = Checkpoint(packed)
    out.mkdir()
    for path in packed.iterdir():
        if path.suffix in (".json", ".jinja", ".model") and "safetensors" not in path.name:
            shutil.copy(path, out)
    config = json.loads((packed / "config.json").read_text())
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name in src.logical():
        is_float = name not in src.names() or src.dtype(name) in FLOATS
        tensors[name] = src.dense(name, torch.float32 if is_float else None).contiguous()
    original = Checkpoint(source)
    for name in original.names():
        if name not in tensors:
            tensors[name] = fuse(original.get(name).float(), name, tensors)
        elif tensors[name].ndim == 2:  # a Conv1D is stored as [k, n], and packed as [n, k]
            tensors[name] = _nearest(original.get(name).float(), [tensors[name], tensors[name].T]).contiguous()
    known = set(original.names())
    kept = {name: tensor for name, tensor in tensors.items() if name in known}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out


def fuse(source: Tensor, name: str, tensors: dict[str, Tensor]) -> Tensor:
    """Return the experts' decoded `tensors` in the shape of `source`, the stored tensor `name` of all experts.

    Which projections it holds, and in which order, is not asked but found: the arrangement nearest to the source is
    taken. ValueError if none is as near as GPTQ to four bits leaves it; a wrong one is farther away than zeros.
    """
    block = (BLOCK.match(name) or BLOCK.search(name) or [""])[0]
    start = name[: name.index(block) + len(block)]
    experts: dict[str, list[Tensor]] = {}
    for other in sorted((n for n in tensors if n.startswith(start) and EXPERT.search(n)), key=_numbers):
        experts.setdefault(EXPERT.sub(".", other), []).append(tensors[other])
    stacks = [torch.stack(parts) for parts in experts.values()]
    pairs = [(a, b) for a in stacks for b in stacks if a is not b and a.shape == b.shape]
    both = [torch.cat(pair, 1) for pair in pairs] + [torch.stack(pair, 2).flatten(1, 2) for pair in pairs]
    turned = [x.transpose(1, 2) for x in (*stacks, *both) if x.ndim == 3]
    shaped = [x.reshape(source.shape) for x in (*stacks, *both, *turned) if x.numel() == source.numel()]
    best = _nearest(source, [*shaped, source * 0])
    if (best - source).norm() > 0.5 * source.norm():
        raise ValueError(f"{name}: no arrangement of the experts in the output is near the source")
    return best.contiguous()


def _nearest(source: Tensor, found: Iterable[Tensor]) -> Tensor:
    """Return the tensor nearest to the source, of those of its shape."""
    return min((x for x in found if x.shape == source.shape), key=lambda x: float((x - source).norm()))


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _share(out: Path) -> dict[str, Any]:
    """Count the weights of the decoder's blocks in the files: matrices and experts.

    What has less than 64 rows or columns is no weight that a layout holds: routers, tables of state space models,
    convolutions. `dense` lists all that stays dense, these too.
    """
    src = Checkpoint(out)
    packed = large = towers = 0
    dense = Counter[str]()
    for module in src.modules():
        if _in_decoder(f"{module}.weight", src):
            packed += prod(src.true_size(module))
        else:
            towers += 1
    owned = {name for module in src.modules() for name in src.parts(module).values()}
    for name in src.names():
        shape = src.shape(name)
        if len(shape) > 1 and name not in owned and src.dtype(name) in FLOATS and _in_decoder(name, src):
            dense[re.sub(r"\.\d+\b", ".#", name)] += prod(shape)
            large += prod(shape) if min(shape[-2:]) >= SMALL else 0
    return {
        "share": round(packed / (packed + large), 4) if packed else 0.0,
        "packed_outside_decoder": towers,
        "dense": dict(dense.most_common(6)),
    }


def _in_decoder(name: str, src: Checkpoint) -> bool:
    family = str(src.config.get("model_type"))
    others = (TOWER, INDEXER, TOWERS.get(family, TOWER), UNCOUNTED.get(family, TOWER))
    if not BLOCKS.get(family, BLOCK).search(name) or any(pattern.search(name) for pattern in others):
        return False
    if drafts.is_draft(name, src.config):
        return False
    encoders = any(re.search(r"(^|\.)decoder\.(layers?|block)\.", other) for other in src.names())
    return not (encoders and re.search(r"(^|\.|_)encoder\.", name))


def _layouts(packed: Path) -> dict[str, str]:
    """Return layout -> "all", or the rules by which it does not hold linears that are packed in the folder."""
    src = Checkpoint(packed)
    found = {}
    for name, scheme in SCHEMES.items():
        rules = Counter(broken_rule(LAYOUTS[name], scheme, *src.true_size(module)) for module in src.modules())
        found[name] = "; ".join(f"{count} x {rule}" for rule, count in rules.items() if rule) or "all"
    return found


def _anatomy(family: str, model: nn.Module) -> dict[str, Any]:
    """Describe a model: its kind, and the classes of its linears and experts."""
    linears, experts = Counter[str](), {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 2 and not isinstance(module, nn.Embedding):
            linears[type(module).__name__] += 1
        wide = {n: list(p.shape) for n, p in module.named_parameters(recurse=False) if p.ndim == 3 and p.shape[2] > 8}
        if wide and "bias" not in wide and not isinstance(module, nn.Conv1d):
            experts[type(module).__name__] = wide
    return {
        "kind": _kind(family, model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "linears": dict(linears),
        "experts": experts,
    }


def _kind(family: str, model: nn.Module) -> str:
    from transformers.models.auto import modeling_auto as auto

    names = [name for name, _ in model.named_modules()]
    kinds = []
    if model.config.is_encoder_decoder:
        kinds.append("encoder-decoder")
    if any(re.search(r"(^|[._])experts?$|block_sparse_moe$", name) for name in names):
        kinds.append("MoE")
    mixers = r"mamba|\bssm|linear_attn|recurrent|rg_lru|\bconv\b|conv1d|\bmixer\.(A|in_proj)"
    inside = [name for name in names if BLOCK.search(f"{name}.") and not TOWER.search(name)]
    if any(re.search(mixers, name) for name in inside):
        kinds.append("hybrid")
    if family in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        kinds.append("VLM")
    return " ".join(kinds) or "dense"


def _expert_names(folder: Path) -> list[str]:
    names = {re.sub(r"\.\d+\b", ".#", n): Checkpoint(folder).shape(n) for n in Checkpoint(folder).names()}
    return [f"{name} {list(shape)}" for name, shape in sorted(names.items()) if re.search(r"expert|moe", name)]


def _try(what: Callable[[], Any]) -> Any:
    """Return the result, or the exception in one line."""
    try:
        return what()
    except Exception as error:
        return f"{_line(error)} at {_place(error)}"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _place(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.endswith("nn/modules/module.py")]
    ours = [f for f in frames if "/quantkit/" in f.filename]
    chosen = [*ours[-1:], *frames[-1:]]
    return " <- ".join(dict.fromkeys(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(chosen)))


def _last_error(text: str) -> str:
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith(("Error: ", "Usage: "))), 0)
    return "\n".join(lines[first:]) or "no message"


def _child(family: str, folder: str, methods: tuple[str, ...], out: str) -> None:
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    Path(out).write_text(json.dumps(survey(family, Path(folder), methods)))


def examine(
    family: str, methods: tuple[str, ...] = METHODS, limit: float = LIMIT, keep: Path | None = None
) -> dict[str, Any]:
    """Return the row of a family from a process of its own; the model and its output by RTN move to `keep`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        process = context.Process(target=_child, args=(family, folder, methods, str(out)))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
            return {"family": family, "class": families.model_class(family), "outcome": f"no end within {limit:.0f} s"}
        if keep is not None and (Path(folder) / "rtn").exists():
            (keep / family).mkdir()
            for name in ("model", "rtn"):
                shutil.move(Path(folder) / name, keep / family)
        with suppress(FileNotFoundError):
            row: dict[str, Any] = json.loads(out.read_text())
            return row
        reason = f"the process ended with code {process.exitcode}"
        return {"family": family, "class": families.model_class(family), "outcome": reason}
