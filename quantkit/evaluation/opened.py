"""Open and load a checkpoint for evaluations in which the model writes text."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.origin import resolve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.inference.load import load_for_evaluation
from quantkit.io.files import hash_of
from quantkit.models.meta_model import config_of, require_decoder_only, require_text
from quantkit.progress import Progress
from quantkit.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose config and tokenizer are read, its weights not yet."""

    src: Checkpoint
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase

    def load(
        self, device: str, trust_remote_code: bool, check: bool, progress: Progress
    ) -> PreTrainedModel:
        """Load the model as evaluations do."""
        options: Any = {"device": device, "trust_remote_code": trust_remote_code, "check": check}
        return load_for_evaluation(self.src, **options, progress=progress)

    def require_decoder_only(self) -> None:
        """Raise CheckpointError for an encoder-decoder, whose text does not continue its prompt."""
        require_decoder_only(
            self.src, self.config, "and this evaluation needs a model that continues its prompt"
        )

    def digest(self) -> str:
        """Return a digest of the names, sizes and times of the files: the same as long as nobody
        writes them.
        """
        stats = [(name, path.stat()) for name, path in sorted(self.src.sources().items())]
        return hash_of(
            repr(
                [self.src.path.absolute(), *((n, s.st_size, s.st_mtime_ns) for n, s in stats)]
            ).encode()
        )


def open_writer(
    checkpoint: str | Path, revision: str | None, trust_remote_code: bool, dequantize: bool = False
) -> Opened:
    """Open a checkpoint without its weights; CheckpointError if it is no model that reads and
    writes text.
    """
    src = Checkpoint(resolve(str(checkpoint), revision), trust_remote_code, dequantize=dequantize)
    config = config_of(src, trust_remote_code)
    require_text(src, config, trust_remote_code)
    return Opened(src, config, load_tokenizer(src.path))


def require_running_text(src: Checkpoint, trust_remote_code: bool) -> None:
    """Raise CheckpointError for an encoder-decoder, which predicts no running text."""
    why = "and perplexity and KL divergence are those of a running text"
    require_decoder_only(src, config_of(src, trust_remote_code), why)


def require_package(module: str, package: str, extra: str) -> None:
    """Raise QuantkitError if a package that only this evaluation needs is not installed."""
    if find_spec(module) is None:
        raise QuantkitError(
            f"the package {package} is not installed", f"pip install 'quantkit[{extra}]'"
        )
