"""GGUF files as sources: opened as a folder of their config and tokenizer, their weights
dequantized on reading.

transformers knows how to read a file: the config and tokenizer in its metadata, the model's name of
each tensor, and the changes of llama.cpp's converter to its values. The package gguf dequantizes.
Both see only files whose header was checked. Nothing in a file is run; a chat template is carried
along, and rendered in the sandbox of transformers.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantkit.checkpoint.stored_tensors import Derived, Read, StoredFile, file_in, read_bytes
from quantkit.core.threads import building
from quantkit.errors import CheckpointError, is_out_of_memory, reason
from quantkit.io import files, json_files
from quantkit.io.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from quantkit.io.json_files import dump_json, shown
from quantkit.names import install

if TYPE_CHECKING:
    import numpy as np

ENDING, ORIGINAL = ".gguf", "use the model's own folder"
#: Families whose activations are beyond float16, by the start of the architecture's name.
BFLOAT16 = ("gemma",)
#: The largest tensors. No family's processing changes them, so they are read in pieces.
PLAIN = ("token_embd.weight", "output.weight")
#: The tensor that divides the frequencies of rotary positions, which transformers' reader leaves
#: out.
FACTORS = "rope_freqs.weight"
#: A vocabulary entry that is a word behind a space mark; and the most entries that are tried.
WORD, WORDS = re.compile("[▁Ġ]?[A-Za-z]{4,}"), 200
#: Values that are dequantized at a time.
PIECE = 2**22
#: Key of the metadata -> entry in front of a model card.
FACTS = {"general.license": "license", "general.languages": "language", "general.tags": "tags"}


class GgufSource(NamedTuple):
    """Hold a GGUF file, the form of its weights in words, its tensors by their names in the model,
    and their bytes.
    """

    file: StoredFile
    form: str
    tensors: dict[str, Derived]
    nbytes: int
    notices: tuple[str, ...]


#: Temporary folders of this process, removed at its end: by the file's path and version, with its
#: contents.
_opened: dict[tuple[Path, tuple[int, ...]], tuple[TemporaryDirectory[str], Path]] = {}
_sources: dict[Path, GgufSource] = {}


def source_of(folder: Path) -> GgufSource | None:
    """Return the GGUF source of a folder that `open_gguf` made; None for any other folder."""
    return _sources.get(folder)


def open_gguf(path: Path) -> Path:
    """Return a temporary folder with a link to a GGUF file, and the config, tokenizer and facts in
    its metadata.

    CheckpointError for a damaged or hostile file, or a file that transformers cannot read. Nothing
    is left then.
    """
    if find_spec("gguf") is None:
        raise CheckpointError(
            "is GGUF, and the package gguf is not installed",
            install("gguf"),
            subject=path,
        )
    with files.guarded(path):
        real = path.resolve(strict=True)
    file = file_in(real.parent, real.name)._replace(name=path.name)
    key = real, file.identity
    if key not in _opened:
        holder = TemporaryDirectory(prefix="quantkit-gguf-")
        try:
            folder = Path(os.path.realpath(holder.name)) / path.name
            with files.guarded(folder):
                folder.mkdir()
                (folder / path.name).symlink_to(real)
            source = _open(path, file, folder)
        except BaseException:
            holder.cleanup()
            raise
        _opened[key], _sources[folder] = (holder, folder), source
    return _opened[key][1]


def _open(path: Path, file: StoredFile, folder: Path) -> GgufSource:
    import gguf

    header = read_gguf_header(
        file.path, {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    )
    stated, nbytes = header.metadata, sum(tensor.nbytes for tensor in header.tensors.values())
    architecture = stated.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(
            "does not state its general.architecture", "convert the model again", subject=path
        )
    if stated.get("split.count", 1) != 1:
        raise CheckpointError(
            f"is one of {shown(stated['split.count'])} files of a model",
            "merge them by llama-gguf-split",
            subject=path,
        )
    sizes = {
        key.replace("_count", "s").replace("_length", "_size"): value
        for key, value in stated.items()
    }
    json_files.check_sizes(sizes, path, len(header.tensors), nbytes)
    _require_dequantizable(path, header)
    with _refused(path, f"transformers cannot read its architecture {shown(architecture)}"):
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        config = AutoConfig.from_pretrained(folder, gguf_file=path.name, local_files_only=True)
        json_files.check_sizes(config.to_dict(), path, len(header.tensors), nbytes)
        if (factors := header.tensors.pop(FACTORS, None)) is not None:
            _scale_positions(
                config, read_bytes(folder, file, factors.start, factors.nbytes).view(torch.float32)
            )
        with building(), init_empty_weights():
            module: Any = AutoModelForCausalLM.from_config(config)
        read = _Reading(folder, file, header, module, config)
        tensors = read.tensors()
    with _refused(path, "transformers cannot make a tokenizer of it"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, gguf_file=path.name, local_files_only=True
        )
        tokenizer.save_pretrained(folder)
    require_words(path, tokenizer)
    _require_template(path, getattr(tokenizer, "chat_template", None))
    described = {**config.to_diff_dict(), "architectures": [type(module).__name__]}
    described["dtype"] = str(read.dtype).removeprefix("torch.")
    for key in ("_name_or_path", "_model_name_or_path", "quantization_config"):
        described.pop(key, None)
    files.write_atomic(
        folder / "config.json", dump_json(dict(sorted(described.items())), special_floats=True)
    )
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    front = {key: stated[name] for name, key in FACTS.items() if stated.get(name)}
    repository = str(stated.get("general.base_model.0.repo_url", ""))
    if repository.startswith("https://huggingface.co/"):
        front["base_model"] = repository.removeprefix("https://huggingface.co/")
    lines = "".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items())
    files.write_atomic(folder / "README.md", f"---\n{lines}---\n".encode())
    form, notices = _form(header)
    return GgufSource(file, form, tensors, nbytes, tuple(notices))


class _Named(NamedTuple):
    """Hide a model's inner modules from transformers' map of names, which would make a map for each
    of them.
    """

    module: Any
    children: dict[str, _Named]

    @property
    def config(self) -> Any:
        return self.module.config

    def state_dict(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.module.state_dict()
        return found

    def named_children(self) -> list[tuple[str, _Named]]:
        return list(self.children.items())


class _Reading:
    """Reads the tensors of a file under their names in a model on the meta device."""

    def __init__(
        self, folder: Path, file: StoredFile, header: GgufHeader, module: Any, config: Any
    ) -> None:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self.folder, self.file, self.header = folder, file, header
        architecture = header.metadata["general.architecture"]
        self.dtype = _dtype(header, architecture)
        processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self.processor = processor(config=config.to_dict())
        model: Any = _Named(module, {module.base_model_prefix: _Named(module.base_model, {})})
        self.names: dict[str, str] = get_gguf_hf_weights_map(model, self.processor)
        self.shapes = {name: tuple(state.shape) for name, state in module.state_dict().items()}
        self.inputs: dict[str, list[str]] = {}
        for stored in header.tensors:  # experts are mapped without the ending of their tensor
            name = self.names.get(stored) or self.names.get(stored.removesuffix(".weight"))
            if name is None:
                raise CheckpointError(
                    f"{stored} has no place in the model as transformers reads it", ORIGINAL
                )
            self.inputs.setdefault(name, []).append(stored)

    def tensors(self) -> dict[str, Derived]:
        """Describe the model's tensors that the file has; CheckpointError for one of another size
        than the model's.
        """
        found = sorted(self.inputs)
        for name in found:
            held = [self.header.tensors[stored].shape for stored in self.inputs[name]]
            if sum(map(prod, held)) != prod(self.shapes[name]):
                raise CheckpointError(
                    f"{self.inputs[name][0]} is {list(held[0])}, and the model has {name} "
                    f"{list(self.shapes[name])}",
                    "convert the model again",
                )
        return {
            name: Derived(self.shapes[name], self.dtype, (), partial(self.compute, name))
            for name in found
        }

    def compute(self, name: str, read: Read, index: int | slice | None) -> Tensor:
        """Dequantize a tensor, or an entry or a range of its first dimension."""
        shape = self.shapes[name]
        some = slice(index, index + 1) if isinstance(index, int) else index or slice(None)
        rows = range(shape[0])[some]
        if len(shape) < 3 and self.inputs[name][0] not in PLAIN:
            found = self.piece(name, slice(None))[some]
        else:
            each = max(1, PIECE // prod(shape[1:]))
            found = torch.empty(len(rows), *shape[1:], dtype=self.dtype)
            for start in range(0, len(rows), each):
                part = rows[start : start + each]
                found[start : start + each] = self.piece(name, slice(part.start, part.stop))
        return found[0] if isinstance(index, int) else found

    def piece(self, name: str, rows: slice) -> Tensor:
        """Dequantize some entries of the first dimension, and undo the changes of the converter to
        GGUF.
        """
        whole = self.shapes[name]
        expected = (len(range(whole[0])[rows]), *whole[1:])
        held: dict[str, Any] = {"tensors": {}}
        with _refused(self.file.path, f"{self.inputs[name][0]} cannot be read"):
            for stored in self.inputs[name]:
                done = self.processor.process(
                    weights=self.dequantized(self.header.tensors[stored], rows),
                    name=stored,
                    tensor_key_mapping=self.names,
                    parsed_parameters=held,
                )
                if done.name is not None:
                    held["tensors"][name] = torch.as_tensor(done.weights)
            values: Tensor = held["tensors"][name].to(self.dtype).contiguous()
            if values.shape != expected:
                raise CheckpointError(
                    f"it is {list(values.shape)}, and the model has {list(expected)}"
                )
        return values

    def dequantized(self, tensor: GgufTensor, rows: slice) -> np.ndarray[Any, Any]:
        import gguf

        kind, wanted = gguf.GGMLQuantizationType(tensor.kind), range(tensor.shape[0])[rows]
        found: np.ndarray[Any, Any] = torch.empty(len(wanted), *tensor.shape[1:]).numpy()
        each, size = max(1, PIECE // prod(tensor.shape[1:])), tensor.nbytes // tensor.shape[0]
        for start in range(0, len(wanted), each):
            part = wanted[start : start + each]
            data = read_bytes(
                self.folder, self.file, tensor.start + part.start * size, len(part) * size
            )
            shape = gguf.quant_shape_to_byte_shape((len(part), *tensor.shape[1:]), kind)
            found[start : start + each] = gguf.dequantize(data.numpy().reshape(shape), kind)
        return found


@contextmanager
def _refused(path: Path, what: str) -> Iterator[None]:
    """Turn any exception of the libraries into a CheckpointError of one line."""
    try:
        yield
    except CheckpointError as error:
        error.subject = error.subject or str(path)
        raise
    except Exception as error:  # both pass on any error of their code
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"{what} ({reason(error)})", ORIGINAL, subject=path) from error


def _scale_positions(config: Any, factors: Tensor) -> None:
    """Write the rotary scaling of Llama 3.1 that has these factors into a config. CheckpointError
    for other factors.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def frequencies(factor: float) -> Tensor:
        scaling = {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_type": "llama3",
        }
        config.rope_parameters = {
            **config.rope_parameters,
            **scaling,
            "original_max_position_embeddings": 8192,
        }
        found: Tensor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
        return found

    expected = frequencies(1.0) / frequencies(float(factors.max()))
    if expected.shape != factors.shape or not torch.allclose(expected, factors, rtol=1e-4):
        raise CheckpointError(f"{FACTORS} has other factors than Llama 3", ORIGINAL)


def _dtype(header: GgufHeader, architecture: str) -> torch.dtype:
    """Choose the model's dtype: float32 or bfloat16 as the weights are, bfloat16 for families that
    need its range, else float16.
    """
    kinds = _kinds(header)
    if kinds.keys() <= {"F32"}:
        return torch.float32
    return torch.bfloat16 if "BF16" in kinds or architecture.startswith(BFLOAT16) else torch.float16


def _kinds(header: GgufHeader) -> Counter[str]:
    """Count the values of the matrices of each number format."""
    import gguf

    found: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            found[gguf.GGMLQuantizationType(tensor.kind).name] += prod(tensor.shape)
    return found


def _form(header: GgufHeader) -> tuple[str, list[str]]:
    """Describe the number formats of the matrices and their bits; and a notice if these are a
    coarse grid.
    """
    matrices = [tensor for tensor in header.tensors.values() if len(tensor.shape) > 1]
    bits = (
        8
        * sum(tensor.nbytes for tensor in matrices)
        / max(1, sum(prod(tensor.shape) for tensor in matrices))
    )
    notice = (
        f"the source was quantized before: its weights lie on a grid of {bits:.2f} bits, what it "
        "lost stays lost"
    )
    form = (
        f"GGUF {'/'.join(kind for kind, _ in _kinds(header).most_common())} ({bits:.2f} bits a "
        "weight)"
    )
    return form, [notice] if bits < 16 else []


def _require_dequantizable(path: Path, header: GgufHeader) -> None:
    import gguf

    for number in dict.fromkeys(tensor.kind for tensor in header.tensors.values()):
        kind = gguf.GGMLQuantizationType(number)
        with _refused(path, f"the package gguf does not dequantize {kind.name}"):
            gguf.dequantize(
                torch.zeros(1, gguf.GGML_QUANT_SIZES[kind][1], dtype=torch.uint8).numpy(), kind
            )


def require_words(path: Path, tokenizer: Any) -> None:
    """Raise CheckpointError for a tokenizer that splits most words of its own vocabulary.

    Some releases of transformers lose the merges of a family (5.17: Gemma), and the model then
    reads other tokens.
    """
    import transformers

    words = sorted(piece for piece in tokenizer.get_vocab() if WORD.fullmatch(piece))
    some = words[:: -(-len(words) // WORDS)] if words else []
    texts = [tokenizer.convert_tokens_to_string([word]) for word in some]
    split = sum(len(tokenizer(text, add_special_tokens=False).input_ids) > 1 for text in texts)
    if 2 * split > len(some):
        raise CheckpointError(
            f"transformers {transformers.__version__} reads its tokenizer wrongly: {split} of "
            f"{len(some)} words of its "
            "vocabulary are split",
            "install a newer transformers",
            ORIGINAL,
            subject=path,
        )


def _require_template(path: Path, templates: str | Mapping[str, str] | None) -> None:
    """Raise CheckpointError unless each chat template parses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for template in (
        templates.values() if isinstance(templates, Mapping) else [templates] if templates else []
    ):
        with _refused(path, "its chat template does not parse"):
            render_jinja_template([], chat_template=template)
