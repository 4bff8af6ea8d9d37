"""Proof that an engine computes a checkpoint rightly: its log-probabilities are compared with the
decoded model's.

The engine reads pieces of the packaged text and continues them, so that its kernels meet many
tokens at once and few, in CUDA graphs. The decoded model computes the same log-probabilities in
float32, and again in the engine's dtype. Its second run shows the effect of rounding, which bounds
the engine's difference.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.formats import dtype_name
from quantkit.core.threads import grouped
from quantkit.errors import KernelError, Option, RecipeError, Words
from quantkit.evaluation.opened import require_package
from quantkit.evaluation.options import VerifyOptions
from quantkit.evaluation.perplexity import token_losses
from quantkit.models.meta_model import config_of, require_decoder_only
from quantkit.models.weights import device_of, load_dense_model
from quantkit.progress import Clock, Progress
from quantkit.text.sources import PACKAGED, load_documents
from quantkit.text.tokenizer import affixes, load_tokenizer, token_ids

#: Prompts, tokens of each, and tokens that the engine adds to each.
PROMPTS, LENGTH, NEW = 8, 240, 16
#: Allowed mean and largest difference of the engine, as multiples of rounding's, and the margins in
#: nats. Activations in eight bits have 2.7 to 36 times the mean (a 29 M Llama and SmolLM2-135M,
#: bfloat16 and float16).
MEAN, LARGEST = (2.0, 0.001), (4.0, 0.01)
#: Documents of the packaged text with enough tokens, and the most seconds of an engine.
DOCUMENTS, LIMIT = 40, 3600
CHILD = "import sys; from quantkit.evaluation.engine_child import main; main(sys.argv[1])"
#: Environment of the engine's process: the model runs in the asked process, and no usage report is
#: sent.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class EngineProof:
    """The comparison with an engine: differences of log-probabilities in nats, and the largest that
    are allowed.

    `layers` has the counts of the methods and kernels that served each kind of layer.
    """

    engine: str
    version: str
    dtype: str
    tokens: int
    mean: float
    largest: float
    mean_bound: float
    largest_bound: float
    layers: Mapping[str, Mapping[str, int]]

    @property
    def ok(self) -> bool:
        """Whether both differences are within their bounds."""
        return self.mean <= self.mean_bound and self.largest <= self.largest_bound

    @property
    def note(self) -> str:
        """One line about the comparison, and about who served what."""
        served = grouped((" or ".join(methods), kind) for kind, methods in self.layers.items())
        by = "; ".join(f"{', '.join(kinds)} by {methods}" for methods, kinds in served.items())
        return (
            f"{self.engine} {self.version} in {self.dtype}: log-probabilities of {self.tokens} "
            f"tokens differ by {self.mean:.2g} nats on average (bound {self.mean_bound:.2g}), by "
            f"{self.largest:.2g} at most (bound {self.largest_bound:.2g}); {by}"
        )


def require_engine(folder: Path, asked: VerifyOptions) -> None:
    """Refuse an engine that is not installed, or that cannot continue texts with this model.

    RecipeError for arguments of no engine, CheckpointError for an encoder-decoder.
    """
    engine = asked.engine
    if engine is not None:
        require_package(engine)
        src = Checkpoint(folder, asked.trust_remote_code)
        require_decoder_only(
            src,
            config_of(src),
            f"and verify asks {engine} to continue texts",
            Words("leave", Option("engine"), "out"),
        )
    elif asked.engine_args:
        raise RecipeError(
            Words(Option("engine_args"), "are of an engine, and none is named"),
            Words("add", Option("engine", "vllm")),
        )


def prove_engine(
    folder: Path, engine: str, asked: VerifyOptions, clock: Clock, progress: Progress
) -> EngineProof:
    """Compare an engine with the decoded model, which runs after the engine, in float32.

    KernelError with the engine's last error if it gives no answer.
    """
    src = Checkpoint(folder, asked.trust_remote_code)
    with clock.phase(engine):
        answer = _ask(engine, asked.engine_args or {}, folder, _prompts(src), progress)
    with clock.phase("decoded model"):
        tokens, half, device = answer["tokens"], answer["dtype"], device_of(asked.device)
        exact = _logprobs(src, tokens, torch.float32, device, progress)
        rounded = _logprobs(src, tokens, getattr(torch, half), device, progress)
        given = torch.cat([torch.tensor(each) for each in answer["logprobs"]])
        noise, off = (rounded - exact).abs(), (given - exact).abs()
        return EngineProof(
            engine,
            answer["version"],
            half,
            len(exact),
            float(off.mean()),
            float(off.max()),
            MEAN[0] * float(noise.mean()) + MEAN[1],
            LARGEST[0] * float(noise.max()) + LARGEST[1],
            answer["layers"],
        )


def _prompts(src: Checkpoint) -> list[list[int]]:
    """Cut the packaged text into prompts of the same length, with BOS if the tokenizer adds it."""
    tokenizer = load_tokenizer(src.path, src.trusted)
    text = "\n\n".join(str(document) for document in load_documents(PACKAGED).texts[:DOCUMENTS])
    ids = token_ids(tokenizer, text, special=False).tolist()
    front, _ = affixes(tokenizer)
    positions = (
        getattr(config_of(src).get_text_config(), "max_position_embeddings", None) or LENGTH + NEW
    )
    length = max(2, min(LENGTH, positions - NEW) - len(front))
    return [front + ids[start : start + length] for start in range(0, PROMPTS * length, length)]


def _ask(
    engine: str,
    arguments: Mapping[str, Any],
    folder: Path,
    prompts: list[list[int]],
    progress: Progress,
) -> dict[str, Any]:
    """Start the engine in a process of its own; KernelError with its last error if it gives no
    answer.
    """
    request = {
        "engine": {
            "model": str(folder.resolve()),
            "max_model_len": len(prompts[0]) + NEW,
            "max_num_seqs": PROMPTS,
            "enable_prefix_caching": False,
            "seed": 0,
            "gpu_memory_utilization": 0.85,  # this process may have a context there
            **arguments,
        },
        "prompts": prompts,
        "new": NEW,
    }
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    progress.note(f"{engine} opens the folder, which may take minutes")
    with (
        tempfile.TemporaryDirectory(prefix="quantkit-") as place,
        (Path(place) / "log").open("wb") as log,
    ):
        answer = Path(place) / "answer"
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(answer)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(request).encode(), timeout=LIMIT)
        except subprocess.TimeoutExpired as error:
            raise KernelError(f"{engine} gave no answer in {LIMIT} s") from error
        finally:
            with suppress(ProcessLookupError):  # with the processes that the engine started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if answer.exists():
            return dict(json.loads(answer.read_bytes()))
        said = (Path(place) / "log").read_text(errors="replace").strip()
    progress.detail(said)
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in said.splitlines()]  # torch marks them
    errors = [line for line in lines if re.search(r"^\S*(Error|Exception)\b", line)] or lines
    raise KernelError(
        f"{engine} ended with code {process.returncode}: "
        f"{' '.join(errors[-1:])[:300] or 'it said nothing'}",
        "-v prints its log",
    )


def _logprobs(
    src: Checkpoint,
    sequences: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Tensor:
    """Compute the log-probabilities of each sequence's tokens except the first, `[t]` in float32 on
    the CPU.
    """
    model = load_dense_model(src, device=str(device), dtype=dtype)
    found = []
    with torch.inference_mode():
        for tokens in progress.bar(sequences, f"decoded, {dtype_name(dtype)}"):
            ids = torch.tensor(tokens, device=device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            found.append(-token_losses(logits, ids[1:]).cpu())
    return torch.cat(found)
