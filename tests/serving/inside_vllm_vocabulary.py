"""Checks of packed embeddings and output heads against vLLM's real classes; `inside_vllm` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import linear, pad

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import Schemes
from tests.serving.samples import packed, record
from tests.serving.vllm_engine import configured, error_of, loaded, ranks, served

EMBEDDINGS, HEAD = "model.embed_tokens", "lm_head"
#: Folder -> the layout that multiplies with its head; None: decoded once.
HEADS = {
    "vocabulary-marlin": "marlin",
    "vocabulary": "marlin",
    "vocabulary-asym": "quick",
    "vocabulary-fp6": "tcfpx",
    "vocabulary-humming": "tcfpx",
    "vocabulary-qwen2": "quick",  # its head is the module of its embeddings
    "vocabulary-llama": "marlin",  # its head is tied by `tie_weights`
    "vocabulary-int8": None,
    "vocabulary-granite": "marlin",  # its head is tied by `weight`
}
TIED = ("vocabulary-qwen2", "vocabulary-llama", "vocabulary-int8", "vocabulary-granite")


def models() -> Iterator[tuple[str, Any]]:
    """Load each folder on one rank, and on each of two."""
    for name in HEADS:
        for rank, size in ((0, 1), (0, 2), (1, 2)):
            yield name, loaded(configured(served(name), quantization="quantkit"), rank, size)


def layer_of(config: Any, rank: int = 0, size: int = 1, prefix: str = HEAD) -> Any:
    """Build a head, or embeddings, of 257 tokens and 256 features by itself."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import vocab_parallel_embedding as layers

    kind = layers.ParallelLMHead if prefix == HEAD else layers.VocabParallelEmbedding
    with set_current_vllm_config(configured(served("marlin"))), ranks(rank, size):
        return kind(257, 256, quant_config=config, prefix=prefix, params_dtype=torch.float16)


def config_of(label: str, **schemes: Any) -> Any:
    from quantkit.serving.vllm_quantization import QuantkitConfig

    return QuantkitConfig(LAYOUTS["compressed-tensors"], Schemes(Scheme.parse(label), **schemes))


def fill(layer: Any, q: Any) -> None:
    for suffix, tensor in packed("compressed-tensors", q).items():
        parameter = layer.get_parameter(suffix)
        parameter.weight_loader(parameter, tensor)


def check_each_rank_has_the_rows_of_its_tokens_and_zeros() -> None:
    for name, model in models():
        src, head, table = Checkpoint(served(name)), model.lm_head, model.model.embed_tokens
        assert (head is table) <= (name in TIED), name  # Granite's tensor is tied, from vLLM 0.33 on the layer
        tokens, count = table.shard_indices, table.num_embeddings_per_partition
        own = slice(tokens.org_vocab_start_index, tokens.org_vocab_end_index)
        weight = src.dense(f"{EMBEDDINGS}.weight", torch.float16)
        padding = (0, 0, 0, count - len(weight[own]))
        numbers = torch.arange(count).view(2, -1)
        found = table.quant_method.embedding(table, numbers)
        assert torch.equal(found.flatten(0, 1), pad(weight[own], padding)), name
        weight = weight if name in TIED else src.dense(f"{HEAD}.weight", torch.float16)
        x = torch.randn(3, weight.shape[1]).half()
        logits = head.quant_method.apply(head, x)
        assert torch.equal(logits, linear(x, pad(weight[own], padding))), name
        assert logits.shape == (3, count) and not logits[:, len(weight[own]) :].any(), name
        assert getattr(head, "quantkit_layout", None) == HEADS[name], (name, head.quantkit_layout)
        left = [
            each for each, _ in model.named_parameters() if each.endswith(("weight_packed", "weight_shape", "_scale"))
        ]
        assert all("quantkit_rows_" in each for each in left), left


def check_a_rank_without_tokens_has_zeros_only() -> None:
    for label in ("int8:channel", "int4:g64:asym"):
        config = config_of(label, overrides=((r"model\.embed_tokens", Scheme.parse(label)),))
        layer = layer_of(config, 7, 8, EMBEDDINGS)
        fill(layer, record(label, 257, 256))
        layer.quant_method.process_weights_after_loading(layer)
        assert not layer.quant_method.embedding(layer, torch.arange(40)).any(), label


def check_rows_are_gathered_by_one_node_of_a_graph() -> None:
    table, graphs = loaded(configured(served("vocabulary"), quantization="quantkit")).model.embed_tokens, []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if str(node.target).startswith("quantkit")])
        return graph.forward

    compiled = torch.compile(lambda x: table.quant_method.embedding(table, x), fullgraph=True, backend=keep)
    numbers = torch.tensor([5, 0, 256])
    assert torch.equal(compiled(numbers), table.quant_method.embedding(table, numbers))
    assert graphs == [["quantkit.gather"]], graphs


def check_adapters_find_dtype_and_device_of_packed_embeddings() -> None:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA

    for name in HEADS:
        model = loaded(configured(served(name), quantization="quantkit"))
        layer = VocabParallelEmbeddingWithLoRA(model.model.embed_tokens)
        layer.create_lora_weights(2, LoRAConfig(max_lora_rank=8, lora_dtype=torch.float16))
        assert layer.lora_a_stacked.shape == (2, 257, 8), name
        for each in (model.lm_head, model.model.embed_tokens):
            assert (each.weight.dtype, each.weight.device.type) == (torch.float16, "cpu"), name


def check_a_head_that_no_kernel_of_quantkit_takes_is_left_to_vllm() -> None:
    config = configured(served("vocabulary-int8-head"), quantization="quantkit")
    head = loaded(config, finish=False).lm_head
    assert type(head.quant_method).__module__.startswith("vllm."), head.quant_method


def check_embeddings_are_found_by_the_names_that_engines_tell() -> None:
    stated = ((r"model\.language_model\.embed_tokens", Scheme.parse("int8:channel")),)
    config = config_of("int4:g128", overrides=stated)
    for prefix in ("", "language_model.model.embed_tokens", "model.language_model.embed_tokens"):
        assert config.table(prefix) == ("model.language_model.embed_tokens", Scheme.parse("int8:channel")), prefix
    assert config.table("visual.pos_embed") is None
    assert config_of("int4:g128").table("") is None
    other = ((r"model\.embed_tokens_per_layer", Scheme.parse("int4:g64")),)
    config = config_of("int4:g128", overrides=(*stated, *other))
    assert config.table("model.embed_tokens_per_layer") == ("model.embed_tokens_per_layer", other[0][1])
    line = error_of(config.table, "")
    assert line.startswith("vLLM joins model.language_model.embed_tokens int8:channel, model.embed_tokens_per"), line


def check_a_head_of_another_width_or_vocabulary_is_one_line() -> None:
    for size in ((256, 256), (257, 128)):
        line = error_of(fill, layer_of(config_of("int4:g128")), record("int4:g128", *size))
        assert line == f"lm_head: it is packed from {list(size)}, config.json asks for [257, 256]", line
