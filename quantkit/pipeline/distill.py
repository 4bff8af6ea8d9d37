"""`distill`: scales and norms of a quantized folder, and codes if asked, learn from the unquantized
model.

Both models are in memory. The step that is best on held-out sequences is written into a new folder
(ALGORITHMS 8.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.algorithms.deviation import relative_error
from quantkit.algorithms.learned_weight import LearnedVector, LearnedWeight
from quantkit.algorithms.rtn import scale_facts
from quantkit.calibration.backward import backward, explaining, in_fixed_order
from quantkit.calibration.preflight import check_text
from quantkit.checkpoint.origin import name_of, resolve
from quantkit.checkpoint.provenance import source_hashes
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import untuned
from quantkit.checkpoint.writer import CheckpointWriter, Item
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.work_queue import WorkQueue
from quantkit.errors import CheckpointError, NumericError, RecipeError, Setting, Words
from quantkit.io.staging import staging
from quantkit.models.block_runner import BlockRunner
from quantkit.models.devices import compute_dtype
from quantkit.models.modules import get_tensor
from quantkit.pipeline.convert import begin_report, expected_names, packed_source
from quantkit.pipeline.publish import finish, write
from quantkit.pipeline.quantize import READERS, calibration_text
from quantkit.planning.memory import tuning_memory, writing_memory
from quantkit.planning.plan import plan_pack
from quantkit.planning.verdict import require_complete_source
from quantkit.progress import Clock, Progress
from quantkit.recipes.calibration_options import Calib
from quantkit.text.sequences import Calibration

INSTEAD = "keep the folder as it is"
#: The steps by default.
STEPS = 200
#: One of this many sequences is held out, at least one.
HELD_OUT = 8
#: Sequences of a step.
BATCH = 8
#: How often the held-out sequences are measured, besides before the first step.
MEASURED = 8
#: The largest steps of Adam for scales and norms, relative to their size.
SCALE_RATE, NORM_RATE = 2e-3, 1e-3
#: Adam's largest step for codes is this number divided by the number of steps, as in SignRound.
#: Because the rate rises and falls, all steps in one direction add up to about half of it. A 2:4
#: weight is far from its source, and gains more from moves than their noise costs.
CODE_TRAVEL, SPARSE_TRAVEL = 0.9, 3.6
BETAS = (0.9, 0.95)
#: Rows of logits per computation of the divergence.
ROWS = 1024


def distill(
    folder: str | Path,
    out: str | Path,
    against: str | Path,
    calib: Calib,
    *,
    steps: int = STEPS,
    codes: bool = False,
    device: str = "auto",
    overwrite: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Let a quantized folder learn from the unquantized model `against`, into a new folder `out`;
    return its report.

    `calib` names the text. `codes` lets codes learn too. Everything else is as for
    `quantkit.distill`.
    """
    if steps < 1:
        raise RecipeError(f"steps is {steps}", "use 50 to 200 steps")
    progress = progress or Progress(quiet=True)
    clock = Clock(torch.device("cpu"))
    with clock.phase("prepare"):
        src, layout = packed_source(folder, trust_remote_code)
        teacher = _unquantized(against, revision, trust_remote_code)
        outside = require_complete_source(src, trust_remote_code)
        planned = plan_pack(src, layout, out=Path(out), outside=outside.modules)
        planned.require()
        require_complete_source(teacher, trust_remote_code)
        model = BlockRunner(teacher, device=device, trust_remote_code=trust_remote_code)
        model.require_runnable()
        _require_same_model(src, model)
        tuned = {module: src.size(module) for module in src.modules()}
        tuning_memory(
            teacher, model.linears, tuned, calib.max_length, codes, model.device.type
        ).require()
        if calib.is_written:
            writing_memory(teacher, calib, model.device.type).require()
    known = list(src.notices)
    report, recorded, schemes = begin_report("distill", folder, src, planned, outside)
    report.pop("evaluation", None)  # its figures describe other values
    with staging(
        Path(out), resume=None, overwrite=overwrite, source=src.path, notice=src.notices.append
    ) as partial:
        writer = CheckpointWriter(
            partial, like=src, layout=layout, expected=expected_names(src, planned)
        )
        with progress.loop():
            with clock.phase("hash"):
                readers = READERS[model.device.type]
                report["source"]["files"], edited = source_hashes(
                    src, readers, check=progress.check
                )
            with clock.phase("load"):
                text = calibration_text(calib, teacher, model, progress, trust_remote_code)
                _require_usable(text, model)
                model.load_whole()
                student = Student(src, model, codes, progress)
            sequences = [tokens.to(model.device) for tokens in text.sequences]
            with clock.phase("distill"):
                found = student.tune(sequences, steps, calib.seed)
            read = {key: text.facts[key] for key in ("source", "seed", "max_length", "sha256")}
            report["distillation"] = {**found, "against": name_of(against), **read}
            items = clock.around("distill", student.items(recorded))
            report["layers"] = write(
                items, writer, report, clock, WorkQueue(model.device, beside=False)
            )
        src.require_unchanged()  # so the hashes are of the bytes read
        for line in (late := [*edited, *(line for line in src.notices if line not in known)]):
            progress.note(line)
        report["notices"] = list(dict.fromkeys([*report["notices"], *late, *text.notices]))
        rest = clock, overwrite, None, trust_remote_code
        return finish(writer, Path(out), schemes, report, planned.share, *rest)


def _unquantized(model: str | Path, revision: str | None, trust_remote_code: bool) -> Checkpoint:
    found = Checkpoint(resolve(str(model), revision), trust_remote_code, dequantize=True)
    if found.layout is not None:
        raise CheckpointError(
            f"is quantized itself ({found.layout.NAME})",
            "give the unquantized model",
            subject=model,
        )
    return found


def _require_same_model(src: Checkpoint, model: BlockRunner) -> None:
    """Raise CheckpointError if a folder is not the model quantized: by the shapes of linears, and
    all other tensors.

    Norms may have other values, because a folder can learn twice.
    """
    theirs, norms, packed = (
        model.src,
        model.norms(),
        {f"{module}.weight" for module in src.modules()},
    )
    names = set(theirs.names())
    for name in src.logical():
        if name in packed:
            module = name.removesuffix(".weight")
            n, k = model.linears.get(module, (0, 0))
            same = src.true_shape(name) in ((n, k), (n, src.scheme(module).padded_k(k)))
        elif name in norms:
            same = src.shape(name) == theirs.shape(name)
        else:
            own = src.get(name)  # its dtype may be that of `dense_dtype`
            same = name in names and torch.equal(
                own, theirs.as_stored(name, theirs.get(name)).to(own.dtype)
            )
        if not same:
            raise CheckpointError(
                f"differs from that of {theirs.path.name}",
                "give the model that was quantized",
                subject=name,
            )


def _require_usable(text: Calibration, model: BlockRunner) -> None:
    """Raise an error for a text or a model that does not allow learning."""
    if len(text.sequences) < 2:
        raise RecipeError(
            "one calibration sequence is held out, and there is one",
            Words("use more", Setting("samples"), "or text"),
        )
    if model.text.get_output_embeddings() is None:
        raise CheckpointError(
            f"{type(model.text).__name__} computes no distribution of tokens from text alone",
            INSTEAD,
        )
    check_text(model, text.sequences)


class Student:
    """A quantized folder that learns: `weights` and `norms` by their names in the checkpoint.

    It shares all other parameters with the unquantized model, which is loaded as a whole. On a CPU
    with AMX, products of both models are computed in bfloat16.
    """

    def __init__(
        self, src: Checkpoint, model: BlockRunner, codes: bool, progress: Progress
    ) -> None:
        self._src, self._model, self._progress, self._codes = src, model, progress, codes
        self.weights: dict[str, LearnedWeight] = {}
        packed = set(src.modules())
        for linear in (linear for linear in model.linears if linear in packed):
            progress.check()
            place = src.quantized(linear).to(model.device)
            source = _padded(model.weights.source(linear), place.shape) if codes else None
            self.weights[linear] = LearnedWeight(place, src.dtype_of_model, source)
        there = set(src.names())
        self._paths = {name: path for name, path in model.norms().items() if name in there}
        self.norms = {name: LearnedVector(src.get(name).to(model.device)) for name in self._paths}
        fast = (
            model.device.type == "cpu"
            and compute_dtype(torch.bfloat16, model.device) == torch.bfloat16
        )
        self._mixed = fast and model.dtype == torch.float32

    def items(self, recorded: Mapping[str, Mapping[str, Any]]) -> Iterator[Item]:
        """Yield every tensor of the folder, learned ones updated; `recorded` has the earlier facts
        of layers.
        """
        for name in self._src.logical():
            self._progress.check()
            linear = name.removesuffix(".weight")
            if name in self.norms:
                yield Item(name, self.norms[name].record().cpu())
            elif linear != name and linear in self.weights:
                yield Item(
                    name,
                    record := self.weights[linear].record(),
                    self._facts(linear, record, recorded),
                )
            else:
                yield Item(name, self._src.get(name))

    def _facts(
        self, linear: str, record: QuantizedTensor, recorded: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Update the facts of a layer; its losses are not recomputed, but reported as losses of
        untuned codes.
        """
        weight, counts = self._model.weights.source(linear), scale_facts(record)
        if "zeros" in counts:  # padding does not count
            counts["zeros"] -= record.codes.numel() - weight.numel()
        n, k = weight.shape
        true = {"true_shape": [n, k]} if self._src.is_padded(linear) else {}
        error = relative_error(weight, record.dequantize()[:n, :k])
        return {**untuned(recorded.get(linear, {})), **true, **counts, "relative_error": error}

    def tune(self, sequences: Sequence[Tensor], steps: int, seed: int) -> dict[str, Any]:
        """Learn for `steps` steps, and go back to the best one by the held-out sequences; return
        facts.

        Facts: steps, best_step (0: nothing was better than the start), codes (whether they were
        learned), held_out (sequences), tokens (of all steps), and kl_before and kl_after, the mean
        held-out KL divergence in nats. NumericError if the divergence is not finite,
        CheckpointError if the model's code has no gradient.
        """
        last = len(sequences) - 1
        held = [sequences[i] for i in range(last, -1, -HELD_OUT)]
        others = [sequences[i] for i in range(last) if (last - i) % HELD_OUT]
        optimizer = torch.optim.Adam(self._groups(steps), betas=BETAS)
        rates = [group["lr"] for group in optimizer.param_groups]
        learned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        draw, order = torch.Generator().manual_seed(seed), list[int]()
        before = best = self._measure(held)
        best_step, kept, tokens = 0, _copies(learned), 0
        for step in self._progress.bar(range(1, steps + 1), "distill", steps):
            while len(order) < BATCH:
                order += torch.randperm(len(others), generator=draw).tolist()
            batch, order = [others[i] for i in order[:BATCH]], order[BATCH:]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * _schedule(step, steps)
            optimizer.zero_grad()
            self._backward(batch)
            optimizer.step()
            tokens += sum(map(len, batch))
            if step == steps or step % max(1, steps // MEASURED) == 0:
                now = self._measure(held)
                self._progress.detail(f"distill: step {step}, held-out KL divergence {now:.6f}")
                if now < best:
                    best, best_step, kept = now, step, _copies(learned)
        with torch.no_grad():
            for parameter, value in zip(learned, kept, strict=True):
                parameter.copy_(value)
        facts = {
            "steps": steps,
            "best_step": best_step,
            "codes": self._codes,
            "held_out": len(held),
            "tokens": tokens,
        }
        return {**facts, "kl_before": before, "kl_after": best}

    def _groups(self, steps: int) -> list[dict[str, Any]]:
        """Return the learned parameters, grouped by learning rate."""
        weights = list(self.weights.values())
        positions: dict[bool, list[Tensor]] = {False: [], True: []}
        for weight in weights:
            if weight.positions is not None:
                positions[weight.is_sparse].append(weight.positions)
        groups = [
            {"params": [weight.factors for weight in weights], "lr": SCALE_RATE},
            {"params": [norm.moves for norm in self.norms.values()], "lr": NORM_RATE},
            {"params": positions[False], "lr": CODE_TRAVEL / steps},
            {"params": positions[True], "lr": SPARSE_TRAVEL / steps},
        ]
        return [group for group in groups if group["params"]]

    def _backward(self, documents: Sequence[Tensor]) -> None:
        """Compute the gradients of the divergence summed over all positions; weights are decoded
        once.
        """
        tensors = self._tensors()
        with explaining(self._model, INSTEAD):
            found = in_fixed_order(
                self._model, self._progress, lambda: self._gradients(documents, tensors)
            )
        torch.autograd.backward([tensors[path] for path in found], list(found.values()))

    def _gradients(
        self, documents: Sequence[Tensor], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the gradients by the weights and norms that are reached."""
        leaves = {path: tensor.detach().requires_grad_() for path, tensor in tensors.items()}
        for document in documents:
            backward(self._model, self._divergence(document, leaves))
        return {path: leaf.grad for path, leaf in leaves.items() if leaf.grad is not None}

    @torch.no_grad()
    def _measure(self, documents: Sequence[Tensor]) -> float:
        """Return the mean KL divergence at all positions of the documents, in nats."""
        tensors = self._tensors()
        with explaining(self._model, INSTEAD):
            total = in_fixed_order(
                self._model,
                self._progress,
                lambda: sum(float(self._divergence(d, tensors)) for d in documents),
            )
        return total / sum(map(len, documents))

    def _divergence(self, tokens: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return KL(unquantized || quantized) of the next-token distributions of a document, summed
        over positions.
        """
        self._progress.check()
        with self._computing():
            with torch.no_grad():
                theirs = self._model.logits(tokens, {})
            ours = self._model.logits(tokens, tensors)
        total = ours.new_zeros((), dtype=torch.float32)
        for p, q in zip(theirs.split(ROWS), ours.split(ROWS), strict=True):
            p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            total = total + (p.exp() * (p - q)).sum()
        if not bool(total.isfinite()):
            raise NumericError(
                "the divergence from the unquantized model is not finite",
                Words("give other", Setting("calib")),
            )
        return total

    def _tensors(self) -> dict[str, Tensor]:
        """Return the weights and norms of the quantized model, by path."""
        found: dict[str, Tensor] = {}
        for linear, weight in self.weights.items():
            n, k = self._model.linears[linear]
            found[f"{self._model.paths[linear]}.weight"] = weight.dense(self._model.dtype)[:n, :k]
        for name, norm in self.norms.items():
            path = self._paths[name]
            found[path] = norm.dense(get_tensor(self._model.module, path).dtype)
        return found

    def _computing(self) -> AbstractContextManager[Any]:
        """Compute products in bfloat16 where that is fast on a CPU."""
        return torch.autocast("cpu", torch.bfloat16) if self._mixed else nullcontext()


def _copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def _schedule(step: int, steps: int) -> float:
    """Return the learning rate's share of its maximum at a step of 1 to `steps`: a rise over a
    tenth, then a cosine.
    """
    return min(1.0, 10 * step / steps) * (1 + math.cos(math.pi * (step - 1) / steps)) / 2


def _padded(weight: Tensor, shape: tuple[int, int]) -> Tensor:
    return pad(weight, (0, shape[1] - weight.shape[1], 0, shape[0] - weight.shape[0]))
