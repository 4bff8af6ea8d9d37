"""Run inside an environment with SGLang: checks of the plug-in against SGLang's real classes, one function each.

    python -m tests.serving.inside_sglang FOLDERS    prints one JSON object: check -> None, or what failed

FOLDERS has the folders that `test_sglang.py` makes. SGLang is imported inside functions, so that the names of checks
can be read without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import Schemes
from tests.serving import inside_vllm
from tests.serving.inside_vllm import fill, share
from tests.serving.samples import PACKED, record

FOLDERS = Path()
KEPT: list[Any] = []


def start() -> None:
    """Import SGLang without its compiled parts, and let it find and register the plug-in."""
    vision = torch.library.Library("torchvision", "FRAGMENT")  # torchvision's compiled part is built for CUDA
    for operator in ("nms", "qnms"):
        vision.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(vision)
    from sglang.srt.plugins import load_plugins

    from quantkit.serving.sglang_plugin import register

    load_plugins()
    register()


def loaded(folder: Path, quantization: str | None, rank: int, size: int) -> Any:
    """Build and load a Llama by SGLang's own loader, as one of several ranks."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader, LoadConfig, _get_quantization_config
    from sglang.srt.models.llama import LlamaForCausalLM
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(model_path=str(folder), device="cpu"), ranks(rank, size):
        config, options = ModelConfig(str(folder), quantization=quantization), LoadConfig()
        method = _get_quantization_config(config, options)
        torch.set_default_dtype(torch.float16)
        model = LlamaForCausalLM(config.hf_config, quant_config=method)
        torch.set_default_dtype(torch.float32)
        loader = DefaultModelLoader(options)
        loader.load_weights_and_postprocess(model, loader._get_all_weights(config, model), torch.device("cpu"))
    return model


@contextlib.contextmanager
def ranks(rank: int = 0, size: int = 1) -> Iterator[None]:
    """Let SGLang's layers be built as on one of several ranks."""
    from sglang.srt.runtime_context import get_parallel

    def group(rank: int, size: int) -> Any:
        ends = {"is_first_rank": True, "is_last_rank": True, "cpu_group": None, "device_group": None}
        return SimpleNamespace(rank_in_group=rank, world_size=size, ranks=[*range(size)], **ends)

    named: dict[str, Any] = {"attn_dp_size": 1, "attn_dp_rank": 0}
    for name, at, count in (("tp", rank, size), ("attn_tp", rank, size), ("moe_tp", rank, size), ("pp", 0, 1)):
        named |= {f"{name}_group": group(at, count), f"{name}_rank": at, f"{name}_size": count}
    with get_parallel().override(**named):
        yield


def config_of(layout: str, label: str, **schemes: Any) -> Any:
    from quantkit.serving.sglang_quantization import QuantkitConfig

    return QuantkitConfig(LAYOUTS[layout], Schemes(Scheme.parse(label), **schemes))


def layer_of(kind: str, config: Any, *sizes: Any, bias: bool = False, prefix: str = "model.layers.0.x") -> Any:
    """Build a linear of SGLang by itself."""
    from sglang.srt.layers import linear as layers

    return getattr(layers, kind)(*sizes, bias=bias, quant_config=config, prefix=prefix, params_dtype=torch.float16)


def of(layer: Any) -> Tensor:
    """Finish a layer, and decode the weight that it multiplies with, float32 `[out, k]`; its product is torch's."""
    weight = inside_vllm.of(layer)
    x = torch.randn(3, weight.shape[1]).half()
    assert torch.equal(layer.quant_method.apply(layer, x), linear(x, weight.half()))
    return weight


def check_the_method_is_asked_first_and_claims_its_own_folders() -> None:
    from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    assert next(iter(QUANTIZATION_METHODS)) == "quantkit" and "awq" in QUANTIZATION_METHODS
    assert QUANTIZATION_CHOICES.count("quantkit") == 1
    method = get_quantization_config("quantkit")
    for path in sorted(FOLDERS.iterdir()):
        stated = json.loads((path / "config.json").read_text())["quantization_config"]
        own = path.name in ("marlin", "tcfpx", "quick")
        assert method.override_quantization_method(stated, None) == ("quantkit" if own else None), path.name
        assert method.override_quantization_method(stated, "quantkit") == "quantkit"


def check_the_config_of_each_folder_is_read_with_what_sglang_adds() -> None:
    from sglang.srt.layers.quantization import get_quantization_config

    for path in sorted(FOLDERS.iterdir()):
        stated = json.loads((path / "config.json").read_text())["quantization_config"]
        added = {"packed_modules_mapping": {"qkv": ["a", "b"]}, "hf_config": SimpleNamespace(tie_word_embeddings=True)}
        config = get_quantization_config("quantkit").from_config({**stated, **added})
        assert config.layout.NAME == Checkpoint(path).layout.NAME, path.name  # type: ignore[union-attr]
        assert config.is_head_tied and config.members("x.qkv") == ["x.a", "x.b"]
        assert config.members("x.gate_up_proj") == ["x.gate_proj", "x.up_proj"]


def check_each_folder_is_loaded_by_sglang_on_each_rank() -> None:
    for path in sorted(FOLDERS.iterdir()):
        for rank, size in ((0, 1), (0, 2), (1, 2)):
            own = path.name in ("marlin", "tcfpx", "quick")
            model = loaded(path, None if own else "quantkit", rank, size)
            for index, block in enumerate(model.model.layers):
                for name, weight in share(path, f"model.layers.{index}", rank, size).items():
                    assert torch.equal(of(block.get_submodule(name)), weight), (
                        f"{path.name}: {name} of {rank} of {size}"
                    )


def check_a_damaged_folder_is_refused() -> None:
    path = Path(shutil.copytree(FOLDERS / "marlin", Path(tempfile.mkdtemp()) / "damaged"))
    (shard,) = path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 1
    shard.write_bytes(data)
    try:
        loaded(path, None, 0, 1)
    except CheckpointError as error:
        assert shard.name in str(error) and "QUANTKIT_CHECK=0" in str(error), error
    else:
        raise AssertionError("a damaged folder was loaded")


def check_eight_ranks_with_copied_heads_of_each_layout() -> None:
    inside_vllm.compare_eight_ranks_with_copied_heads(ranks, layer_of, config_of, of)


def check_rows_columns_and_joined_linears_are_split_over_two_ranks() -> None:
    for layout, label, _ in PACKED:
        gate, up, down = record(label, 256, 512), record(label, 256, 512, 1), record(label, 256, 512, 2)
        for rank in range(2):
            with ranks(rank, 2):
                config = config_of(layout, label)
                joined = layer_of("MergedColumnParallelLinear", config, 512, [256, 256])
                fill(joined, layout, gate, 0)
                fill(joined, layout, up, 1)
                rows = layer_of("RowParallelLinear", config, 512, 256)
                fill(rows, layout, down)
                whole = layer_of("ReplicatedLinear", config, 512, 256)
                fill(whole, layout, down)
            halves = [q.dequantize().chunk(2)[rank] for q in (gate, up)]
            assert torch.equal(of(joined), torch.cat(halves)), (layout, label, rank)
            assert torch.equal(of(rows), down.dequantize().chunk(2, 1)[rank]), (layout, label, rank)
            assert torch.equal(of(whole), down.dequantize())


def check_dense_linears_and_a_head_are_left_to_sglang_and_mixtures_refused() -> None:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    config = config_of("marlin", "int4:g128", ignore=("lm_head", "model.layers.0.mlp.gate_proj"))
    with ranks():
        dense = layer_of("ColumnParallelLinear", config, 256, 128, prefix="model.layers.0.mlp.gate_proj")
        assert isinstance(dense.quant_method, UnquantizedLinearMethod)
        try:
            layer_of("MergedColumnParallelLinear", config, 256, [128, 128], prefix="model.layers.0.mlp.gate_up_proj")
        except ValueError as error:
            assert str(error).startswith("SGLang joins model.layers.0.mlp.gate_proj dense, model.layers.0.mlp.up_proj")
        else:
            raise AssertionError("a mixture was taken")


def check_packed_embeddings_and_heads_are_refused() -> None:
    from sglang.srt.layers.quantization import get_quantization_config
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    stated = LAYOUTS["compressed-tensors"].write_config(
        Schemes(Scheme.parse("int4:g128"), ((r"model\.embed_tokens", Scheme.parse("int8:channel")),))
    )
    line = inside_vllm.error_of(get_quantization_config("quantkit").from_config, stated)
    assert line == "model.embed_tokens is packed, which SGLang does not serve with quantkit: quantize without it", line
    with ranks():
        line = inside_vllm.error_of(
            ParallelLMHead, 512, 256, quant_config=config_of("marlin", "int4:g128"), prefix="lm_head"
        )
    assert line == "lm_head is packed, which SGLang does not serve with quantkit: quantize without it", line


CHECKS = [name for name in list(globals()) if name.startswith("check_")]

if __name__ == "__main__":
    FOLDERS = Path(sys.argv[1])
    results: dict[str, str | None] = {}
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        start()
        for name in CHECKS:
            try:
                globals()[name]()
                results[name] = None
            except Exception:
                results[name] = traceback.format_exc()[-1500:]
    print("RESULTS " + json.dumps(results), flush=True)
    os._exit(0)
