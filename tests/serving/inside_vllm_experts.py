"""Checks of packed experts against vLLM's real classes; `inside_vllm` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.inference.products import PRODUCTS
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import Schemes
from tests.serving.samples import PACKED, decoded, packed, record
from tests.serving.vllm_engine import configured, damaged, error_of, flip, loaded, ranks, served

#: Beside the folders: what the experts of each compute when `quantkit.load` opens it.
OUTPUTS = "outputs"
#: Folders of quantkit's own layouts, of others, and the layouts that kernels then multiply.
OWN = {
    "experts-marlin": "marlin",
    "experts-tcfpx-fp6": "tcfpx",
    "experts-tcfpx-fp5": "tcfpx",
    "experts-marlin24": "marlin24",
    "experts-quick": "quick",
}
OTHERS = {
    "experts": "quick",
    "experts-compressed-tensors": "quick",
    "experts-gptq": "marlin",
    "experts-humming": "tcfpx",
}
SPLITS = [(0, 1, False), (0, 2, False), (1, 2, False), (0, 2, True), (1, 2, True)]


def layers_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield each layer of experts with its name in the folder."""
    for name, module in model.named_modules():
        if type(module).__name__ == "RoutedExperts":
            yield name.removesuffix(".routed_experts"), module


def of(layer: Any) -> tuple[Tensor, Tensor]:
    """Decode the weights that a layer multiplies with: those before the activation and after it, one of each expert."""
    left = [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]
    assert not left, f"left behind: {left}"
    found, kind = [], PRODUCTS[layer.quantkit_handle, layer.quantkit_out]
    for start, names, one in zip(("w13_", "w2_"), layer.quantkit_names, (kind.first, kind.second), strict=True):
        stacked = {name.removeprefix(f"quantkit_{start}"): layer.get_parameter(name) for name in names}
        k = layer.hidden_size if start == "w13_" else layer.intermediate_size_per_partition
        experts = [
            decoded(one.layout, one.scheme.label, {suffix: t[i] for suffix, t in stacked.items()}, one.out, k)
            for i in range(layer.local_num_experts)
        ]
        found.append(torch.stack(experts))
    return found[0], found[1]


def share(folder: Path, name: str, leaves: tuple[str, str, str], place: tuple[int, int, bool]) -> tuple[Tensor, Tensor]:
    """Cut a rank's share out of the decoded weights: some experts whole, or rows and columns of all."""
    src, (rank, size, by_experts) = Checkpoint(folder), place
    first, second = [], []
    for expert in torch.arange(4).chunk(size)[rank].tolist() if by_experts else range(4):
        gate, down, up = (src.dense(f"{name}.{expert}.{leaf}.weight", torch.float32) for leaf in leaves)
        if not by_experts:
            gate, down, up = gate.chunk(size)[rank], down.chunk(size, 1)[rank], up.chunk(size)[rank]
        first.append(torch.cat([gate, up]))
        second.append(down)
    return torch.stack(first), torch.stack(second)


def compare_with_load(name: str, target: str, **options: Any) -> None:
    folder = served(name)
    kept = load_file(served(OUTPUTS) / f"{name}.safetensors")
    sums: dict[tuple[str, int, bool], Tensor] = {}
    for rank, size, by_experts in SPLITS:
        config = configured(folder, enable_expert_parallel=by_experts, **options)
        model = loaded(config, rank, size)
        for where, layer in layers_of(model):
            leaves = ("w1", "w2", "w3") if "block_sparse_moe" in where else ("gate_proj", "down_proj", "up_proj")
            expected = share(folder, where, leaves, (rank, size, by_experts))
            for got, wanted in zip(of(layer), expected, strict=True):
                assert torch.equal(got, wanted), f"{name} {where}: rank {rank} of {size}, {by_experts=}"
            assert layer.quantkit_layout == target, layer.quantkit_layout
            out = layer.quant_method.apply(layer, kept["x"], kept["weights"], kept["ids"].int(), None, None)
            key = where, size, by_experts
            sums[key] = sums.get(key, torch.zeros_like(out)) + out
    for (where, size, by_experts), out in sums.items():
        wanted = kept[f"out.{where.split('.')[2]}"]
        assert torch.allclose(out, wanted, rtol=1e-4, atol=1e-5), (where, size, by_experts, (out - wanted).abs().max())


def check_experts_of_each_own_layout_compute_what_load_computes() -> None:
    for name, target in OWN.items():
        assert configured(served(name)).model_config.quantization == "quantkit", name
        compare_with_load(name, target)


def check_experts_of_each_other_layout_do_if_the_user_asks() -> None:
    for name, target in OTHERS.items():
        assert configured(served(name)).model_config.quantization != "quantkit", name
        compare_with_load(name, target, quantization="quantkit")


def check_the_runner_of_vllm_calls_the_method_and_adds_nothing() -> None:
    name = "experts-marlin"
    kept = load_file(served(OUTPUTS) / f"{name}.safetensors")
    model = loaded(configured(served(name)))
    runner = model.model.layers[0].block_sparse_moe.experts
    ids = kept["ids"].int()
    runner.router = SimpleNamespace(select_experts=lambda **asked: (kept["weights"], ids))
    runner.routed_experts._ensure_moe_quant_config_init()
    shared, out = runner._apply_quant_method(kept["x"], kept["x"][:, :4], None)
    assert shared is None and torch.allclose(out, kept["out.0"], rtol=1e-4, atol=1e-5)
    runner.maybe_init_modular_kernel() if hasattr(runner, "maybe_init_modular_kernel") else None
    assert type(runner.routed_experts.quant_method).__name__ == "QuantkitExpertsMethod"


def check_a_compiled_graph_of_experts_has_one_node_that_is_the_same_in_each_block() -> None:
    model, graphs = loaded(configured(served("experts-tcfpx-fp6"))), []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append([(node.target, node.args[5:]) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    x, weights, ids = torch.randn(3, 256).half(), torch.rand(3, 2), torch.tensor([[0, 1], [3, 2], [1, 3]])
    for _, layer in layers_of(model):
        method = layer.quant_method
        compiled = torch.compile(
            lambda x, w, i, layer=layer, method=method: method.apply(layer, x, w, i), fullgraph=True, backend=keep
        )
        assert torch.equal(compiled(x, weights, ids), method.apply(layer, x, weights, ids))
        torch._dynamo.reset()
    assert graphs[0] == graphs[1] and len(graphs[0]) == 1, graphs
    assert str(graphs[0][0][0]).startswith("quantkit.multiply"), graphs


def config_of(layout: str, label: str, **schemes: Any) -> Any:
    from quantkit.serving.vllm_quantization import QuantkitConfig

    return QuantkitConfig(LAYOUTS[layout], Schemes(Scheme.parse(label), **schemes))


def built(config: Any, rank: int = 0, size: int = 1, **options: Any) -> Any:
    """Build a layer of four experts by itself."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import layer as module

    make = getattr(module, "FusedMoEFactory", None) or module.FusedMoE
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 256, "intermediate_size": 256}
    with set_current_vllm_config(configured(served("experts-marlin"))), ranks(rank, size):
        return make(
            **{**sizes, "params_dtype": torch.float16, "prefix": "model.layers.0.mlp.experts", **options},
            quant_config=config,
        ).routed_experts


def fill(layer: Any, layout: str, expert: int, **shards: Any) -> None:
    """Load the packed linears of an expert, as vLLM's models do."""
    for shard, q in shards.items():
        for suffix, tensor in packed(layout, q).items():
            parameter = layer.get_parameter(f"{'w2' if shard == 'w2' else 'w13'}_{suffix}")
            taken = parameter.weight_loader(
                parameter, tensor, f"x.{suffix}", shard_id=shard, expert_id=expert, return_success=True
            )
            assert taken is True


def check_a_layer_of_each_layout_is_packed_for_a_kernel_and_multiplies() -> None:
    x, weights, ids = torch.randn(5, 256), torch.rand(5, 2), torch.randint(0, 4, (5, 2))
    for layout, label, _ in PACKED:
        layer = built(config_of(layout, label))
        experts = [[record(label, 256, 256, 3 * e + i) for i in range(3)] for e in range(4)]
        for e, (gate, down, up) in enumerate(experts):
            fill(layer, layout, e, w3=up, w2=down, w1=gate)
        layer.quant_method.process_weights_after_loading(layer)
        expected = torch.zeros(5, 256)
        for token in range(5):
            for choice in range(2):
                gate, down, up = (q.dequantize() for q in experts[ids[token, choice]])
                inner = silu(linear(x[token], gate)) * linear(x[token], up)
                expected[token] += weights[token, choice] * linear(inner, down)
        out = layer.quant_method.apply(layer, x, weights, ids)
        assert torch.allclose(out, expected, rtol=1e-4, atol=1e-3), (layout, label, (out - expected).abs().max())


def check_experts_of_two_schemes_are_refused_by_name() -> None:
    first = "model.layers.0.mlp.experts.0.gate_proj"
    for other, words in (
        ({"overrides": ((r".*experts\.2\.down_proj", Scheme.parse("int4:channel")),)}, "int4:channel"),
        ({"ignore": ("model.layers.0.mlp.experts.2.down_proj",)}, "dense"),
    ):
        line = error_of(built, config_of("marlin", "int4:g128", **other))
        assert line == (
            f"vLLM joins {first} int4:g128, model.layers.0.mlp.experts.2.down_proj {words}: "
            "quantize them alike, with --set fused_alike=true"
        ), line
    for ignore in (("re:.*experts.*",), ("model.layers.0.mlp.experts",)):
        layer = built(config_of("marlin", "int4:g128", ignore=ignore))
        assert type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"


def check_what_is_not_served_of_experts_is_refused_in_one_line() -> None:
    config = config_of("marlin", "int4:g128")
    start = "model.layers.0.mlp.experts: quantkit's plug-in does not serve experts with "
    for options, words in (
        ({"has_bias": True}, "biases"),
        ({"activation": "swigluoai"}, "the activation swigluoai"),
        ({"swiglu_limit": 7.0}, "the activation silu and swiglu_limit 7.0"),
    ):
        line = error_of(built, config, **options)
        assert line == start + words, line
    line = error_of(built, config, 0, 4)
    assert line == (
        "model.layers.0.mlp.experts.0.down_proj: its 256 columns in groups of 128 cannot be split over 4 GPUs: "
        "use --tensor-parallel-size 1 or 2"
    ), line
    line = error_of(built, config_of("awq", "int4:g8"))
    assert line.startswith("model.layers.0.mlp.experts.0.gate_proj: no kernel takes int4:g8 of [512, 256]"), line


def check_experts_of_an_older_vllm_are_refused_in_one_line() -> None:
    old = type("FusedMoE", (torch.nn.Module,), {})()
    line = error_of(config_of("marlin", "int4:g128").get_quant_method, old, "model.layers.0.mlp.experts")
    assert line.endswith("knows no experts of a vLLM before 0.26: update vLLM") and "\n" not in line, line


def check_experts_without_a_gate_and_with_weights_of_inputs() -> None:
    x, ids = torch.randn(5, 256), torch.randint(0, 4, (5, 1))
    experts = [[record("fp6:channel", 256, 256, 2 * e + i) for i in range(2)] for e in range(4)]
    weights = torch.rand(5, 1)
    names = {"ckpt_names": ("up_proj", "down_proj", None)}
    try:
        layer = built(config_of("tcfpx", "fp6:channel"), activation="relu2_no_mul", top_k=1, **names)
    except (TypeError, AttributeError):
        names = {"ckpt_names": ("up_proj", "down_proj", "")}
        layer = built(config_of("tcfpx", "fp6:channel"), activation="relu2_no_mul", top_k=1, **names)
    for e, (up, down) in enumerate(experts):
        fill(layer, "tcfpx", e, w1=up, w2=down)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.quant_method.names == ("up_proj", "down_proj")
    for on_input in (False, True):
        layer.apply_router_weight_on_input = on_input
        expected = []
        for row, weight, (expert,) in zip(x, weights, ids.tolist(), strict=True):
            up, down = (q.dequantize() for q in experts[expert])
            inner = linear(row * weight if on_input else row, up).relu() ** 2
            expected.append(linear(inner, down) * (1 if on_input else weight))
        out = layer.quant_method.apply(layer, x, weights, ids)
        assert torch.allclose(out, torch.stack(expected), rtol=1e-4, atol=1e-3)


def check_a_damaged_or_missing_expert_is_seen_in_one_line() -> None:
    folder = damaged("experts-marlin", flip)
    line = error_of(lambda: loaded(configured(folder)))
    assert "its hash is not the one that quantkit_report.json lists" in line and "\n" not in line, line

    def drop(folder: Path) -> None:
        src = Checkpoint(folder)
        tensors = {
            name: src.get(name) for name in src.names() if "layers.1" not in name or "experts.3.w3.s" not in name
        }
        for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json"), folder / "quantkit_report.json"):
            file.unlink()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    line = error_of(lambda: loaded(configured(damaged("experts-marlin", drop))))
    assert line.startswith("model.layers.1.block_sparse_moe.experts.3.w3: tensor 's' is missing"), line
