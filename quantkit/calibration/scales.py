"""Tune the scales of a whole quantized model together, by the divergence of its outputs from the
unquantized model's (ALGORITHMS 8.3).

Codes and zero points stay. The source and its quantized weights are in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, pad
from torch.utils.checkpoint import checkpoint

from quantkit.algorithms.block_tuning import FACTORS, usable_scales
from quantkit.calibration.backward import (
    PASS_BYTES,
    backward_bytes,
    explaining,
    in_fixed_order,
    strictly,
)
from quantkit.calibration.budget import DOCUMENT, TUNED_AT_ONCE, WHOLE, Sizes, stays_on_gpu
from quantkit.calibration.stages.tune import BATCH, HELD_OUT, batches
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.errors import NumericError, Setting, Words
from quantkit.models.block_runner import BlockRunner
from quantkit.models.weights import free_bytes, load_dense_model, replaced
from quantkit.progress import Progress

#: The largest step of a factor, and the warm-up steps.
RATE, WARM_UP = 3e-3, 10
#: Decay of Adam's means of gradients and of their squares.
DECAYS = (0.9, 0.99)
#: Tokens whose logits are compared at a time.
ROWS = 1024
#: The way out of every refusal.
INSTEAD = Words("use", Setting("tune_scales", 0))


def tuning_bytes(sizes: Sizes) -> dict[str, int]:
    """Count the bytes of the source, the quantized weights with their codes, and one pass."""
    width = 2 if sizes.on_gpu else 4
    tokens = max(sizes.longest, TUNED_AT_ONCE[sizes.device])
    largest = max((n * k for n, k in sizes.linears.values()), default=0)
    source = width * (sum(sizes.blocks.values()) + sum(sizes.outside))
    states = width * tokens * len(sizes.blocks) * sizes.hidden
    logits = 3 * width * tokens * sizes.vocabulary + 12 * ROWS * sizes.vocabulary
    return {
        WHOLE: source + (width + 1) * sum(n * k for n, k in sizes.linears.values()),
        DOCUMENT: sum(backward_bytes(sizes)) + states + logits + 12 * largest,
    }


class ScaleTuning:
    """The state of tuning the scales of a `packed` checkpoint towards the source of `model`.

    Gradients are of bfloat16 on a GPU, else of float32. The sequences are int64 `[t]`; every eighth
    is held out.
    """

    def __init__(
        self,
        model: BlockRunner,
        packed: Checkpoint,
        sequences: Sequence[Tensor],
        progress: Progress,
    ) -> None:
        self._model, self._progress, device = model, progress, model.device
        self._sequences = [tokens.to(device) for tokens in sequences]
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._module = load_dense_model(model.src, device=str(device), dtype=self._dtype)
        self._module.requires_grad_(False)
        self._text = self._module.get_submodule(model.text_path)
        self._scales, self._ids = dict[str, TunedScales](), dict[str, int]()
        for name in packed.modules():
            stored, record = model.src.dtype(f"{name}.weight"), packed.quantized(name).to(device)
            self._scales[name] = TunedScales(record, model.sizes[name], stored)
            self._ids[name] = id(self._module.get_parameter(f"{model.places[name]}.weight"))
        outputs = sum(model.sizes[name][0] for name in self._scales)
        passes = PASS_BYTES * BATCH * max(map(len, sequences)) * outputs
        if not stays_on_gpu(passes, int(free_bytes(device))):
            for path in model.blocks:  # a block runs again for its gradient
                block = self._module.get_submodule(path)
                block.forward = partial(
                    checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
                )

    def run(self, steps: int, seed: int) -> tuple[dict[str, QuantizedTensor], dict[str, Any]]:
        """Take all steps; return the changed records on the CPU, none if the held-out divergence
        did not fall, and the facts of the report.

        `before` and `after` are mean divergences in nats for each token. NumericError if the first
        is not finite.
        """
        before = self.held_out_divergence()
        if not math.isfinite(before):
            raise NumericError("its logits on held-out sequences are not finite", INSTEAD)
        factors = [each.factors for each in self._scales.values()]
        adam = torch.optim.Adam(factors, betas=DECAYS, eps=1e-12)
        trained = [n for n in range(len(self._sequences)) if (n + 1) % HELD_OUT]
        drawn = batches([trained], torch.Generator().manual_seed(seed % 2**63))
        for step in self._progress.bar(range(1, steps + 1), "tune scales", "step"):
            decay = (1 + math.cos(math.pi * (step - 0.5) / steps)) / 2
            adam.param_groups[0]["lr"] = RATE * min(1.0, step / WARM_UP) * decay
            task = partial(self._gradients, next(drawn))
            with explaining(self._model, INSTEAD):
                in_fixed_order(self._model, self._progress, task)
            adam.step()
            with torch.no_grad():
                for each in factors:
                    each.clamp_(*FACTORS)
        after = self.held_out_divergence()
        if not after < before:
            return {}, {"steps": 0, "before": before, "after": before}
        tuned = {name: each.tensor() for name, each in self._scales.items()}
        return tuned, {"steps": steps, "before": before, "after": after}

    @torch.no_grad()
    def held_out_divergence(self) -> float:
        """Compute the mean divergence with the scales as they would be stored, in nats."""
        held_out, weights = range(HELD_OUT - 1, len(self._sequences), HELD_OUT), self._weights()

        def total() -> float:
            found = 0.0
            for part in self._parts(held_out):
                with self._divergence(part, weights) as divergence:
                    found += float(divergence)
            return found

        found = in_fixed_order(self._model, self._progress, total)
        return found / sum(len(self._sequences[number]) for number in held_out)

    def _gradients(self, batch: Sequence[int]) -> None:
        """Give the factors the gradients of a batch's mean divergence."""
        for each in self._scales.values():
            each.factors.grad = None
        weights, size = self._weights(), sum(len(self._sequences[number]) for number in batch)
        for part in self._parts(batch):
            with self._divergence(part, weights) as divergence, strictly(self._model):
                (divergence / size).backward()

    @contextmanager
    def _divergence(self, part: Tensor, weights: Mapping[int, Tensor]) -> Iterator[Tensor]:
        """Add up the divergence of the tokens `[b, t]` of equally long sequences. The model has the
        weights meanwhile, for blocks that run again.
        """
        with torch.no_grad():
            theirs = self._logits(part)
        with replaced(self._module, weights):
            yield _Divergence.apply(self._logits(part), theirs)  # type: ignore[no-untyped-call]

    def _logits(self, part: Tensor) -> Tensor:
        found: Tensor = self._text(input_ids=part, use_cache=False).logits
        return found.flatten(0, 1)

    def _parts(self, numbers: Sequence[int]) -> Iterator[Tensor]:
        """Stack sequences of one length, on a GPU several at a time."""
        self._progress.check()
        chosen = sorted((self._sequences[number] for number in numbers), key=len)
        for length, same in groupby(chosen, len):
            count = max(1, TUNED_AT_ONCE[self._model.device.type] // length)
            yield from torch.stack([*same]).split(count)

    def _weights(self) -> dict[int, Tensor]:
        """Compute all quantized weights, by the id of the source's parameter."""
        apply: Any = _Dense.apply
        return {
            self._ids[name]: apply(each.factors, each, self._dtype)
            for name, each in self._scales.items()
        }


class TunedScales:
    """The scales of a weight of true shape `size`, which `record` may pad, and a factor for each.

    `stored` is the dtype of the source's weight.
    """

    def __init__(self, record: QuantizedTensor, size: tuple[int, int], stored: torch.dtype) -> None:
        self.record, self.size, self._stored = record, size, stored
        self.factors = torch.ones_like(record.scales, dtype=torch.float32).requires_grad_()

    def tensor(self) -> QuantizedTensor:
        """Return the record with the present scales, on the CPU."""
        return replace(self.record, scales=self.scales().half()).to(torch.device("cpu"))

    def scales(self) -> Tensor:
        """Compute the scales that would be stored, float32 `[n, groups]`."""
        zeros = None if self.record.zeros is None else self.record.zeros.float()
        scales, fmt = self.record.scales.float(), self.record.scheme.format
        return usable_scales(scales, self.factors.detach(), fmt, zeros, self._stored)


class _Dense(torch.autograd.Function):
    """Compute a weight from its scales; its gradient gives way to that of the scales at once."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, scales: TunedScales, dtype: torch.dtype) -> Tensor:
        """Return the weight `[n, k]` with the scales that would be stored."""
        ctx.record, (n, k) = scales.record, scales.size
        weight = scales.record.values().mul_(scales.scales().unsqueeze(-1)).flatten(1)
        return weight[:n, :k].to(dtype, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient by the factors, float32 `[n, groups]`, straight through the rounding
        of scales.
        """
        values, (n, k), (rows, columns) = ctx.record.values(), gradients[0].shape, ctx.record.shape
        full = pad(gradients[0].float(), (0, columns - k, 0, rows - n)).view_as(values)
        return values.mul_(full).sum(-1).mul_(ctx.record.scales), None, None


class _Divergence(torch.autograd.Function):
    """Sum the divergence of logits from those of a reference, some tokens at a time in float32."""

    @staticmethod
    def forward(ctx: Any, ours: Tensor, theirs: Tensor) -> Tensor:
        """Return the sum in nats, for logits `[t, v]`; `theirs` are overwritten."""
        total = torch.zeros((), device=ours.device)
        for mine, other in zip(ours.split(ROWS), theirs.split(ROWS), strict=True):
            log, wanted = mine.float().log_softmax(-1), other.float().log_softmax(-1)
            total += kl_div(log, wanted, reduction="sum", log_target=True)
            other.copy_(log.exp_().sub_(wanted.exp_()))  # the gradient
        ctx.slope = theirs
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient by the logits, in their dtype."""
        return ctx.slope * gradients[0], None
