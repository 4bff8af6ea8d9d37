"""A model as transformers builds it, on the meta device, with one block of weights in memory at a time.

No code here knows an architecture. The model's own forward drives everything, for each document: it makes the masks,
rotary tables and per-layer windows and calls its blocks one after another. Blocks before the one at work hand their
input on; the one at work is given the activation stored for the document instead, and once it has run, an exception
unwinds the rest. So whatever a block is called with is right, and only its own parameters need to be there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, RecipeError, reason
from quantkit.models.meta_model import match, require_complete, skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from quantkit.pipeline.recipe import Goal, Pruning, Recipe

#: What `Model.max_length` says of a model whose positions have no limit.
UNLIMITED = 2**31


class _Stop(Exception):
    """Unwinds the model's forward when nothing after this point is wanted."""


class Model:
    """The skeleton of a dense checkpoint's causal LM, and what it takes to run it block by block.

    `blocks`: module paths of the transformer blocks, in order. `linears`: name in the checkpoint -> `(n, k)` of every
    `nn.Linear`; `paths`: the same names -> where they are in the model, which is elsewhere in a few published families;
    `tied`: those that share their weight with the embeddings. `notices`: what is left dense without being asked.
    `dtype`: of weights and activations while they are computed with (float32 on a CPU, bfloat16 for a bfloat16 model if
    the CPU has AMX; the model's own on a GPU). `max_length`: the most tokens that a sequence may have.

    Raises CheckpointError if transformers cannot build the model, RecipeError for an unknown device.
    """

    def __init__(self, src: Checkpoint, *, device: str = "auto", trust_remote_code: bool = False) -> None:
        self.src = src
        self.device = device_of(device)
        self.device_name = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        self.dtype = compute_dtype(src.dtype_of_model, self.device)
        self.module = skeleton(src, self.dtype, trust_remote_code)
        self._stored, self._missing, strangers = match(self.module, src)
        self.blocks = blocks(self.module)
        if not self.blocks:
            raise CheckpointError(
                f"{src.path}: {type(self.module).__name__} has no list of blocks with nn.Linear: use another model"
            )
        self.paths, self.tied, self.notices = _survey(self.module, self._stored)
        self.linears: dict[str, tuple[int, int]] = {}
        for name, path in self.paths.items():
            n, k = _get(self.module, f"{path}.weight").shape
            self.linears[name] = (n, k)
        if strangers:
            self.notices.append(f"{strangers[0]}: not part of the model, copied unchanged ({len(strangers)} in all)")
        text = self.module.config.get_text_config()
        self.max_length: int = getattr(text, "max_position_embeddings", None) or UNLIMITED
        #: What blocks return, known once one has run: None a tensor, else a tuple of the hidden state and these extras,
        #: each either None (False) or something that only a caller who asked for it would look at (True).
        self.extras: list[bool] | None = None
        self._unwanted = torch.empty(0, device=self.device)
        self._at = 0
        self._hidden: Tensor | None = None
        self._output: Tensor | None = None
        for index, path in enumerate(self.blocks):
            block = self.module.get_submodule(path)
            block.forward = partial(self._visit, index, block.forward)

    def scheme_of(self, linear: str, recipe: Recipe | Pruning) -> Goal | None:
        """Return what a linear becomes: a recipe may call it by its name in the checkpoint or its path in the model."""
        by_path = recipe.scheme_of(self.paths[linear])
        by_name = recipe.scheme_of(linear)
        return None if by_path is None or by_name is None else by_path if by_name == recipe.scheme else by_name

    def stored(self, block: int | None) -> list[str]:
        """Return the checkpoint's names of a block's tensors in its order; with None, of all outside the blocks."""
        paths = self.blocks if block is None else [self.blocks[block]]
        inside = {name for state, name in self._stored.items() if state.startswith(tuple(f"{p}." for p in paths))}
        return [name for name in self.src.names() if (name in inside) != (block is None)]

    def targets(self, block: int) -> list[str]:
        """Return the checkpoint's names of a block's linears, in the order of the modules."""
        inside = set(self.stored(block))
        return [name for name in self.linears if f"{name}.weight" in inside]

    def prepare(self, *, embeddings: bool) -> None:
        """Load what lies outside the blocks and runs before them; without `embeddings`, zeros stand in for these.

        CheckpointError if a tensor of the model is not in the checkpoint under its name.
        """
        if self._missing:
            raise CheckpointError(
                f"{self.src.path}: {self._missing[0]} is not in the checkpoint ({len(self._missing)} missing in all): "
                f"{type(self.module).__name__} cannot be run from it, use --method rtn"
            )
        table, head = self.module.get_input_embeddings(), self.module.get_output_embeddings()
        last = {f"{name}." for name, module in self.module.named_modules() if module is head}
        first = {f"{name}." for name, module in self.module.named_modules() if module is table}
        away = tuple(last - first if embeddings else last | first)
        inside = tuple(f"{path}." for path in self.blocks)
        for state in self._stored:
            if not state.startswith(inside + away):
                self._load(state)
        for name, buffer in self.module.named_buffers():
            if buffer.device.type != "meta":
                _put(self.module, name, buffer.to(self.device))
        if not embeddings:
            self._drop(table)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the hidden state `[t, h]` that enters the first block for one document's tokens, int64 `[t]`."""
        self._at, self._hidden = 0, None
        entering = self._run(tokens)
        assert entering is not None
        return entering

    def drop_embeddings(self) -> None:
        """Free the input embeddings; they are needed no more once every document has entered the first block."""
        self._drop(self.module.get_input_embeddings())

    def load_block(self, index: int) -> None:
        """Read a block's parameters from the checkpoint, in the compute dtype."""
        for state in self._states(index):
            self._load(state)

    def unload_block(self, index: int) -> None:
        """Free a block's parameters."""
        for state in self._states(index):
            _put(self.module, state, _get(self.module, state).to("meta"))

    def replace(self, linear: str, weight: Tensor) -> None:
        """Put another weight `[n, k]` into a linear of a loaded block."""
        _put(self.module, f"{self.paths[linear]}.weight", weight.to(self.device, self.dtype))

    def run(self, index: int, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        """Run a loaded block on one document: tokens int64 `[t]`, hidden `[t, h]` -> its output `[t, h]`.

        Returns None if a watcher stopped it. CheckpointError if the block returns more than its hidden state.
        """
        self._at, self._hidden = index, hidden.to(self.device)[None]
        return self._run(tokens)

    @contextmanager
    def watching(self, linears: Iterable[str], see: Callable[[str, Tensor], bool]) -> Iterator[None]:
        """Call `see(linear, its input [..., k])` before each of `linears` runs; when it returns True the run stops."""

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
        """Stand in for the forward of block `index`."""
        entering = args[0] if args else kwargs["hidden_states"]
        if index < self._at:
            extras = [self._unwanted if extra else None for extra in self.extras or ()]
            return entering if self.extras is None else (entering, *extras)
        if self._hidden is None:
            self._output = entering[0]
            raise _Stop
        if any(given is self._unwanted for given in (*args, *kwargs.values())):
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
        _put(self.module, state, tensor.to(self.device, self.dtype if tensor.is_floating_point() else None))

    def _drop(self, table: nn.Module) -> None:
        weight = table.get_parameter("weight")
        width, dtype, device = weight.shape[1], self.dtype, self.device
        table.weight = nn.Parameter(weight.to("meta"), requires_grad=False)
        table.forward = lambda ids: torch.zeros(*ids.shape, width, dtype=dtype, device=device)


def dense_model(
    src: Checkpoint, *, device: str = "cpu", dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the whole model of a dense or quantized checkpoint in memory, every weight decoded, for evaluation.

    Loading is strict: CheckpointError for a tensor that is missing, of another shape, or not part of the model (but for
    those that the model's class itself says to ignore).
    """
    module = skeleton(src, dtype, trust_remote_code)
    stored, missing, strangers = match(module, src)
    require_complete(module, src, missing, strangers)
    target = device_of(device)
    once = {name: state for state, name in reversed(stored.items())}
    for name, state in once.items():
        # Decoded straight to `dtype`: a quantized weight is not rounded to the model's dtype in between.
        _put(module, state, src.dense(name, dtype if _get(module, state).is_floating_point() else None).to(target))
    module.tie_weights(missing_keys=set(stored) - set(once.values()), recompute_mapping=False)
    nn.Module.to(module, target)
    return module


def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder; CheckpointError if there is none that can be read without its code."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each tokenizer class fails in its own way on files that are missing or damaged
        raise CheckpointError(
            f"{folder}: has no tokenizer that transformers can read ({reason(error)}): put the model's own files there"
        ) from error


def device_of(name: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `cuda:1` means here; RecipeError for one that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"unknown device {name!r}: use auto, cpu or cuda") from error
    there = {"cpu": 1, "cuda": torch.cuda.device_count()}
    if (device.index or 0) >= there.get(device.type, 0):
        raise RecipeError(f"device {name} cannot be used here: use --device cpu")
    if device.type == "cuda":
        # Read when cuBLAS starts: without a fixed workspace equal runs may differ in the last bits (ALGORITHMS 13).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return device


def compute_dtype(model: torch.dtype, device: torch.device) -> torch.dtype:
    """Return what a model of a dtype is computed with: float32 on a CPU (bfloat16 if it has AMX), its own on a GPU."""
    if device.type == "cuda":
        return model
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return torch.bfloat16 if amx and model == torch.bfloat16 else torch.float32


def blocks(module: nn.Module) -> list[str]:
    """Return the paths of the transformer blocks: the largest list of modules of one class that hold linears."""
    best, largest = [], 0
    for path, found in module.named_modules():
        if not isinstance(found, nn.ModuleList) or len({type(child) for child in found}) != 1:
            continue
        size = sum(p.numel() for p in found.parameters())
        if size > largest and any(isinstance(m, nn.Linear) for m in found.modules()):
            best, largest = [f"{path}.{i}" for i in range(len(found))], size
    return best


def _survey(module: PreTrainedModel, stored: dict[str, str]) -> tuple[dict[str, str], set[str], list[str]]:
    """Return stored name -> module path of every linear, which ones are tied, and notices of what is left dense."""
    paths: dict[str, str] = {}
    tied: set[str] = set()
    others: dict[str, list[str]] = {}
    for path, found in module.named_modules():
        weight = f"{path}.weight"
        if isinstance(found, nn.Linear) and weight in module.all_tied_weights_keys:
            paths[path] = path
            tied.add(path)
        elif isinstance(found, nn.Linear) and weight in stored:
            paths[stored[weight].removesuffix(".weight")] = path
        elif isinstance(found, nn.Linear):
            others.setdefault("linear that is not in the checkpoint as such,", []).append(path)
    return paths, tied, _left_dense(others) + no_linears(module)


def no_linears(module: PreTrainedModel) -> list[str]:
    """Return notices of matrices that are no linears', such as experts in one parameter: they are left dense."""
    others: dict[str, list[str]] = {}
    for path, found in module.named_modules():
        if not isinstance(found, nn.Linear | nn.Embedding):
            wide = [f"{path}.{name}" for name, p in found.named_parameters(recurse=False) if p.ndim > 1]
            if wide:
                others.setdefault(f"parameter of {type(found).__name__}, which is no nn.Linear,", []).extend(wide)
    return _left_dense(others)


def _left_dense(others: dict[str, list[str]]) -> list[str]:
    return [f"{names[0]}: {what} left dense ({len(names)} in all)" for what, names in others.items()]


def _get(module: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(module.get_submodule(path), leaf)
    return found


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` the parameter or buffer called `name`; CheckpointError if its shape is another."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    expected = getattr(owner, leaf).shape
    if tensor.shape != expected:
        raise CheckpointError(
            f"{name}: is {list(tensor.shape)} in the checkpoint, config.json asks for {list(expected)}"
        )
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
