"""Reading model folders: headers first, then one tensor at a time (`writer` makes new folders).

A folder is untrusted input: headers and indexes are checked before they are used (RELIABILITY 2).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint import gguf_source, low_bit_sources
from quantkit.checkpoint.stored_tensors import Derived, Read, StoredTensors, file_in
from quantkit.core.formats import FLOATS, dtype_name
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme, Tensors
from quantkit.errors import CheckpointError, Command, LayoutError, Words, about
from quantkit.io import files, json_files, model_folder
from quantkit.layouts import LAYOUTS, read_config
from quantkit.layouts.base import DAMAGED, Layout, Unpacking, static_groups
from quantkit.layouts.compressed_tensors import METHOD as COMPRESSED_TENSORS
from quantkit.layouts.recast import broken_rule, check_padding, recast
from quantkit.layouts.schemes import Schemes, is_head
from quantkit.names import Json

#: The section of config.json that states the quantization, and its name in compressed-tensors'
#: first releases.
CONFIG, QUANTIZATION, FORMER = "config.json", "quantization_config", "compression_config"
#: Dtypes of dense weights, and of masks.
_DENSE = (*FLOATS, torch.bool)
#: Dtypes that codes are packed into. No dense weight of a causal LM has one of them.
_PACKED = (torch.int32, torch.int16, torch.uint8, torch.float8_e4m3fn)


#: Parts that wrappers of a model add to the names of its tensors: anywhere, and before all names.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_(fsdp|checkpoint)_wrapped_module|_forward_module)\.")
# A class that holds a causal LM as `model` makes `model.model` and `model.lm_head` of its parts.
_OUTER = re.compile(
    r"^((module|base_model\.model)\.)+"
    r"|^model\.(?=lm_head\.|model\.(layers|embed_tokens|norm)\.)|^(?=lm_head\.)"
)
#: All names of the text model that was taken out of a model of images and text.
_OF_TEXT = re.compile(r"(model\.)?language_model\.|lm_head\.")
#: Names in a decoder that was saved without the class of its head, by what that class puts before
#: them. transformers adds it on reading, most classes of engines do not.
_BARE = {
    "model": re.compile(
        r"^(?=(layers\.\d+|embed_tokens\w*|(final_|embedding_)?(layer)?norm"
        r"|(altup|per_layer)_\w+)\.)"
    ),
    "transformer": re.compile(r"^(?=((h|blocks)\.\d+|wte|wpe|word_embeddings\w*|ln_f|norm_f)\.)"),
}


class Checkpoint(StoredTensors):
    """Open a folder of safetensors shards with config.json, dense or packed, and read one tensor at
    a time.

    `path` is the real folder; for a GGUF file it is temporary, and `home` is the file. `trusted`
    says whether the user trusts the Python code beside the weights. `stated` is
    its `quantization_config`; `layout` and `schemes` are its meaning, None for a dense model.
    `low_bit` is the form of weights that are dequantized on reading, None if there are none: such a
    model counts as dense. `wrapped` is the first stored name with a part of a wrapper, such as
    torch.compile, or None: names are given without such parts. `source_bytes` are the bytes of all
    tensors in the files. `notices` list ignored entries. `config` takes the place of config.json in
    a folder that has none yet. With `dequantize`, INT4 weights of compressed-tensors that quantkit
    did not write are dequantized too. CheckpointError for a folder that is incomplete, damaged,
    hostile or contradictory.
    """

    def __init__(
        self,
        folder: Path | str,
        trust_remote_code: bool = False,
        *,
        config: Json | None = None,
        dequantize: bool = False,
    ) -> None:
        path = Path(os.path.realpath(folder))
        self.notices: list[str] = []
        self.trusted = trust_remote_code
        if not path.is_dir():
            is_gguf = path.suffix.lower() == gguf_source.ENDING and path.is_file()
            way = (
                Words("use", Command("quantize"), "first")
                if is_gguf
                else "give the folder of a model"
            )
            raise CheckpointError(
                f"{folder} is {'a GGUF file, a source' if is_gguf else 'no folder'}", way
            )
        with files.guarded(path):
            listing = sorted(os.listdir(path))
        if config is None and CONFIG not in listing:
            ways = {
                "adapter_config.json": "merge the adapter into its base model",
                "snapshots": "give a folder in its snapshots",
            }
            hint = next((ways[name] for name in ways if name in listing), "check the path")
            raise CheckpointError(f"{folder} is no model folder, {CONFIG} is missing: {hint}")
        beside = [file_in(path, CONFIG)] if config is None else []
        self.config = (
            json_files.load_json(beside[0].path, special_floats=True) if config is None else config
        )
        self.notices += json_files.drop_auto_map(self.config, trust_remote_code)
        if trust_remote_code:
            model_folder.require_code(path)
        else:
            self.notices += map(model_folder.untrusted, model_folder.names_code(path))
        json_files.check_config(self.config, path / CONFIG, trust_remote_code)
        source = gguf_source.source_of(path)
        shards, weight_map = (
            ([], None) if source else model_folder.shards(path, listing, self.notices)
        )
        super().__init__(path, shards, weight_map, beside, self.notices)
        self.wrapped = self._unwrap()
        model_folder.require_inside(path, listing)
        self.home, self.source_bytes = path, sum(map(self.nbytes, self.names()))
        self.low_bit: str | None = None
        if source is not None:
            self.supply(source.files, source.tensors)
            self.home, self.source_bytes = source.files[0].path, source.nbytes
            self.low_bit = source.form
            self.notices += (
                *source.notices,
                f"source weights are {source.form}, {self._dequantized()}{source.loss}",
            )
        json_files.check_sizes(self.config, path / CONFIG, len(self.names()), self.source_bytes)
        self.layout: Layout | None = None
        self.schemes: Schemes | None = None
        self._section = QUANTIZATION
        self.stated, where = self._quantization_config(listing)
        if self.stated is not None:
            # An index of the model before it was quantized lacks the parts of packed weights.
            owners = {name.rpartition(".")[0] for name in (*self.names(), *self.absent)}
            self.admit([name for name in self.unlisted if name.rpartition(".")[0] in owners])
            self._read_quantization(self.stated, where, dequantize)
        self._sizes: dict[str, tuple[int, int]] = {}
        self._modules: dict[str, dict[str, str]] = {}
        if self.layout is not None and self.schemes is not None:
            self._modules = _find_packed(self, self.layout, self.schemes)
            if "quantkit" not in (self.stated or {}):
                self._decode_act_order(self.layout)
            if self.layout is not None and not self._modules:
                self.notices.append(
                    f"{CONFIG} states the {self.layout.NAME} layout, no tensor is packed in it"
                )
        self._owner = {name: m for m, parts in self._modules.items() for name in parts.values()}
        self._padded = self._true_shapes()

    def true_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of `logical`, of a packed module without padding, from the
        headers.
        """
        module = self._module_of(name)
        return self.shape(name) if module is None else self.true_size(module)

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
        """Return the stored `(n, k)` of a packed module, padding included, from the headers.

        CheckpointError if the shapes do not belong to a weight in the layout of config.json.
        """
        if module in self._sizes:
            return self._sizes[module]
        layout, scheme, parts = self._packed(module)
        shapes = {
            suffix: layout.shape_in_words(self.shape(name), self.dtype(name))
            for suffix, name in parts.items()
        }
        with _of_file(self.path, module):
            n, k = layout.size(shapes, scheme)
            if rule := broken_rule(layout, scheme, n, k):
                raise LayoutError(
                    f"{rule}: its tensors are not those of the layout that {CONFIG} states"
                )
            for suffix, (_, shape) in layout.stored(scheme, n, k).items():
                found = shapes.get(suffix, shape)
                if [size for size in found if size != 1] != [size for size in shape if size != 1]:
                    raise LayoutError(
                        f"tensor {suffix!r} must have shape {list(shape)}, it has {list(found)}",
                        DAMAGED,
                    )
        self._sizes[module] = n, k
        return n, k

    def true_size(self, module: str) -> tuple[int, int]:
        """Return `(n, k)` of a packed module without its padding."""
        return self._padded.get(module) or self.size(module)

    def is_padded(self, module: str) -> bool:
        """Return True if a packed module is stored with rows or columns of zeros past its true
        shape.
        """
        return module in self._padded

    def stored(self, module: str) -> dict[str, Tensor]:
        """Read the tensors that a packed module consists of, by suffix."""
        return {suffix: self.get(name) for suffix, name in self.parts(module).items()}

    def quantized(self, module: str) -> QuantizedTensor:
        """Read a packed module with its padding; see `record`."""
        return self.record(module, self.stored(module))

    def record(
        self, module: str, tensors: Tensors, notices: list[str] | None = None
    ) -> QuantizedTensor:
        """Unpack the `stored` tensors of a module, on the device where they are.

        CheckpointError, naming the module, if a part is missing or malformed, or its padding is not
        zero. `notices`, by default the checkpoint's, get a line if GPTQ's zero points are not of
        the version that the label says.
        """
        unpacking = self.unpacking(module, tensors, notices)
        with _of_file(self.path, module):
            q = unpacking.record()
            if module in self._padded:
                check_padding(q, *self._padded[module])
        return q

    def unpacking(
        self, module: str, tensors: Tensors, notices: list[str] | None = None
    ) -> Unpacking:
        """Return an unpacker by rows for a module without padding; errors and notices as for
        `record`.
        """
        layout, scheme, _ = self._packed(module)
        with _of_file(self.path, module):
            unpacking = layout.unpacking(tensors, scheme)
        found, notices = (
            layout.stored_as(tensors, scheme),
            self.notices if notices is None else notices,
        )
        line = f"labelled {layout.NAME}, stored as {found}: the data was trusted"
        if found != layout.NAME and line not in notices:
            notices.append(line)
        return unpacking

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
            n, k = self._padded.get(module, weight.shape)
            return weight[:n, :k].contiguous()
        tensor = self.get(name)
        return tensor if dtype is None else tensor.to(dtype)

    def logical(self) -> list[str]:
        """Return every tensor's name with each packed module as its `....weight`, in file order."""
        return list(
            dict.fromkeys(
                f"{self._owner[n]}.weight" if n in self._owner else n for n in self.names()
            )
        )

    def dense_config(self) -> Json:
        """Return the configuration without the quantization of the model, or of its
        language model.
        """
        config = {key: value for key, value in self.config.items() if key != QUANTIZATION}
        if isinstance(text := config.get("text_config"), dict):
            config["text_config"] = {
                key: value for key, value in text.items() if key != QUANTIZATION
            }
        return config

    @property
    def is_tied(self) -> bool:
        """True if no output head is stored: the embeddings are it."""
        return not any(is_head(name.rpartition(".")[0]) for name in self.names())

    @property
    def dtype_of_model(self) -> torch.dtype:
        """The dtype in config.json; if there is none, the dtype of the largest float tensor."""
        stated = self.config.get("dtype") or self.config.get("torch_dtype")
        for dtype in FLOATS:
            if getattr(torch, str(stated), None) == dtype:
                return dtype
        floats = [name for name in self.names() if self.dtype(name) in FLOATS]
        return self.dtype(max(floats, key=self.nbytes)) if floats else torch.float32

    def _unwrap(self) -> str | None:
        """Remove what wrappers of the model added to names. Returns the first such stored name."""
        plain = {name: _WRAPPERS.sub("", name) for name in self.names()}
        if all(map(_OUTER.match, plain.values())):
            plain = {stored: _OUTER.sub("", name) for stored, name in plain.items()}
        if "text_config" not in self.config and all(map(_OF_TEXT.match, plain.values())):
            plain = {stored: n.replace("language_model.", "", 1) for stored, n in plain.items()}
        wrapped = self._rename(
            plain,
            "a wrapper of the model, such as torch.compile, DDP, FSDP or PEFT, made it longer",
        )
        stated = self.config.get(QUANTIZATION)
        ours = isinstance(stated, dict) and "quantkit" in stated  # which states modules by name
        for before, bare in _BARE.items() if not ours else ():
            if all(bare.match(name) or name.startswith("lm_head.") for name in self.names()):
                whole = {name: bare.sub(f"{before}.", name) for name in self.names()}
                self._rename(whole, "the decoder was saved without the class of its head")
        return wrapped

    def _rename(self, names: Mapping[str, str], why: str) -> str | None:
        """Read tensors by other names, with a notice. Returns the first name that changed."""
        changed = [stored for stored, name in names.items() if stored != name]
        if not changed or len(set(names.values())) < len(names):
            return None
        self._where = {names[stored]: place for stored, place in self._where.items()}
        self.notices.append(
            f"{changed[0]} is read as {names[changed[0]]}: {why} ({len(changed)} in all)"
        )
        return changed[0]

    def _read_quantization(self, stated: Json, where: str, dequantize: bool) -> None:
        """Read the layout and the schemes, or present the weights of a low-bit source under their
        dense names.
        """
        try:
            layout, schemes = read_config(stated, self.path / where)
        except CheckpointError:
            if not self._dequantize(stated):
                if stated.get("quantization_mode") != "online":  # BitNet rounds dense weights later
                    self.require_quantized(json_files.shown(stated.get("quant_method")), where)
                raise
            return
        foreign = layout.NAME == COMPRESSED_TENSORS and "quantkit" not in stated
        if not (
            foreign
            and (dequantize or low_bit_sources.is_variant(self, schemes))
            and self._dequantize(stated)
        ):
            self.layout, self.schemes = layout, schemes

    def _dequantize(self, stated: Json) -> bool:
        with about(str(self.path)):
            found = low_bit_sources.find(self, stated, self.dtype_of_model)
        if found is None:
            return False
        self.low_bit = found.form
        self.derive(found.tensors, found.dropped)
        notice = f"source weights are {found.form}, {self._dequantized()}"
        notice += f"; left out: {found.left_out}" if found.left_out else ""
        self.notices.append(
            notice if found.tensors else f"{CONFIG} states {found.form}, no tensor is stored in it"
        )
        return True

    def _decode_act_order(self, layout: Layout) -> None:
        """Present packed weights as dense ones if their groups of columns are in an order that no
        layout holds.
        """
        if all(map(self._is_static, self._modules)):
            return
        weights, dtype = {}, self.dtype_of_model
        for module, parts in self._modules.items():
            inputs, subject = tuple(parts.values()), (self.path, module)
            weights[f"{module}.weight"] = Derived(
                self.size(module),
                dtype,
                inputs,
                partial(_decode, layout, self.scheme(module), subject, parts, dtype),
            )
        self.derive(weights)
        self.layout, self.schemes, self._modules = None, None, {}
        self.low_bit = f"{layout.NAME} (act-order)"
        self.notices.append(f"source weights are {self.low_bit}, {self._dequantized()}")

    def _is_static(self, module: str) -> bool:
        """Return True if the columns of a packed module are in the order of their groups."""
        layout, scheme, parts = self._packed(module)
        if layout.ORDER not in parts:
            return True
        order = self.get(parts[layout.ORDER])
        return torch.equal(order.int(), static_groups(scheme, self.size(module)[1], order.device))

    def _dequantized(self) -> str:
        return f"dequantized to {dtype_name(self.dtype_of_model)} on reading"

    def _quantization_config(self, listing: list[str]) -> tuple[Json | None, str]:
        """Find the quantization config, None for a dense model, and the file that states it."""
        former = self.config.pop(
            FORMER, None
        )  # beside the other name it would be a contradiction in an output
        if former is not None and self.config.get(QUANTIZATION) is None:
            self.config[QUANTIZATION], self._section = former, FORMER
        stated = self.config.get(QUANTIZATION)
        text = self.config.get("text_config")
        if stated is None and isinstance(
            text, dict
        ):  # some wrappers state the language model's dtype there
            stated = text.get(QUANTIZATION)
        if stated is not None and not isinstance(stated, dict):
            raise CheckpointError(
                f"{self._section} is no object", "remove it or mend it", subject=self.path / CONFIG
            )
        for name, (method, key) in model_folder.SIDE_FILES.items():
            if stated is None and name in listing:
                found = json_files.load_json(model_folder.inside(self.path, name))
                if key is None or key in found:
                    self.require_quantized(method, name)
                    return {"quant_method": method, **found}, name
        return stated, CONFIG

    def require_quantized(self, method: str, where: str) -> None:
        """Raise CheckpointError if the file `where` states a quantization, and all matrices are
        dense.
        """
        rows = ((), (1,))  # also of counters and positions
        if all(self.dtype(n) in _DENSE or self.shape(n)[:-1] in rows for n in self.names()):
            what = f"{self._section} from {CONFIG}" if where == CONFIG else where
            raise CheckpointError(
                f"{where} states weights quantized by {method}, and all weights are dense",
                f"remove {what}, which is out of date",
                subject=self.path,
            )

    def _true_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the true shapes in the `quantkit` key. CheckpointError for an impossible shape."""
        padded = dict(self.schemes.padded) if self.schemes is not None else {}
        for module, (n, k) in padded.items():
            stored = self.size(module) if module in self._modules else None
            if stored is None or n > stored[0] or k > stored[1]:
                what = "no packed module" if stored is None else f"stored as {list(stored)}"
                raise CheckpointError(
                    f"{json_files.shown(module)} is 'padded' from {[n, k]} in {CONFIG} and "
                    f"is {what}",
                    "mend the entry",
                    subject=self.path,
                )
        return padded

    def _module_of(self, name: str) -> str | None:
        module = name.removesuffix(".weight")
        return module if module != name and module in self._modules else None

    def _packed(self, module: str) -> tuple[Layout, Scheme, dict[str, str]]:
        if module not in self._modules or self.layout is None or self.schemes is None:
            raise CheckpointError(
                f"{json_files.shown(module)} is no packed module: quantkit inspect lists them",
                subject=self.path,
            )
        return self.layout, self.schemes.of(module), self._modules[module]


def _decode(
    layout: Layout,
    scheme: Scheme,
    subject: tuple[Path, str],
    parts: Mapping[str, str],
    dtype: torch.dtype,
    read: Read,
    index: int | slice | None,
) -> Tensor:
    """Read and decode a packed weight, or rows of it, whose columns are in any order."""
    with _of_file(*subject):
        tensors = {suffix: read(name, None) for suffix, name in parts.items()}
        weight = layout.decode_ordered(tensors, scheme, dtype)
    return weight if index is None else weight[index]


@contextmanager
def _of_file(folder: Path, module: str) -> Iterator[None]:
    """Add the folder and the module to a layout's error about stored tensors."""
    try:
        yield
    except LayoutError as error:
        raise CheckpointError(
            error.rule, *error.ways_out, subject=Words(folder, ":", module)
        ) from error


def _find_packed(src: StoredTensors, layout: Layout, schemes: Schemes) -> dict[str, dict[str, str]]:
    """Map each packed module to suffix -> stored name of its tensors, in file order.

    CheckpointError if a module is incomplete, stored twice, listed as dense, or of another layout.
    """
    found: dict[str, dict[str, str]] = {}
    for name in src.names():
        module, _, suffix = name.rpartition(".")
        if module and suffix in layout.TENSORS:
            found.setdefault(module, {})[suffix] = name
    packed = {module: parts for module, parts in found.items() if layout.MARKER in parts}
    stored = set(src.names())
    for module, parts in found.items():
        stray = [
            name
            for suffix, name in parts.items()
            if suffix != "weight" or src.dtype(name) not in FLOATS
        ]
        if module not in packed and stray:
            raise CheckpointError(
                f"{stray[0]} is there, {module}.{layout.MARKER} is missing",
                json_files.AGAIN,
                subject=src.path,
            )
        if module in packed and "weight" not in parts and f"{module}.weight" in stored:
            raise CheckpointError(
                f"{module} is there twice, packed and as {module}.weight", subject=src.path
            )
        if module in packed and module in schemes.ignore:
            raise CheckpointError(
                f"{module} is packed, and config.json says that it is not",
                f"take it out of the entry there if its tensors are right, or {json_files.AGAIN}",
                subject=src.path,
            )
    _require_one_layout(src, layout, packed)
    return packed


def _require_one_layout(
    src: StoredTensors, layout: Layout, packed: Mapping[str, Mapping[str, str]]
) -> None:
    ours = {name for parts in packed.values() for name in parts.values()}
    suffixes = {suffix for each in LAYOUTS.values() for suffix in each.TENSORS}
    for name in src.names():
        if name not in ours and name.rpartition(".")[2] in suffixes and src.dtype(name) in _PACKED:
            raise CheckpointError(
                f"{name} is packed and no part of the {layout.NAME} layout that config.json "
                "states: a folder holds one layout, convert each on its own",
                subject=src.path,
            )
