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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.checkpoint import gguf_tokenizer
from quantkit.checkpoint.gguf_config import FAMILIES, ORIGINAL, config_of
from quantkit.checkpoint.stored_tensors import Derived, Read, StoredFile, file_in, read_bytes
from quantkit.core.formats import dtype_name
from quantkit.core.threads import building
from quantkit.errors import CheckpointError, is_out_of_memory, reason
from quantkit.io import files, json_files
from quantkit.io.gguf_header import GgufHeader, read_gguf_header
from quantkit.names import install

ENDING = ".gguf"
#: The name of a file of a split model.
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
#: Families whose activations are beyond float16, by the start of the architecture's name.
BFLOAT16 = ("gemma",)
#: The largest tensors. No family's processing changes them, so they are read in pieces.
PLAIN = ("token_embd.weight", "output.weight")
#: Tensors that divide the frequencies of rotary positions, which transformers' reader leaves out.
FACTORS = "rope_freqs.weight"
LONG_FACTORS = {f"{size}_factor": f"rope_factors_{size}.weight" for size in ("short", "long")}
#: A vocabulary entry that is a word behind a space mark (an ending is split where a tokenizer puts
#: the mark before each text); and the most entries that are tried.
WORD, WORDS = re.compile("[▁Ġ][A-Za-z]{4,}"), 200
#: Values that are dequantized at a time; the most files of a split model.
PIECE, PARTS_LIMIT = 2**22, 10**3
#: How to draw tokens: keys of the metadata -> entries of a generation config.
SAMPLING = "general.sampling."
DRAWS = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
#: Key of the metadata -> entry in front of a model card.
FACTS = {"general.license": "license", "general.languages": "language", "general.tags": "tags"}


class GgufSource(NamedTuple):
    """Hold the files of a GGUF model, the form of its weights in words, the words for their loss,
    its tensors by their names in the model, their bytes, and why no text can be read, if none can.
    """

    files: list[StoredFile]
    form: str
    loss: str
    tensors: dict[str, Derived]
    nbytes: int
    notices: tuple[str, ...]
    unreadable: str | None
    metadata: dict[str, Any]


#: Temporary folders of this process, removed at its end: by the file's path and version, with its
#: contents.
_opened: dict[tuple[Path, tuple[int, ...]], tuple[TemporaryDirectory[str], Path]] = {}
_sources: dict[Path, GgufSource] = {}


def source_of(folder: Path) -> GgufSource | None:
    """Return the GGUF source of a folder that `open_gguf` made; None for any other folder."""
    return _sources.get(folder)


def parts_of(path: Path) -> list[Path]:
    """List the files of the model that a GGUF file is part of; CheckpointError if one lacks."""
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, count = found[1], int(found[3])
    paths = [
        path.with_name(f"{stem}-{number:05d}-of-{found[3]}{path.suffix}")
        for number in range(1, min(count, PARTS_LIMIT) + 1)
    ]
    absent = next((each for each in paths if not each.is_file()), None)
    if absent is not None or count > PARTS_LIMIT:
        raise CheckpointError(
            f"is part of a model that is split into {count} files, "
            f"{absent.name if absent else 'too many'} is missing",
            "put all files into one folder",
            subject=path,
        )
    return paths


def open_gguf(path: Path, described: bool = False) -> Path:
    """Return a temporary folder with links to a GGUF file, or to all files of a split model, and
    the config and facts in its metadata.

    With `described`, transformers is left out: the tensors have their names in the file, and no
    values. CheckpointError for a damaged or hostile file, or a file that transformers cannot read.
    Nothing is left then.
    """
    if find_spec("gguf") is None:
        raise CheckpointError(
            "is GGUF, and the package gguf is not installed",
            install("gguf"),
            subject=path,
        )
    paths = parts_of(path)
    stored = []
    for each in paths:
        with files.guarded(each):
            real = each.resolve(strict=True)
        stored.append(file_in(real.parent, real.name)._replace(name=each.name))
    key = stored[0].path, (described, *(number for file in stored for number in file.identity))
    if key not in _opened:
        holder = TemporaryDirectory(prefix="quantkit-gguf-")
        try:
            folder = Path(os.path.realpath(holder.name)) / paths[0].name
            with files.guarded(folder):
                folder.mkdir()
                for file in stored:
                    with suppress(OSError, NotImplementedError):  # Windows lets few users do it
                        (folder / file.name).symlink_to(file.path)
                    if not (folder / file.name).exists():
                        (folder / file.name).hardlink_to(file.path)
            source = (_describe if described else _open)(paths[0], stored, folder)
        except BaseException:
            holder.cleanup()
            raise
        _opened[key], _sources[folder] = (holder, folder), source
    return _opened[key][1]


@cache
def add_tokenizer(folder: Path) -> list[str] | None:
    """Write the tokenizer of a GGUF file into the folder that `open_gguf` made, if it has one, and
    return the words into which it splits `gguf_tokenizer.PROBE`. None for any other folder.

    It is not written on opening, because a vocabulary takes most of the time.
    """
    source = _sources.get(folder)
    if source is None or source.unreadable is not None:
        return None
    stated, path = source.metadata, source.files[0].path
    with _refused(path, "transformers cannot make a tokenizer of it"):
        made, words = gguf_tokenizer.files_of(stated["general.architecture"], stated)
    for name, text in made.items():
        files.write_atomic(folder / name, text)
    return words


def _read_headers(path: Path, stored: list[StoredFile]) -> tuple[GgufHeader, dict[str, StoredFile]]:
    """Read the headers of all files of a model: the metadata of the first, and the tensors of all
    with their files.
    """
    import gguf

    blocks = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    try:
        headers = [read_gguf_header(file.path, blocks) for file in stored]
    except CheckpointError as error:
        if len(stored) > 1:
            error.rule += f" (one of the {len(stored)} files of a split model)"
        raise
    count = headers[0].metadata.get("split.count", 1) or 1
    if count != len(stored):
        raise CheckpointError(
            f"is one of {json_files.shown(count)} files of a model",
            "name them NAME-00001-of-00003.gguf and so on, or merge them by llama-gguf-split",
            subject=path,
        )
    where: dict[str, StoredFile] = {}
    first = {key: v for key, v in headers[0].metadata.items() if key.startswith("split.")}
    for number, (file, header) in enumerate(zip(stored, headers, strict=True)):
        expected = {**first, "split.no": number}.items()
        same = all(header.metadata.get(key, value) == value for key, value in expected)
        if not same or where.keys() & header.tensors:
            raise CheckpointError(
                f"is not file {number + 1} of this split model",
                "download all files again",
                subject=file.path,
            )
        where |= dict.fromkeys(header.tensors, file)
    tensors = {
        name: tensor._replace(kind=gguf.GGMLQuantizationType(tensor.kind))
        for header in headers
        for name, tensor in header.tensors.items()
    }
    if headers[0].metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        raise CheckpointError(
            f"should have {headers[0].metadata['split.tensors.count']} tensors, its files have "
            f"{len(tensors)}",
            "download all files again",
            subject=path,
        )
    if not isinstance(headers[0].metadata.get("general.architecture"), str):
        raise CheckpointError(
            "does not state its general.architecture", "convert the model again", subject=path
        )
    return GgufHeader(headers[0].metadata, tensors), where


def _describe(path: Path, stored: list[StoredFile], folder: Path) -> GgufSource:
    """Describe a file by its header."""
    header, _ = _read_headers(path, stored)
    architecture = header.metadata["general.architecture"]

    def compute(read: Read, index: int | slice | None) -> Tensor:
        raise KeyError(path)

    dtype = _dtype(header, architecture)
    tensors = {
        name: Derived(each.shape, dtype, (), compute) for name, each in header.tensors.items()
    }
    files.write_atomic(folder / "config.json", json_files.dump_json({"model_type": architecture}))
    return _source(stored, header, tensors)


def _source(
    stored: list[StoredFile],
    header: GgufHeader,
    tensors: dict[str, Derived],
    unreadable: str | None = None,
    notices: Sequence[str] = (),
) -> GgufSource:
    form, loss = _form(header)
    if unreadable is not None:
        notices = [*notices, f"{unreadable}: outputs get no tokenizer, and no text can be read"]
    return GgufSource(
        stored,
        form,
        loss,
        tensors,
        sum(tensor.nbytes for tensor in header.tensors.values()),
        tuple(notices),
        unreadable,
        header.metadata,
    )


def _open(path: Path, stored: list[StoredFile], folder: Path) -> GgufSource:
    header, where = _read_headers(path, stored)
    stated, nbytes = header.metadata, sum(tensor.nbytes for tensor in header.tensors.values())
    architecture = stated["general.architecture"]
    if (kind := stated.get("general.type", "model")) != "model":
        raise CheckpointError(
            f"is GGUF of the type {json_files.shown(kind)}, no model",
            "give the model's file",
            subject=path,
        )
    sizes = {
        key.replace("_count", "s").replace("_length", "_size"): value
        for key, value in stated.items()
    }
    json_files.check_sizes(sizes, path, len(header.tensors), nbytes)
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"transformers cannot read its architecture {json_files.shown(architecture)}",
            ORIGINAL,
            subject=path,
        )
    _require_dequantizable(path, header)
    unreadable = gguf_tokenizer.check_keys(stated, path)
    notices = gguf_tokenizer.drop_impossible(stated)
    with _refused(
        path, f"transformers cannot read its architecture {json_files.shown(architecture)}"
    ):
        from transformers import AutoModelForCausalLM, GenerationConfig

        factors = _factors(folder, header, where)
        plain = factors.pop(FACTORS, None)
        sized = {f"{architecture}.vocab_size": gguf_tokenizer.count_of(stated, "tokens"), **stated}
        lists = {name: values.tolist() for name, values in factors.items()}
        config = config_of(sized, header.tensors, lists, path)
        json_files.check_sizes(config.to_dict(), path, len(header.tensors), nbytes)
        if plain is not None:
            _scale_positions(config, plain)
        with building(), torch.device("meta"):
            module: Any = AutoModelForCausalLM.from_config(config)
        read = _Reading(folder, where, header, module, config)
        tensors = read.tensors()
    templates = gguf_tokenizer.templates_of(stated)
    _require_templates(path, templates)
    for name, text in templates.items():
        (folder / name).parent.mkdir(exist_ok=True)
        files.write_atomic(folder / name, text.encode())
    described = {
        **config.to_diff_dict(),
        "architectures": [type(module).__name__],
        "dtype": dtype_name(read.dtype),
    }
    kept = sorted(
        described.keys() - {"_name_or_path", "_model_name_or_path", "quantization_config"}
    )
    files.write_atomic(
        folder / "config.json",
        json_files.dump_json({key: described[key] for key in kept}, special_floats=True),
    )
    generation = GenerationConfig.from_model_config(config)
    if ends := gguf_tokenizer.ends_of(stated):
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    generation.suppress_tokens = gguf_tokenizer.list_of(stated, "suppress_tokens") or None
    with _refused(path, f"its keys {SAMPLING}* cannot be followed"):
        notices += _draw_as_stated(generation, stated)
        with files.guarded(folder):
            generation.save_pretrained(folder)
    front = {
        key: stated[name]
        for name, key in FACTS.items()
        if isinstance(stated.get(name), (str, list)) and stated[name]
    }
    repository = str(stated.get("general.base_model.0.repo_url", ""))
    if repository.startswith("https://huggingface.co/"):
        front["base_model"] = repository.removeprefix("https://huggingface.co/")
    if front:
        lines = "".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items())
        files.write_atomic(folder / "README.md", f"---\n{lines}---\n".encode())
    return _source(stored, header, tensors, unreadable, notices)


def _draw_as_stated(generation: Any, stated: Mapping[str, Any]) -> list[str]:
    """Write a file's sampling settings into a generation config; return a notice of settings that
    have no entry there.
    """
    keys = [key.removeprefix(SAMPLING) for key in stated if key.startswith(SAMPLING)]
    values = {key: stated[SAMPLING + key] for key in keys if key in DRAWS}
    if values and values.get("temp", 1) > 0:  # 0 takes the likeliest token, as without a draw
        generation.update(  # numbers of float32, without digits of chance
            do_sample=True, **{DRAWS[key]: type(v)(f"{v:.7g}") for key, v in values.items()}
        )
    others = [f"{SAMPLING}{key}" for key in keys if key not in DRAWS]
    return [f"{', '.join(others)}: left out, no entry of transformers says so"] if others else []


def _factors(
    folder: Path, header: GgufHeader, where: Mapping[str, StoredFile]
) -> dict[str, Tensor]:
    """Take the tensors out of a header that divide the frequencies of positions."""
    names = {FACTORS: FACTORS}
    if all(name in header.tensors for name in LONG_FACTORS.values()):
        names |= LONG_FACTORS
    found = {}
    for name, stored in names.items():
        if stored in header.tensors:
            tensor = header.tensors.pop(stored)
            found[name] = read_bytes(folder, where[stored], tensor.start, tensor.nbytes).view(
                torch.float32
            )
    return found


def _named(module: Any, **children: Any) -> Any:
    """Hide a model's inner modules, except `children`, from transformers' map of names, which would
    make a map for each of them.
    """
    return SimpleNamespace(
        config=module.config, state_dict=module.state_dict, named_children=children.items
    )


class _Reading:
    """Reads the tensors of a file under their names in a model on the meta device."""

    def __init__(
        self,
        folder: Path,
        where: Mapping[str, StoredFile],
        header: GgufHeader,
        module: Any,
        config: Any,
    ) -> None:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self.folder, self.where, self.header = folder, where, header
        architecture = header.metadata["general.architecture"]
        self.dtype = _dtype(header, architecture)
        processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self.processor = processor(config=config.to_dict())
        model = _named(module, **{module.base_model_prefix: _named(module.base_model)})
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
        first = self.inputs[name][0]
        with _refused(self.where[first].path, f"{first} cannot be read"):
            for stored in self.inputs[name]:
                done = self.processor.process(
                    weights=self.dequantized(stored, rows),
                    name=stored,
                    tensor_key_mapping=self.names,
                    parsed_parameters=held,
                )
                if done.name is not None:
                    held["tensors"][name] = torch.as_tensor(done.weights)
            values: Tensor = held["tensors"][name].to(self.dtype).contiguous()
            if [size for size in values.shape if size > 1] == [
                size for size in expected if size > 1
            ]:
                values = values.reshape(expected)  # converters of some years leave out sizes of 1
            if values.shape != expected:
                raise CheckpointError(
                    f"it is {list(values.shape)}, and the model has {list(expected)}"
                )
        return values

    def dequantized(self, name: str, rows: slice) -> Any:
        """Dequantize some rows of a stored tensor to a float32 array of numpy."""
        import gguf

        tensor = self.header.tensors[name]
        wanted = range(tensor.shape[0])[rows]
        found = torch.empty(len(wanted), *tensor.shape[1:]).numpy()
        each, size = max(1, PIECE // prod(tensor.shape[1:])), tensor.nbytes // tensor.shape[0]
        for start in range(0, len(wanted), each):
            part = wanted[start : start + each]
            data = read_bytes(
                self.folder, self.where[name], tensor.start + part.start * size, len(part) * size
            )
            shape = gguf.quant_shape_to_byte_shape((len(part), *tensor.shape[1:]), tensor.kind)
            found[start : start + each] = gguf.dequantize(data.numpy().reshape(shape), tensor.kind)
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
        config.rope_parameters = {
            **config.rope_parameters,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        }
        return ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]

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
    found: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            found[tensor.kind.name] += prod(tensor.shape)
    return found


def _form(header: GgufHeader) -> tuple[str, str]:
    """Describe the number formats of the matrices and their bits; and the loss of a coarse grid."""
    matrices = [tensor for tensor in header.tensors.values() if len(tensor.shape) > 1]
    bits = (
        8
        * sum(tensor.nbytes for tensor in matrices)
        / max(1, sum(prod(tensor.shape) for tensor in matrices))
    )
    form = (
        f"GGUF {'/'.join(kind for kind, _ in _kinds(header).most_common())} ({bits:.2f} bits a "
        "weight)"
    )
    return form, "; what they lost before stays lost" if bits < 16 else ""


def _require_dequantizable(path: Path, header: GgufHeader) -> None:
    import gguf

    for kind in dict.fromkeys(tensor.kind for tensor in header.tensors.values()):
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

    every = max(1, len(tokenizer) // (20 * WORDS))
    pieces = tokenizer.convert_ids_to_tokens(range(0, len(tokenizer), every))
    some = [piece for piece in pieces if piece and WORD.fullmatch(piece)][:WORDS]
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


def require_same_words(path: Path, tokenizer: Any, words: list[str]) -> None:
    """Raise CheckpointError for a tokenizer that transformers builds otherwise than the file says,
    as it does for some families by a class of theirs.
    """
    require_words(path, tokenizer)
    if gguf_tokenizer.words_of(tokenizer.backend_tokenizer) != words:
        raise CheckpointError(
            f"{type(tokenizer).__name__} of transformers splits text otherwise than "
            "tokenizer.ggml.pre of the file says",
            ORIGINAL,
            subject=path,
        )


def _require_templates(path: Path, templates: Mapping[str, str]) -> None:
    """Raise CheckpointError unless each chat template parses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for template in templates.values():
        with _refused(path, "its chat template does not parse"):
            render_jinja_template([], chat_template=template)
