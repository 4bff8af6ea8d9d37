"""Embeddings and heads in few bits: configs that name them, gathered rows, and what has no place for them."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError, QuantkitError, RecipeError
from quantkit.inference.packed_linear import PackedEmbedding, PackedLinear
from quantkit.inference.swap_linears import repack_for_kernels
from quantkit.layouts import LAYOUTS
from quantkit.recipes.recipe import from_mapping, require_effect
from tests.command_line import call
from tests.folders import NEWEST, edit, restate, stored
from tests.inference.samples import compiled, decoded, logits
from tests.layouts.samples import HELD, record
from tests.tiny_models import write_model

#: Family, its embedding, the scheme, and whether the head is tied to it. Gemma scales the rows.
MODELS = [
    ("llama", "model.embed_tokens", "int8:channel", False),
    ("gemma", "model.embed_tokens", "int6:g64", True),
    ("opt", "model.decoder.embed_tokens", "int4:g64:asym", True),
]
SHAPES = [torch.tensor([[3, 256], [0, 3]]), torch.empty(1, 0, dtype=torch.int64)]


def packed(folders: dict[str, Path], family: str, out: Path, pattern: str, label: str, **options: Any) -> Any:
    return quantkit.quantize(folders[family], out, **{"method": "rtn", "override": {pattern: label}, **options})


@pytest.fixture(scope="module")
def tied(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack embeddings that are the head too. Tests must not change the folder."""
    out = tmp_path_factory.mktemp("tied") / "out"
    packed(folders, "qwen2", out, "embed_tokens", "int8:channel")
    return out


class NoWaiting(TorchDispatchMode):
    """Fails where Python asks for a value in a tensor: on a GPU it would wait, and no CUDA graph could be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func)
        return func(*args, **(kwargs or {}))


def stated(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize(
    ("family", "name", "label", "tied"),
    [pytest.param(*model, marks=[NEWEST] if model[0] == "gemma" else []) for model in MODELS],
)
def test_rows_of_a_packed_embedding_are_those_of_the_decoded_model(
    family: str, name: str, label: str, tied: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    made = packed(folders, family, out, name.rpartition(".")[2], label)
    assert {each["name"]: each["scheme"] for each in made.layers}[name] == label
    assert made["opened_by"] == ["quantkit.load"] and "transformers" in made["not_opened_by"]
    assert quantkit.verify(out).ok
    model, expected = quantkit.load(out, device="cpu"), decoded(out)
    assert torch.equal(logits(model), expected)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, PackedEmbedding) and isinstance(head, PackedLinear) is tied
    assert tied is any(f"{name}.weight_packed" == b for b in model.all_tied_weights_keys.values())
    if tied:  # one tensor in memory and in the file
        assert head.packed()["weight_packed"].data_ptr() == table.packed()["weight_packed"].data_ptr()
    for ids in SHAPES:
        assert table(ids).shape == (*ids.shape, 128)
    graph, operators = compiled(table)
    assert (
        torch.equal(graph(SHAPES[0]), table(SHAPES[0]))
        and not table(SHAPES[0]).requires_grad
        and operators == ["quantkit.gather"]
    )
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(quantkit.load(tmp_path / "saved", device="cpu")), expected)
    assert model.to(torch.bfloat16).get_input_embeddings()(SHAPES[0]).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (layout.NAME, label)
        for layout in LAYOUTS.values()
        for label in [*HELD[layout.NAME][0], "int3:g64:asym", "int4:channel:asym"]
        if layout.GATHERS and not label.endswith(":24")
    ],
)
def test_gathered_rows_are_the_rows_of_the_weight_and_wait_for_no_gpu(name: str, label: str) -> None:
    layout, scheme, rows = LAYOUTS[name], Scheme.parse(label), torch.tensor([5, 0, 31, 5])
    units = layout.multiples(scheme)
    k = 250 if units[1] == 1 and scheme.group_size is None else 256  # the last word is not full
    whole = record(scheme, 40 if units[0] == 1 else 32, k)
    tensors = layout.pack(whole)
    with NoWaiting():
        part = layout.gather(scheme, tensors, rows, k)
    assert torch.equal(part, whole.dequantize()[rows])


@pytest.mark.parametrize(
    ("family", "name", "label", "others"),
    [
        ("gpt2", "transformer.wte", "int8:channel", ["transformer.wpe"]),  # else wpe would count as packed
        ("gpt_neox", "gpt_neox.embed_in", "int4:g128", []),  # the scheme of all linears
    ],
)
def test_a_config_names_embeddings_by_class_and_other_tables_as_dense(
    family: str, name: str, label: str, others: list[str], folders: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    packed(folders, family, out, name.rpartition(".")[2], label)
    config = stated(out)
    (group,) = [each for each in config["config_groups"].values() if "Embedding" in each["targets"]]
    assert name in group["targets"] and group["weights"]["num_bits"] == Scheme.parse(label).format.bits
    assert [each for each in config["ignore"] if each.endswith("wpe")] == others
    del config["quantkit"]  # as another program would write it
    group["targets"].remove(name)
    restate(out / "config.json", quantization_config=config)
    assert Checkpoint(out).scheme(name).label == label
    assert torch.equal(logits(quantkit.load(out, device="cpu", check=False)), decoded(out))


def test_an_override_of_the_head_beats_the_skip_of_the_head_alone(tmp_path: Path) -> None:
    made = from_mapping({"overrides": {".*lm_head": "int8"}, "skip": ["lm_head", "o_proj"], "method": "rtn"})
    assert made.skip == ("o_proj",) and made.scheme_of("lm_head") == Scheme.parse("int8")
    assert from_mapping(made.to_mapping()) == made
    assert from_mapping({"overrides": {".*": "int8"}, "method": "rtn"}).skip == ("lm_head",)


def test_keys_for_embeddings_and_head_are_overrides_that_beat_the_default_skip_alone() -> None:
    made = from_mapping({"embeddings": "int8:channel", "head": "int6:g64", "overrides": {".*": "int4:g64"}})
    assert made.scheme_of("lm_head") == Scheme.parse("int6:g64") and made.skip == ()
    assert made.scheme_of("model.embed_tokens") == Scheme.parse("int8:channel")
    assert made.scheme_of("model.layers.0.mlp.up_proj") == Scheme.parse("int4:g64")
    again = made.to_mapping()  # the written recipe has the keys, not their patterns
    assert (again["embeddings"], again["head"], list(again["overrides"])) == ("int8:channel", "int6:g64", [".*"])
    assert from_mapping(again) == made
    assert not {"embeddings", "head"} & from_mapping({"embeddings": "dense"}).to_mapping().keys()


def test_keys_pack_both_and_every_report_names_them(folders: dict[str, Path], tmp_path: Path) -> None:
    args = (folders["llama"], "--method", "rtn", "--embeddings", "int8:channel", "--head", "int4:g64")
    named = "int8:channel (embed_tokens)"
    assert named in call("plan", *args).stdout
    made = call("quantize", *args, "-o", tmp_path / "out").stdout
    assert named in made and "int4:g64 (lm_head)" in made and "to save" not in made
    assert named in (tmp_path / "out" / "README.md").read_text()
    assert "model.embed_tokens int8:channel, lm_head int4:g64" in call("inspect", tmp_path / "out").stdout
    assert torch.equal(logits(quantkit.load(tmp_path / "out", device="cpu")), decoded(tmp_path / "out"))


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("qwen2", {"head": "int8"}, 'the embeddings\' weight: drop it, and pack both with embeddings="int8"'),
        ("llama", {"head": "int8", "skip": "lm_head"}, "head to int8:channel matches only linears that are skipped"),
        ("llama", {"head": "int8:g48"}, 'lm_head is .*use head="int8:g128"'),
        ("llama", {"embeddings": "int8:g48"}, 'model.embed_tokens is .*use embeddings="int8:g128"'),
        ("llama", {"embeddings": "int8", "layout": "gptq"}, 'use layout="compressed-tensors", or drop embeddings'),
        ("llama", {"head": "int4:g128", "layout": "gptq"}, "257.*lm_head is .*pad=True"),  # rows by the 32
        ("llama", {"embeddings": "int9"}, "unknown format 'int9'"),
    ],
)
def test_a_key_without_effect_or_place_names_the_key_to_change(
    family: str, options: dict[str, str], says: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(QuantkitError, match=says) as failed:
        quantkit.quantize(folders[family], tmp_path / "not", method="rtn", **options)
    assert "\n" not in str(failed.value)
    with pytest.raises(RecipeError, match="head to int8:channel matches nothing"):
        require_effect(from_mapping({"head": "int8"}), ["model.layers.0.mlp.up_proj"], [])


def test_a_tied_flag_with_two_packed_tensors_that_differ_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Some readers take the first, some the second."""
    out = tmp_path / "out"
    quantkit.quantize(folders["llama"], out, method="rtn", embeddings="int8:channel", head="int8:channel")
    restate(out / "config.json", tie_word_embeddings=True)
    (out / "quantkit_report.json").unlink()
    for reads in (partial(quantkit.load, device="cpu"), partial(quantkit.pack, out=tmp_path / "not", layout="humming")):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
            reads(out)
    head = {name.replace("model.embed_tokens", "lm_head"): t for name, t in stored(out).items() if "embed" in name}
    edit(out, lambda tensors: tensors.update(head))
    assert torch.isfinite(logits(quantkit.load(out, device="cpu"))).all()


@pytest.mark.parametrize(("module", "is_packed"), [("lm_head", True), ("model.embed_tokens", False)])
def test_a_head_or_embeddings_of_another_width_than_the_config_says_are_refused(
    module: str, is_packed: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["llama"], tmp_path / "source")
    if is_packed:
        folder = tmp_path / "out"
        quantkit.quantize(folders["llama"], folder, method="rtn", embeddings="int8:channel", head="int8:channel")

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("weight_packed", "weight_scale") if is_packed else ("weight",):
            tensors[f"{module}.{suffix}"] = tensors[f"{module}.{suffix}"][:200].contiguous()
        if is_packed:
            tensors[f"{module}.weight_shape"] = torch.tensor([200, 128])

    edit(folder, cut)
    with pytest.raises(CheckpointError, match=rf"{re.escape(module)}.*200.*257|257.*200"):
        if is_packed:
            quantkit.load(folder, device="cpu", check=False)
        else:
            quantkit.quantize(folder, tmp_path / "not", method="rtn", embeddings="int8:channel", head="int8:channel")


def test_only_an_override_for_embeddings_alone_packs_them(folders: dict[str, Path], tmp_path: Path) -> None:
    made = packed(folders, "llama", tmp_path / "out", ".*", "int8:channel")
    assert "model.embed_tokens" not in {each["name"] for each in made.layers}
    assert stated(tmp_path / "out")["ignore"] == ["lm_head"]
    with pytest.raises(RecipeError, match="matches only linears that are skipped"):
        packed(folders, "llama", tmp_path / "not", "embed_tokens", "int8:channel", skip=["embed_tokens"])


@NEWEST
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_decodes_embeddings_of_the_scheme_of_all_linears(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the compressed-tensors library, which is not installed")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    made = packed(folders, family, tmp_path / "out", "embed_tokens", "int4:g128", group_size=128)
    assert any("dequantize=True" in reader for reader in made["readers"])
    whole: Any = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", quantization_config=whole)
    assert torch.equal(logits(model), decoded(tmp_path / "out", torch.float16))


def test_calibration_rounds_embeddings_and_says_so(folders: dict[str, Path], calib: Path, tmp_path: Path) -> None:
    options = {"method": "gptq", "calib": str(calib), "samples": 4, "max_length": 64}
    made = packed(folders, "llama", tmp_path / "out", "embed_tokens", "int8:channel", **options)
    (row,) = [each for each in made.layers if each["name"] == "model.embed_tokens"]
    assert row["method"] == "rtn" and "outside the blocks" in row["reason"] and row["relative_error"] < 0.01
    assert torch.equal(logits(quantkit.load(tmp_path / "out", device="cpu")), decoded(tmp_path / "out"))


def test_a_model_with_packed_embeddings_keeps_the_dtype_of_its_activations(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Its first stored tensors are float8 codes, and caches are made in the model's dtype."""
    packed(folders, "llama", tmp_path / "out", "embed_tokens", "fp6")
    model = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and model.to(torch.float32).dtype == torch.float32
    model.save_pretrained(tmp_path / "saved")
    assert stored(tmp_path / "saved").keys() == stored(tmp_path / "out").keys()


def test_a_head_stored_beside_packed_embeddings_stays_its_own(tied: Path, tmp_path: Path) -> None:
    head = torch.linspace(-1, 1, 257 * 128).view(257, 128).half()
    out = edit(shutil.copytree(tied, tmp_path / "out"), lambda tensors: tensors.update({"lm_head.weight": head}))
    model = quantkit.load(out, device="cpu", check=False)
    assert torch.equal(model.get_output_embeddings().weight, head.float())
    assert not model.config.tie_word_embeddings and isinstance(model.get_input_embeddings(), PackedEmbedding)


def test_a_tied_head_is_packed_for_a_kernel_beside_the_rows_of_its_embeddings(tmp_path: Path) -> None:
    source = write_model("qwen2", tmp_path / "dense", hidden_size=256, num_attention_heads=4)
    quantkit.quantize(source, tmp_path / "out", method="rtn", override={"embed_tokens": "int4:g64:asym"})
    model, expected = quantkit.load(tmp_path / "out", device="cpu"), decoded(tmp_path / "out")
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.repack() is None and head.layout == "quick" and table.layout == "compressed-tensors"
    head.decoded = None
    assert torch.equal(logits(model), expected)


def test_a_head_without_a_kernel_is_decoded_once_on_a_gpu(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantkit.load(tied, device="cpu")
    linears = {name: each for name, each in model.named_modules() if isinstance(each, PackedLinear)}
    for linear in linears.values():
        linear.decoded = None
    why = "no kernel takes it"
    monkeypatch.setattr(PackedLinear, "prepare_kernel", lambda self: why)
    notices, once = repack_for_kernels(linears)
    assert once == f"lm_head is decoded once, to float32: {why}"
    assert len(notices) == 1 and f"({len(linears) - 2} such weights): {why}" in notices[0]
    head = model.to(torch.bfloat16).get_output_embeddings()
    assert head.decoded.dtype == torch.bfloat16 and head.decoded.shape == (257, 128)
