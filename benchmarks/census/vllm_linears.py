"""Ask vLLM's model classes which linears they join, and which they make without a quantization. Needs vLLM's Python.

    python -m benchmarks.census.vllm_linears configs FOLDER   # quantkit's Python: a config.json of each family
    python benchmarks/census/vllm_linears.py ask FOLDER -o vllm_linears.json   # vLLM's Python

`vllm_without_gpu.py` lets vLLM build its classes on a machine without a GPU. No weights are read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any


def write_configs(out: Path) -> None:
    """Write the tiny configuration of each family of the census."""
    from benchmarks.census import families

    for family in families.families():
        with suppress(Exception):  # a family without a tiny model
            config = families.tiny_config(family)
            config.architectures = [families.model_class(family)]
            config.save_pretrained(out / family)


def facts(folder: Path) -> dict[str, Any]:
    """Build vLLM's model of a configuration; return its joined linears, and those without a quantization."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    asked: set[int] = set()

    class Recorder(QuantizationConfig):  # type: ignore[misc]
        """Leaves every layer dense, and remembers which were offered to it."""

        get_name = classmethod(lambda cls: "compressed-tensors")
        get_min_capability = classmethod(lambda cls: 0)
        get_config_filenames = staticmethod(lambda: [])
        from_config = classmethod(lambda cls, config: cls())
        get_supported_act_dtypes = lambda self: [torch.bfloat16, torch.float16]  # noqa: E731

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            asked.add(id(layer))
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", model_impl="vllm"
    ).create_engine_config()
    config.quant_config = Recorder()
    with (
        set_current_vllm_config(config),
        tempfile.TemporaryDirectory() as store,
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
    ):
        with torch.device("cpu"):
            init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        model = initialize_model(config)
    joined = {k: list(v) for k, v in (getattr(model, "packed_modules_mapping", None) or {}).items()}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, LinearBase)}
    dense = {re.sub(r"\.\d+(?=\.)", ".N", name) for name, module in linears.items() if id(module) not in asked}
    leaves = {name.rpartition(".")[2] for name in linears}
    used = {name: members for name, members in joined.items() if name in leaves and len(set(members)) > 1}
    return {"joined": dict(sorted(used.items())), "dense": sorted(dense)}


def in_child(folder: Path) -> dict[str, Any]:
    """Ask in a forked process, because vLLM keeps global state."""
    read, write = os.pipe()
    if not (child := os.fork()):
        found: dict[str, Any]
        try:
            found = facts(folder)
        except BaseException as error:
            found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:160]}
        with os.fdopen(write, "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process ended"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Which linears vLLM joins or keeps dense.")
    parser.add_argument("what", choices=("configs", "ask"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "configs":
        return write_configs(arguments.folder)
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="CRITICAL", VLLM_NO_USAGE_STATS="1")
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", GLOO_SOCKET_IFNAME="lo", VLLM_HOST_IP="127.0.0.1")
    import vllm_without_gpu

    vllm_without_gpu.pretend()
    import vllm
    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader.default_loader

    answers: dict[str, Any] = {}
    for folder in sorted(path for path in arguments.folder.iterdir() if path.is_dir()):
        answer = in_child(folder)
        if "layer_types" in answer.get("error", ""):  # kinds that vLLM's own transformers does not know
            path = folder / "config.json"
            path.write_text(re.sub(r'\s*"layer_types": \[[^]]*\],?', "", path.read_text()))
            answer = in_child(folder)
        answers[folder.name] = answer
    head = {"vllm": vllm.__version__, "date": f"{date.today()}", "script": "benchmarks/census/vllm_linears.py"}
    built = {family: answer for family, answer in answers.items() if "error" not in answer}
    lines = ",\n".join(f"  {json.dumps(family)}: {json.dumps(answer)}" for family, answer in built.items())
    start = json.dumps(head, indent=1).removesuffix("\n}")
    rest = json.dumps(sorted(answers.keys() - built.keys()))
    arguments.out.write_text(f'{start},\n "families": {{\n{lines}\n }},\n "not_built": {rest}\n}}\n')


if __name__ == "__main__":
    main()
