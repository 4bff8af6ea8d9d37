"""Run a model block by block, with the weights of one block in memory at a time.

No code here knows an architecture. For each document the model's own forward makes masks, rotary tables and per-layer
windows, and calls its blocks in order. Blocks before the current one pass their input on. The current block receives
the stored activation of the document. After it has run, an exception ends the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.models.devices import compute_dtype, device_of
from quantkit.models.meta_model import find_blocks, find_linears, get_tensor, put_tensor, skeleton
from quantkit.models.state_names import match

#: `BlockRunner.max_length` of a model whose positions have no limit.
UNLIMITED = 2**31


class _Stop(Exception):
    """End the model's forward early."""


class BlockRunner:
    """Run the causal LM of a dense checkpoint block by block.

    `blocks`: module paths of the transformer blocks, in order. `linears`: name in the checkpoint -> `(n, k)` of every
    `nn.Linear`. `paths`: the same names -> module paths, which differ in a few published families. `tied`: linears that
    share their weight with the embeddings. `notices`: matrices that stay dense without being skipped. `dtype`: of
    weights and activations in memory, see `compute_dtype`. `max_length`: the most tokens of a sequence.

    CheckpointError if transformers cannot build the model, RecipeError for an unknown device.
    """

    def __init__(self, src: Checkpoint, *, device: str = "auto", trust_remote_code: bool = False) -> None:
        self.src = src
        self.device = device_of(device)
        self.device_name = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        self.dtype = compute_dtype(src.dtype_of_model, self.device)
        self.module = skeleton(src, self.dtype, trust_remote_code)
        self._stored, self._missing, unexpected = match(self.module, src)
        self.blocks = find_blocks(self.module)
        if not self.blocks:
            raise CheckpointError(
                f"{src.path}: {type(self.module).__name__} has no list of blocks with nn.Linear: use another model"
            )
        self.paths, self.tied, self.notices = find_linears(self.module, self._stored)
        self.linears: dict[str, tuple[int, int]] = {}
        for name, path in self.paths.items():
            n, k = get_tensor(self.module, f"{path}.weight").shape
            self.linears[name] = (n, k)
        if unexpected:
            self.notices.append(f"{unexpected[0]}: not part of the model, copied unchanged ({len(unexpected)} in all)")
        text = self.module.config.get_text_config()
        self.max_length: int = getattr(text, "max_position_embeddings", None) or UNLIMITED
        #: Known once a block has run. None: blocks return a tensor. Else they return a tuple of the hidden state and
        #: extras; each entry tells whether that extra is not None.
        self.extras: list[bool] | None = None
        self._placeholder = torch.empty(0, device=self.device)
        self._at = 0
        self._hidden: Tensor | None = None
        self._output: Tensor | None = None
        for index, path in enumerate(self.blocks):
            block = self.module.get_submodule(path)
            block.forward = partial(self._visit, index, block.forward)

    def stored(self, block: int | None) -> list[str]:
        """Return the names of a block's tensors in checkpoint order; with None, of all tensors outside the blocks."""
        paths = self.blocks if block is None else [self.blocks[block]]
        inside = {name for state, name in self._stored.items() if state.startswith(tuple(f"{p}." for p in paths))}
        return [name for name in self.src.names() if (name in inside) != (block is None)]

    def targets(self, block: int) -> list[str]:
        """Return the checkpoint names of a block's linears, in module order."""
        inside = set(self.stored(block))
        return [name for name in self.linears if f"{name}.weight" in inside]

    def prepare(self, *, embeddings: bool) -> None:
        """Load the weights that run before the blocks; without `embeddings`, zeros replace the embeddings.

        CheckpointError if the checkpoint lacks a tensor of the model.
        """
        if self._missing:
            raise CheckpointError(
                f"{self.src.path}: {self._missing[0]} is not in the checkpoint ({len(self._missing)} missing in all): "
                f"{type(self.module).__name__} cannot be run from it, use --method rtn"
            )
        table, head = self.module.get_input_embeddings(), self.module.get_output_embeddings()
        last = {f"{name}." for name, module in self.module.named_modules() if module is head}
        first = {f"{name}." for name, module in self.module.named_modules() if module is table}
        excluded = tuple(last - first if embeddings else last | first)
        inside = tuple(f"{path}." for path in self.blocks)
        for state in self._stored:
            if not state.startswith(inside + excluded):
                self._load(state)
        for name, buffer in self.module.named_buffers():
            if buffer.device.type != "meta":
                put_tensor(self.module, name, buffer.to(self.device))
        if not embeddings:
            self._drop(table)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input `[t, h]` of the first block for one document's tokens, int64 `[t]`."""
        self._at, self._hidden = 0, None
        entering = self._run(tokens)
        assert entering is not None
        return entering

    def drop_embeddings(self) -> None:
        """Free the input embeddings, after every document has entered the first block."""
        self._drop(self.module.get_input_embeddings())

    def load_block(self, index: int) -> None:
        """Read a block's parameters from the checkpoint, in the compute dtype."""
        for state in self._states(index):
            self._load(state)

    def unload_block(self, index: int) -> None:
        """Free a block's parameters."""
        for state in self._states(index):
            put_tensor(self.module, state, get_tensor(self.module, state).to("meta"))

    def replace(self, linear: str, weight: Tensor) -> None:
        """Replace the weight `[n, k]` of a linear in a loaded block."""
        put_tensor(self.module, f"{self.paths[linear]}.weight", weight.to(self.device, self.dtype))

    def run(self, index: int, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        """Run a loaded block on one document: tokens int64 `[t]`, hidden `[t, h]` -> output `[t, h]`.

        Returns None if a watcher stopped it. CheckpointError if a block needs more than the hidden state before it.
        """
        self._at, self._hidden = index, hidden.to(self.device)[None]
        return self._run(tokens)

    @contextmanager
    def watching(self, linears: Iterable[str], see: Callable[[str, Tensor], bool]) -> Iterator[None]:
        """Call `see(linear, input [..., k])` before each of `linears` runs; the run stops when `see` returns True."""

        def hook(linear: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if see(linear, args[0] if args else kwargs["input"]):
                raise _Stop

        handles = []
        for linear in linears:
            module = self.module.get_submodule(self.paths[linear])
            handles.append(module.register_forward_pre_hook(partial(hook, linear), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _run(self, tokens: Tensor) -> Tensor | None:
        self._output = None
        try:
            with torch.no_grad():
                self.module(input_ids=tokens.to(self.device)[None], use_cache=False)
        except _Stop:
            return self._output
        finally:
            self._hidden = None
        raise CheckpointError(
            f"{self.blocks[self._at]}: the model's forward never reached this block: skip its linears"
        )

    def _visit(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the forward of block `index`."""
        entering = args[0] if args else kwargs["hidden_states"]
        if index < self._at:
            extras = [self._placeholder if extra else None for extra in self.extras or ()]
            return entering if self.extras is None else (entering, *extras)
        if self._hidden is None:
            self._output = entering[0]
            raise _Stop
        if any(given is self._placeholder for given in (*args, *kwargs.values())):
            raise CheckpointError(
                f"{self.blocks[index]}: takes more from the block before than its hidden state: use --method rtn"
            )
        if args:
            args = (self._hidden, *args[1:])
        else:
            kwargs["hidden_states"] = self._hidden
        out = forward(*args, **kwargs)
        self.extras = [extra is not None for extra in out[1:]] if isinstance(out, tuple) else None
        self._output = (out if self.extras is None else out[0])[0]
        raise _Stop

    def _states(self, index: int) -> list[str]:
        return [state for state in self._stored if state.startswith(f"{self.blocks[index]}.")]

    def _load(self, state: str) -> None:
        tensor = self.src.get(self._stored[state])
        put_tensor(self.module, state, tensor.to(self.device, self.dtype if tensor.is_floating_point() else None))

    def _drop(self, table: nn.Module) -> None:
        weight = table.get_parameter("weight")
        width, dtype, device = weight.shape[1], self.dtype, self.device
        table.weight = nn.Parameter(weight.to("meta"), requires_grad=False)
        table.forward = lambda ids: torch.zeros(*ids.shape, width, dtype=dtype, device=device)
