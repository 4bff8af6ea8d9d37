"""Which folders quantkit serves inside an engine, the scheme of each layer, and how the engine's
input compares with the folder; without an engine's classes.

Engines call layers by names of their own: they join linears, and rename prefixes in wrapper models.
They pass both to the config before they build layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.origin import checked
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.formats import raw_bytes
from quantkit.core.quantized_tensor import Scheme
from quantkit.engines.joined import JOINED
from quantkit.errors import CheckpointError, LayoutError, QuantkitError, Setting, Words
from quantkit.kernels.contract import ACTIVATIONS
from quantkit.layouts import LAYOUTS, Layout
from quantkit.layouts.schemes import EMBEDDINGS, HEADS, Schemes, is_embedding, literal, matches
from quantkit.names import KERNELS, JsonView

#: The name of the method: `--quantization quantkit`.
METHOD = "quantkit"
#: The variable of the environment that switches the comparison off, by the value 0.
VARIABLE = "QUANTKIT_CHECK"
#: Places of a tensor that are compared, and the least bytes of each.
PLACES, BYTES = 8, 256


class FolderCheck:
    """The comparison of a model with its folder: `begin` when files are read, and `require` before
    weights are used.
    """

    _model: tuple[str, str | None, str | None] | None = None
    _hashes = False
    _folder: Checkpoint | None = None
    _running: Future[None] | None = None

    def expect(self, model: str, revision: str | None, cache: str | None, hashes: bool) -> None:
        """Name the folder, or the hub id whose snapshot is in `cache`; with `hashes` this process
        hashes its files.
        """
        if os.environ.get(VARIABLE) != "0":
            self._model, self._hashes = (model, revision, cache), hashes

    def begin(self) -> None:
        """Open the expected model, and start hashing its files; a second call does nothing."""
        if self._model is None or self._folder is not None:
            return
        model, *where = self._model
        self._model, folder = (
            None,
            Path(model) if os.path.isdir(model) else _snapshot(model, *where),
        )
        if folder is None:  # other loaders of an engine read from elsewhere
            return
        self._folder = Checkpoint(folder, trust_remote_code=True)
        if self._hashes:
            pool = ThreadPoolExecutor(1, "quantkit-check")
            self._running = pool.submit(_compare, self._folder)
            pool.shutdown(wait=False)

    def is_stored(self, names: Iterable[str], tensor: Tensor) -> bool:
        """Return False if the folder has a tensor under one of `names` that differs from `tensor`
        in a few sampled places.
        """
        folder = self._folder
        name = next((name for name in names if folder is not None and name in folder), None)
        if folder is None or name is None:
            return True
        if folder.shape(name) != tuple(tensor.shape):
            return False
        rows = max(1, -(-BYTES * len(tensor) // max(1, tensor.nbytes)))
        starts = sorted({len(tensor) * place // PLACES for place in range(PLACES)})
        parts = [slice(start, start + rows) for start in starts]
        return all(
            torch.equal(raw_bytes(tensor[part].contiguous()), raw_bytes(folder.get(name, part)))
            for part in parts
        )

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Prefer the damage of a file to an error that follows from it."""
        try:
            yield
        except QuantkitError:
            self.require()
            raise

    def require(self) -> None:
        """Wait for the hashes; CheckpointError for a file that was changed."""
        if self._running is not None:
            self._running.result()
        self._folder = self._running = None  # an engine may copy its config


def _compare(folder: Checkpoint) -> None:
    try:
        with checked(folder):
            pass
    except CheckpointError as error:
        error.ways_out = (*error.ways_out[:-1], Words(f"set {VARIABLE}=0 to use it as it is"))
        raise


def _snapshot(model: str, revision: str | None, cache: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # the hub's client has several errors for a missing file
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
        )
    return None


class EngineConfig:
    """The layout and the schemes of a folder: the first base of an engine's config. `ENGINE` is for
    messages.
    """

    ENGINE = ""
    #: The engine's name of joined linears -> those that it joins.
    packed_modules_mapping: dict[str, list[str]]

    def __init__(self, layout: Layout, schemes: Schemes) -> None:
        super().__init__()
        self.layout, self.schemes = layout, schemes
        self.is_head_tied = False
        self.damage = FolderCheck()
        self._patterns = [entry[3:] for entry in schemes.ignore if entry.startswith("re:")]
        self._dense = frozenset(schemes.ignore)
        #: The engine's name -> the name in the folder, for names that the config states; then pairs
        #: of prefixes.
        self._stated: dict[str, str] = {}
        self._prefixes: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"QuantkitConfig({self.layout.NAME}, {self.schemes.default.label})"

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(ACTIVATIONS)

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: JsonView, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim folders in layouts of quantkit's kernels, and any that it reads if the user asks;
        None for others.
        """
        return METHOD if user_quant == METHOD or is_kernel_layout(hf_quant_cfg) else None

    def learn_head(self, hf_config: Any) -> None:
        """Remember whether the head is tied to the embeddings."""
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        self.is_head_tied = any(
            getattr(config, "tie_word_embeddings", False) for config in (hf_config, text)
        )

    def learn_names(self, mapper: Any) -> None:
        """Remember how the engine renames the tensors of a model, to find a linear's name in the
        folder.
        """
        named = [literal(pattern) for pattern, _ in self.schemes.overrides] + sorted(self._dense)
        for name in [*self._stated, *filter(None, named)]:
            for renamed in mapper.apply_list([f"{name}.weight"]):
                self._stated.setdefault(
                    renamed.removesuffix(".weight"), self._stated.get(name, name)
                )
        prefixes = mapper.orig_to_new_prefix.items()
        self._prefixes |= {new: old for old, new in prefixes if new is not None}

    def scheme_of_linear(self, prefix: str) -> Scheme | None:
        """Return the scheme of a linear, None if it is dense; ValueError for linears of several
        schemes that the engine joins.
        """
        whole = self.treatment(prefix)
        if whole != self.schemes.default:  # on disk they may be joined too
            return whole
        schemes = {name: self.treatment(name) for name in self.members(prefix)}
        self._require_alike(schemes)
        return next(iter(schemes.values()))

    def head(self, prefix: str) -> tuple[str, Scheme] | None:
        """Return the name in the folder and the scheme of a packed output head, or of packed
        embeddings to which it is tied; None if it is dense.

        Some classes of engines do not tell `prefix`.
        """
        if self.is_head_tied:
            return self.table("")
        names = [prefix, prefix.rpartition(".")[2]] if prefix else [*HEADS]
        if any(map(self.is_dense, names)) or not (prefix or self.schemes.quantizes_head):
            return None
        other = (s for s in map(self.scheme, names) if s != self.schemes.default)
        return names[0], next(other, self.schemes.default)

    @property
    def tables(self) -> dict[str, Scheme]:
        """The packed embeddings of the folder; "" stands for all of them."""
        return {
            literal(text) or "": scheme
            for text, scheme in self.schemes.overrides
            if text == EMBEDDINGS or is_embedding(literal(text) or "")
        }

    def table(self, prefix: str) -> tuple[str, Scheme] | None:
        """Return the name in the folder and the scheme of packed embeddings, None if they are
        dense.

        ValueError if the engine does not tell `prefix`, as many classes, and the folder has several
        schemes.
        """
        names, leaf = set(self.in_folder(prefix)), prefix.rpartition(".")[2]
        found = {name: scheme for name, scheme in self.tables.items() if name in names} or {
            name: scheme
            for name, scheme in self.tables.items()
            if leaf in ("", name.rpartition(".")[2]) or not name
        }
        self._require_alike(found)
        return next(((name or prefix, scheme) for name, scheme in found.items()), None)

    def scheme_of_experts(self, prefix: str, names: Iterable[str]) -> Scheme | None:
        """Return the scheme of all linears `names` of the experts `prefix`, None if they are dense.

        ValueError if they differ: the engine has one method for all.
        """
        if self.is_dense(prefix):
            return None
        first: dict[Scheme | None, str] = {}
        for name in names:
            first.setdefault(self.treatment(name), name)
        self._require_alike({name: scheme for scheme, name in first.items()})
        return next(iter(first))

    def _require_alike(self, schemes: Mapping[str, Scheme | None]) -> None:
        """Raise ValueError unless linears that the engine joins have one scheme."""
        if len(set(schemes.values())) > 1:
            mixed = ", ".join(
                f"{name} {'dense' if s is None else s.label}" for name, s in schemes.items()
            )
            raise ValueError(
                f"{self.ENGINE} joins {mixed}: quantize them alike, with --set fused_alike=true"
            )

    def check_stored(self, name: str, suffix: str, tensor: Tensor) -> None:
        """Raise LayoutError if an engine has changed a tensor of the linear `name` before it hands
        it on.
        """
        if not self.damage.is_stored((f"{each}.{suffix}" for each in self.in_folder(name)), tensor):
            raise reordered(name, self.ENGINE)

    def members(self, prefix: str) -> list[str]:
        """Name the linears that the engine joins into the linear `prefix`, itself if it
        joins none.
        """
        parent, _, leaf = prefix.rpartition(".")
        usual = next(
            (members for joined, members in JOINED if joined == leaf), (leaf,)
        )  # some classes do not tell
        return [
            f"{parent}.{member}".lstrip(".")
            for member in self.packed_modules_mapping.get(leaf, usual)
        ]

    def treatment(self, name: str) -> Scheme | None:
        """Give the scheme of the linear that the engine calls `name`, None if it is dense."""
        return None if self.is_dense(name) else self.scheme(name)

    def is_dense(self, name: str) -> bool:
        """Return True if the config leaves the linear, which the engine calls `name`, dense."""
        return any(
            each in self._dense
            or any(matches(f"(?:{pattern}).*", each) for pattern in self._patterns)
            for each in self.in_folder(name)
        )

    def scheme(self, name: str) -> Scheme:
        """Give the scheme of the linear that the engine calls `name`."""
        found = map(self.schemes.of, self.in_folder(name))
        return next(
            (scheme for scheme in found if scheme != self.schemes.default), self.schemes.default
        )

    def in_folder(self, name: str) -> Iterator[str]:
        """Yield the names that a linear may have in the folder: the engine's, and those before its
        renaming.
        """
        yield name
        if name in self._stated:
            yield self._stated[name]
        yield from (
            old + name[len(new) :] for new, old in self._prefixes.items() if name.startswith(new)
        )


def reordered(name: str, engine: str) -> LayoutError:
    """Warn that an engine changes a weight before the plug-in sees it, which would give wrong
    products.
    """
    return LayoutError(
        f"{engine}'s class of this model reorders it while loading, which packed words do not "
        "survive",
        Words("leave it dense with", Setting("skip", f".*{name.rpartition('.')[2]}")),
        subject=name,
    )


def is_kernel_layout(config: JsonView) -> bool:
    """Return True for a `quantization_config` of a layout that one of quantkit's kernels
    multiplies.

    A malformed one counts too, if another reader would take it for something else.
    """
    own = config.get("quantkit")
    if isinstance(own, Mapping):
        return own.get("layout") in tuple(KERNELS)
    try:
        return any(LAYOUTS[name].read_config(config) is not None for name in KERNELS)
    except CheckpointError:
        return config.get("quant_method") not in ("awq", "compressed-tensors")
