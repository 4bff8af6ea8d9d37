"""Whole packed models on a GPU: logits of the kernels, memory, CUDA graphs, torch.compile."""

from __future__ import annotations

import gc
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError
from quantkit.inference import swap_linears, transformers_plugin
from quantkit.inference.generate import generate
from quantkit.inference.packed_linear import FusedLinear
from quantkit.kernels.proof import relative_error
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import Schemes
from quantkit.models.weights import free_gpu_memory, load_dense_model
from tests.folders import stored
from tests.inference.samples import attention, bits, gauss, layers, logits, packed as packed_linear, values
from tests.layouts.samples import write_folder
from tests.serving.samples import PACKED
from tests.tiny_models import write_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

#: Layout, scheme, layout in memory after repacking.
CASES = [*PACKED, ("compressed-tensors", "int4:g128:24", "marlin24")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    root = tmp_path_factory.mktemp("dense")
    wide = {"hidden_size": 512, "intermediate_size": 1024}
    return {dtype: write_model("llama", root / str(dtype), dtype, **wide) for dtype in (torch.float16, torch.bfloat16)}


def fused_linears(model: nn.Module) -> list[FusedLinear]:
    return [module for module in model.modules() if isinstance(module, FusedLinear)]


class Launches(TorchDispatchMode):
    """Counts the calls of the packed product."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "quantkit.multiply" in str(func)
        return func(*args, **(kwargs or {}))


def write(source: Path, out: Path, layout: str, label: str) -> Path:
    write_folder(source, out, layout, Schemes(Scheme.parse(label), ignore=("lm_head",)))
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("layout", "label", "kernel"), CASES)
def test_logits_by_kernel_are_those_of_the_decoded_model(
    layout: str, label: str, kernel: str, dtype: torch.dtype, sources: dict[torch.dtype, Path], tmp_path: Path
) -> None:
    path = write(sources[dtype], tmp_path / "out", layout, label)
    exact = logits(load_dense_model(Checkpoint(path), dtype=torch.float32, device="cuda"))
    rounded = relative_error(logits(load_dense_model(Checkpoint(path), dtype=dtype, device="cuda")), exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing is decoded
        model = quantkit.load(path, device="cuda")
    assert {layer.layout for layer in layers(model)} == {kernel}
    assert [fused.is_fused for fused in fused_linears(model)] == 4 * [LAYOUTS[kernel].STACKING_UNIT is not None]
    assert (
        swap_linears.describe_weights(model) == f"weights by the {kernel} kernel, {str(dtype).removeprefix('torch.')}"
    )
    found = logits(model)
    assert found.dtype == dtype
    assert relative_error(found, exact) < 1.5 * rounded + 1e-3  # no further off than cuBLAS in this dtype


@pytest.mark.parametrize(
    ("layout", "options", "kernel"),
    [
        ("marlin", {"group_size": 128}, "marlin"),
        ("compressed-tensors", {"group_size": 128, "asym": True}, "quick"),
        ("tcfpx", {"format": "fp6"}, "tcfpx"),
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_are_multiplied_by_kernels(
    family: str, layout: str, options: dict[str, Any], kernel: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 256, "moe_intermediate_size": 128}
    source = write_model(family, tmp_path / "dense", **sizes)
    quantkit.quantize(source, tmp_path / "out", method="rtn", layout=layout, **options)
    exact = logits(load_dense_model(Checkpoint(tmp_path / "out"), dtype=torch.float32, device="cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing is decoded
        model = quantkit.load(tmp_path / "out", device="cuda")
    assert {layer.layout for layer in layers(model)} == {kernel} and len(layers(model)) == 2 * (4 + 4 * 3)
    assert relative_error(logits(model), exact) < 0.02
    text = generate(tmp_path / "out", "experts", max_new_tokens=4, device="cuda")
    assert text.tokens == 4 and f"by the {kernel} kernel" in text.weights


@pytest.mark.parametrize(("layout", "label"), [case[:2] for case in CASES if case[1] != "int4:channel"])
def test_memory_stays_packed(layout: str, label: str, sources: dict[torch.dtype, Path], tmp_path: Path) -> None:
    path = write(sources[torch.float16], tmp_path / "out", layout, label)
    src = Checkpoint(path)
    quantkit.load(path, device="cuda")  # allocates tables that stay on the GPU
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = quantkit.load(path, device="cuda")
    gc.collect()
    taken = torch.cuda.memory_allocated() - before
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert taken < 1.03 * held
    if layout == "quick" or layers(model)[0].layout != "quick":  # QUICK stores each scale twice
        assert held < 1.03 * sum(src.nbytes(name) for name in src.names())
    logits(model)
    del model
    gc.collect()


def test_a_decoding_step_is_captured_in_a_cuda_graph(sources: dict[torch.dtype, Path], tmp_path: Path) -> None:
    from transformers import StaticCache

    path = write(sources[torch.float16], tmp_path / "out", "marlin", "int4:g128")
    model = quantkit.load(path, device="cuda")
    prompt = torch.tensor([[5, 99, 31, 7]], device="cuda")
    token, position = torch.tensor([[64]], device="cuda"), torch.tensor([[4]], device="cuda")
    mask = torch.full((1, 1, 1, 16), -torch.inf, dtype=torch.float16, device="cuda")
    mask[..., :5] = 0

    def step(cache: Any) -> Tensor:
        return model(token, past_key_values=cache, position_ids=position, attention_mask=mask).logits

    with torch.inference_mode():
        expected = []
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(prompt, past_key_values=cache)
        for _ in range(2):
            expected.append(step(cache).clone())
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(prompt, past_key_values=cache)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(cache)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step(cache)
        for layer in cache.layers:
            layer.cumulative_length.fill_(4)
        for wanted in expected:
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, wanted)


def test_float32_activations_are_decoded_exactly_with_a_warning() -> None:
    q = values("int4:g128", 128, 256)
    layer = packed_linear("marlin", q, bias=False).cuda()
    x = gauss(3, 256).cuda()
    with pytest.warns(RuntimeWarning, match="float32 activations"):
        y = layer(x)
    assert torch.equal(y, torch.nn.functional.linear(x, q.dequantize().cuda()))


def test_weights_offloaded_to_a_cpu_are_multiplied_on_the_gpu(sources: dict[torch.dtype, Path], tmp_path: Path) -> None:
    path = write(sources[torch.float16], tmp_path / "out", "marlin", "int4:g128")
    expected = logits(quantkit.load(path, device="cuda"))
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.norm": 0, "lm_head": 0}
    model = quantkit.load(path, device_map=places | {"model.rotary_emb": 0})
    assert model.model.layers[1].mlp.up_proj.B.device.type == "meta"
    assert [fused.is_fused for fused in fused_linears(model)] == [True, True]  # offloaded linears are not fused
    assert relative_error(logits(model), expected) < 5e-3  # sums of another order
    if torch.cuda.device_count() == 1:
        assert torch.equal(logits(quantkit.load(path, device_map="auto")), expected)


@pytest.mark.parametrize(("layout", "label"), [case[:2] for case in CASES if LAYOUTS[case[0]].STACKING_UNIT])
def test_linears_fused_on_a_gpu_are_saved_as_the_bytes_of_the_source(
    layout: str, label: str, sources: dict[torch.dtype, Path], tmp_path: Path
) -> None:
    path = write(sources[torch.bfloat16], tmp_path / "out", layout, label)
    model = quantkit.load(path, device="cuda")
    allocated = torch.cuda.memory_allocated()
    model.save_pretrained(tmp_path / "saved")
    assert torch.cuda.memory_allocated() == allocated
    was, now = stored(path), stored(tmp_path / "saved")
    assert was.keys() == now.keys() and all(torch.equal(bits(was[name]), bits(now[name])) for name in was)
    model.cpu().cuda()
    assert all(fused.is_fused for fused in fused_linears(model))
    assert torch.equal(logits(model), logits(quantkit.load(tmp_path / "saved", device="cuda")))


def test_fusing_needs_memory_for_one_more_copy_of_the_siblings() -> None:
    linears = [packed_linear("marlin", values("int4:g128", n, 4096), bias=False).cuda() for n in (4096, 1024, 1024)]
    gc.collect()
    held = sum(p.nbytes for linear in linears for p in linear.parameters())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fused = FusedLinear(linears)
    fused.fuse_on_gpu()
    assert fused.is_fused
    assert torch.cuda.max_memory_allocated() - before < 1.03 * held
    assert torch.cuda.memory_allocated() - before < 0.03 * held  # less if an earlier test frees memory meanwhile


@pytest.mark.parametrize(("layout", "label"), [("marlin", "int4:g128"), ("tcfpx", "fp6:channel")])
def test_fused_linears_make_one_launch_compiled_and_captured(layout: str, label: str) -> None:
    separate, fused = (module.cuda().half() for module in attention(layout, label))
    x = gauss(3, 256).cuda().half()
    with torch.inference_mode():
        expected = separate(x)
        launches = Launches()
        with launches:
            assert all(relative_error(a, b) < 2e-3 for a, b in zip(fused(x), expected, strict=True))
        assert launches.count == 1
        compiled = torch.compile(fused, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(compiled(x), fused(x), strict=True))
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fused.q_proj(x)  # cached for this stream, and not for the graph
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                y = fused.k_proj(x)
        x.copy_(gauss(3, 256, seed=5))
        graph.replay()
        assert relative_error(y, separate.k_proj(x)) < 2e-3


def test_a_repacked_model_is_saved_in_its_layout_in_memory(sources: dict[torch.dtype, Path], tmp_path: Path) -> None:
    path = write(sources[torch.float16], tmp_path / "out", "compressed-tensors", "int4:g128")
    model = quantkit.load(path, device="cuda")
    model.save_pretrained(tmp_path / "saved")
    shutil.copy(path / "tokenizer.json", tmp_path / "saved")
    src = Checkpoint(tmp_path / "saved")
    assert src.layout is not None and src.layout.NAME == "marlin"
    assert torch.equal(logits(quantkit.load(tmp_path / "saved", device="cuda")), logits(model))
    assert all(src.quantized(name).equal(Checkpoint(path).quantized(name)) for name in src.modules())


def test_a_model_moved_to_a_gpu_later_runs_the_kernels(sources: dict[torch.dtype, Path], tmp_path: Path) -> None:
    path = write(sources[torch.float16], tmp_path / "out", "gptq", "int4:g128")
    model: Any = quantkit.load(path, device="cpu", dtype=torch.float16)
    assert {layer.layout for layer in layers(model)} == {"gptq"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model.cuda()
    assert torch.equal(logits(model), logits(quantkit.load(path, device="cuda")))


def test_a_gpu_that_is_too_small_is_refused_before_any_weight_is_read(
    sources: dict[torch.dtype, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(sources[torch.float16], tmp_path / "out", "marlin", "int4:g128")
    assert free_gpu_memory(torch.device("cuda", 0)) > 0
    monkeypatch.setattr(transformers_plugin, "free_bytes", lambda device: 1000)
    before = torch.cuda.memory_allocated()
    with pytest.raises(CheckpointError, match=r"cuda:0, which has 1\.0 kB free"):
        quantkit.load(path, device="cuda")
    assert torch.cuda.memory_allocated() == before
