"""Save activations after blocks, and continue a stopped run after its last finished block, with the
same bits.

Activations are saved before the commit of a block, on a GPU after every eighth block (RELIABILITY
1.2, 1.3). Later committed blocks are run again with their solved weights, read from the journal's
files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from quantkit.calibration.activations import Activations
from quantkit.calibration.budget import SAVED_BLOCKS
from quantkit.calibration.run import Run, Stream, embedded
from quantkit.checkpoint.shards import committed_files
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, Words, about
from quantkit.io import files
from quantkit.io.safetensors_files import read_header


def save(
    run: Run, stream: Stream, block: int
) -> tuple[list[dict[str, Any]] | None, Callable[[], dict[str, Any]] | None]:
    """Save the activations after a block, if a snapshot is due and the block is not the last.

    Two snapshots alternate, so that the last commit's stays while another is written. The result
    has the facts of each rank's part, or the function that saves a copy.
    """
    model = run.model
    every = SAVED_BLOCKS[model.device.type]
    if block + 1 == len(model.blocks) or (block + 1) % every:
        return None, None
    parity = _parity(run, block)
    with run.clock.phase("save"):
        copied = (
            stream.activations.copied(model.device) if run.beside and run.ranks.count == 1 else None
        )
        if copied is not None:
            return None, lambda: {"activations": [copied.save(parity)]}
        facts = stream.activations.save(parity)
    with run.exchanging():
        return run.ranks.exchange(facts), None


def resume(
    run: Run, finished: Sequence[Mapping[str, Any]], done: Sequence[Mapping[str, Any]]
) -> Stream:
    """Make the stream that enters the first unfinished block. `finished` has the facts of the
    finished blocks.

    It comes from the last saved activations, through the blocks that finished after them. Without
    any, it comes from the text.
    """
    first, stream = _load_saved(run, finished)
    if stream is None:
        stream = embedded(run)
    for block in range(first, len(finished)):
        with run.clock.phase("load"):
            run.model.load_block(block)
            for linear, value in committed(run, run.model.targets(block), done):
                run.put_back(linear, value)
        stream.forward(block)
        run.model.unload_block(block)
    return stream


def _load_saved(run: Run, finished: Sequence[Mapping[str, Any]]) -> tuple[int, Stream | None]:
    """Load the last saved activations, and the number of the block that they enter; 0 and None if
    there are none.
    """
    number = max(
        (block for block, facts in enumerate(finished) if facts["activations"] is not None),
        default=-1,
    )
    if number < 0:
        return 0, None
    problem, loaded = None, None
    try:
        parts, parity = finished[number]["activations"], _parity(run, number)
        mine = range(run.first, run.first + len(run.sequences))
        loaded = Activations.load(
            run.work, run.act_budget, parity, parts, mine, run.model.device, run.ranks.rank
        )
    except CheckpointError as error:
        problem = error.typed
    problem = next((told for told in run.ranks.exchange(problem) if told is not None), None)
    if problem is not None or loaded is None:
        if run.ranks.first:
            again = f"the activations of {len(finished)} finished blocks are computed again"
            run.progress.warn(Words(problem, ":", again))
        return 0, None
    run.model.forms[number] = finished[number]["form"]
    with run.clock.phase("load"):
        run.model.prepare(embeddings=False)
    return number + 1, Stream(run, loaded)


def _parity(run: Run, block: int) -> int:
    """Number the snapshot after a block, 0 or 1."""
    return block // SAVED_BLOCKS[run.model.device.type] % 2


def committed(
    run: Run, linears: Iterable[str], done: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, QuantizedTensor | Tensor]]:
    """Yield those of `linears` that were solved, read back from the journal's files."""
    layout = run.recipe.output_layout
    paths = [run.work / name for name in committed_files(done)]
    where = {name: (path, info) for path in paths for name, info in read_header(path)[0].items()}
    for linear, goal in run.goals(linears).items():
        parts: dict[str, Tensor] = {}
        for suffix in layout.TENSORS if layout else ("weight",):
            if f"{linear}.{suffix}" in where:
                path, info = where[f"{linear}.{suffix}"]
                with files.open_regular(path) as file:
                    data = files.read_exactly(file, info.start, info.end - info.start, path)
                parts[suffix] = data.view(info.dtype).reshape(info.shape)
        with about(linear):
            if layout is not None and isinstance(goal, Scheme):
                yield linear, layout.unpack(parts, goal)
            else:
                yield linear, parts["weight"]
