"""The files of an output folder and their bytes, before any is written.

The parts that write a folder predict their files here: the writer its shards, the layout its side
file, the pipeline config.json. Only report and model card hold measured values; their size has an
upper bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from quantkit.checkpoint.origin import companions_of
from quantkit.checkpoint.reader import CONFIG, Checkpoint
from quantkit.checkpoint.shards import planned_shards
from quantkit.checkpoint.writer import texts_beside
from quantkit.core.scheme import Scheme
from quantkit.engines.joined import output_config
from quantkit.io.json_files import dump_json
from quantkit.io.model_folder import RECIPE, inside
from quantkit.layouts.base import Layout
from quantkit.layouts.schemes import Schemes
from quantkit.planning.memory import GRADIENTS
from quantkit.planning.plan import Plan
from quantkit.planning.rows import Row
from quantkit.recipes.recipe import Recipe, without_paths

#: Upper bounds of the bytes of report and model card: of any model, of a changed linear, of any
#: other tensor or file.
REPORT_BYTES, LINEAR_BYTES, NAME_BYTES = 32 * 2**10, 1024, 192


class Output(NamedTuple):
    """The bytes of each file but report and card, of all tensors but those of the last two commits,
    and of a join.

    The last two commits of a calibrated run are its last block and the tensors outside the blocks.
    While small files are joined, the largest weight file may be there twice.
    """

    files: dict[str, int]
    before_last: int
    joined: int


def output_files(
    src: Checkpoint,
    planned: Plan,
    layout: Layout | None,
    schemes: Schemes | None,
    recipe: Recipe,
    units: Iterable[Iterable[str]],
) -> Output:
    """Return the exact bytes of every file of an output but report and model card.

    `units` are the tensors of the source by commit. `layout` and `schemes` are None for a dense
    output.
    """
    rows = {f"{row.module}.weight": row for row in planned.quantized}
    written = [
        {
            key: size
            for name in unit
            for key, size in _tensors(src, layout, name, rows.get(name)).items()
        }
        for unit in units
    ]
    shards = planned_shards(written)
    weight_map = {name: file for file, (_, names) in shards.items() for name in names}
    recipe, beside = without_paths(recipe), companions_of(src).texts
    config = planned_config(src, planned, layout, schemes, recipe)
    texts = {
        **texts_beside(weight_map, planned.bytes, layout, config),
        **({} if recipe.layout is None else {RECIPE: recipe.to_yaml().encode()}),
        CONFIG: dump_json(config, special_floats=True),
    }
    files = {
        **{name: size for name, (size, _) in shards.items()},
        **{
            name: inside(src.path, name).stat().st_size if changed is None else len(changed)
            for name, changed in beside.items()
        },
        **{name: len(text) for name, text in texts.items()},
    }
    largest = max(size for size, _ in shards.values()) if len(shards) < len(written) else 0
    return Output(files, sum(sum(unit.values()) for unit in written[:-2]), largest)


def planned_config(
    src: Checkpoint, planned: Plan, layout: Layout | None, schemes: Schemes | None, recipe: Recipe
) -> dict[str, Any]:
    """Make the config.json of an output; `layout` and `schemes` are None for a dense one."""
    true_shapes = {row.module: row.shape if row.padded else None for row in planned.quantized}
    return output_config(src, layout, schemes, true_shapes, without_paths(recipe).sha256())


def report_bytes(src: Checkpoint, planned: Plan) -> int:
    """Return an upper bound of the bytes of the report and the model card of an output."""
    names = sum(len(name) for name in src.names())
    others = NAME_BYTES * (len(src.files()) + len(planned.files))
    others += sum(NAME_BYTES + len(name) for name in companions_of(src).left_out)
    lines = sum(len(line) for line in (*planned.notices, *planned.readers))
    return REPORT_BYTES + LINEAR_BYTES * len(planned.quantized) + 2 * names + others + 4 * lines


def disk_peak(
    planned: Plan, activations: int, blocks: int, mapped: int, gradients: int, sums: int
) -> dict[str, int]:
    """Return the peak bytes of a run on the disk, by part.

    `activations` are the bytes of all hidden states, 0 without calibration. Two of their snapshots
    stay until the end, and a third exists while the older one is replaced. `mapped` are the bytes
    of stores that are files. `gradients` are the bytes of one block's, 0 without any. They give way
    to `sums`, the bytes of a block's sum, which stay to the end.
    """
    saved = max(0, blocks - 1)
    written, kept = max(
        (planned.before_last, min(saved, 3) * activations),  # at the last snapshot
        (planned.total + planned.joined, min(saved, 2) * activations),  # at the end
        key=sum,
    )
    before, later = blocks * max(gradients, sums), blocks * sums
    if before > written + kept + later:
        return {"activations": mapped, GRADIENTS: before}
    return {"output": written, "activations": kept + mapped, GRADIENTS: later}


def _tensors(
    src: Checkpoint, layout: Layout | None, name: str, row: Row | None
) -> Mapping[str, int]:
    """Return the bytes of each tensor that a tensor of the source becomes."""
    if row is None or layout is None or row.scheme is None:
        return {name: src.bytes_written(name)}
    stored = layout.stored(Scheme.parse(row.scheme), *row.stored)
    return {
        f"{row.module}.{suffix}": dtype.itemsize * prod(shape)
        for suffix, (dtype, shape) in stored.items()
    }
