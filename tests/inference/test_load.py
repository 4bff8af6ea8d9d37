"""A loaded packed folder has the logits of the decoded model, and saves the bytes of its source."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError
from quantkit.evaluation.perplexity import perplexity
from quantkit.inference.generate import generate
from quantkit.layouts.schemes import Schemes
from quantkit.models.weights import load_dense_model
from quantkit.text.tokenizer import load_tokenizer
from tests.folders import TEXT, edit, stored
from tests.inference.samples import KERNELS, OTHERS, Folders, bits, decoded, layers, logits
from tests.layouts.samples import write_folder
from tests.tiny_models import write_model


@pytest.mark.parametrize(("layout", "label"), dict(reversed([*KERNELS, *OTHERS])).items())
def test_a_loaded_model_equals_the_decoded_one_and_saves_the_same_bytes(
    layout: str, label: str, folder: Folders, tmp_path: Path
) -> None:
    path = folder(layout, label)
    expected = decoded(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = quantkit.load(path, device="cpu")
    assert torch.equal(logits(model), expected)
    assert [layer.layout for layer in layers(model)] == 14 * [layout]
    assert not any(name.startswith("model.layers") and p.ndim == 2 and p.dtype == torch.float32
                   for name, p in model.named_parameters())  # fmt: skip
    quantkit.load(path, device="cpu", dtype=torch.float16).save_pretrained(tmp_path / "saved")
    before, after = stored(path), stored(tmp_path / "saved")
    assert before.keys() == after.keys()
    assert all(torch.equal(bits(before[name]), bits(after[name])) for name in before)
    was, now = (json.loads((p / "config.json").read_text()) for p in (path, tmp_path / "saved"))
    assert was["quantization_config"] == now["quantization_config"]
    assert torch.equal(logits(quantkit.load(tmp_path / "saved", device="cpu")), expected)


def test_a_half_precision_model_computes_in_its_dtype(tmp_path: Path) -> None:
    source = write_model("qwen2", tmp_path / "dense", torch.bfloat16, num_key_value_heads=4)
    schemes = Schemes(Scheme.parse("int4:g32"), ignore=("lm_head",))
    write_folder(source, tmp_path / "out", "quick", schemes)
    model = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.bfloat16)
    assert {layer.bias.dtype for layer in layers(model) if layer.bias is not None} == {torch.bfloat16}
    found = logits(model)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, decoded(tmp_path / "out", torch.bfloat16))
    assert model.lm_head.weight is model.model.embed_tokens.weight  # still tied


def test_padded_and_dense_weights_beside_packed_ones(tmp_path: Path) -> None:
    odd = {"hidden_size": 192, "intermediate_size": 336, "num_attention_heads": 6, "num_key_value_heads": 2}
    source = write_model("mistral", tmp_path / "dense", **odd)
    options = {"method": "rtn", "layout": "marlin", "pad": True, "skip": [".*o_proj"], "min_share": 0.8}
    quantkit.quantize(source, tmp_path / "out", **options)
    model = quantkit.load(tmp_path / "out", device="cpu")
    assert type(model.model.layers[0].self_attn.o_proj) is nn.Linear and len(layers(model)) == 12
    assert {(layer.out_features, layer.in_features) for layer in layers(model)} == {
        (192, 192), (64, 192), (336, 192), (192, 336)
    }  # fmt: skip
    assert all(layer.n % 64 == layer.k % 128 == 0 for layer in layers(model))
    assert torch.equal(logits(model), decoded(tmp_path / "out"))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4_text", "granitemoe", "dbrx", "gpt2"])
def test_experts_and_transposed_linears_are_packed(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    skip = [] if family in ("gpt2", "dbrx") else ["layers.1.*"]
    options = {"method": "rtn", "group_size": 64, "layout": "gptq", "skip": skip, "min_share": 0.4}
    report = quantkit.quantize(folders[family], tmp_path / "out", **options)
    model = quantkit.load(tmp_path / "out", device="cpu")
    assert len(layers(model)) == len(report["layers"])
    # A Conv1D multiplies by the transposed weight, whose sums may have another order.
    torch.testing.assert_close(logits(model), decoded(tmp_path / "out"), rtol=0, atol=1e-5 if family == "gpt2" else 0)


def test_a_decoded_weight_is_there_for_models_that_ask(folder: Folders) -> None:
    layer = layers(quantkit.load(folder("marlin", "int4:g128"), device="cpu"))[0]
    assert torch.equal(layer.weight, layer.record().dequantize())
    assert "weight" not in layer.state_dict()


def test_weights_can_be_offloaded_to_a_cpu_and_a_disk(folder: Folders) -> None:
    path = folder("marlin", "int4:g128")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model: Any = quantkit.load(path, device_map=places, dtype=torch.float32)
    far = model.model.layers[1].mlp.up_proj
    assert far.B.device.type == "meta"  # packed tensors are offloaded too
    assert torch.equal(logits(model), decoded(path))
    assert far.B.device.type == "meta"
    assert torch.equal(logits(quantkit.load(path, device="cpu", device_map="cpu")), decoded(path))


def test_perplexity_and_divergence_are_those_of_the_decoded_model(folder: Folders, tmp_path: Path) -> None:
    path = folder("tcfpx", "fp6:channel")
    (tmp_path / "text.txt").write_text(TEXT)
    from quantkit.api import eval_kld, eval_ppl

    data = str(tmp_path / "text.txt")
    found = eval_ppl(path, data=data, window=128, device="cpu")
    expected = perplexity(load_dense_model(Checkpoint(path)), load_tokenizer(path), TEXT, window=128)
    assert found.nll == expected.nll and found.weights == "weights decoded, float32"
    itself = eval_kld(path, path, data=data, window=128, device="cpu")
    assert (itself.kld, itself.top1) == (0, 1)
    assert eval_kld(folder("marlin", "int4:g128"), path, data=data, window=128, device="cpu").kld > 0


def test_load_opens_folders_of_other_programs(folder: Folders) -> None:
    path = folder("gptq", "int4:g128", False)  # type: ignore[call-arg]
    model = quantkit.load(path, device="cpu")
    assert torch.equal(logits(model), decoded(path)) and len(layers(model)) == 14


def test_load_opens_dense_folders_and_weight_files_of_any_name(small_llama: Path, broken: Path) -> None:
    assert torch.equal(logits(quantkit.load(small_llama, device="cpu")), decoded(small_llama))
    expected = decoded(broken)
    (broken / "model.safetensors").rename(broken / "gptq_model-4bit-128g.safetensors")
    model = quantkit.load(broken, device="cpu")
    assert torch.equal(logits(model), expected) and not hasattr(model.config, "transformers_weights")


def test_a_bias_that_only_the_file_has_is_added(broken: Path) -> None:
    bias = torch.randn(256, generator=torch.Generator().manual_seed(0)).half()
    edit(broken, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.bias": bias}))
    model = quantkit.load(broken, device="cpu")
    layer = model.model.layers[1].mlp.up_proj
    x = torch.ones(1, 128)
    expected = torch.nn.functional.linear(x, layer.record().dequantize(), bias.float())
    assert torch.equal(layer(x), expected)


def test_a_model_with_several_layouts_is_not_saved(folder: Folders, tmp_path: Path) -> None:
    model = quantkit.load(folder("gptq", "int4:g128"), device="cpu", dtype=torch.float16)
    repacked = layers(model)
    assert repacked[0].repack() is None  # on a GPU, some weights can be repacked and others not
    with pytest.raises(CheckpointError, match="gptq and marlin"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    expected = logits(model)
    for layer in repacked[1:]:
        layer.repack()
    model.save_pretrained(tmp_path / "out")
    src = Checkpoint(tmp_path / "out")
    assert src.layout is not None and src.layout.NAME == "marlin"
    again = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.float16)
    assert torch.equal(logits(again), logits(model)) and torch.allclose(logits(again), expected, atol=1e-2)


def test_weights_that_are_decoded_once_stay_packed_for_all_else(
    folder: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder("quick", "int4:g64:asym")
    model = quantkit.load(path, device="cpu")
    assert capsys.readouterr().err.startswith("14 weights are decoded once, to float32")
    layer, expected = layers(model)[0], decoded(path)
    other, x = layers(model)[1], torch.eye(128)
    assert layer.decoded is not None and not any("decoded" in name for name in model.state_dict())
    before = layer(x)
    layer.scales.data *= 2  # proofs read the packed tensors
    assert torch.equal(layer.record().dequantize().T, 2 * before) and torch.equal(layer(x), before)
    model.load_state_dict(model.state_dict())
    assert torch.equal(layer(x), 2 * before)
    other.half()
    assert other.decoded is not None and other.decoded.dtype == torch.float16
    assert torch.equal(other(x.half()), other.record().dequantize(torch.float16).T)
    assert torch.equal(logits(quantkit.load(path, device="cpu")), expected)


def test_weights_beyond_the_free_memory_are_decoded_at_each_call(
    folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder("humming", "fp6:channel")
    monkeypatch.setattr("quantkit.inference.transformers_plugin.unused_memory", lambda: 400_000)
    with pytest.warns(RuntimeWarning, match=r"decoded at each call, which is slow \(\d+ such weights\)"):
        model = quantkit.load(path, device="cpu")
    held = [layer.decoded.nbytes for layer in layers(model) if layer.decoded is not None]
    assert 0 < len(held) < 14 and sum(held) <= 300_000
    assert torch.equal(logits(model), decoded(path))


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_model_that_the_memory_does_not_hold_is_refused_before_it_is_read(
    is_packed: bool, folder: Folders, small_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder("marlin", "int4:g128") if is_packed else small_llama
    monkeypatch.setattr("quantkit.models.weights.unused_memory", lambda swap: 100_000)
    for load in (quantkit.load, lambda path, device: generate(path, "a", device=device)):
        with pytest.raises(CheckpointError, match=r"take .* on cpu, which has 100\.0 kB free, .* too little"):
            load(path, device="cpu")
