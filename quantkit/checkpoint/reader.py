"""Reading model folders: headers first, then one tensor at a time (`writer` makes new folders).

A folder is untrusted input: headers and indexes are checked before they are used (RELIABILITY 2).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.checkpoint import low_bit_sources
from quantkit.checkpoint.derived import Derived, Read
from quantkit.checkpoint.items import Item
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import FLOATS, dtype_name
from quantkit.errors import CheckpointError, LayoutError, about, reason
from quantkit.io import config_checks, files, hashing, json_files, model_folder
from quantkit.io.hub import UNREACHABLE, is_unreachable
from quantkit.io.json_files import AGAIN, shown
from quantkit.io.model_folder import inside
from quantkit.io.safetensors_header import TensorInfo, read_header
from quantkit.layouts import LAYOUTS, read_config
from quantkit.layouts.base import Layout, Unpacking
from quantkit.layouts.recast import broken_rule, check_padding, recast
from quantkit.layouts.schemes import Schemes
from quantkit.layouts.validation import DAMAGED

CONFIG, QUANTIZATION = "config.json", "quantization_config"

#: Dtypes that codes are packed into. No dense weight of a causal LM has one of them.
PACKED = (torch.int32, torch.int16, torch.uint8, torch.float8_e4m3fn)


class _File(NamedTuple):
    name: str
    path: Path
    identity: tuple[int, ...]


class _Stored(NamedTuple):
    """Hold where the bytes of a tensor are."""

    file: _File
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.info.dtype


class _Bound(NamedTuple):
    """Hold a derived tensor, and how it reads its inputs."""

    derived: Derived
    read: Read

    @property
    def shape(self) -> tuple[int, ...]:
        return self.derived.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.derived.dtype


def resolve(model: str, revision: str | None = None) -> Path:
    """Find the folder of a model: `model` itself, or a hub id's snapshot in the cache, downloaded if need be.

    Only safetensors files and files of data at the top are downloaded. A name that looks like a path never reaches the
    network. CheckpointError if there is no such folder and the hub does not give it.
    """
    folder = Path(model)
    if model and folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"{model} is a folder, which has no revisions: drop --revision")
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        what = "a file, not a folder" if folder.is_file() else "no such folder"
        raise CheckpointError(f"{model or repr(model)}: {what}: check the path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    wanted = ["*.safetensors", *model_folder.DOWNLOADED]
    unwanted = ["consolidated*", *(f"*/{pattern}" for pattern in ("*.safetensors", *model_folder.ENDINGS))]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted))
    except Exception as error:  # the hub's client, its HTTP library and the disk each have their own
        if is_unreachable(error):
            why = f"{UNREACHABLE}: download the model and give its folder"
        else:
            why = f"the hub does not give it ({reason(error)}): check the name and the revision"
        raise CheckpointError(f"{model}: no folder here, and {why}") from error


class Checkpoint:
    """Open a folder of safetensors shards with config.json, dense or packed, and read one tensor at a time.

    `path` is the real folder. `stated` is its `quantization_config`; `layout` and `schemes` are its meaning, None for a
    dense model. `low_bit` is the form of weights that are dequantized on reading, None if there are none: such a model
    counts as dense. `source_bytes` are the bytes of all tensors in the files. `notices` list what was ignored. `config`
    takes the place of config.json in a folder that has none yet.
    CheckpointError for a folder that is incomplete, damaged, hostile or contradictory.
    """

    def __init__(
        self, folder: Path | str, trust_remote_code: bool = False, *, config: dict[str, Any] | None = None
    ) -> None:
        self.path = Path(os.path.realpath(folder))
        self.notices: list[str] = []
        if not self.path.is_dir():
            raise CheckpointError(f"{folder} is no folder: give the folder of a model")
        with files.guarded(self.path):
            listing = sorted(os.listdir(self.path))
        if config is None and CONFIG not in listing:
            hint = "merge the adapter into its base model" if "adapter_config.json" in listing else "check the path"
            raise CheckpointError(f"{folder} is no model folder, {CONFIG} is missing: {hint}")
        self._config_file = [_found(self.path, CONFIG)] if config is None else []
        if config is None:
            config = json_files.load_json(self._config_file[0].path, special_floats=True)
        self.config = config
        if not trust_remote_code:
            self.notices += config_checks.drop_auto_map(self.config)
        config_checks.check_config(self.config, self.path / CONFIG, trust_remote_code)
        self._shards: list[_File] = []
        self._where: dict[str, _Stored | _Bound] = {}
        self._open_shards(*model_folder.shards(self.path, listing, self.notices))
        model_folder.require_inside(self.path, listing)
        self.source_bytes = sum(map(self.nbytes, self._where))
        config_checks.check_sizes(self.config, self.path / CONFIG, len(self._where), self.source_bytes)
        self.layout: Layout | None = None
        self.schemes: Schemes | None = None
        self.stated, where = self._quantization_config(listing)
        self.low_bit = self._dequantize()
        if self.stated is not None and self.low_bit is None:
            self.layout, self.schemes = read_config(self.stated, self.path / where)
        self._sizes: dict[str, tuple[int, int]] = {}
        self._modules = self._find_modules()
        self._owner = {name: m for m, parts in self._modules.items() for name in parts.values()}
        self._padded = self._true_shapes()

    def derive(self, tensors: Mapping[str, Derived], drop: Collection[str] = ()) -> None:
        """Replace stored tensors by tensors computed from them, each in the place of its first input.

        The inputs have no name any more; a derived tensor may have the name of one. Inputs may be derived themselves.
        The tensors `drop` have no name any more either.
        """
        before = self._where

        def read(name: str, index: int | slice | None) -> Tensor:
            return self._read(before[name], index)

        replaced = {*drop, *(name for derived in tensors.values() for name in derived.inputs)}
        at: dict[str, dict[str, _Bound]] = {}
        for name, derived in tensors.items():
            at.setdefault(derived.inputs[0], {})[name] = _Bound(derived, read)
        self._where = {}
        for name, place in before.items():
            self._where.update(at.get(name, {}) if name in replaced else {name: place})

    def is_presented_otherwise(self, name: str) -> bool:
        """Return whether a tensor has another form here than a dense tensor of its name is written in."""
        place = self._where.get(name)
        return isinstance(place, _Bound) and place.derived.restore is not None

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Return a dense tensor in the form in which the source stores it."""
        place = self._where.get(name)
        restore = place.derived.restore if isinstance(place, _Bound) else None
        return tensor if restore is None else restore(tensor)

    def names(self) -> list[str]:
        """Return the tensors' names, in the order of the shards' names and of the bytes in them."""
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header."""
        return self._at(name).shape

    def true_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of `logical`, of a packed module without padding, from the headers."""
        module = self._module_of(name)
        return self.shape(name) if module is None else self.true_size(module)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, from the header."""
        return self._at(name).dtype

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor, from the header."""
        place = self._at(name)
        return prod(place.shape) * place.dtype.itemsize

    def get(self, name: str, index: int | slice | None = None) -> Tensor:
        """Read one tensor, or an entry or a range of its first dimension.

        CheckpointError if its file changed since the checkpoint was opened.
        """
        return self._read(self._at(name), index)

    def _read(self, place: _Stored | _Bound, index: int | slice | None) -> Tensor:
        if isinstance(place, _Bound):
            return place.derived.compute(place.read, index)
        shard, info = place
        start, size, shape = info.start, info.end - info.start, info.shape
        if index is not None:
            first, last, _ = index.indices(shape[0]) if isinstance(index, slice) else (index, index + 1, 1)
            each = size // shape[0]
            start, size = start + first * each, (last - first) * each
            shape = (last - first, *shape[1:]) if isinstance(index, slice) else shape[1:]
        with files.open_regular(shard.path) as file:
            self._require_same(shard, _identity(os.fstat(file.fileno())))
            data = files.read_exactly(file, start, size, shard.path)
        return data.view(info.dtype).reshape(shape)

    def modules(self) -> list[str]:
        """Return the names of the packed modules, in file order."""
        return list(self._modules)

    def parts(self, module: str) -> dict[str, str]:
        """Return suffix -> stored name of the tensors that a packed module consists of."""
        return self._packed(module)[2]

    def scheme(self, module: str) -> Scheme:
        """Return the scheme of a packed module."""
        return self._packed(module)[1]

    def size(self, module: str) -> tuple[int, int]:
        """Return `(n, k)` of a packed module as it is stored, padding included, from the headers' shapes.

        CheckpointError if these are not all of one weight in the layout that config.json states.
        """
        if module in self._sizes:
            return self._sizes[module]
        layout, scheme, parts = self._packed(module)
        shapes = {suffix: self._in_words(name) for suffix, name in parts.items()}
        with _of_file(self.path, module):
            n, k = layout.size(shapes, scheme)
            if rule := broken_rule(layout, scheme, n, k):
                raise LayoutError(f"{rule}: its tensors are not those of the layout that {CONFIG} states")
            for suffix, (_, shape) in layout.stored(scheme, n, k).items():
                found = shapes.get(suffix, shape)
                if [size for size in found if size != 1] != [size for size in shape if size != 1]:
                    raise LayoutError(
                        f"tensor {suffix!r} must have shape {list(shape)}, it has {list(found)}: {DAMAGED}"
                    )
        self._sizes[module] = n, k
        return n, k

    def true_size(self, module: str) -> tuple[int, int]:
        """Return `(n, k)` of a packed module without its padding."""
        return self._padded.get(module) or self.size(module)

    def is_padded(self, module: str) -> bool:
        """Return whether a packed module is stored with rows or columns of zeros past its true shape."""
        return module in self._padded

    def stored(self, module: str) -> dict[str, Tensor]:
        """Read the tensors that a packed module consists of, by suffix."""
        return {suffix: self.get(name) for suffix, name in self.parts(module).items()}

    def quantized(self, module: str) -> QuantizedTensor:
        """Read a packed module as it is stored, padding included; see `record`."""
        return self.record(module, self.stored(module))

    def record(self, module: str, tensors: Mapping[str, Tensor], notices: list[str] | None = None) -> QuantizedTensor:
        """Unpack the `stored` tensors of a module, on the device where they are.

        CheckpointError, naming the module, if a part is missing or malformed, or its padding is not zero. `notices`, by
        default the checkpoint's, get a line if GPTQ's zero points are not of the version that the label says.
        """
        layout, scheme, _ = self._packed(module)
        with _of_file(self.path, module):
            q = layout.unpack(tensors, scheme)
            if module in self._padded:
                check_padding(q, *self._padded[module])
        self._tell(layout, tensors, scheme, self.notices if notices is None else notices)
        return q

    def unpacking(self, module: str, tensors: Mapping[str, Tensor], notices: list[str]) -> Unpacking:
        """Return an unpacker by rows for a module without padding; errors and notices as for `record`."""
        layout, scheme, _ = self._packed(module)
        with _of_file(self.path, module):
            found = layout.unpacking(tensors, scheme)
        self._tell(layout, tensors, scheme, notices)
        return found

    def _tell(self, layout: Layout, tensors: Mapping[str, Tensor], scheme: Scheme, notices: list[str]) -> None:
        found = layout.stored_as(tensors, scheme)
        line = f"labelled {layout.NAME}, stored as {found}: the data was trusted"
        if found != layout.NAME and line not in notices:
            notices.append(line)

    def unpadded(self, module: str) -> QuantizedTensor:
        """Read a packed module without its padding; columns that complete its last group stay."""
        q = self.quantized(module)
        if module not in self._padded:
            return q
        n, k = self._padded[module]
        return recast(q, q.scheme, (n, q.scheme.padded_k(k)))

    def dense(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read the tensor `name`, or decode a packed module's weight, in its true shape.

        A decoded weight has the model's dtype if none is given.
        """
        if (module := self._module_of(name)) is not None:
            weight = self.quantized(module).dequantize(dtype or self.dtype_of_model)
            if module not in self._padded:
                return weight
            n, k = self._padded[module]
            return weight[:n, :k].contiguous()
        tensor = self.get(name)
        return tensor if dtype is None else tensor.to(dtype)

    def logical(self) -> list[str]:
        """Return every tensor's name with each packed module as its `....weight`, in file order."""
        return list(dict.fromkeys(f"{self._owner[n]}.weight" if n in self._owner else n for n in self._where))

    def item(self, name: str) -> Item:
        """Read a tensor of `logical`, a packed module as QuantizedTensor."""
        module = self._module_of(name)
        return Item(name, self.get(name) if module is None else self.quantized(module))

    def items(self) -> Iterator[Item]:
        """Yield every tensor once, packed modules as QuantizedTensor in the place of their first part."""
        yield from map(self.item, self.logical())

    def files(self) -> list[Path]:
        """Return the paths of the weight shards in the folder."""
        return [self.path / shard.name for shard in self._shards]

    def plain(self) -> dict[str, dict[str, TensorInfo]]:
        """Return file name -> the tensors that are read from it as they are stored, in the order of their bytes."""
        found: dict[str, dict[str, TensorInfo]] = {name: {} for name in self.sources()}
        for name, at in self._where.items():
            if isinstance(at, _Stored):
                found[at.file.name][name] = at.info
        return found

    def hashes(self, recorded: Mapping[str, object] | None = None) -> dict[str, str]:
        """Return file name -> hash of the shards and config.json, each of the kind that was `recorded` of it."""
        like = recorded or {}
        return {name: hashing.hash_of_file(path, like.get(name)) for name, path in self.sources().items()}

    def require_unchanged(self) -> None:
        """Raise CheckpointError if config.json or a weight file is not what it was when the checkpoint was opened."""
        for shard in (*self._config_file, *self._shards):
            self._require_same(shard, _found(self.path, shard.name).identity)

    def sources(self) -> dict[str, Path]:
        """Return file name -> real path of the shards, in their order, and config.json."""
        return {shard.name: shard.path for shard in (*self._shards, *self._config_file)}

    def dense_config(self) -> dict[str, Any]:
        """Return the configuration without the quantization of the model, or of its language model."""
        config = {key: value for key, value in self.config.items() if key != QUANTIZATION}
        if isinstance(text := config.get("text_config"), dict):
            config["text_config"] = {key: value for key, value in text.items() if key != QUANTIZATION}
        return config

    @property
    def dtype_of_model(self) -> torch.dtype:
        """The dtype that config.json states, or without one that of the largest float tensor."""
        stated = self.config.get("dtype") or self.config.get("torch_dtype")
        for dtype in FLOATS:
            if stated in (dtype_name(dtype), str(dtype)):
                return dtype
        floats = [name for name in self._where if self.dtype(name) in FLOATS]
        return self.dtype(max(floats, key=self.nbytes)) if floats else torch.float32

    def _open_shards(self, names: list[str], weight_map: dict[str, str] | None) -> None:
        for shard_name in names:
            self._shards.append(shard := _found(self.path, shard_name))
            for name, info in read_header(shard.path)[0].items():
                if weight_map is not None and weight_map.get(name) != shard_name:
                    raise CheckpointError(f"{self.path}: {name} is in {shard_name}, the index does not say so: {AGAIN}")
                self._where[name] = _Stored(shard, info)
        absent = [name for name in weight_map or {} if name not in self._where]
        if absent:
            raise CheckpointError(f"{self.path}: the index lists {shown(absent[0])}, its shard has not: {AGAIN}")

    def _dequantize(self) -> str | None:
        """Present the weights of a low-bit source under their dense names; return their form, None if it is no such."""
        dtype = self.dtype_of_model
        with about(str(self.path)):
            found = None if self.stated is None else low_bit_sources.find(self, self.stated, dtype)
        if found is None:
            return None
        self.derive(found.tensors, found.dropped)
        told = f"source weights are {found.form}, dequantized to {dtype_name(dtype)} on reading"
        self.notices.append(told if found.tensors else f"{CONFIG} states {found.form}, no tensor is stored in it")
        return found.form

    def _quantization_config(self, listing: list[str]) -> tuple[dict[str, Any] | None, str]:
        """Return what is stated of the quantization, None for a dense model, and the file that states it."""
        stated = self.config.get(QUANTIZATION)
        text = self.config.get("text_config")
        if stated is None and isinstance(text, dict):  # some wrappers state there what the language model has
            stated = text.get(QUANTIZATION)
        if stated is not None and not isinstance(stated, dict):
            raise CheckpointError(f"{self.path / CONFIG}: quantization_config is no object: remove it or mend it")
        for name, (method, key) in model_folder.SIDE_FILES.items():
            if stated is None and name in listing:
                found = json_files.load_json(inside(self.path, name))
                if key is None or key in found:
                    return {"quant_method": method, **found}, name
        return stated, CONFIG

    def _find_modules(self) -> dict[str, dict[str, str]]:
        if self.layout is None or self.schemes is None:
            return {}
        found: dict[str, dict[str, str]] = {}
        for name in self._where:
            module, _, suffix = name.rpartition(".")
            if module and suffix in self.layout.TENSORS:
                found.setdefault(module, {})[suffix] = name
        packed = {module: parts for module, parts in found.items() if self.layout.MARKER in parts}
        for module, parts in found.items():
            stray = [name for suffix, name in parts.items() if suffix != "weight" or self.dtype(name) not in FLOATS]
            if module not in packed and stray:
                raise CheckpointError(
                    f"{self.path}: {stray[0]} is there, {module}.{self.layout.MARKER} is missing: {AGAIN}"
                )
            if module in packed and "weight" not in parts and f"{module}.weight" in self._where:
                raise CheckpointError(f"{self.path}: {module} is there twice, packed and as {module}.weight")
            if module in packed and module in self.schemes.ignore:
                raise CheckpointError(f"{self.path}: {module} is packed, and {CONFIG} says that it is not")
        ours = {name for parts in packed.values() for name in parts.values()}
        suffixes = {suffix for layout in LAYOUTS.values() for suffix in layout.TENSORS}
        for name in self._where:
            if name not in ours and name.rpartition(".")[2] in suffixes and self.dtype(name) in PACKED:
                raise CheckpointError(
                    f"{self.path}: {name} is packed and no part of the {self.layout.NAME} layout that {CONFIG} states: "
                    "a folder holds one layout, convert each on its own"
                )
        if not packed:
            self.notices.append(f"{CONFIG} states the {self.layout.NAME} layout, no tensor is packed in it")
        return packed

    def _true_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the true shapes that the `quantkit` key states; CheckpointError for one that cannot be."""
        padded = dict(self.schemes.padded) if self.schemes is not None else {}
        for module, (n, k) in padded.items():
            stored = self.size(module) if module in self._modules else None
            if stored is None or n > stored[0] or k > stored[1]:
                what = "no packed module" if stored is None else f"stored as {list(stored)}"
                raise CheckpointError(
                    f"{self.path}: {shown(module)} is 'padded' from {[n, k]} in {CONFIG} and is {what}: mend the entry"
                )
        return padded

    def _module_of(self, name: str) -> str | None:
        module = name.removesuffix(".weight")
        return module if module != name and module in self._modules else None

    def _packed(self, module: str) -> tuple[Layout, Scheme, dict[str, str]]:
        if module not in self._modules or self.layout is None or self.schemes is None:
            raise CheckpointError(f"{self.path}: {shown(module)} is no packed module: quantkit inspect lists them")
        return self.layout, self.schemes.of(module), self._modules[module]

    def _in_words(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor; one that holds packed words as bytes counts in words (LAYOUTS 7.1)."""
        shape = self.shape(name)
        return (*shape[:-1], shape[-1] // 4) if shape and self.dtype(name) == torch.uint8 else shape

    def _require_same(self, shard: _File, identity: tuple[int, ...]) -> None:
        if identity != shard.identity:
            raise CheckpointError(f"{self.path / shard.name}: changed while it was in use: run again")

    def _at(self, name: str) -> _Stored | _Bound:
        if name not in self._where:
            raise CheckpointError(f"{self.path}: has no tensor {shown(name)}: quantkit inspect lists them")
        return self._where[name]


@contextmanager
def _of_file(folder: Path, module: str) -> Iterator[None]:
    """Turn a layout's error about stored tensors into one that names the folder and the module."""
    try:
        yield
    except LayoutError as error:
        raise CheckpointError(f"{folder}: {module}: {error}") from error


def _found(folder: Path, name: str) -> _File:
    path = inside(folder, name)
    with files.guarded(path):
        return _File(name, path, _identity(os.stat(path)))


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Return numbers that tell a file from another of its name, and from itself after a change."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
