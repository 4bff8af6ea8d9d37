"""The parts that evaluations share: a checkpoint whose weights are not read yet, and a journal of
answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from quantkit.checkpoint.origin import resolve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import FILE, CheckpointError, Option, QuantkitError, RecipeError, Words
from quantkit.inference.load import load_for_evaluation
from quantkit.io.files import guarded, hash_of
from quantkit.io.staging import append_journal, read_journal
from quantkit.models.meta_model import config_of, require_continuing, require_decoder_only
from quantkit.names import install
from quantkit.progress import Progress
from quantkit.recipes.options import LoadOptions
from quantkit.text.sources import load_evaluation_text
from quantkit.text.tokenizer import continued, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_T = TypeVar("_T")


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose weights are not read yet, and the options that it is loaded with."""

    src: Checkpoint
    options: LoadOptions

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer, for prompts that are continued; CheckpointError if it
        has none.
        """
        return continued(load_tokenizer(self.src.path, self.src.trusted))

    def load(self, progress: Progress) -> PreTrainedModel:
        """Load the model as evaluations do."""
        return load_for_evaluation(self.src, progress=progress, **vars(self.options))

    def text(self, source: str, option: str = "data") -> tuple[str, str]:
        """Read the text on which the model is judged, and a line that describes it; `option` of the
        command takes the text.
        """
        self.require_decoder_only()
        return load_evaluation_text(source, option)

    def require_decoder_only(self) -> None:
        """Raise CheckpointError for a model whose text does not continue its prompt."""
        config = config_of(self.src)
        require_decoder_only(
            self.src, config, "and evaluations need a model that continues its prompt"
        )
        require_continuing(self.src, config)

    def digest(self) -> str:
        """Return a digest of the names, sizes and times of the files: the same as long as nobody
        writes them.
        """
        with guarded(self.src.path):
            stats = [(name, path.stat()) for name, path in sorted(self.src.sources().items())]
        files = ((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        return hash_of(repr([self.src.path.absolute(), *files]).encode())


def open_checkpoint(
    checkpoint: str | Path, options: LoadOptions, dequantize: bool = False
) -> Opened:
    """Open a folder or a hub id without its weights."""
    path = resolve(str(checkpoint), options.revision, options.trust_remote_code)
    return Opened(Checkpoint(path, options.trust_remote_code, dequantize=dequantize), options)


def require_package(package: str) -> None:
    """Raise QuantkitError if a package that only this evaluation needs is not installed."""
    if find_spec(package.replace("-", "_")) is None:
        raise QuantkitError(f"the package {package} is not installed", install(package))


class Finished:
    """A store of computed values by name; without a `path` only in memory.

    `run` has everything that the results depend on, as JSON has it. It is the first line of the
    file. RecipeError if the file is another run's, CheckpointError if it is damaged.
    """

    def __init__(self, path: str | Path | None, run: Mapping[str, Any]) -> None:
        self._path, self._run = None if path is None else Path(path), json.loads(json.dumps(run))
        try:
            lines = read_journal(self._path) if self._path else []
        except CheckpointError as error:
            raise CheckpointError(error.rule, "remove the file", subject=path) from error
        if lines and lines[0] != {"run": self._run}:
            before = lines[0].get("run", {})
            keys = [
                key
                for key in self._run
                if not isinstance(before, dict) or before.get(key) != self._run[key]
            ]
            raise RecipeError(
                f"belongs to another run ({', '.join(keys) or 'version'} changed)",
                Words("name another file with", Option("journal", FILE)),
                subject=path,
            )
        self._known = {line["name"]: line["value"] for line in lines[1:]}
        self._begun = bool(lines)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def value(self, name: str) -> Any:
        """Return the value stored under a name."""
        return self._known[name]

    def get(self, name: str, compute: Callable[[], _T]) -> _T:
        """Return the value of a name; a missing value is computed and stored. It must be JSON."""
        if name not in self._known:
            value = compute()
            if self._path is not None:
                if not self._begun:
                    append_journal(self._path, {"run": self._run})
                    self._begun = True
                append_journal(self._path, {"name": name, "value": value})
            self._known[name] = value
        return cast("_T", self._known[name])
