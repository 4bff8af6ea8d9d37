"""A model over several GPUs: each kernel runs on the device of its weights, in that device's stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.evaluation.perplexity import perplexity
from quantkit.inference.packed_linear import FusedLinear, PackedLinear
from quantkit.kernels import MATMULS, proof
from quantkit.kernels.proof import relative_error
from quantkit.text.tokenizer import load_tokenizer
from tests.inference.samples import logits
from tests.kernels.operands import weight
from tests.kernels.products import on_gpu

pytestmark = pytest.mark.gpu
CASES = {"marlin": {}, "tcfpx": {"format": "fp6"}}
KERNELS = [("marlin", "int4:g128"), ("marlin24", "int4:g128:24"), ("tcfpx", "fp6:channel"), ("quick", "int4:g128")]
Packed = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA GPUs, and torch sees {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def packed(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Pack the small model in a layout, once."""
    root = tmp_path_factory.mktemp("packed")

    def made(layout: str) -> Path:
        if not (root / layout).exists():
            options: dict[str, Any] = {"method": "rtn", "layout": layout, "device": "cuda", **CASES[layout]}
            quantkit.quantize(shared / "models" / "llama-29m", root / layout, **options)
        return root / layout

    return made


def places(model: Any) -> list[str]:
    """Return the device of each layer's packed weights."""
    return [
        ",".join(sorted({str(m.device) for m in layer.modules() if isinstance(m, PackedLinear)}))
        for layer in model.model.layers
    ]


def run_in_a_new_thread(call: Callable[[], Tensor]) -> Tensor:
    """Run a call in a thread that has used no GPU so far, and return its result."""
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(("layout", "label"), KERNELS)
def test_a_product_runs_on_the_device_of_its_weights(layout: str, label: str) -> None:
    """This holds for any current device, stream and thread, and in a CUDA graph."""
    tensors, q = on_gpu(layout, weight(label, 512, 1024))
    x = proof.activations(q.dequantize(), 5, torch.float16)
    expected = MATMULS[layout](x, tensors, q.scheme, 512, 1024).cpu()
    far = torch.device("cuda", 1)
    there, x = {name: tensor.to(far) for name, tensor in tensors.items()}, x.to(far)
    torch.cuda.synchronize(far)

    def product() -> Tensor:
        y = MATMULS[layout](x, there, q.scheme, 512, 1024)
        assert y.device == far
        return y

    for current in (0, 1):
        with torch.cuda.device(current):
            assert torch.equal(product().cpu(), expected)
            assert torch.equal(run_in_a_new_thread(product).cpu(), expected)
            assert torch.cuda.current_device() == current
    side = torch.cuda.Stream(far)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        y = product()
    side.synchronize()
    assert torch.equal(y.cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(far):
        with torch.cuda.graph(graph, stream=side):
            y = product()
        y.fill_(float("nan"))
        graph.replay()
    assert torch.equal(y.cpu(), expected)


@pytest.mark.parametrize("layout", CASES)
def test_two_gpus_give_the_bits_of_one(layout: str, packed: Packed, shared: Path) -> None:
    single = quantkit.load(packed(layout), device="cuda")
    expected = logits(single)
    split: Any = quantkit.load(packed(layout), device_map="auto")
    assert len(set(places(split))) >= 2, places(split)
    fused_linears = [module for module in split.modules() if isinstance(module, FusedLinear)]
    assert len(fused_linears) == 2 * 8 and all(fused.is_fused for fused in fused_linears)
    assert torch.equal(logits(split), expected)
    text = (shared / "data" / "wikitext2" / "test.txt").read_text()[:20_000]
    words = load_tokenizer(packed(layout))
    figures = [perplexity(model, words, text, window=512).perplexity for model in (single, split)]
    print(f"{layout}: perplexity {figures[0]:.5f} on one GPU, {figures[1]:.5f} on two")
    assert figures[1] == pytest.approx(figures[0], rel=1e-6)
    ids = torch.tensor([[5, 99, 31, 7]])
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    wrote = [model.generate(ids.to(model.device), **greedy).cpu() for model in (single, split)]
    assert torch.equal(wrote[0], wrote[1])
    moved = single.to("cuda:1")
    assert set(places(moved)) == {"cuda:1"} and torch.equal(logits(moved), expected)


@pytest.mark.parametrize("layout", CASES)
def test_a_model_over_two_gpus_a_cpu_and_a_disk(layout: str, packed: Packed) -> None:
    expected = logits(quantkit.load(packed(layout), device="cuda"))
    where: dict[str, Any] = {f"model.layers.{i}": place for i, place in enumerate([0, 0, 0, 1, 1, 1, "cpu", "disk"])}
    where |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 0}
    model: Any = quantkit.load(packed(layout), device_map=where)
    assert places(model) == 3 * ["cuda:0"] + 3 * ["cuda:1"] + 2 * ["meta"]
    for _ in range(2):
        assert (
            relative_error(logits(model), expected) < 5e-3
        )  # offloaded linears are not fused: sums have another order
    assert places(model)[6:] == 2 * ["meta"]
