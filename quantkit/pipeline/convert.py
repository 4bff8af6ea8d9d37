"""`pack` and `convert`: write the values of a quantized checkpoint in another layout.

A pool of workers reads and packs weights within a memory budget. The caller's thread writes them in
the order of the source. One more thread hashes the source's files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.origin import Recorded, name_of, origin, recorded_hashes, require_unchanged
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import heading, load as load_report
from quantkit.checkpoint.writer import SHARD_BYTES, CheckpointWriter, Item
from quantkit.core.threads import ahead
from quantkit.engines.joined import output_config
from quantkit.errors import CheckpointError, Command, Words, require_known
from quantkit.inference.load import NotTried, refusal_by_transformers
from quantkit.io import files
from quantkit.io.staging import staging
from quantkit.layouts import LAYOUTS
from quantkit.models.outside import Outside
from quantkit.pipeline.publish import finish, write
from quantkit.pipeline.repack import Repacker
from quantkit.planning.plan import Plan, plan_pack
from quantkit.planning.verdict import require_complete_source
from quantkit.progress import Clock, Progress
from quantkit.text.tokenizer import require_readable_tokenizer

#: Bytes of weights, read and packed, in memory at a time; a larger weight is processed by itself.
BUDGET = 256 * 2**20
#: Bytes of small tensors that a worker takes at a time: handing each over costs as much as packing
#: 10,000 codes.
BATCH = 4 * 2**20
#: The most workers: more would wait for the writing and the hashing thread.
MOST_WORKERS = 4
#: The key of an error that a linear may have of a run -> the event in words, and the key of the
#: mean error.
LOSSES = {
    "requantized_error": (
        "were rounded again: relative to the source's weights",
        "requantized_error",
    ),
    "scale_error": (
        "had scales that are no float16 values, rounded: relative error of the weights",
        "mean_scale_error",
    ),
}


def pack(
    checkpoint: str | Path,
    out: str | Path,
    layout: str,
    *,
    expect: str | None = None,
    pad: bool = False,
    requantize: bool = False,
    requantize_scales: bool = False,
    max_shard_size: int = SHARD_BYTES,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Rewrite a quantized checkpoint in another layout, bit for bit, into a new folder `out`;
    return its report.

    `pad` adds zeros up to a shape that the layout holds. `requantize` rounds weights again that
    cannot be converted without loss. `requantize_scales` rounds scales to float16 and leaves the
    codes. `max_shard_size` is the most bytes of one weight file. Everything else is as for
    `quantkit.pack`.
    """
    for name in filter(None, (layout, expect)):
        require_known("layout", name, LAYOUTS)
    progress = progress or Progress(quiet=True)
    clock = Clock(torch.device("cpu"))
    with clock.phase("prepare"):
        src = Checkpoint(Path(checkpoint), trust_remote_code)
        if (given := src.layout) is None:
            held = f"{src.low_bit} weights, a source" if src.low_bit else "no quantized weights"
            raise CheckpointError(
                f"holds {held}", Words("use", Command("quantize"), "first"), subject=checkpoint
            )
        if expect is not None and given.family != LAYOUTS[expect].family:
            raise CheckpointError(
                f"is in the {given.NAME} layout, not {expect}",
                f"say {given.NAME}-to-{layout}",
                subject=checkpoint,
            )
        require_readable_tokenizer(src.path)
        outside, outline = require_complete_source(src)
        planned = plan_pack(
            src,
            LAYOUTS[layout],
            out=Path(out),
            pad=pad,
            requantize=requantize,
            outside=outside,
        )
        planned.require()
        if outline is not None:  # else this would show when the folder is finished
            output, written = planned.output, LAYOUTS[layout]
            shapes = {row.module: row.shape if row.padded else None for row in output.quantized}
            config = output_config(src, written, output.schemes, shapes, None)
            stated = config["quantization_config"]
            with suppress(NotTried):
                refusal_by_transformers(outline, src, stated, dict(output.forms))
    src.notices += outside.notices()
    progress.note(*planned.notices, *outside.notices())
    known, known_files = list(src.notices), recorded_hashes(src)
    report, recorded = _begin_report(checkpoint, src, planned, outside)
    with staging(
        Path(out), resume=None, overwrite=overwrite, source=src.path, notice=src.notices.append
    ) as partial:
        writer = CheckpointWriter(
            partial,
            like=src,
            layout=LAYOUTS[layout],
            max_shard_bytes=max_shard_size,
            expected=iter(planned.output.forms),
        )
        # A signal that raised while this thread waits for another could leave a lock taken.
        with progress.loop(), _hashed_behind(src, known_files) as hashes:
            names = src.logical()
            bar = progress.bar(names, "pack", len(names))
            with closing(
                repacked(src, bar, planned, recorded, requantize, progress, requantize_scales)
            ) as items:
                layers = write(clock.around("pack", items), writer, report, clock)
            with clock.phase("hash"):
                report["layers"], report["source"]["files"] = layers, hashes()
        src.require_unchanged()  # so these are the hashes of the bytes read
        src.notices += require_unchanged(src, report["source"]["files"], known_files)
        # Those found in the data or on the disk.
        progress.note(*(line for line in src.notices if line not in known))
        for line in (lost := _losses(layers, recorded)):
            progress.warn(line)
        if lost:  # then the figures describe other values
            report.pop("evaluation", None)
        report["notices"] = list(dict.fromkeys([*report["notices"], *src.notices, *lost]))
        changed = {each["name"] for key in LOSSES for each in _lost(layers, recorded, key)}
        report["same_values"] = len(layers) - len(changed)
        return finish(
            writer, Path(out), planned.output.schemes, report, planned.share, clock, overwrite
        )


def repacked(
    src: Checkpoint,
    names: Iterable[str],
    planned: Plan,
    recorded: Mapping[str, Mapping[str, Any]],
    requantize: bool,
    progress: Progress,
    requantize_scales: bool = False,
) -> Generator[Item, None, None]:
    """Yield the tensors `names` of `src.logical()`, in that order, packed weights as `planned`.

    `recorded` has the facts of each linear from the source's report. The errors of a weight are
    raised when its item is yielded: LayoutError for data that the layout does not hold,
    CheckpointError for damaged data.
    """
    repacker = Repacker(src, planned, recorded, requantize, requantize_scales)
    yield from ahead(
        names,
        repacker.item,
        repacker.nbytes,
        workers=1 if requantize else workers(),  # rounding again uses all threads for each weight
        most=BUDGET,
        batch=BATCH,
        check=progress.check,
    )
    src.notices.extend(repacker.notices())


@contextmanager
def _hashed_behind(
    src: Checkpoint, recorded: Mapping[str, Recorded]
) -> Iterator[Callable[[], dict[str, str]]]:
    """Hash the source's files in a thread; yield a function that waits for file name -> hash.

    Files are hashed in order, so the thread also brings the workers' next bytes into the page
    cache.
    """
    with ThreadPoolExecutor(1, "quantkit-hash") as pool:
        like = {name: entry.digest for name, entry in recorded.items()}
        found = {
            name: pool.submit(files.hash_of_file, path, like.get(name))
            for name, path in src.sources().items()
        }
        try:
            yield lambda: {name: future.result() for name, future in found.items()}
        finally:
            pool.shutdown(cancel_futures=True)


def workers() -> int:
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(usable, MOST_WORKERS)


def _lost(
    layers: list[dict[str, Any]], recorded: Mapping[str, Mapping[str, Any]], key: str
) -> list[dict[str, Any]]:
    """Find the layers with an error of this run under a `key`; `recorded` has the facts of the
    source's report.
    """
    return [
        each
        for each in layers
        if key in each and each[key] != recorded.get(each["name"], {}).get(key)
    ]


def _losses(layers: list[dict[str, Any]], recorded: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Warn, in a line each, how much rounding again and rounding scales lost in this run."""
    found = []
    for key, (event, mean_key) in LOSSES.items():
        if lost := _lost(layers, recorded, key):
            worst, name = max((float(layer[key]), layer["name"]) for layer in lost)
            mean = sum(float(layer[mean_key]) for layer in lost) / len(lost)
            found.append(
                f"{len(lost)} of {len(layers)} linears {event}, mean {mean:.4g}, worst {worst:.4g} "
                f"({name})"
            )
    return found


def _begin_report(
    checkpoint: str | Path, src: Checkpoint, planned: Plan, outside: Outside
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Begin the report of a rewritten checkpoint; return it, and the facts of each layer of `src`.

    `outside` are the tensors that the model does not have. Unreadable facts of the origin become
    notices of `src`.
    """
    before, notices, schemes = load_report(src.path), list(src.notices), planned.output.schemes
    assert schemes is not None  # a plan without misfits has them
    base, unread = (before["base"], []) if before.get("base") else origin(src, checkpoint, None)
    src.notices += unread
    carried = ("recipe", "recipe_sha256", "calibration", "device", "compute_dtype", "evaluation")
    report = {
        **{key: before[key] for key in carried if key in before},
        **heading("pack", name_of(checkpoint), None, {}, base),
        "layout": planned.layout,
        "scheme": schemes.default.label,
        "dense": list(schemes.ignore),
        **outside.counted(),
        "notices": list(dict.fromkeys([*before.get("notices", []), *notices])),
        "layout_notices": list(planned.verdict.layout_remarks),
        "readers": list(planned.output.readers),
    }
    return report, {layer["name"]: layer for layer in before.get("layers", [])}
