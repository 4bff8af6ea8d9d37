"""Packed embeddings and heads on a GPU: rows inside CUDA graphs, kernels of heads, and heads that are decoded once."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.inference.packed_linear import PackedEmbedding, PackedLinear
from quantkit.kernels.proof import relative_error
from quantkit.layouts import LAYOUTS
from quantkit.models.weights import load_dense_model
from tests.inference.samples import logits
from tests.layouts.samples import HELD, record
from tests.tiny_models import write_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

LABELS = [each for each in HELD["compressed-tensors"][0] if not each.endswith(":24")]


@pytest.mark.parametrize("label", LABELS)
def test_a_cuda_graph_gathers_the_rows_of_its_next_tokens(label: str) -> None:
    layout, scheme, k = LAYOUTS["compressed-tensors"], Scheme.parse(label), 256 if ":g" in label else 250
    whole = record(scheme, 40, k)
    tensors = {suffix: tensor.cuda() for suffix, tensor in layout.pack(whole).items()}
    numbers = torch.tensor([[5, 0], [39, 5]], device="cuda")

    def gathered() -> torch.Tensor:
        form = [*tensors.values()], [*tensors], layout.NAME, label, k, torch.float16
        found: torch.Tensor = torch.ops.quantkit.gather(numbers, *form)
        return found

    gathered()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gathered()
    for tokens in ([[5, 0], [39, 5]], [[1, 2], [3, 39]]):
        numbers.copy_(torch.tensor(tokens))
        graph.replay()
        assert torch.equal(found.cpu(), whole.dequantize(torch.float16)[torch.tensor(tokens)])


@pytest.mark.parametrize(
    ("tied", "table", "head", "kernel"),
    [
        (True, "int4:g128", None, "marlin"),
        (True, "int4:g64:asym", None, "quick"),
        (True, "int8:channel", None, None),
        (False, "int8:channel", "int4:g128", "marlin"),
        (False, "fp6", "fp6", "tcfpx"),
        (False, "int4:g64", "int8:g64", None),
    ],
)
def test_heads_multiply_by_kernels_or_are_decoded_once(
    tied: bool, table: str, head: str | None, kernel: str | None, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "tie_word_embeddings": tied}
    source = write_model("llama", tmp_path / "dense", **sizes)
    schemes = {"embed_tokens": table} | ({} if head is None else {"lm_head": head})
    quantkit.quantize(source, tmp_path / "out", method="rtn", group_size=128, override=schemes)
    exact = logits(load_dense_model(Checkpoint(tmp_path / "out"), dtype=torch.float32, device="cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing is decoded at each call
        model = quantkit.load(tmp_path / "out", device="cuda")
    found, gathering = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(found, PackedLinear) and isinstance(gathering, PackedEmbedding)
    assert (found.layout if found.decoded is None else None) == kernel
    assert relative_error(logits(model), exact) < 0.02
    numbers = torch.tensor([3, 256], device="cuda")
    assert torch.equal(gathering(numbers), gathering.record().dequantize(model.dtype)[numbers])
    assert model.generate(numbers[None], min_new_tokens=4, max_new_tokens=4, do_sample=False).shape == (1, 6)
