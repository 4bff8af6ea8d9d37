"""Run a model block by block, with the weights of one block in memory at a time.

No code here knows an architecture. For each document the model's own forward makes masks, rotary tables and per-layer
windows, and calls its blocks in order. The block before the current one returns the stored activation of the document
instead of running, and the model's own code hands that to the current block. After it has run, an exception ends the
forward.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.tensors import FLOATS
from quantkit.errors import CheckpointError, QuantkitError, about, reason
from quantkit.models.devices import compute_dtype, device_of, is_fast_in_bfloat16
from quantkit.models.experts import ROUTER, Expert, find_experts, find_routers, unfuse_experts
from quantkit.models.linears import is_linear, replace_transposed, size_of
from quantkit.models.meta_model import (
    find_blocks,
    find_linears,
    find_towers,
    float32_states,
    get_tensor,
    language_model,
    lists_beside,
    put_tensor,
    skeleton,
    text_model,
)
from quantkit.models.passing import Form, Needed, Passed, State, Unused, pack, tensors_in, unpack
from quantkit.models.state_names import match, spellings
from quantkit.models.stored_rows import follow_storage
from quantkit.models.unfused_experts import UnfusedExperts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: `BlockRunner.max_length` of a model whose positions have no limit.
UNLIMITED = 2**31
#: Linears with fewer inputs or outputs stay dense unless a recipe names them: gates and small mixers, which engines
#: keep dense.
FEWEST = 64
#: Linears of state spaces whose weight the model multiplies itself, so that no input of theirs is ever seen.
NEVER_CALLED = ("dt_proj",)
#: Linears that only an encoder's or an image's states reach.
CROSS_ATTENTION = re.compile(r"\.(encoder_attn|crossattention|cross_attn)\.")
#: Model types whose attention hashes tokens with random numbers.
RANDOM = ("reformer",)
#: The modules that hold experts for tokens of images alone.
VISION_EXPERTS = re.compile(r"\.vision_moe\.")


#: The most bytes of arguments of calls that are kept for one block: none where a CPU computes, and hides no time.
CALLS_BYTES = {"cpu": 0, "cuda": 2**28}
#: Stands for the hidden state among the arguments of a call.
_HIDDEN = object()


class _Stop(Exception):
    """End the model's forward early."""


class _Call(NamedTuple):
    """Hold the arguments of a call of a block, and the shape in which it takes its hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: torch.Size
    nbytes: int
    versions: list[int]

    def tensors(self) -> list[Tensor]:
        return list(tensors_in((self.args, self.kwargs)))

    def on(self, hidden: Tensor) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with a hidden state in its place."""
        hidden = hidden.reshape(self.shape)
        args = [hidden if value is _HIDDEN else value for value in self.args]
        return args, {name: hidden if value is _HIDDEN else value for name, value in self.kwargs.items()}


def _is_ours(error: Exception) -> bool:
    """Return whether code of quantkit raised an exception, not the code of the model that it runs."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and str(at.tb_frame.f_globals.get("__name__")).startswith("quantkit.")


def _is_plain(value: Any) -> bool:
    """Return whether an argument is a tensor or a value that no call can change."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is _HIDDEN or value is None or type(value) in (Tensor, bool, int, float, str, torch.dtype)


def _batch_axis(hidden: Tensor) -> int:
    """Return the dimension of the batch of one document: 0, or 1 if tokens or streams of hidden states come before."""
    return 1 if hidden.ndim > 2 and hidden.shape[0] > 1 and hidden.shape[1] == 1 else 0


def _by_token(hidden: Tensor) -> Tensor:
    """Return hidden states of one document with the tokens first: `[s, 1, t, h]` as `[t, s, h]`."""
    axis = _batch_axis(hidden)
    return hidden.select(axis, 0).movedim(axis if hidden.ndim > 3 else 0, 0)


def _like(hidden: Tensor, entering: Tensor) -> Tensor:
    """Return `_by_token`'s result in the dimensions of a tensor that enters a block; a batch has them already."""
    if hidden.shape == entering.shape:
        return hidden
    axis = _batch_axis(entering)
    return hidden.movedim(0, axis if entering.ndim > 3 else 0).unsqueeze(axis)


class BlockRunner:
    """Run the language model of a dense checkpoint block by block.

    `blocks`: module paths of the transformer blocks, in order. `linears`: name in the checkpoint -> `(n, k)` of every
    linear. `paths`: the same names -> module paths, which differ in a few published families. `tied`: linears that
    share their weight with the embeddings. `kept_dense`: name -> reason, of matrices that stay dense unless a recipe
    names them: routers, towers of other inputs, small linears. `experts`: name -> the expert that a linear
    belongs to. `sliced`: stored tensors that hold several experts. `notices`: matrices that stay dense without being
    skipped. `dtype`: of weights and activations in memory, see `compute_dtype`. `max_length`: the most tokens of a
    sequence. `text`: the module whose forward is run, the whole model or the outermost one that runs on tokens alone;
    `text_path`: its path. `fuses_attention`: whether gradients may come from a GPU's fused kernels for attention.

    In `src`, tensors of many experts are replaced by one tensor a linear, and weights of Conv1D by their transposes.

    CheckpointError if transformers cannot build the model, RecipeError for an unknown device.
    """

    def __init__(self, src: Checkpoint, *, device: str = "auto", trust_remote_code: bool = False) -> None:
        self.src = src
        self.device = device_of(device)
        self.device_name = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        self.dtype = compute_dtype(src.dtype_of_model, self.device)
        self.module = skeleton(src, self.dtype, trust_remote_code)
        self._in_float32 = float32_states(self.module, self.dtype)
        self.sliced = unfuse_experts(self.module, src, spellings(self.module))
        matched = match(self.module, src)
        if follow_storage(self.module, src, matched.merged):
            matched = match(self.module, src)
        replace_transposed(self.module, matched.stored, src)
        self._stored, self._merged, self._missing, unexpected = match(self.module, src)
        self._require_shapes()
        decoder, module = language_model(self.module)
        self.blocks = [f"{decoder}.{path}" if decoder else path for path in find_blocks(module)]
        if not self.blocks:
            raise CheckpointError(
                f"{src.path}: {type(self.module).__name__} has no list of blocks with nn.Linear: use another model"
            )
        self._block_of = self._find_blocks_of_names()
        self.paths, self.tied, self.notices = find_linears(self.module, self._stored)
        self.linears = {name: size_of(self.module.get_submodule(path)) for name, path in self.paths.items()}
        self.kept_dense = self._find_kept_dense(decoder)
        of_path = find_experts(self.module)
        self.experts = {name: of_path[path] for name, path in self.paths.items() if path in of_path}
        if unexpected:
            self.notices.append(f"{unexpected[0]}: not part of the model, copied unchanged ({len(unexpected)} in all)")
        text = self.module.config.get_text_config()
        positions: int = getattr(text, "max_position_embeddings", None) or UNLIMITED
        self.max_length = positions if positions > 0 else UNLIMITED
        self.text_path = text_model(self.module, self.blocks)
        self.text = cast("PreTrainedModel", self.module.get_submodule(self.text_path))
        self.fuses_attention = self.device.type == "cuda"
        #: Number of a block that has run -> the form of what it passes on.
        self.forms: dict[int, Form] = {}
        self._unused: dict[int, frozenset[int]] = {}
        self._batch_comes_first = False
        self._in_batch = False
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[dict[str, Tensor]]] = {}
        self._at = 0
        self._passed: Passed | None = None
        self._enters_only = False
        self._whole = False
        self._output: Passed | None = None
        self._key: Hashable = None
        self._version = -1
        self._calls: dict[Hashable, _Call] = {}
        for index, path in enumerate(self.blocks):
            block = self.module.get_submodule(path)
            block.forward = partial(self._visit, index, block.forward)

    def _require_shapes(self) -> None:
        """Raise CheckpointError if a stored tensor has not the shape that config.json asks for."""
        for state, name in self._stored.items():
            expected, found = tuple(get_tensor(self.module, state).shape), self.src.shape(name)
            if found != expected:
                raise CheckpointError(
                    f"{name}: is {list(found)} in the checkpoint, config.json asks for {list(expected)}"
                )

    def _find_blocks_of_names(self) -> dict[str, int]:
        """Return stored name -> number of its block, the first one if blocks share the tensor."""
        numbers = {path: index for index, path in enumerate(self.blocks)}
        found: dict[str, int] = {}
        states = [*self._stored.items(), *((each.states[0], name) for each in self._merged for name in each.names)]
        for state, name in states:
            parts = state.split(".")
            path = next((path for cut in range(len(parts)) if (path := ".".join(parts[:cut])) in numbers), None)
            if path is not None:
                found[name] = min(found.get(name, numbers[path]), numbers[path])
        return found

    def _find_kept_dense(self, decoder: str) -> dict[str, str]:
        routers, head = find_routers(self.module), self.module.get_output_embeddings()
        towers = tuple(f"{path}." for path in find_towers(self.module))
        shared = set(self.module.all_tied_weights_keys.values())
        kept: dict[str, str] = {}
        for path, module in self.module.named_modules():
            name = path if path in self.tied else self._stored.get(f"{path}.weight", "").removesuffix(".weight")
            if not name:
                continue
            if path in routers:
                kept[name] = ROUTER
            elif not is_linear(module):
                if isinstance(module, nn.Linear):
                    kept[name] = "no plain linear"
            elif module is head:
                if "lm_head" not in (name.rpartition(".")[2], path.rpartition(".")[2]):  # which recipes skip by name
                    kept[name] = "the output head"
            elif path in self.tied or f"{path}.weight" in shared:
                kept[name] = "its weight is shared"
            elif (decoder and not path.startswith(f"{decoder}.")) or path.startswith(towers):
                kept[name] = "outside the language model"
            elif min(size_of(module)) < FEWEST:
                kept[name] = f"fewer than {FEWEST} inputs or outputs"
            elif path.rpartition(".")[2] in NEVER_CALLED:
                kept[name] = "its weight is used without calling it"
        return kept

    def stored(self, block: int | None) -> list[str]:
        """Return the names of a block's tensors in checkpoint order; with None, of all tensors outside the blocks."""
        return [name for name in self.src.names() if self._block_of.get(name) == block]

    def targets(self, block: int) -> list[str]:
        """Return the checkpoint names of a block's linears, in module order."""
        inside = set(self.stored(block))
        return [name for name in self.linears if f"{name}.weight" in inside]

    def prepare(self, *, embeddings: bool) -> None:
        """Load the weights that run before the blocks; without `embeddings`, they are freed as by `drop_embeddings`.

        CheckpointError if the checkpoint lacks a tensor of the model, or a pass of the model is random.
        """
        if self.module.config.model_type in RANDOM:
            raise CheckpointError(
                f"{self.src.path}: {type(self.module).__name__} draws random numbers when it runs, so that two passes "
                "over a document differ: use --method rtn"
            )
        if self._missing:
            raise CheckpointError(
                f"{self.src.path}: {self._missing[0]} is not in the checkpoint ({len(self._missing)} missing in "
                f"all): {type(self.module).__name__} cannot be run from it, use a complete checkpoint of a family in "
                "docs/models.md"
            )
        if beside := lists_beside(self.module, self.blocks):
            raise CheckpointError(
                f"{self.src.path}: a layer of {type(self.module).__name__} has parts in {beside[0]} and in "
                f"{self.blocks[0].rpartition('.')[0]}: they cannot be run one by one, use --method rtn"
            )
        table, head = self.text.get_input_embeddings(), self.text.get_output_embeddings()
        last = {f"{name}." for name, module in self.module.named_modules() if module is head}
        first = {f"{name}." for name, module in self.module.named_modules() if module is table}
        excluded = tuple(last - first)
        inside = tuple(f"{path}." for path in self.blocks)
        self._load(lambda state: not state.startswith(inside + excluded))
        for name, buffer in self.module.named_buffers():
            if buffer.device.type != "meta":
                put_tensor(self.module, name, buffer.to(self.device))
        if not embeddings:
            self.drop_embeddings()

    def embed(self, tokens: Tensor) -> State:
        """Return the input of the first block for one document's tokens, int64 `[t]`.

        CheckpointError, here and from `run`, if the model's own code does not run on tokens alone, block by block.
        """
        entering = self._enter(0, tokens, None)
        assert entering is not None
        return State(entering.hidden)

    def drop_embeddings(self) -> None:
        """Free the input embeddings, after every document has entered the first block; zeros replace them.

        They stay in a model whose blocks receive more that depends on them, such as inputs of their own for each layer
        (Gemma 3n and 4) or the embeddings themselves (Zamba).
        """
        table = self.text.get_input_embeddings()
        weight, before = table.get_parameter("weight"), self._beside()
        # One row of zeros in memory: code that adds images indexes the weight too.
        zeros = torch.zeros(1, weight.shape[1], dtype=self.dtype, device=self.device).expand(weight.shape)
        table.weight = nn.Parameter(zeros, requires_grad=False)
        if not all(torch.equal(a, b) for a, b in zip(before, self._beside(), strict=True)):
            table.weight = weight

    def _beside(self) -> list[Tensor]:
        """Return the tensors that the first block receives beside the hidden state, for some tokens."""
        found = list[Tensor]()

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entering = args[0] if args else kwargs["hidden_states"]
            found.extend(x for x in tensors_in((args, kwargs)) if x is not entering)

        handle = self.module.get_submodule(self.blocks[0]).register_forward_pre_hook(see, with_kwargs=True)
        try:
            self._enter(0, torch.arange(4), None)
        finally:
            handle.remove()
        return found

    def load_block(self, index: int) -> None:
        """Read a block's parameters from the checkpoint, in the compute dtype."""
        ready = self._ahead.pop(index).result() if index in self._ahead else {}
        self._load(lambda state: state.startswith(f"{self.blocks[index]}."), ready)

    def read_ahead(self, index: int) -> None:
        """Begin to read a block into RAM, beside other work, for `load_block`, which raises the errors.

        For a GPU it is pinned memory, if there is any, from which `load_block` copies several times as fast.
        """

        def read(name: str) -> Tensor:
            tensor = self.src.get(name)
            with suppress(RuntimeError):  # a limit of locked memory
                return tensor.pin_memory() if self.device.type == "cuda" else tensor
            return tensor

        self._reader = self._reader or ThreadPoolExecutor(1, "quantkit-read")
        names = self.stored(index)
        self._ahead[index] = self._reader.submit(lambda: {name: read(name) for name in names})

    def unload_block(self, index: int) -> None:
        """Free a block's parameters."""
        self._calls.clear()
        for state, parameter in self.module.get_submodule(self.blocks[index]).named_parameters():
            put_tensor(self.module, f"{self.blocks[index]}.{state}", parameter.to("meta"))

    def replace(self, linear: str, weight: Tensor) -> None:
        """Replace the weight `[n, k]` of a linear in a loaded block."""
        put_tensor(self.module, f"{self.paths[linear]}.weight", weight.to(self.device, self.dtype))

    def source_weight(self, linear: str) -> Tensor:
        """Return the weight `[n, k]` of a linear in a loaded block as its source stores it, on the device.

        It is read again only if the compute dtype is another one.
        """
        loaded = get_tensor(self.module, f"{self.paths[linear]}.weight")
        name = f"{linear}.weight"
        if loaded.dtype == self.src.dtype(name) and loaded.shape == self.src.shape(name):
            return loaded.detach()
        return self.src.get(name).to(self.device)

    def norms(self) -> dict[str, str]:
        """Return name in the checkpoint -> path of the weights and biases of norms, each of which one module uses."""
        counts = Counter(self._stored.values())
        return {
            name: state
            for state, name in self._stored.items()
            if counts[name] == 1
            and "norm" in type(self.module.get_submodule(state.rpartition(".")[0])).__name__.lower()
            and len(self.src.shape(name)) == 1
            and self.src.dtype(name) in FLOATS
        }

    def load_whole(self) -> None:
        """Load all weights, for `logits`."""
        self.prepare(embeddings=True)
        self._load(lambda state: get_tensor(self.module, state).device.type == "meta")

    def logits(self, tokens: Tensor, replaced: Mapping[str, Tensor]) -> Tensor:
        """Run the whole model, which is loaded, on the tokens int64 `[t]` of a document; return its logits `[t, v]`.

        `replaced` has tensors that take the place of parameters, by path. Gradients reach them.
        """
        prefix, self._whole = f"{self.text_path}." if self.text_path else "", True
        inside = {path.removeprefix(prefix): tensor for path, tensor in replaced.items()}
        asked = {"input_ids": tokens.to(self.device)[None], "use_cache": False}
        try:
            found: Tensor = functional_call(self.text, inside, (), asked).logits[0]
        finally:
            self._whole = False
        return found

    def load_head(self) -> None:
        """Load the weights that run behind the blocks, for `logits_of`; `prepare` has loaded those before them."""
        inside = tuple(f"{path}." for path in self.blocks)
        self._load(lambda state: not state.startswith(inside) and get_tensor(self.module, state).device.type == "meta")

    def drop_head(self) -> None:
        """Free the weights of the output head, which `load_head` has loaded."""
        head = self.text.get_output_embeddings()
        if head is not None:
            for name, parameter in head.named_parameters():
                put_tensor(head, name, parameter.to("meta"))

    def logits_of(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits `[t, v]` of a document from its hidden states `[t, h]` behind the last block.

        Gradients reach the hidden states. Products are in bfloat16 where the device is fast at it.
        """
        self._at, self._output, self._in_batch, self._key = len(self.blocks), None, False, None
        passed = self._passed_on(len(self.blocks), State(hidden))
        self._passed = passed._replace(hidden=passed.hidden.float()) if self.dtype == torch.float16 else passed
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=is_fast_in_bfloat16(self.device)):
                found: Tensor = self.text(input_ids=tokens.to(self.device)[None], use_cache=False).logits[0]
        finally:
            self._passed = None
        return found

    def takes_batches(self, index: int) -> bool:
        """Return whether a block can run on the hidden states of several documents at a time.

        One document must have entered a block before.
        """
        return self._batch_comes_first and not self.forms.get(index - 1, {}).get("left")

    def run(self, index: int, tokens: Tensor, state: State, key: Hashable = None) -> State | None:
        """Run a loaded block on one document, tokens int64 `[t]`, and return what it passes on.

        Or on a batch, tokens `[b, t]` and hidden states `[b, t, h]`, if it `takes_batches`. The next runs with the same
        `key`, which names tokens and state, may call the block alone, with the masks and tables of the first run.

        `forms` gets its form. Returns None if a watcher stopped it. CheckpointError if the block needs something of an
        earlier block that was not stored.
        """
        try:
            output = self._run(index, tokens, self._passed_on(index, state), key=key)
        except Needed as error:
            raise CheckpointError(
                f"{self.blocks[index]}: takes from an earlier block what the next one did not use: use --method rtn"
            ) from error
        if output is None:
            return None
        if index not in self._unused:
            self._unused[index] = self._find_unused(index, tokens, output)
        with about(self.blocks[index]):
            packed, self.forms[index] = pack(output, self._unused[index])
        return packed

    def run_with(self, index: int, tokens: Tensor, state: State, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states that a loaded block passes on with other `weights` `[n, k]` of its linears, by name.

        Documents are as for `run`. Gradients flow to the weights. Products are in bfloat16 where the device is fast at
        it; the hidden state stays in float32 in a float16 model, whose gradients would underflow.
        """
        passed = self._passed_on(index, state)
        if self.dtype == torch.float16:
            passed = passed._replace(hidden=passed.hidden.float())
        fast = is_fast_in_bfloat16(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=fast), self._replaced(index, weights):
            output = self._run(index, tokens, passed, gradients=torch.is_grad_enabled())
        assert output is not None
        return output.hidden

    @contextmanager
    def _replaced(self, index: int, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Let tensors take the place of weights of a block's linears, wherever the block uses these.

        `functional_call` would look for them in the whole model at each call, which takes longer than a small block.
        """
        instead = {id(get_tensor(self.module, f"{self.paths[name]}.weight")): new for name, new in weights.items()}
        places: list[tuple[dict[str, Any], str, Any]] = [
            (module._parameters, name, old)
            for module in self.module.get_submodule(self.blocks[index]).modules()
            for name, old in module._parameters.items()
            if id(old) in instead
        ]
        try:
            for parameters, name, old in places:
                parameters[name] = instead[id(old)]
            yield
        finally:
            for parameters, name, old in places:
                parameters[name] = old

    def _passed_on(self, index: int, state: State) -> Passed:
        """Return copies on the device of what enters a block; the model may change them in place."""
        if index:
            return unpack(state, self.forms[index - 1], self.device)
        return Passed(state.hidden.to(self.device, copy=True), None, {})

    def _find_unused(self, index: int, tokens: Tensor, output: Passed) -> frozenset[int]:
        """Return the returned values, such as attention weights, that never enter the next block.

        The model's own code is run up to that block, with a placeholder in place of each value.
        """
        returned = output.returned or []
        unused = {i for i, value in enumerate(returned) if next(tensors_in(value), None) is not None}
        while unused and index + 1 < len(self.blocks):
            replaced = [Unused.of(i) if i in unused else value for i, value in enumerate(returned)]
            try:
                self._enter(index + 1, tokens, output._replace(returned=replaced))
                break
            except Needed as error:
                unused.remove(error.number)
        return frozenset(unused)

    def why_uncalled(self, linear: str) -> str | None:
        """Return the reason why text alone never calls a linear; None if it may."""
        if CROSS_ATTENTION.search(f".{self.paths[linear]}."):
            return "text alone never calls cross attention"
        if linear in self.experts and VISION_EXPERTS.search(f".{self.experts[linear].owner}."):
            return "text alone never calls vision experts"
        return None

    def run_on_all_tokens(self, experts: Iterable[Expert]) -> None:
        """Let these experts, and no others, also run on tokens that are routed elsewhere."""
        chosen: dict[str, set[int]] = {}
        for expert in experts:
            chosen.setdefault(expert.owner, set()).add(expert.number)
        for owner in {expert.owner for expert in self.experts.values()}:
            module = self.module.get_submodule(owner)
            assert isinstance(module, UnfusedExperts)
            module.on_all_tokens = frozenset(chosen.get(owner, ()))

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

    @contextmanager
    def watching_gradients(self, linears: Iterable[str], see: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Call `see(linear, gradient [..., n])` when a backward pass reaches the output of one of `linears`."""

        def hook(linear: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(partial(see, linear))

        modules = {linear: self.module.get_submodule(self.paths[linear]) for linear in linears}
        handles = [module.register_forward_hook(partial(hook, linear)) for linear, module in modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, index: int, tokens: Tensor, passed: Passed | None) -> Passed | None:
        """Run the model up to a block, which is not run; return its input."""
        self._enters_only = True
        try:
            return self._run(index, tokens, passed)
        finally:
            self._enters_only = False

    def _run(
        self,
        index: int,
        tokens: Tensor,
        passed: Passed | None,
        gradients: bool = False,
        key: Hashable = None,
    ) -> Passed | None:
        """Run a block on what the block before it passed on; return what it passes on, or None if a watcher stopped."""
        self._at, self._passed, self._output, self._in_batch, self._key = index, passed, None, tokens.ndim > 1, key
        self._version = -1 if passed is None else passed.hidden._version
        call = self._calls.get(key)
        given = {"input_ids": torch.atleast_2d(tokens.to(self.device)), "use_cache": False}
        try:
            with torch.set_grad_enabled(gradients):
                if call is not None and passed is not None:
                    args, kwargs = call.on(passed.hidden)
                    self.module.get_submodule(self.blocks[index])(*args, **kwargs)
                else:
                    self.text(**given)
        except _Stop:
            return self._output
        except Exception as error:  # an image may be missing, or what an earlier block left for later ones
            if isinstance(error, QuantkitError | torch.OutOfMemoryError | Needed) or _is_ours(error):
                raise
            raise CheckpointError(
                f"{self.src.path}: {type(self.text).__name__} cannot be run on tokens alone, block by block "
                f"({reason(error)}): use --method rtn"
            ) from error
        finally:
            self._passed = None
        raise CheckpointError(
            f"{self.blocks[self._at]}: the model's forward never reached this block: skip its linears"
        )

    def _visit(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the forward of block `index`."""
        if self._whole:
            return forward(*args, **kwargs)
        entering = args[0] if args else kwargs["hidden_states"]
        if index < self._at:
            assert self._passed is not None
            # Code between blocks may change what they return in place: only the last block returns the activation.
            hidden = _like(self._passed.hidden, entering) if index + 1 == self._at else entering
            return hidden if self._passed.returned is None else (hidden, *self._passed.returned)
        for given in tensors_in((args, kwargs)):
            if isinstance(given, Unused):
                raise Needed(given.number)
        if not self._in_batch:
            self._batch_comes_first = entering.ndim == 3 and len(entering) == 1
        if self._enters_only:
            self._output = Passed(_by_token(entering), None, {})
            raise _Stop
        assert self._passed is not None
        if index == 0:
            hidden = _like(self._passed.hidden, entering)
            args = tuple(hidden if given is entering else given for given in args)
            kwargs = {name: hidden if given is entering else given for name, given in kwargs.items()}
            entering = hidden
        call = None if self._key is None or self._key in self._calls else self._call(entering, args, kwargs)
        left = dict(self._passed.left)
        arguments = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        shared = {name: value for name, value in arguments.items() if isinstance(value, MutableMapping)}
        before = {name: dict(value) for name, value in shared.items()}
        for name, mapping in shared.items():
            mapping.update(left.get(name, {}))
        try:
            out = forward(*args, **kwargs)
        finally:
            # A block that a watcher stops was called as well. What it has changed in place is not kept.
            if call is not None and [tensor._version for tensor in call.tensors()] == call.versions:
                self._calls[self._key] = call
        for name, mapping in shared.items():
            if entries := {key: value for key, value in mapping.items() if before[name].get(key) is not value}:
                left[name] = entries
        first, returned = (out[0], list(out[1:])) if isinstance(out, tuple | list) else (out, None)
        self._output = Passed(first if self._in_batch else _by_token(first), returned, left)
        raise _Stop

    def _call(self, entering: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Return the call of a block if it can be made again with another hidden state.

        It can if the stored hidden state enters unchanged, and everything else is a plain value or a tensor of its own.
        """
        assert self._passed is not None
        hidden = self._passed.hidden
        entered = entering.ndim == 3 and entering.is_contiguous() and entering._version == self._version
        if not entered or entering.data_ptr() != hidden.data_ptr() or entering.numel() != hidden.numel():
            return None
        if self._passed.returned or self._passed.left:
            return None
        kept = tuple(_HIDDEN if value is entering else value for value in args)
        named = {name: _HIDDEN if value is entering else value for name, value in kwargs.items()}
        if not all(map(_is_plain, (*kept, *named.values()))):
            return None
        tensors = list(tensors_in((kept, named)))
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        most = CALLS_BYTES[self.device.type] - sum(call.nbytes for call in self._calls.values())
        storage = entering.untyped_storage().data_ptr()
        if nbytes > most or any(tensor.untyped_storage().data_ptr() == storage for tensor in tensors):
            return None
        return _Call(kept, named, entering.shape, nbytes, [tensor._version for tensor in tensors])

    def _load(self, wanted: Callable[[str], bool], ready: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Take the wanted states from the tensors that are `ready`, else from the checkpoint, in the compute dtype."""

        def read(name: str) -> Tensor:
            return ready[name] if name in ready else self.src.get(name)

        for state, name in self._stored.items():
            if wanted(state):
                self._put(state, read(name))
        for each in self._merged:
            if wanted(each.states[0]):
                for state, tensor in each.convert([read(name) for name in each.names]).items():
                    self._put(state, tensor)

    def _put(self, state: str, tensor: Tensor) -> None:
        dtype = torch.float32 if self._in_float32 and self._in_float32.search(state) else self.dtype
        kind = dtype if tensor.is_floating_point() else None
        put_tensor(self.module, state, tensor.to(self.device, kind, non_blocking=True))
