"""Models with random weights have the shapes, sizes and packed weights of real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import random_model
from benchmarks.bench_kernels import MODELS, SCHEMES
from benchmarks.random_model import (
    DENSE,
    Outline,
    Variant,
    Workload,
    fit_batches,
    random_weight,
    sizes,
    variants,
    working_bytes,
)
from quantkit.core.quantized_tensor import Scheme
from quantkit.inference.packed_linear import PackedLinear
from quantkit.layouts import LAYOUTS, quantkit_key
from quantkit.layouts.schemes import Schemes
from quantkit.models.meta_model import skeleton
from tests.benchmarks.samples import CPU, LLAMA, built, tiny

LAYOUT_SCHEMES = [(layout, labels[0]) for layout, labels in SCHEMES.items()]


def variant(layout: str, label: str, model: Outline) -> Variant:
    return variants(model, [layout], [Scheme.parse(label)], [])[1]


def packed(path: Path, layout: str, schemes: Schemes) -> Path:
    key = quantkit_key(layout, schemes, "1", None)
    config = LLAMA | {"quantization_config": {**LAYOUTS[layout].write_config(schemes), "quantkit": key}}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("name", "parameters"), [("llama3-8b", 8_030_261_248), ("llama2-70b", 68_976_648_192)])
def test_the_models_by_name_have_the_published_sizes_and_layers(name: str, parameters: int) -> None:
    model = random_model.read(name)
    blank = skeleton(model, torch.float16)
    assert sizes(blank, Variant(DENSE, {})).weights == 2 * parameters
    fused = MODELS[name]
    shapes = {path.rpartition(".")[2]: shape for path, shape in random_model.linears_of(blank).items()}
    assert shapes["o_proj"] == fused["o"] and shapes["down_proj"] == fused["down"]
    assert sum(shapes[part][0] for part in ("q_proj", "k_proj", "v_proj")) == fused["qkv"][0]
    assert shapes["gate_proj"][0] + shapes["up_proj"][0] == fused["gate_up"][0]


def test_the_size_of_a_70b_model_in_fp6_follows_from_its_bits() -> None:
    model = random_model.read("llama2-70b")
    blank = skeleton(model, torch.float16)
    shapes = random_model.linears_of(blank).values()
    weights, rows = sum(n * k for n, k in shapes), sum(n for n, _ in shapes)
    found = sizes(blank, variant("tcfpx", "fp6:channel", model))
    rest = 2 * (68_976_648_192 - weights)
    assert found.weights == weights * 6 // 8 + 2 * rows + rest and found.weights < 53e9
    assert found.weights - found.read == 2 * 32000 * 8192, "embeddings are looked up, the head is read"


def test_a_packed_config_keeps_its_layout(tmp_path: Path) -> None:
    wider = (r".*down_proj", Scheme.parse("int4:channel"))
    schemes = Schemes(Scheme.parse("int4:g128"), (wider,), ignore=("lm_head", "model.layers.1.mlp.up_proj"))
    model = random_model.read(str(packed(tmp_path, "marlin", schemes)))
    dense, own = variants(model, [], [], [])
    assert dense.layout == DENSE and own.layout == "marlin" and own.scheme == "int4:g128, int4:channel"
    assert len(own.schemes) == 13 and "model.layers.1.mlp.up_proj" not in own.schemes
    made = built(model, own)
    assert made.model.layers[0].mlp.down_proj.scheme == Scheme.parse("int4:channel")
    assert type(made.model.layers[1].mlp.up_proj) is nn.Linear and type(made.lm_head) is nn.Linear
    other = variants(model, ["tcfpx"], [], [])[1]
    assert other.scheme == "fp6:channel" and other.schemes.keys() == own.schemes.keys()


@pytest.mark.parametrize(("layout", "label"), LAYOUT_SCHEMES)
def test_a_packed_model_is_the_model_of_its_decoded_records(layout: str, label: str) -> None:
    model = tiny()
    found = variant(layout, label, model)
    made, plain = built(model, found), built(model, Variant(DENSE, {}))
    others = {name: p for name, p in made.named_parameters() if name.rpartition(".")[0] not in found.schemes}
    assert len(found.schemes) == 14 and len(others) == 2 * 2 + 3, "norms, embeddings, head"
    for name, parameter in others.items():
        plain.get_parameter(name).data = parameter.data
    for path, scheme in found.schemes.items():
        n, k = plain.get_submodule(path).weight.shape
        plain.get_parameter(f"{path}.weight").data = random_weight(scheme, n, k, CPU).dequantize()
    ids = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        assert torch.equal(made(ids).logits, plain(ids).logits)


@pytest.mark.parametrize(("layout", "label"), [(DENSE, ""), *LAYOUT_SCHEMES])
def test_expected_sizes_are_those_in_memory_and_layers_share_none(layout: str, label: str) -> None:
    model = tiny()
    found = variant(layout, label, model) if label else Variant(DENSE, {})
    made = built(model, found, torch.float16)
    assert sizes(skeleton(model, torch.float16), found).weights == sum(p.nbytes for p in made.parameters())
    places = [p.data_ptr() for p in made.parameters()]
    assert len(set(places)) == len(places)
    assert {type(m) for m in made.model.layers.modules() if hasattr(m, "in_features")} == {
        PackedLinear if label else nn.Linear
    }


def test_a_dense_model_that_does_not_fit_is_left_out_with_a_notice() -> None:
    model = random_model.read("llama2-70b")
    blank, load = skeleton(model, torch.float16), Workload((1, 64), 512, 64, torch.float16)
    found = variants(model, ["tcfpx"], [], [])
    jobs, notices = fit_batches(model.name, blank, found, load, 149_500_000_000)
    assert [(job.layout, batches) for job, batches in jobs] == [(DENSE, (1,)), ("tcfpx", (1, 64))]
    assert len(notices) == 1 and "the dense model is left out at batch 64" in notices[0]
    jobs, notices = fit_batches(model.name, blank, found, load, 85_000_000_000)
    assert [(job.layout, batches) for job, batches in jobs] == [("tcfpx", (1, 64))]
    assert "left out at batch 1, 64" in notices[0] and "too little" in notices[0]


def test_the_cache_is_counted() -> None:
    blank = skeleton(random_model.read("llama2-70b"), torch.float16)
    few, many = (working_bytes(blank, Workload((64,), 512, new, torch.float16), 64) for new in (64, 576))
    assert many - few == 64 * 512 * 2 * 80 * 8 * 128 * 2
