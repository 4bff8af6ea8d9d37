"""Encoder-decoders through the real commands: what is loaded and written is what the decoded model writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.inference.generate import generate
from quantkit.inference.packed_linear import PackedLinear
from tests.command_line import call
from tests.faults import state
from tests.tiny_models import write_model

INT4: dict[str, Any] = {"method": "rtn", "clip": "none", "group_size": 64}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a family, which tests must not change."""
    root = tmp_path_factory.mktemp("encoder-decoders")

    def folder(family: str) -> Path:
        return root / family if (root / family).exists() else write_model(family, root / family)

    return folder


def decoded(packed: Path, dense: Path, out: Path) -> Any:
    """Open, by transformers alone, a copy of `dense` in float32 with the decoded weights of `packed`."""
    src = Checkpoint(packed)
    shutil.copytree(dense, out)
    found = {name: src.dense(name, torch.float32).contiguous() for name in src.logical()}
    for file in out.glob("*.safetensors"):
        assert load_file(file).keys() <= found.keys()
        save_file({name: found[name] for name in load_file(file)}, file, {"format": "pt"})
    speech = src.config["model_type"] == "whisper"
    auto: Any = transformers.AutoModelForSpeechSeq2Seq if speech else transformers.AutoModelForSeq2SeqLM
    return auto.from_pretrained(out, dtype=torch.float32)


def inputs(family: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if family == "whisper":
        return {"input_features": torch.randn(1, 16, 64, generator=generator)}
    return {"input_ids": torch.randint(256, (1, 24), generator=generator)}


def answers(model: Any, family: str) -> tuple[Tensor, Tensor]:
    """Return the tokens that a model writes, and its logits for some tokens of the decoder."""
    asked = inputs(family)
    with torch.inference_mode():
        written = model.generate(**asked, max_new_tokens=8, do_sample=False, num_beams=1)
        return written, model(**asked, decoder_input_ids=torch.arange(65, 81)[None]).logits


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    apart = float((one[1] - other[1]).abs().max() / other[1].std())
    return torch.equal(one[0], other[0]) and apart < 1e-4


@pytest.mark.parametrize("family", ["encoder-bart", "flan-t5", "whisper"])
def test_what_is_loaded_writes_what_the_decoded_model_writes(
    family: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    report = quantkit.quantize(source(family), tmp_path / "a", **INT4)
    assert quantkit.verify(tmp_path / "a").ok and "quantkit.load" in report["opened_by"]
    assert "vLLM" not in report["readers"] and report["totals"]["share"] > 0.99
    card = (tmp_path / "a" / "README.md").read_text()
    assert ('Seq2SeqLM.from_pretrained("FOLDER"' in card) is (family == "encoder-bart") and "vllm serve" not in card
    model = quantkit.load(tmp_path / "a", device="cpu")
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    has_encoder = any(".encoder." in f".{name}" for name in packed)
    assert any(".decoder." in f".{name}" for name in packed) and has_encoder is (family != "whisper")
    expected = answers(decoded(tmp_path / "a", source(family), tmp_path / "dense"), family)
    assert same(answers(model, family), expected)
    original = answers(quantkit.load(source(family), device="cpu"), family)
    assert not same(original, expected), "rounding changes nothing: the comparison sees nothing"


def test_the_dtype_of_a_packed_weight_is_known_without_decoding_it(
    source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T5 asks for it before every second product of its feed-forward layers."""
    quantkit.quantize(source("t5"), tmp_path / "a", method="rtn", clip="none", format="fp6", layout="humming")
    model = quantkit.load(tmp_path / "a", device="cpu", dtype=torch.float16)
    read = model.get_submodule("decoder.block.0.layer.2.DenseReluDense.wo")
    assert read.weight.dtype == torch.float32, "T5 keeps it so in a float16 model"
    assert torch.equal(read.weight + 0, read.record().dequantize())
    monkeypatch.setattr(PackedLinear, "record", lambda self: pytest.fail("decoded"))
    answers(model, "t5")


def test_a_folder_without_computed_tables_is_the_same_model(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Published folders of Pegasus lack its sinusoidal positions, and often the zero bias of its logits."""
    family, lacking = "pegasus", ("final_logits_bias", "embed_positions")
    shutil.copytree(source(family), tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {
        name: tensor for file in source(family).glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    kept = {name: tensor for name, tensor in tensors.items() if not any(map(name.__contains__, lacking))}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    expected = answers(
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "old", dtype=torch.float32), family
    )
    assert same(answers(quantkit.load(tmp_path / "old", device="cpu"), family), expected)
    quantkit.quantize(tmp_path / "old", tmp_path / "a", **INT4)
    model = quantkit.load(tmp_path / "a", device="cpu")
    assert same(answers(model, family), answers(decoded(tmp_path / "a", tmp_path / "old", tmp_path / "d"), family))


@pytest.mark.parametrize(("family", "written"), [("led", 32), ("fsmt", 64)])
def test_texts_longer_than_the_model_are_refused(family: str, written: int, source: Callable[[str], Path]) -> None:
    """LED has positions of its own in the encoder."""
    with pytest.raises(QuantkitError, match=f"64 positions in the encoder and {written} in the decoder: use a shorter"):
        generate(source(family), "a document. " * 20, max_new_tokens=4, device="cpu")
    with pytest.raises(QuantkitError, match=f"use --max-new-tokens {written} or less"):
        generate(source(family), "Hello", max_new_tokens=100, device="cpu")


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_calibration_is_refused_before_any_work(family: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    before = state(tmp_path)
    for command in ("plan", "quantize"):
        printed = call(command, source(family), "-o", tmp_path / "a", "--calib", tmp_path / "no.txt", code=1)
        line = f"{family} is an encoder-decoder, and blocks are calibrated on one text alone: use --method rtn"
        assert line in printed.stderr and state(tmp_path) == before


def test_what_needs_a_decoder_alone_says_so(source: Callable[[str], Path]) -> None:
    for work, says in {
        lambda: quantkit.eval_ppl(source("whisper"), data="wikitext2"): "continues its prompt",
        lambda: quantkit.eval_ppl(source("t5"), data="wikitext2"): "continues its prompt",
        lambda: quantkit.eval_kld(source("t5"), source("t5")): "continues its prompt",
        lambda: generate(source("whisper"), "Hello"): "reads input_features, and no text",
    }.items():
        with pytest.raises(QuantkitError, match=says):
            work()
