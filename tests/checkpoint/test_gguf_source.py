"""GGUF sources: their tensors are those that transformers reads, their outputs those of the dense model, and a file
that is damaged, hostile or unknown is refused in one line and leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.api import pack, plan, quantize, verify
from quantkit.checkpoint import gguf_source
from quantkit.checkpoint.origin import resolve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.cli.demo import MODEL
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.io.gguf_header import read_gguf_header
from quantkit.text.tokenizer import load_tokenizer
from tests.gguf_files import converted, gguf, tokenizer_keys, write_file, write_gguf
from tests.tiny_models import CHAT_TEMPLATE, byte_tokenizer

RTN: dict[str, Any] = {"format": "int4", "group_size": 64, "method": "rtn"}
BLOCKS = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}


def opened(file: Path) -> Checkpoint:
    return Checkpoint(resolve(str(file)))


def states_by_transformers(file: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_gguf("llama", tmp_path_factory.mktemp("llama"), "Q4_0")


@pytest.mark.parametrize(
    ("family", "kind", "dtype", "form"),
    [
        ("llama", "Q4_K", torch.float16, "GGUF Q4_K (4.50 bits a weight)"),
        ("llama", "BF16", torch.bfloat16, "GGUF BF16 (16.00 bits a weight)"),
        ("llama", "F32", torch.float32, "GGUF F32 (32.00 bits a weight)"),
        ("qwen2", "Q4_0", torch.float16, "GGUF Q4_0 (4.50 bits a weight)"),
        ("gemma2", "Q8_0", torch.bfloat16, "GGUF Q8_0 (8.50 bits a weight)"),
        ("qwen3_moe", "Q8_0", torch.float16, "GGUF Q8_0 (8.50 bits a weight)"),
    ],
)
def test_each_tensor_is_the_one_that_transformers_reads_rounded_once(
    family: str, kind: str, dtype: torch.dtype, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_source, "PIECE", 2**12)  # so that embeddings and experts are read in pieces
    file, _ = write_gguf(family, tmp_path, kind)
    src, states = opened(file), states_by_transformers(file)
    assert src.low_bit == form and src.dtype_of_model == dtype
    tied = {"lm_head.weight"} if src.config["tie_word_embeddings"] else set()
    assert src.names() == sorted(states.keys() - tied)
    for name in src.names():
        expected = states[name].to(dtype)
        found = src.get(name)
        assert found.dtype == dtype == src.dtype(name) and tuple(found.shape) == src.shape(name)
        assert torch.equal(found, expected), name
        assert torch.equal(src.get(name, slice(1, 3)), expected[1:3]) and torch.equal(src.get(name, 1), expected[1])
    assert any("stays lost" in line for line in src.notices) == (kind.startswith("Q"))


def test_weights_in_float16_are_those_of_the_model_that_was_converted(tmp_path: Path) -> None:
    file, dense = write_gguf("llama", tmp_path)
    src, exact = opened(file), Checkpoint(dense)
    assert sorted(src.names()) == sorted(exact.names())
    assert all(torch.equal(src.get(name), exact.get(name)) for name in exact.names())
    same = set(src.config) - {"transformers_version", "rms_norm_eps"}  # GGUF has the latter in float32
    assert len(same) > 15 and {key: src.config[key] for key in same} == {key: exact.config.get(key) for key in same}


@pytest.mark.parametrize("squeezed", [False, True])
def test_a_gate_of_one_row_is_read_from_files_of_all_years(
    squeezed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(model: Any, architecture: str) -> dict[str, Any]:
        found = converted(model, architecture)
        return {name: w.squeeze() if squeezed and len(w) == 1 else w for name, w in found.items()}

    monkeypatch.setattr("tests.gguf_files.converted", weights)
    file, dense = write_gguf("qwen2_moe", tmp_path)
    name = "model.layers.1.mlp.shared_expert_gate.weight"
    assert torch.equal(opened(file).get(name), Checkpoint(dense).get(name))


def test_an_output_has_the_bytes_of_quantizing_the_dequantized_folder(llama: tuple[Path, Path], tmp_path: Path) -> None:
    src = opened(llama[0])
    dense = tmp_path / "dense"
    dense.mkdir()
    save_file({name: src.get(name) for name in src.names()}, dense / "model.safetensors")
    load_tokenizer(src.path)  # its files are written when they are needed
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (dense / name).write_bytes((src.path / name).read_bytes())
    made = quantize(llama[0], tmp_path / "a", **RTN)
    quantize(dense, tmp_path / "b", **RTN)
    assert made["totals"]["source_bytes"] == plan(llama[0], **RTN).output.source_bytes > 0
    found, expected = (load_file(tmp_path / name / "model-00001-of-00001.safetensors") for name in "ab")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()

    assert made["source"]["weights"] == "GGUF Q4_0 (4.50 bits a weight), dequantized"
    assert made["source"]["name"] == "model.gguf" and "model.gguf" in made["source"]["files"]
    (note,) = (line for line in made.notices if "4.50 bits a weight" in line)
    assert note.endswith("on reading; what they lost before stays lost")
    card = (tmp_path / "a" / "README.md").read_text()
    assert "| source | GGUF Q4_0 (4.50 bits a weight), dequantized |" in card
    assert 'license: "apache-2.0"' in card and 'base_model: "maker/model"' in card
    assert not [f.name for f in (tmp_path / "a").iterdir() if str(src.path.parent) in f.read_text(errors="replace")]


def test_embeddings_of_few_bits_can_stay_near_them_in_the_scheme_of_an_override(tmp_path: Path) -> None:
    file, _ = write_gguf("qwen2", tmp_path, "Q8_0")  # INT8 in groups of 32; tied
    wide = plan(file, method="rtn").total
    planned = plan(file, method="rtn", override={"embed_tokens": "int8:g32"})
    assert wide - planned.total > 0.4 * 257 * 256 * 2
    quantize(file, tmp_path / "out", method="rtn", override={"embed_tokens": "int8:g32"}, min_share=0)
    (tensor,) = [each for each in gguf.GGUFReader(file).tensors if each.name == "token_embd.weight"]
    exact = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    found = Checkpoint(tmp_path / "out").dense("model.embed_tokens.weight", torch.float32)
    assert float((found - exact).norm() / exact.norm()) < 0.005 and verify(tmp_path / "out").ok


def test_commands_of_packed_folders_send_the_file_to_quantize(llama: tuple[Path, Path], tmp_path: Path) -> None:
    for command in (partial(pack, llama[0], tmp_path / "out", "marlin"), partial(verify, llama[0])):
        with pytest.raises(CheckpointError, match=r"is a GGUF file, a source: use quantkit\.quantize first"):
            command()


def test_tokenizer_and_chat_template_are_those_of_the_model(llama: tuple[Path, Path], tmp_path: Path) -> None:
    quantize(llama[0], tmp_path / "out", **RTN)
    found, expected = load_tokenizer(tmp_path / "out"), byte_tokenizer()
    text = "Sinks — and <|endoftext|> naïve tokens\n\tin 2 lines"
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert found.chat_template == CHAT_TEMPLATE
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 256


def test_a_tokenizer_that_lost_its_merges_is_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    whole = load_tokenizer(MODEL)
    gguf_source.require_words(tmp_path, whole)
    state = json.loads(whole.backend_tokenizer.to_str())
    state["model"]["merges"] = []
    broken = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    with pytest.raises(CheckpointError, match=r"reads its tokenizer wrongly: \d+ of \d+ words .* newer transformers"):
        gguf_source.require_words(tmp_path, broken)


def test_a_vocabulary_of_endings_is_no_broken_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["▁", *"tion", "ti", "on", "tion"]
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [("t", "i"), ("o", "n"), ("ti", "on")]))
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # puts a mark before each text
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert tokenizer.tokenize("tion") == ["▁", "tion"]
    gguf_source.require_words(tmp_path, tokenizer)


def test_a_folder_gives_its_only_file_and_safetensors_come_first(llama: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(llama[0].read_bytes())
    assert Checkpoint(resolve(str(tmp_path))).low_bit == "GGUF Q4_0 (4.50 bits a weight)"
    (tmp_path / "y.gguf").write_bytes(llama[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"holds several GGUF files \(x.gguf, y.gguf\): give the path of one"):
        resolve(str(tmp_path))
    named = quantize(tmp_path / "y.gguf", tmp_path.parent / "named", **RTN)
    assert named["source"]["files"].keys() >= {"y.gguf"}
    for file in llama[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    src = Checkpoint(resolve(str(tmp_path)))
    assert src.low_bit is None and "ignored: x.gguf, y.gguf" in src.notices


def test_a_full_disk_of_temporary_files_is_no_fault_of_the_file(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationConfig

    def save(self: GenerationConfig, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(GenerationConfig, "save_pretrained", save)
    with pytest.raises(CheckpointError, match="no space left"):
        resolve(str(shutil.copy(llama[0], tmp_path / "new.gguf")))


def test_the_folder_of_the_file_is_not_overwritten(llama: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.gguf").write_bytes(llama[0].read_bytes())
    (tmp_path / "in" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="lie in each other"):
        quantize(tmp_path / "in" / "model.gguf", tmp_path / "in", overwrite=True, **RTN)
    assert (tmp_path / "in" / "model.gguf").exists()


def test_a_file_that_changes_while_it_is_read_is_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(llama[0].read_bytes())
    src = opened(file)
    file.write_bytes(llama[0].read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        src.get("lm_head.weight")
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        src.require_unchanged()


def test_the_missing_package_is_named_with_its_command(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_source, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=re.escape("pip install 'gguf>=0.18'")):
        quantize(llama[0], tmp_path / "out", **RTN)


#: Case -> metadata that is added or replaced, and what the error says.
STATED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown family": ({"general.architecture": "quux"}, "cannot read its architecture 'quux'"),
    "an encoder-decoder": ({"general.architecture": "t5"}, "cannot read its architecture 't5'"),
    "one of several files": ({"split.count": 3}, "is one of 3 files of a model: name them NAME-00001-of-00003.gguf"),
    "a million layers": ({"llama.block_count": 2**20}, "is 1048576, and the weight files hold 21 tensors"),
    "a huge width": ({"llama.embedding_length": 2**31}, "is 2147483648, and the weight files hold"),
    "another width": ({"llama.feed_forward_length": 128}, "and the model has"),
    "a layer too few": ({"llama.block_count": 1}, "blk.1.attn_q.weight has no place in the model"),
    "a template that does not parse": ({"tokenizer.chat_template": "{% for m in"}, "its chat template does not parse"),
    "an unknown tokenizer": ({"tokenizer.ggml.model": "quux"}, "cannot make a tokenizer of it"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "cannot"),
    "an alignment of 3": ({"general.alignment": 3}, "has general.alignment 3"),
    **{kind: ({"general.type": kind}, f"is GGUF of the type '{kind}', no model") for kind in ("adapter", "mmproj")},
}


@pytest.mark.parametrize("case", STATED)
def test_metadata_that_cannot_be_are_refused_in_one_line_and_leave_nothing(
    case: str, llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated, words = STATED[case]
    file = changed(llama[0], tmp_path / "model.gguf", stated)
    refuse(file, words, tmp_path, monkeypatch)


def changed(source: Path, file: Path, stated: dict[str, Any]) -> Path:
    """Write a GGUF file with other metadata: entries are added in front, the old ones renamed."""
    data = bytearray(source.read_bytes())
    count = struct.unpack_from("<Q", data, 16)[0]
    for key, value in stated.items():
        at = data.find(key.encode())
        if at >= 0:
            data[at : at + len(key)] = b"x" * len(key.encode())
        if value is not None:
            form = struct.pack("<I", 4) + struct.pack("<I", value) if isinstance(value, int) else None
            entry = text(key) + (form or struct.pack("<I", 8) + text(str(value)))
            entry += text("pad") + struct.pack("<I", 8)
            entry += text("p" * (-(len(entry) + 8) % 32))
            data[24:24] = entry
            count += 2
    data[16:24] = struct.pack("<Q", count)
    file.write_bytes(data)
    return file


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def refuse(file: Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Require that a file is refused with these words, in one line, and that no folder is left."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = set(tmp_path.iterdir())
    with pytest.raises(QuantkitError) as caught:
        quantize(file, tmp_path / "out", **RTN)
    assert words in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
    assert set(tmp_path.iterdir()) == before and not list(temporary.iterdir())


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def one_tensor(rank: int = 2, kind: int = 0, offset: int = 0, dims: tuple[int, ...] = (8, 4)) -> bytes:
    info = text("a") + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, kind, offset)
    return header(tensors=1) + info + bytes(512)


#: Case -> bytes of a file, and what the error says.
BYTES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is no GGUF file"),
    "another magic": (b"GGML" + bytes(60), "is no GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "or big-endian"),
    "version 1": (header(version=1), "is of GGUF version 1"),
    "countless tensors": (header(tensors=2**60), "the limit is 100000"),
    "countless keys": (header(keys=2**60), "the limit is 100000"),
    "a key of an exabyte": (header(keys=1) + struct.pack("<Q", 2**60), "states a text of 1152921504606846976 bytes"),
    "a text past the end": (header(keys=1) + text("k") + struct.pack("<IQ", 8, 1000), "is cut at byte"),
    "a list of an exabyte": (
        header(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, 2**58),
        "lists 288230376151711744 values",
    ),
    "a list past the end": (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, 2**20), "is cut at byte"),
    "a list of lists": (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "lists 1 values of type 9"),
    "an unknown type": (header(keys=1) + text("k") + struct.pack("<I", 77), "has a value of type 77"),
    "no UTF-8": (header(keys=1) + struct.pack("<Q", 2) + b"\xff\xfe", "has a text that is not UTF-8"),
    "a key twice": (header(keys=2) + 2 * (text("k") + struct.pack("<II", 4, 1)), "has the key 'k' twice"),
    "no architecture": (header(), "does not state its general.architecture"),
    "countless dimensions": (one_tensor(rank=2**31), "2147483648 dimensions"),
    "a dimension of nothing": (one_tensor(dims=(0, 4)), "the shape [4, 0]"),
    "an exabyte of values": (one_tensor(dims=(2**40, 2**40)), "gives 'a' the shape"),
    "bytes past the end": (one_tensor(offset=2**40), "bytes of 'a' at"),
    "bytes between": (one_tensor(offset=7), "bytes of 'a' at"),
    "an unknown format": (one_tensor(kind=9999), "has number format 9999"),
    "a format that the package does not dequantize": (
        header(tensors=1, keys=1)
        + b"".join((text("general.architecture"), struct.pack("<I", 8), text("llama")))
        + one_tensor(kind=int(gguf.GGMLQuantizationType.I8))[24:],
        "does not dequantize I8",
    ),
    "half a block": (one_tensor(kind=2, dims=(8, 4)), "the shape [4, 8]"),
    "a tensor twice": (
        header(tensors=2) + 2 * (text("a") + struct.pack("<I2QIQ", 2, 8, 4, 0, 0)) + bytes(512),
        "has the tensor 'a' twice",
    ),
    "tensors in each other": (
        header(tensors=2)
        + b"".join(text(name) + struct.pack("<I2QIQ", 2, 8, 4, 0, 32 * i) for i, name in enumerate("ab"))
        + bytes(512),
        "has bytes of 'b' inside another tensor",
    ),
}


@pytest.mark.parametrize("case", BYTES)
def test_headers_that_cannot_be_are_refused_before_a_library_reads_them(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, words = BYTES[case]
    (tmp_path / "model.gguf").write_bytes(data)
    refuse(tmp_path / "model.gguf", words, tmp_path, monkeypatch)


def test_a_file_that_is_cut_anywhere_is_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    data, file = llama[0].read_bytes(), tmp_path / "model.gguf"
    for size in (*range(0, 4000, 161), len(data) // 2, len(data) - 64):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut|ends at|no GGUF"):
            read_gguf_header(file, BLOCKS)


def test_changed_bytes_of_a_header_are_an_error_of_one_line_or_another_header(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    data, file = llama[0].read_bytes(), tmp_path / "model.gguf"
    chance = np.random.default_rng(0)
    refused = 0
    for _ in range(80):
        bad = bytearray(data[:16384])
        for at in chance.integers(0, len(bad), 3):
            bad[at] = chance.integers(256)
        file.write_bytes(bytes(bad) + data[16384:])
        try:
            read_gguf_header(file, BLOCKS)
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 5


def test_tensors_without_a_place_and_missing_ones_are_refused_by_name(llama: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama[1], dtype=torch.float32)
    stated = keys_of(llama[0])
    weights = converted(model, "llama")
    write_file(tmp_path / "a.gguf", "llama", stated, {**weights, "rope_factors_long.weight": np.ones(32)}, "F16")
    with pytest.raises(CheckpointError, match=r"rope_factors_long.weight has no place in the model"):
        opened(tmp_path / "a.gguf")
    del weights["blk.1.ffn_up.weight"]
    write_file(tmp_path / "b.gguf", "llama", stated, weights, "F16")
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight"):
        quantize(tmp_path / "b.gguf", tmp_path / "out", **RTN)
    write_file(tmp_path / "c.gguf", "llama", {**stated, "llama.block_count": 3}, converted(model, "llama"), "F16")
    with pytest.raises(CheckpointError, match=r"c.gguf: model.layers.2.*: save the whole model again"):
        quantize(tmp_path / "c.gguf", tmp_path / "out", **RTN)


def keys_of(file: Path) -> dict[str, Any]:
    stated = read_gguf_header(file, BLOCKS).metadata
    found = {**stated, **tokenizer_keys(), "general.architecture": None}
    return {key: value for key, value in found.items() if value is not None}


def test_the_scaled_positions_of_llama_3_are_kept_and_other_factors_refused(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    weights = converted(AutoModelForCausalLM.from_pretrained(llama[1], dtype=torch.float32), "llama")
    # By the formula of the model card of Llama 3.1, for heads of 64 and a base of 500,000.
    factors = np.float32([*[1.0] * 15, 1.5534146, 2.6945296, 5.2573266, *[8.0] * 14])
    stated = {**keys_of(llama[0]), "llama.rope.freq_base": 5e5}
    write_file(tmp_path / "a.gguf", "llama", stated, {**weights, "rope_freqs.weight": factors}, "F16")
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    expected = {"rope_theta": 5e5, "rope_type": "llama3", **scaling}
    assert opened(tmp_path / "a.gguf").config["rope_parameters"] == expected
    write_file(tmp_path / "b.gguf", "llama", stated, {**weights, "rope_freqs.weight": factors + 1}, "F16")
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight has other factors than Llama 3"):
        opened(tmp_path / "b.gguf")


def split_up(file: Path, folder: Path, name: str = "m") -> list[Path]:
    """Write the model of a GGUF file as three files, as llama-gguf-split does."""
    weights = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(file).tensors}
    names, paths = list(weights), []
    for number in range(3):
        path = folder / f"{name}-0000{number + 1}-of-00003.gguf"
        stated = {**(keys_of(file) if number == 0 else {}), "split.no": number, "split.count": 3}
        some = {each: weights[each] for each in names[number::3]}
        write_file(path, "llama", {**stated, "split.tensors.count": len(names)}, some, "F32")
        paths.append(path)
    return paths


def test_a_split_model_opens_by_any_of_its_files_or_its_folder(llama: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    paths = split_up(llama[0], tmp_path / "parts")
    whole = opened(llama[0])
    for given in (paths[0], paths[2], tmp_path / "parts"):
        src = opened(given)
        assert src.names() == whole.names()
        assert all(torch.equal(src.get(name).half(), whole.get(name)) for name in whole.names())
    made = quantize(paths[0], tmp_path / "out", **RTN)
    assert made["source"]["files"].keys() >= {path.name for path in paths}


def test_a_split_model_with_a_missing_damaged_or_foreign_file_is_refused(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    paths = split_up(llama[0], tmp_path)
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[:64])
    with pytest.raises(CheckpointError, match=r"cut at byte 64.*one of the 3 files of a split model"):
        opened(paths[0])
    paths[1].write_bytes(data.replace(b"split.count\x04\0\0\0\3", b"split.count\x04\0\0\0\4"))
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003.gguf: is not file 2 of this split model"):
        opened(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003.gguf: is not file 2 of this split model"):
        opened(paths[0])
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"split into 3 files, m-00002-of-00003.gguf is missing: put all files"):
        opened(paths[0])


@pytest.mark.parametrize("parts", [False, True])
def test_a_file_of_the_hub_opens_by_the_id_of_its_repository(
    parts: bool, llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--maker--tiny" / "snapshots" / ("0" * 40)
    (snapshot / "Q4").mkdir(parents=True)
    asked = []

    def download(repository: str, revision: str | None, allow_patterns: list[str], **options: Any) -> str:
        asked.append((repository, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (snapshot / "Q4" / "m.gguf").symlink_to(llama[0])
    name = split_up(llama[0], snapshot / "Q4")[0].name if parts else "m.gguf"
    made = quantize(f"maker/tiny:Q4/{name}", tmp_path / "out", **RTN)
    assert asked[0] == ("maker/tiny", ["Q4/m-*-of-00003.gguf" if parts else "Q4/m.gguf"])
    assert made["source"]["name"] == f"maker/tiny:Q4/{name}"
    assert 'base_model: "maker/tiny"' in (tmp_path / "out" / "README.md").read_text()


def test_a_file_without_a_licence_gives_no_notice_about_a_card(tmp_path: Path) -> None:
    nothing = {"general.license": None, "general.base_model.0.repo_url": None}
    file, _ = write_gguf("qwen2", tmp_path, stated=nothing)
    made = quantize(file, tmp_path / "out", **RTN)
    assert not any("README" in line or "licence" in line for line in made.notices)


def test_a_file_is_described_by_its_header_and_its_vocabulary_read_when_it_is_needed(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(llama[0].read_bytes())  # of which no folder is made yet
    src = opened(tmp_path / "model.gguf")
    assert not (src.path / "tokenizer.json").exists()
    load_tokenizer(src.path)
    assert (src.path / "tokenizer.json").exists()
    described = Checkpoint(resolve(str(tmp_path / "model.gguf"), described=True))
    assert described.low_bit == src.low_bit and described.source_bytes == src.source_bytes
    assert sorted(map(described.shape, described.names())) == sorted(map(src.shape, src.names()))
    assert {path.name for path in described.path.iterdir()} == {"model.gguf", "config.json"}


@pytest.mark.parametrize("heat", [0.6, 0.0])
def test_how_a_file_says_that_tokens_are_drawn_is_kept_or_named(heat: float, tmp_path: Path) -> None:
    draws: dict[str, Any] = {"temp": heat, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.1, "sequence": "top_k"}
    file, _ = write_gguf("llama", tmp_path, stated={f"general.sampling.{key}": value for key, value in draws.items()})
    src = opened(file)
    kept = json.loads((src.path / "generation_config.json").read_text())
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95} if heat else {}
    assert {key: value for key, value in kept.items() if key in ("do_sample", "temperature", "top_k", "top_p")} == asked
    assert "general.sampling.penalty_repeat, general.sampling.sequence: left out" in "\n".join(map(str, src.notices))
