"""Run a model block by block, with the weights of one block in memory at a time.

It joins three parts: the match of model and stored tensors (`outline`), the weights in memory
(`weights`), the model's own forward with one block taken out (`interception`). No code here
knows an architecture.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, QuantkitError, about, reason
from quantkit.models.families import family_of
from quantkit.models.interception import (
    USE_RTN,
    Form,
    Given,
    Interception,
    Needed,
    NotReached,
    Pass,
    Passed,
    Repeated,
    State,
    Stop,
    Unused,
    independent,
    pack,
    telling,
    tensors_in,
    unpack,
    watching,
)
from quantkit.models.meta_model import require_decoder_only
from quantkit.models.modules import Norm, fused, is_norm, lists_beside, rms_norms
from quantkit.models.outline import LanguageModel
from quantkit.models.weights import BlockWeights, compute_dtype, device_of, is_fast_in_bfloat16

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BlockRunner(LanguageModel):
    """Run the language model of a dense checkpoint block by block.

    `weights`: the weights in memory. `dtype`: of weights and activations, see `compute_dtype`.
    `forms`: number of a block that has run -> the form of its outputs. `fuses_attention`: whether
    gradients may come from a GPU's fused kernels for attention. `ran_alone`: whether the last pass
    ran only the block, without reading tokens. CheckpointError as for `LanguageModel`, RecipeError
    for an unknown device.
    """

    def __init__(self, src: Checkpoint, *, device: str = "auto") -> None:
        self.device = device_of(device)
        self.device_name = (
            "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        )
        super().__init__(src, compute_dtype(src.dtype_of_model, self.device))
        self.fuses_attention = self.device.type == "cuda"
        self._begin()

    def _begin(self) -> None:
        """Begin before any block: no weight is in memory."""
        self.weights = BlockWeights(self, self.device)
        self.forms: dict[int, Form] = {}
        self._is_emptied = False
        self._checked: set[int] = set()
        self._unused: dict[int, frozenset[int]] = {}
        self._norms: dict[int, list[Norm]] = {}
        self._interception = Interception([self.module.get_submodule(path) for path in self.blocks])
        self._repeated, self.ran_alone = Repeated(), False

    def first_blocks(self, count: int) -> BlockRunner:
        """Copy a model that has not run, without all blocks but the first, for a probe; with all
        blocks, if the model holds them in several lists.
        """
        made = copy.copy(self)
        made.module = copy.deepcopy(self.module)
        made.text = cast("PreTrainedModel", made.module.get_submodule(self.text_path))
        made._begin()
        lists = {path.rpartition(".")[0] for path in self.blocks}
        if len(lists) == 1:
            made.blocks = self.blocks[:count]
            made.module.set_submodule(
                lists.pop(), nn.ModuleList(map(made.module.get_submodule, made.blocks))
            )
        return made

    def prepare(self, *, embeddings: bool) -> None:
        """Load the weights that run before the blocks; without `embeddings`, they are freed as by
        `drop_embeddings`.

        CheckpointError if the checkpoint lacks a tensor of the model, or the model cannot run block
        by block.
        """
        self.require_runnable()
        self.weights.load_before_blocks()
        if not embeddings:
            self.drop_embeddings()

    def require_runnable(self) -> None:
        """Raise CheckpointError if the checkpoint lacks a tensor of the model, or its blocks cannot
        be run one by one.

        An encoder-decoder is such a model: its decoder's blocks take its encoder's output for
        another text.
        """
        require_decoder_only(
            self.src, self.module.config, "and blocks are calibrated on one text alone", USE_RTN
        )
        kind, missing = type(self.module).__name__, self.states.missing(self.module)
        if family_of(self.module.config.model_type).is_random:
            raise CheckpointError(
                f"{kind} draws random numbers when it runs, so that two passes over a document "
                "differ",
                USE_RTN,
                subject=self.src.path,
            )
        if missing:
            raise CheckpointError(
                f"{missing[0]} is not in the checkpoint ({len(missing)} missing in all): {kind} "
                "cannot be run from it",
                "use a complete checkpoint of a family in docs/models.md",
                subject=self.src.path,
            )
        if beside := lists_beside(self.module, self.blocks):
            own = self.blocks[0].rpartition(".")[0]
            raise CheckpointError(
                f"a layer of {kind} has parts in {beside[0]} and in {own}, which cannot be run one "
                "by one",
                USE_RTN,
                subject=self.src.path,
            )

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> State:
        """Return the input of the first block for one document's tokens, int64 `[t]`.

        CheckpointError, here and from `run`, if the model's own code does not run block by block,
        given only tokens.
        """
        entering = self._pass(tokens, Pass(0, enters_only=True)).output
        assert entering is not None
        return State(entering.hidden)

    @torch.no_grad()
    def drop_embeddings(self) -> None:
        """Free the input embeddings, after every document has entered the first block; zeros
        replace them.

        Some blocks receive other tensors that depend on them: inputs of their own for each layer
        (Gemma 3n and 4), or the embeddings themselves (Zamba). There they stay.
        """
        table = self.text.get_input_embeddings()
        weight, before = table.get_parameter("weight"), self._beside()
        # One row of zeros in memory: code that adds images indexes the weight too.
        zeros = torch.zeros(1, weight.shape[1], dtype=self.dtype, device=self.device).expand(
            weight.shape
        )
        table.weight = nn.Parameter(zeros, requires_grad=False)
        self._is_emptied = all(
            torch.equal(a, b) for a, b in zip(before, self._beside(), strict=True)
        )
        if not self._is_emptied:
            table.weight = weight

    def _beside(self) -> list[Tensor]:
        """Return the tensors that the first block receives beside the hidden state, for some
        tokens.
        """
        return list(tensors_in(self._arguments(torch.arange(4), Pass(0))[:2]))

    def logits_of(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits `[t, v]` of a document from its hidden states `[t, h]` after the last
        block.

        Gradients reach the hidden states. Products are in bfloat16 where the device is fast at it.
        """
        last = len(self.blocks)
        with self.fast_products():
            passed = self._passed_on(last, State(hidden), wide=True)
            out = self._interception.run_behind(
                partial(self.text, **self._asked(tokens)), Pass(last, passed)
            )
            return cast("Tensor", out.logits[0])

    def takes_batches(self, index: int) -> bool:
        """Return True if a block can run on several documents at a time; one must have entered a
        block before.
        """
        return self._interception.batch_comes_first and not self.forms.get(index - 1, {}).get(
            "left"
        )

    @torch.no_grad()
    def run(self, index: int, tokens: Tensor, state: State) -> State | None:
        """Run a loaded block on one document, tokens int64 `[t]`, and return its outputs.

        Or on a batch, tokens `[b, t]` and hidden states `[b, t, h]`, if it `takes_batches`. `forms`
        gets its form. Returns None if a watcher stopped it. The index behind the last block runs
        what follows the blocks, up to the watcher. CheckpointError if the block needs something of
        an earlier block that was not stored.
        """
        if index == len(self.blocks):
            forward, passed = (
                partial(self.text, **self._asked(tokens)),
                self._passed_on(index, state),
            )
            with self._own_code(index - 1), suppress(Stop):
                self._interception.run_behind(forward, Pass(index, passed))
            return None
        if index and index not in self._checked:
            self._checked.add(index)
            self._require_own_input(index, tokens, state)
        try:
            output = self._run(index, tokens, self._passed_on(index, state))
        except Needed as error:
            raise CheckpointError(
                "takes from an earlier block what the next one did not use",
                USE_RTN,
                subject=self.blocks[index],
            ) from error
        if output is None:
            return None
        if index not in self._unused:
            self._unused[index] = self._find_unused(index, tokens, output)
        with about(self.blocks[index]):
            packed, self.forms[index] = pack(output, self._unused[index])
        return packed

    def run_with(
        self, index: int, tokens: Tensor, state: State, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """Run a loaded block with other `weights` (name -> `[n, k]`) of its linears, and return its
        hidden states.

        Documents are as for `run`. Gradients flow to the weights. Products are in bfloat16 where
        the device is fast at it. In a float16 model the hidden state stays in float32, as gradients
        would underflow.
        """
        passed = self._passed_on(index, state, wide=True)
        if index not in self._norms:
            self._norms[index] = (
                rms_norms(self.module.get_submodule(self.blocks[index]))
                if self.device.type == "cuda"
                else []
            )
        with self.fast_products(), self.weights.replaced(index, weights), fused(self._norms[index]):
            output = self._run(index, tokens, passed)
        assert output is not None
        return output.hidden

    def fast_products(self) -> torch.autocast:
        """Let products of any tensors be in bfloat16 where the device is fast at it."""
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=is_fast_in_bfloat16(self.device)
        )

    def watching(
        self, linears: Iterable[str], see: Callable[[str, Tensor], bool]
    ) -> AbstractContextManager[None]:
        """Call `see(linear, input [..., k])` before each of `linears` runs; the run stops when
        `see` returns True.
        """
        return watching(
            {linear: self.module.get_submodule(self.places[linear]) for linear in linears}, see
        )

    def watching_norms(self, index: int) -> AbstractContextManager[Callable[[Tensor], bool]]:
        """Return a function that tells, while a block runs, whether a tensor is the output of one
        of its norms.
        """
        block = self.module.get_submodule(self.blocks[index])
        return telling(module for module in block.modules() if is_norm(module))

    def _asked(self, tokens: Tensor) -> dict[str, Any]:
        return {"input_ids": torch.atleast_2d(tokens.to(self.device)), "use_cache": False}

    def _passed_on(self, index: int, state: State, wide: bool = False) -> Passed:
        """Copy the inputs of a block to the device; the model may change them. With `wide`, float16
        becomes float32.
        """
        form = self.forms[index - 1] if index else {"returned": None, "left": {}}
        passed = unpack(state, form, self.device)
        wide = wide and self.dtype == torch.float16
        return passed._replace(hidden=passed.hidden.float()) if wide else passed

    def _require_own_input(self, index: int, tokens: Tensor, state: State) -> None:
        """Raise CheckpointError if a block takes hidden states of earlier blocks than the last one:
        none is stored.

        The model's own code is run up to that block with two sets of such states.
        """
        try:
            plain, other = (
                self._arguments(
                    tokens,
                    Pass(
                        index,
                        self._passed_on(index, state),
                        is_disturbed=disturbed,
                        is_emptied=disturbed and self._is_emptied,
                    ),
                )
                for disturbed in (False, True)
            )
        except Exception:  # the run's own error names the missing input
            return
        first, second = (list(tensors_in(found[:2])) for found in (plain, other))
        if len(first) != len(second) or not all(map(torch.equal, first, second)):
            raise CheckpointError(
                "takes hidden states of earlier blocks, which are not stored",
                USE_RTN,
                subject=self.blocks[index],
            )

    def _find_unused(self, index: int, tokens: Tensor, output: Passed) -> frozenset[int]:
        """Find the returned values, such as attention weights, that never enter the next block.

        The model's own code is run up to that block, with a placeholder in place of each value.
        """
        returned = output.returned or []
        unused = {
            i for i, value in enumerate(returned) if next(tensors_in(value), None) is not None
        }
        while unused and index + 1 < len(self.blocks):
            replaced = [Unused.of(i) if i in unused else value for i, value in enumerate(returned)]
            try:
                self._arguments(tokens, Pass(index + 1, output._replace(returned=replaced)))
                break
            except Needed as error:
                unused.remove(error.number)
        return frozenset(unused)

    def _run(self, index: int, tokens: Tensor, passed: Passed) -> Passed | None:
        """Run a block on its stored input, and return its output; None if a watcher stopped it."""
        shape = (tokens.shape, passed.hidden.dtype, torch.is_autocast_enabled(self.device.type))
        given = self._repeated.get(index, shape, partial(self._unchanging, index, tokens, passed))
        self.ran_alone = given is not None
        if given is None:
            return self._pass(tokens, Pass(index, passed)).output
        with self._own_code(index):
            return self._interception.call(index, given, passed, tokens.ndim > 1)

    def _arguments(self, tokens: Tensor, now: Pass) -> Given:
        """Run the model up to the block of a pass, and return the arguments of that block."""
        now.enters_only = True
        given = self._pass(tokens, now).given
        assert given is not None
        return given

    def _pass(self, tokens: Tensor, now: Pass) -> Pass:
        """Run the model on tokens, `[t]` or a batch `[b, t]`, until a pass is over."""
        now.in_batch = tokens.ndim > 1
        with self._own_code(now.at):
            return self._interception.run(partial(self.text, **self._asked(tokens)), now)

    @contextmanager
    def _own_code(self, index: int) -> Iterator[None]:
        """Turn an error of the model's own code, up to a block, into a CheckpointError."""
        try:
            yield
        except NotReached:
            raise CheckpointError(
                "the model's forward never reached this block",
                "skip its linears",
                subject=self.blocks[index],
            ) from None
        except (QuantkitError, torch.OutOfMemoryError, Needed):
            raise
        except Exception as error:  # such as for a missing image, or a value of an earlier block
            if _is_ours(error):
                raise
            kind = type(self.text).__name__
            raise CheckpointError(
                f"{kind} cannot be run on tokens alone, block by block ({reason(error)})",
                USE_RTN,
                subject=self.src.path,
            ) from error

    def _unchanging(self, index: int, tokens: Tensor, passed: Passed) -> Given | None:
        """Return the arguments of a block, if neither the tokens nor the hidden state
        change them.
        """
        if passed.left or next(tensors_in(passed.returned), None) is not None:
            return None
        others = torch.arange(tokens.shape[-1]).remainder_(
            self.text.get_input_embeddings().get_parameter("weight").shape[0]
        )
        named = (
            getattr(self.text.config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")
        )
        special = [number for number in named if isinstance(number, int)][: len(others)]
        others[: len(special)] = torch.tensor(special, dtype=others.dtype)
        passes = (
            (tokens, passed._replace(hidden=passed.hidden.clone())),
            (others.expand_as(tokens), passed._replace(hidden=torch.zeros_like(passed.hidden))),
        )
        try:
            first, second = (self._arguments(ids, Pass(index, stored)) for ids, stored in passes)
        except Exception:  # code that asks more of tokens, such as an image for one of them
            return None
        return first if independent(first, second, passed.hidden) else None


def _is_ours(error: Exception) -> bool:
    """Return True if code of quantkit raised an exception, not the code of the model."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and str(at.tb_frame.f_globals.get("__name__")).startswith("quantkit.")
