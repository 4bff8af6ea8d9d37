"""A model built without weights leaves the modules that other threads make at the same time as they are."""

from __future__ import annotations

import json
import re
import threading
from contextlib import suppress
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
        module = nn.Module()
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
    # transformers would take the first and lose the base of the second
    "rope_scaling is {'factor': 2.0} and rope_parameters is": ("llama", {"rope_scaling": {"factor": 2.0}}),
    "rope_scaling is {'factor': 4.0} and": ("gemma3", {"text_config": {"rope_scaling": {"factor": 4.0}}}),
}


@pytest.mark.parametrize("says", TWICE)
def test_an_entry_with_two_values_under_two_names_is_refused(says: str, tmp_path: Path) -> None:
    family, change = TWICE[says]
    folder = families.write(family, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    change = {key: {**config[key], **new} if key == "text_config" else new for key, new in change.items()}
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(quantkit.QuantkitError, match=re.escape(says)):
        config_of(Checkpoint(folder))


def test_an_entry_that_two_names_state_alike_is_taken(tmp_path: Path) -> None:
    folder = families.write("mixtral", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    same = {"num_experts": 4, "rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": None}
    (folder / "config.json").write_text(json.dumps(config | same))
    assert config_of(Checkpoint(folder)).num_local_experts == 4


@pytest.mark.parametrize("named", [["BitnetForCausalLM"], ["MistralForCausalLM"], ["LlamaModel"], None, 5])
def test_a_class_that_the_model_type_does_not_have_is_noted(named: Any, tmp_path: Path) -> None:
    folder = families.write("llama", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": named}))
    src = Checkpoint(folder)
    skeleton(src, torch.float16)
    foreign = named in (["BitnetForCausalLM"], ["MistralForCausalLM"])
    assert any("transformers builds LlamaForCausalLM" in line for line in src.notices) == foreign


def test_a_config_without_a_model_type_is_not_called_too_new(tmp_path: Path) -> None:
    folder = families.write("llama", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "model_type"}))
    with pytest.raises(quantkit.QuantkitError, match=r"config\.json states no model_type: check config\.json$"):
        config_of(Checkpoint(folder))
