"""Run inside vLLM's own environment: checks of the plug-in against vLLM's real classes, one function each.

    python -m tests.serving.inside_vllm FOLDERS    prints one JSON object: check -> None, or what failed

FOLDERS has the folders that `test_vllm.py` makes. vLLM is imported inside functions, so that the names of the checks
can be read without it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import Schemes
from tests.serving import inside_vllm_experts, inside_vllm_vocabulary
from tests.serving.samples import PACKED, decoded, packed, record
from tests.serving.vllm_engine import configured, damaged, error_of, flip, loaded, ranks, served, start

#: Folders of the layouts of quantkit's kernels; of others, which need `--quantization quantkit`.
OWN = ("marlin", "marlin24", "tcfpx-fp6", "tcfpx-fp5", "quick")
OTHERS = ("compressed-tensors", "compressed-tensors-asym", "gptq", "awq", "humming")


def of(layer: Any) -> Tensor:
    """Finish a layer, and decode the weight that it multiplies with, float32 `[out, k]`."""
    layer.quant_method.process_weights_after_loading(layer)  # a second call does nothing
    tensors = {name.removeprefix("quantkit_"): layer.get_parameter(name) for name in layer.quantkit_names}
    left = {name for name, _ in layer.named_parameters(recurse=False)} - {*layer.quantkit_names, "bias"}
    assert not left, f"left behind: {left}"
    k = getattr(layer, "input_size_per_partition", layer.input_size)
    return decoded(layer.quantkit_layout, layer.quantkit_label, tensors, layer.quantkit_out, k)


def share(folder: Path, block: str, rank: int, size: int) -> dict[str, Tensor]:
    """Cut a rank's share of each joined linear of a Llama out of the decoded weights, by heads, rows and columns."""
    src = Checkpoint(folder)
    heads, kv_heads = src.config["num_attention_heads"], src.config["num_key_value_heads"]
    copies = max(1, size // kv_heads)
    found = {}
    for leaf, count, at in (("q", heads, rank), ("k", kv_heads, rank // copies), ("v", kv_heads, rank // copies)):
        weight = src.dense(f"{block}.self_attn.{leaf}_proj.weight", torch.float32)
        of_head = weight.view(count, -1, weight.shape[1])
        each = max(1, count // size)
        found[leaf] = of_head[at * each : (at + 1) * each].flatten(0, 1)
    mlp = {leaf: src.dense(f"{block}.mlp.{leaf}_proj.weight", torch.float32) for leaf in ("gate", "up", "down")}
    o = src.dense(f"{block}.self_attn.o_proj.weight", torch.float32)
    return {
        "self_attn.qkv_proj": torch.cat([found["q"], found["k"], found["v"]]),
        "self_attn.o_proj": o.chunk(size, 1)[rank],
        "mlp.gate_up_proj": torch.cat([mlp["gate"].chunk(size)[rank], mlp["up"].chunk(size)[rank]]),
        "mlp.down_proj": mlp["down"].chunk(size, 1)[rank],
    }


def compare_model(folder: Path, **options: Any) -> None:
    """Compare each linear of a Llama on each rank with slices of the decoded weights, and its product with torch's."""
    for size in (1, 2, 4):
        if size == 4 and any(scheme.group_size == 128 for scheme in [Checkpoint(folder).schemes.default]):
            continue  # 256 columns
        for rank in range(size):
            model = loaded(configured(folder, **options), rank, size)
            for index, block in enumerate(model.model.layers):
                for name, weight in share(folder, f"model.layers.{index}", rank, size).items():
                    layer = block.get_submodule(name)
                    assert torch.equal(of(layer), weight), f"{name} of rank {rank} of {size}"
                    x = torch.randn(3, weight.shape[1]).half()
                    assert torch.equal(layer.quant_method.apply(layer, x), linear(x, weight.half())), name


def check_each_own_layout_is_claimed_and_loads() -> None:
    for name in OWN:
        config = configured(served(name))
        assert config.model_config.quantization == "quantkit", name
        compare_model(served(name))


def check_each_other_layout_is_left_to_vllm() -> None:
    for name in OTHERS:
        config = configured(served(name))
        assert config.model_config.quantization != "quantkit", name
        assert type(config.quant_config).__module__.startswith("vllm."), name


def check_vllms_own_classes_open_each_other_layout() -> None:
    for name in OTHERS:
        model = loaded(configured(served(name)), finish=False)
        methods = {type(layer.quant_method).__module__ for layer in (b.mlp.down_proj for b in model.model.layers)}
        assert all(method.startswith("vllm.") for method in methods), (name, methods)


def check_each_other_layout_loads_if_the_user_asks() -> None:
    for name in OTHERS:
        compare_model(served(name), quantization="quantkit")


def check_the_config_goes_to_workers_and_copies() -> None:
    config = configured(served("mixed"))

    def check() -> None:
        for each in (pickle.loads(pickle.dumps(config.quant_config)), copy.deepcopy(config.quant_config)):
            assert each.scheme("model.layers.1.mlp.down_proj").label == "int4:channel"
            assert each.is_dense("model.layers.0.self_attn.q_proj")

    check()
    loaded(config)
    check()


def check_a_compiled_graph_has_one_node_that_is_the_same_in_each_block() -> None:
    model, graphs = loaded(configured(served("marlin"))), []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append([(node.target, node.args[3:]) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    for block in model.model.layers:
        layer, x = block.mlp.down_proj, torch.randn(2, 512).half()
        compiled = torch.compile(
            lambda x, layer=layer: layer.quant_method.apply(layer, x), fullgraph=True, backend=keep
        )
        assert torch.equal(compiled(x), layer.quant_method.apply(layer, x))
        torch._dynamo.reset()
    assert graphs[0] == graphs[1] and len(graphs[0]) == 1, graphs
    assert str(graphs[0][0][0]).startswith("quantkit.multiply"), graphs


def check_registering_is_light() -> None:
    # transformers imports accelerate by itself where it is installed
    heavy = {"cupy", "datasets", "quantkit.inference.transformers_plugin", "quantkit.pipeline"}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert QUANTIZATION_METHODS.count("quantkit") == 1


def layer_of(kind: str, config: Any, *sizes: Any, bias: bool = False, prefix: str = "model.layers.0.x") -> Any:
    """Build a linear of vLLM by itself."""
    from vllm.model_executor.layers import linear as layers

    return getattr(layers, kind)(*sizes, bias=bias, quant_config=config, prefix=prefix, params_dtype=torch.float16)


def config_of(layout: str, label: str, **schemes: Any) -> Any:
    from quantkit.serving.vllm_quantization import QuantkitConfig

    config = QuantkitConfig(LAYOUTS[layout], Schemes(Scheme.parse(label), **schemes))
    config.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    return config


@contextlib.contextmanager
def building(rank: int = 0, size: int = 1) -> Iterator[None]:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(configured(served("marlin"))), ranks(rank, size):
        yield


def fill(layer: Any, layout: str, q: Any, *shard: Any) -> None:
    """Load a packed weight into a layer, as vLLM's models do."""
    for suffix, tensor in packed(layout, q).items():
        parameter = layer.get_parameter(suffix)
        parameter.weight_loader(parameter, tensor, *shard)


def compare_eight_ranks_with_copied_heads(place: Any, layer_of: Any, config_of: Any, of: Any) -> None:
    """Compare joined queries, keys and values on each rank; the functions are those of an engine."""
    k, head, heads, kv_heads = 256, 64, 8, 2
    for layout, label, target in PACKED:
        whole = [record(label, count * head, k, seed) for seed, count in enumerate((heads, kv_heads, kv_heads))]
        dense = [q.dequantize() for q in whole]
        for rank in range(8):
            with place(rank, 8):
                layer = layer_of("QKVParallelLinear", config_of(layout, label), k, head, heads, kv_heads)
                for shard, q in zip("qkv", whole, strict=True):
                    fill(layer, layout, q, shard)
            rows = dense[0][head * rank :][:head], *(d[head * (rank // 4) :][:head] for d in dense[1:])
            assert torch.equal(of(layer), torch.cat(rows)), (layout, label, rank)
            assert layer.quantkit_layout == target, layout


def check_eight_ranks_with_copied_heads_of_each_layout() -> None:
    compare_eight_ranks_with_copied_heads(building, layer_of, config_of, of)


def check_joined_on_disk_as_phi_3() -> None:
    k, head, heads, kv_heads = 256, 64, 4, 2
    for layout, label, _ in PACKED:
        q, mlp = record(label, head * (heads + 2 * kv_heads), k), record(label, 512, k, 1)
        parts = q.dequantize().split([head * heads, head * kv_heads, head * kv_heads])
        for rank in range(2):
            with building(rank, 2):
                layer = layer_of("QKVParallelLinear", config_of(layout, label), k, head, heads, kv_heads)
                gate_up = layer_of("MergedColumnParallelLinear", config_of(layout, label), k, [256, 256])
                fill(layer, layout, q)
                fill(gate_up, layout, mlp)
            assert torch.equal(of(layer), torch.cat([part.chunk(2)[rank] for part in parts])), layout
            halves = [part.chunk(2)[rank] for part in mlp.dequantize().chunk(2)]
            assert torch.equal(of(gate_up), torch.cat(halves)), layout


def check_latent_attention_gets_the_decoded_weight() -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

    for layout, label, _ in PACKED:
        q = record(label, 256, 256)
        with building():
            layer = layer_of("ColumnParallelLinear", config_of(layout, label), 256, 256)
            fill(layer, layout, q)
            layer.quant_method.process_weights_after_loading(layer)
        assert torch.equal(get_and_maybe_dequant_weights(layer, torch.float16), q.dequantize(torch.float16)), layout
        assert layer.weight.dtype == torch.float16


def check_several_parts_in_one_tensor() -> None:
    q, other = record("int4:g128", 256, 256), record("int4:g128", 128, 256, 1)
    with building(1, 2):
        layer = layer_of("MergedColumnParallelLinear", config_of("marlin", "int4:g128"), 256, [128, 128, 128])
        fill(layer, "marlin", other, 2)
        fill(layer, "marlin", q, (0, 1))
    parts = [*q.dequantize().split(128), other.dequantize()]
    assert torch.equal(of(layer), torch.cat([part.chunk(2)[1] for part in parts]))


def check_a_replicated_linear_is_whole_on_each_rank() -> None:
    q = record("fp6:channel", 192, 320)
    for rank in range(2):
        with building(rank, 2):
            layer = layer_of("ReplicatedLinear", config_of("humming", "fp6:channel"), 320, 192)
            fill(layer, "humming", q)
        assert torch.equal(of(layer), q.dequantize())


def check_odd_sizes_are_padded_and_their_bias_counts_once() -> None:
    q = record("int4:g32:asym", 200, 96)
    with building():
        layer = layer_of("ColumnParallelLinear", config_of("compressed-tensors", "int4:g32:asym"), 96, 200, bias=True)
        fill(layer, "compressed-tensors", q)
        bias = torch.randn(200)
        layer.bias.weight_loader(layer.bias, bias)
        layer.quant_method.process_weights_after_loading(layer)
    assert (layer.quantkit_out, layer.quantkit_qweight.shape[1] * 2) == (200, 256)
    assert layer.bias.dtype == torch.float16
    for x in (torch.randn(5, 96).half(), torch.randn(2, 3, 96).half(), torch.randn(0, 96).half()):
        expected = linear(x, q.dequantize(torch.float16), bias.half())
        assert torch.equal(layer(x)[0], expected)


def check_biases_of_qwen2_and_a_tied_head() -> None:
    src = Checkpoint(served("qwen2"))
    for rank in range(2):
        model = loaded(configured(served("qwen2")), rank, 2)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        layer = model.model.layers[1].self_attn.qkv_proj
        names = [f"model.layers.1.self_attn.{leaf}_proj" for leaf in "qkv"]
        bias = torch.cat([src.get(f"{name}.bias").chunk(2)[rank] for name in names]).half()
        weight = torch.cat([src.dense(f"{name}.weight", torch.float32).chunk(2)[rank] for name in names])
        assert torch.equal(layer.bias, bias)
        assert torch.equal(of(layer), weight)
        x = torch.randn(3, weight.shape[1]).half()
        assert torch.equal(layer(x)[0], linear(x, weight.half(), bias))


def check_several_schemes_and_dense_linears_in_one_model() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    src = Checkpoint(served("mixed"))
    model = loaded(configured(served("mixed")))
    first, second = model.model.layers
    assert isinstance(first.self_attn.qkv_proj.quant_method, UnquantizedLinearMethod)
    dense = torch.cat([src.get(f"model.layers.0.self_attn.{leaf}_proj.weight") for leaf in "qkv"])
    assert torch.equal(first.self_attn.qkv_proj.weight, dense.half())
    labels = {block.mlp.down_proj.quantkit_label for block in (first, second)}
    assert labels == {"int4:g128", "int4:channel"}, labels
    for index, block in enumerate(model.model.layers):
        weight = src.dense(f"model.layers.{index}.mlp.down_proj.weight", torch.float32)
        assert torch.equal(of(block.mlp.down_proj), weight)


def check_linears_of_two_schemes_are_not_joined() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    with building():
        other = ((r"model\.layers\.0\.k_proj", Scheme.parse("int4:channel")),)
        config = config_of("marlin", "int4:g128", overrides=other)
        line = error_of(layer_of, "QKVParallelLinear", config, 256, 64, 4, 4, prefix="model.layers.0.qkv_proj")
        assert line == (
            "vLLM joins model.layers.0.q_proj int4:g128, model.layers.0.k_proj int4:channel, model.layers.0.v_proj "
            "int4:g128: quantize them alike, with --set fused_alike=true"
        ), line
        config = config_of("marlin", "int4:g128", ignore=("model.layers.0.up_proj",))
        line = error_of(
            layer_of, "MergedColumnParallelLinear", config, 256, [256, 256], prefix="model.layers.0.gate_up_proj"
        )
        assert "model.layers.0.gate_proj int4:g128, model.layers.0.up_proj dense" in line, line
        config = config_of("marlin", "int4:g128", ignore=("re:.*layers.0.(up|gate)_proj",))
        layer = layer_of("MergedColumnParallelLinear", config, 256, [256, 256], prefix="model.layers.0.gate_up_proj")
        assert isinstance(layer.quant_method, UnquantizedLinearMethod)


def check_a_scheme_of_a_linear_that_is_joined_on_disk_counts() -> None:
    with building():
        stated = ((r"model\.layers\.0\.gate_up_proj", Scheme.parse("int4:channel")),)
        config = config_of("marlin", "int4:g128", overrides=stated, ignore=("model.layers.0.qkv_proj",))
        layer = layer_of("MergedColumnParallelLinear", config, 256, [256, 256], prefix="model.layers.0.gate_up_proj")
        assert layer.quant_method.scheme.label == "int4:channel"
        config.packed_modules_mapping = {}  # as some classes of vLLM, which join all the same
        layer = layer_of("QKVParallelLinear", config, 256, 64, 4, 4, prefix="model.layers.1.qkv_proj")
        assert layer.quant_method.names == [f"model.layers.1.{leaf}_proj" for leaf in "qkv"]
        layer = layer_of("QKVParallelLinear", config, 256, 64, 4, 4, prefix="model.layers.0.qkv_proj")
        assert not hasattr(layer, "quantkit_weight")


def check_no_weight_is_loaded_that_vllm_reordered() -> None:
    for family in ("bloom", "falcon"):
        line = error_of(lambda family=family: loaded(configured(served(family))))
        assert line.endswith(
            "query_key_value: vLLM's class of this model reorders it while loading, which packed words do not survive: "
            "leave it dense with --skip '.*query_key_value'"
        ), line


def check_names_are_those_before_the_renaming_of_a_wrapper() -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    ignore = ("model.language_model.layers.0.mlp.up_proj", "re:model\\.vision_tower.*", "lm_head")
    override = ((r"model\.language_model\.layers\.0\.mlp\.down_proj", Scheme.parse("int4:channel")),)
    pattern = ((r"model\.language_model\.layers\.[12]\..*down_proj", Scheme.parse("int4:g64")),)
    config = config_of("gptq", "int4:g128", ignore=ignore, overrides=(*override, *pattern))
    prefixes = {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.",
        "lm_head.": "language_model.lm_head.",
    }
    for _ in range(2):  # a wrapper and the model inside it both tell their renaming
        config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix=prefixes))
    dense = ["language_model.model.layers.0.mlp.up_proj", "vision_tower.blocks.0.fc1", "language_model.lm_head"]
    assert all(map(config.is_dense, dense)), [name for name in dense if not config.is_dense(name)]
    assert not config.is_dense("language_model.model.layers.0.mlp.gate_proj")
    found = [config.scheme(f"language_model.model.layers.{i}.mlp.down_proj").label for i in (0, 1, 3)]
    assert found == ["int4:channel", "int4:g64", "int4:g128"], found


def check_what_is_not_served_is_refused_in_one_line() -> None:
    with building():
        config = config_of("marlin", "int4:g128")
        line = error_of(layer_of, "ColumnParallelLinear", config_of("awq", "int4:g8"), 256, 256)
        assert line.startswith("model.layers.0.x: no kernel takes int4:g8 of [256, 256]"), line
    with building(0, 4):
        line = error_of(layer_of, "RowParallelLinear", config, 256, 512)
        assert line == (
            "model.layers.0.x: its 256 columns in groups of 128 cannot be split over 4 GPUs: "
            "use --tensor-parallel-size 1 or 2"
        ), line


def check_experts_that_stay_dense_are_left_to_vllm() -> None:
    src = Checkpoint(served("experts-dense"))
    model = loaded(configured(served("experts-dense")))
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
    assert {"UnquantizedFusedMoEMethod", "QuantkitLinearMethod"} <= methods, methods
    names = [f"model.layers.0.self_attn.{leaf}_proj.weight" for leaf in "qkv"]
    weight = torch.cat([src.dense(name, torch.float32) for name in names])
    assert torch.equal(of(model.model.layers[0].self_attn.qkv_proj), weight)


def check_damage_is_seen_in_one_line() -> None:
    folder = damaged("marlin", flip)
    line = error_of(lambda: loaded(configured(folder)))
    assert "-of-00001.safetensors: its hash is not the one that quantkit_report.json lists" in line, line
    assert line.endswith("set QUANTKIT_CHECK=0 to use it as it is") and "\n" not in line, line
    (folder / "quantkit_report.json").unlink()
    line = error_of(lambda: loaded(configured(folder)))
    assert "does not have the digest that the file states, it was changed" in line, line
    os.environ["QUANTKIT_CHECK"] = "0"
    try:
        loaded(configured(folder))
    finally:
        del os.environ["QUANTKIT_CHECK"]


def check_act_order_is_refused_and_not_dropped() -> None:
    def change(folder: Path) -> None:
        src = Checkpoint(folder)
        tensors = {name: src.get(name) for name in src.names()}
        tensors["model.layers.1.mlp.down_proj.g_idx"] = tensors["model.layers.1.mlp.down_proj.g_idx"].flip(0)
        next(folder.glob("*.safetensors")).unlink()
        (folder / "quantkit_report.json").unlink()
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    line = error_of(lambda: loaded(configured(damaged("gptq", change), quantization="quantkit")))
    assert line.startswith("model.layers.1.mlp.down_proj: g_idx is not k // group_size, act-order"), line


def check_a_config_of_ours_that_is_malformed_is_not_another_readers() -> None:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["quantkit"]["scheme"] = "int7"
        (folder / "config.json").write_text(json.dumps(config))

    line = error_of(configured, damaged("tcfpx-fp6", change))
    assert "scheme 'int7' in the 'quantkit' key" in line, line


def check_a_missing_cupy_is_one_line_with_the_command() -> None:
    from quantkit.serving.methods import require_kernels

    line = error_of(require_kernels, torch.device("cuda", 0), "vLLM")
    assert line.startswith("quantkit's kernels cannot run inside vLLM here: CuPy does not load (No module named"), line
    assert "pip install 'cupy-" in line and "\n" not in line, line
    assert error_of(require_kernels, torch.device("cpu"), "vLLM") == "no error"


def check_batch_invariance_is_not_promised() -> None:
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    try:
        line = error_of(configured, served("marlin"))
    finally:
        del os.environ["VLLM_BATCH_INVARIANT"]
    assert "VLLM_BATCH_INVARIANT=1: sums of quantkit's kernels depend on the batch: unset it" in line, line


def check_a_dtype_that_no_kernel_takes_is_refused() -> None:
    line = error_of(configured, served("marlin"), dtype="float32")
    assert "torch.float32 is not supported for quantization method quantkit" in line, line


_ALL = {**globals(), **vars(inside_vllm_experts), **vars(inside_vllm_vocabulary)}
CHECKS = {name: check for name, check in _ALL.items() if name.startswith("check_")}


def main(folders: str) -> None:
    start(folders)
    found = {}
    # The lightness of the import is checked before anything else is loaded.
    for name in sorted(CHECKS, key=lambda name: name != "check_registering_is_light"):
        try:
            CHECKS[name]()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    print("RESULTS " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
