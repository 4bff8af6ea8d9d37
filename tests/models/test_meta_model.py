"""A model built without weights leaves the modules that other threads make at the same time as they are."""

from __future__ import annotations

import json
import re
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import quantkit
from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.meta_model import config_of, skeleton


def test_modules_that_another_thread_makes_meanwhile_have_values(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = transformers.AutoModelForCausalLM.from_config, list[nn.Linear]()

    def meanwhile(*args: Any, **more: Any) -> Any:
        other = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        other.start()
        other.join()
        return real(*args, **more)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", meanwhile)
    built = skeleton(Checkpoint(tiny_llama), torch.float16)
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}
    assert made[0].weight.device.type == "cpu" and nn.Linear(2, 2).weight.device.type == "cpu"


def test_threads_that_build_models_leave_the_default_dtype(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, inside = transformers.AutoModelForCausalLM.from_config, threading.Barrier(2)

    def meet(*args: Any, **more: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            inside.wait(0.3)  # two builds at once would meet here, and nest the dtypes that they restore
        return real(*args, **more)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", meet)
    src = Checkpoint(tiny_llama)
    threads = [threading.Thread(target=skeleton, args=(src, torch.bfloat16)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside.broken, "two threads built a model at the same time"
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("make", [torch.empty, torch.zeros])  # Llama 4 makes its experts of zeros
def test_experts_larger_than_the_memory_are_built(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    def build(*args: Any, **more: Any) -> nn.Module:
        module: Any = nn.Module()
        module.named_non_persistent_buffers = module.named_buffers  # of transformers' models
        module.experts = nn.Parameter(make(2**8, 2**20, 2**20))
        module.register_buffer("positions", make(8).fill_(1))
        return module

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", build)
    built: Any = skeleton(Checkpoint(tiny_llama), torch.float32)
    assert built.experts.is_meta and built.positions.sum() == 8


def test_an_implementation_in_the_config_needs_no_package_here_and_stays_in_the_output(tmp_path: Path) -> None:
    folder = families.write("gemma3", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["_attn_implementation"] = "flash_attention_3"
    config["attn_implementation"] = {"text_config": "flash_attention_3", "vision_config": "eager"}
    (folder / "config.json").write_text(json.dumps(config))
    quantkit.quantize(folder, tmp_path / "out", method="rtn", group_size=64, min_share=0)
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["text_config"]["_attn_implementation"] == "flash_attention_3"
    assert quantkit.load(tmp_path / "out", device="cpu").config.text_config._attn_implementation == "sdpa"


TWICE: dict[str, tuple[str, dict[str, Any]]] = {
    "num_experts is 8 and num_local_experts is 4": ("mixtral", {"num_experts": 8}),
    "num_hidden_layers is 7 and n_layer is 2": ("gpt2", {"num_hidden_layers": 7}),
    "rope_theta is 500.0 and rope_parameters.rope_theta is 10000.0": ("llama", {"rope_theta": 500.0}),
    "torch_dtype is 'bfloat16' and dtype is 'float16'": ("llama", {"dtype": "float16", "torch_dtype": "bfloat16"}),
    # transformers would take the first and lose the base of the second
    "rope_scaling is {'factor': 2.0} and rope_parameters is": ("llama", {"rope_scaling": {"factor": 2.0}}),
    "rope_scaling is {'factor': 4.0} and": ("gemma3", {"text_config": {"rope_scaling": {"factor": 4.0}}}),
}


def stating(family: str, change: dict[str, Any], tmp_path: Path) -> Path:
    """Write a model of a family whose config.json states other values."""
    folder = families.write(family, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    change = {key: {**config[key], **new} if key == "text_config" else new for key, new in change.items()}
    (folder / "config.json").write_text(json.dumps(config | change))
    return folder


@pytest.mark.parametrize("says", TWICE)
def test_an_entry_with_two_values_under_two_names_is_refused(says: str, tmp_path: Path) -> None:
    folder = stating(*TWICE[says], tmp_path)
    with pytest.raises(quantkit.QuantkitError, match=re.escape(says)):
        config_of(Checkpoint(folder))


@pytest.mark.parametrize("stated", ["auto", "fp16", "torch.float16", "", 5, False, ["float16"], {"x": 1}])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_no_reader_knows_is_refused_by_its_key(key: str, stated: Any, tmp_path: Path) -> None:
    """transformers takes "auto" as an argument, and refuses it in a config in torch's words."""
    for family, change in (("llama", {key: stated}), ("gemma3", {"text_config": {key: stated}})):
        folder = stating(family, {**change, "quantization_config": None}, tmp_path / family)
        with pytest.raises(quantkit.QuantkitError, match=f"config.json: {key} is .*: name that of .*, or remove the"):
            config_of(Checkpoint(folder))


def test_an_output_does_not_repeat_a_dtype_that_no_reader_knows(tiny_llama: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    quantkit.quantize(tiny_llama, packed, method="rtn", clip="none", group_size=32)
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "torch_dtype": "auto", "dtype": "auto"}))
    with pytest.raises(quantkit.QuantkitError, match="dtype is 'auto', which is no dtype of torch"):
        quantkit.pack(packed, tmp_path / "out", layout="gptq")
    assert not list(tmp_path.glob("out*"))


def test_an_entry_that_two_names_state_alike_is_taken(tmp_path: Path) -> None:
    theta = families.tiny_config("mixtral").rope_parameters["rope_theta"]
    same = {"num_experts": 4, "rope_theta": theta, "rope_scaling": None}
    assert config_of(Checkpoint(stating("mixtral", same, tmp_path))).num_local_experts == 4


#: Positions as newer readers and as older ones have them -> whether both read the same.
POSITIONS: list[tuple[str, dict[str, Any], bool]] = [
    ("llama", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, True),
    ("llama", {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, False),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}, False),
    ("llama", {"rope_theta": 1e4, "rope_scaling": {"rope_type": "nothing"}}, False),
    (
        "gemma3_text",
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        True,
    ),
    (
        "gemma3_text",
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        False,
    ),
]
NEWER = {
    "llama": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "gemma3_text": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


@pytest.mark.parametrize(("family", "older", "agrees"), POSITIONS)
def test_positions_for_older_readers_are_taken_if_they_are_the_same(
    family: str, older: dict[str, Any], agrees: bool, tmp_path: Path
) -> None:
    folder = stating(family, {"rope_parameters": NEWER[family], **older}, tmp_path)
    with nullcontext() if agrees else pytest.raises(quantkit.QuantkitError, match="rope_scaling is"):
        assert config_of(Checkpoint(folder)).rope_parameters.items() >= NEWER[family].items()


#: Entries that no tensor shows, and that a model computes NaN with or refuses at its first token.
IMPOSSIBLE: dict[str, tuple[str, dict[str, Any]]] = {
    "config.json makes model.rotary_emb.inv_freq NaN or infinite": ("llama", {"rope_parameters": {"rope_theta": 0.0}}),
    "makes model.rotary_emb.inv_freq NaN": ("llama", {"rope_parameters": {"rope_theta": -5.0}}),
    "inv_freq NaN or infinite": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0.0}}),
    "'rms_norm_eps' is -1e-05, and must be above 0": ("llama", {"rms_norm_eps": -1e-5}),
    "'max_position_embeddings' is 0, and must": ("llama", {"max_position_embeddings": 0}),
    "num_experts_per_tok is 9, and there are 4": ("mixtral", {"num_experts_per_tok": 9}),
    "num_experts_per_tok is 0, and there are 4": ("qwen3_moe", {"num_experts_per_tok": 0}),
    "moe_k is 5, and there are 4": ("ernie4_5_moe", {"moe_k": 5}),
    "sliding_window is 0, and must be null or above 0": ("mistral", {"sliding_window": 0}),
    "sliding_window is -1, and": ("gemma3", {"text_config": {"sliding_window": -1}}),
    "topk_group is 2, and there are 1": ("deepseek_v3", {"topk_group": 2}),
}


@pytest.mark.parametrize("says", IMPOSSIBLE)
def test_a_number_that_gives_no_text_is_refused_before_any_work(says: str, tmp_path: Path) -> None:
    folder = stating(*IMPOSSIBLE[says], tmp_path)
    with pytest.raises(quantkit.QuantkitError, match=re.escape(says)):
        skeleton(Checkpoint(folder), torch.float16)


def test_a_window_of_zero_that_is_not_used_is_none(tmp_path: Path) -> None:
    folder = families.write("qwen2_moe", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    assert config["sliding_window"] == 0 and not config["use_sliding_window"]  # so transformers writes it
    assert skeleton(Checkpoint(folder), torch.float16)


@pytest.mark.parametrize("named", [["BitnetForCausalLM"], ["MistralForCausalLM"], ["LlamaModel"], None, 5])
def test_a_class_that_the_model_type_does_not_have_is_noted(named: Any, tmp_path: Path) -> None:
    src = Checkpoint(stating("llama", {"architectures": named}, tmp_path))
    skeleton(src, torch.float16)
    foreign = named in (["BitnetForCausalLM"], ["MistralForCausalLM"])
    assert any("transformers builds LlamaForCausalLM" in line for line in src.notices) == foreign


def test_a_config_without_a_model_type_is_not_called_too_new(tmp_path: Path) -> None:
    folder = families.write("llama", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "model_type"}))
    with pytest.raises(quantkit.QuantkitError, match=r"config\.json states no model_type: check config\.json$"):
        config_of(Checkpoint(folder))
