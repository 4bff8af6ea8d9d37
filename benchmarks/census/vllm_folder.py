"""Does vLLM open a folder, or its draft model? A script for `python -m benchmarks.census --vllm`; needs vLLM's Python.

    benchmarks/census/vllm_folder.py [--draft] FOLDER... [--json] [-q] [--option key=value]...

It is `check_folder.py` of $VLLM_TOOLS (../shared/tools/vllm), which builds vLLM's model and loads the weights on a CPU.
It starts itself again with the Python of $VLLM_CHECK, and answers for the GPU more questions than that script: models
that make tensors on it or look at its driver when they are built. Entries of config.json that only newer versions of
transformers know (KINDS) are taken out of a copy of the folder. With `--draft`, it builds and loads the draft model.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOOLS = Path(os.environ.get("VLLM_TOOLS") or Path(__file__).resolve().parents[3] / "shared/tools/vllm")
#: entries of config.json that vLLM's own transformers refuses if it does not know the kinds in them
KINDS = re.compile(r"(\w+_)?layer_types|layer types")
#: what a check comes to, in this order; "process" and None are its end
STAGES = ("process", "config", "model", "weights", "unfilled", None)
#: vLLM's method of embeddings whose rows are packed
GATHERED = "CompressedTensorsEmbeddingWNA16Int"
#: what the next check does before it starts
PREPARED: list[Callable[[], None]] = []
#: what registers the plug-ins that are asked for
PLUGINS: list[Callable[[], None]] = []
#: modules of torchvision; only image processors use them
VISION = ("", ".io", ".transforms", ".transforms.v2", ".transforms.v2.functional", ".transforms.functional")


class Anything:
    """A stand-in for an object that vLLM imports and never uses here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **options: Any) -> Any:
        return Anything()


class Named(type):
    """The class of classes whose members are their own names, such as the modes of an interpolation."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class Absent(types.ModuleType):
    """Stand for a module of which only names are used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {}) if name[:1].isupper() else Anything()


def use_environment() -> None:
    """Start again with the environment's Python, unless this is it."""
    home = Path(os.environ.get("VLLM_CHECK", TOOLS.parents[2] / ".vllm-check"))
    python = home / "bin/python"
    if Path(sys.prefix).resolve() == home.resolve():
        return
    if not python.exists():
        sys.exit(f"no vLLM environment in {home}: name its folder in VLLM_CHECK")
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it has packages of its own
    os.execve(python, [str(python), os.path.abspath(__file__), *sys.argv[1:]], others)


def answer_for_the_gpu() -> None:
    """Answer what models ask Triton's driver and torch.cuda while they are built; let them make tensors on the CPU."""
    import torch
    from triton.runtime import driver

    sizes = {"multiprocessor_count": 132, "max_shared_mem": 232448, "warpSize": 32}
    driver._active = types.SimpleNamespace(
        get_current_target=lambda: types.SimpleNamespace(backend="cuda", arch=90, warp_size=32),
        get_current_device=lambda: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: "cpu",
        is_active=lambda: True,
        utils=types.SimpleNamespace(get_device_properties=lambda device: sizes),
    )
    facts = {"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 141 << 30}
    facts |= {"warp_size": 32, "shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472}
    answers: dict[str, Any] = {
        "get_device_properties": types.SimpleNamespace(**facts),
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H200",
        "current_device": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **options: answer)
    import vllm.model_executor.layers.sparse_attn_indexer as indexer
    from vllm.platforms import current_platform

    type(current_platform).device_type = "cpu"
    indexer.has_deep_gemm = lambda: True


def without_torchvision() -> None:
    """Let modules import names of torchvision, whose compiled part is built for CUDA."""
    for name in VISION:
        module = Absent(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        sys.modules[module.__name__] = module


def require_head(model: Any) -> None:
    """ValueError if the model multiplies by packed embeddings, which vLLM can only gather: loading does not show it."""
    methods = {
        name: type(module.quant_method).__name__
        for name, module in model.named_modules(remove_duplicate=False)
        if hasattr(module, "quant_method")
    }
    heads = {method for name, method in methods.items() if name.rpartition(".")[2] in ("lm_head", "proj_out")}
    if GATHERED in methods.values() and not heads - {GATHERED}:
        raise ValueError("its head is the packed embeddings, for which vLLM has no product")


def multiply(model: Any) -> dict[str, float]:
    """Pack what quantkit's plug-in has loaded, as on a GPU, look up a token, and ask for its logits."""
    import torch

    layers = [module for module in model.modules() if hasattr(module, "quant_method")]
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    (table,) = (layer for layer in layers if hasattr(layer, "num_embeddings") and "Head" not in type(layer).__name__)
    model.compute_logits(table.quant_method.embedding(table, torch.tensor([1])))
    return {}


def load_draft(checks: Any, folder: str, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    """Build the draft model of a folder and load its weights. What `check_folder.check` returns, for the draft."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    result: dict[str, Any] = {"folder": folder, "ok": False, "stage": "config", "error": None}
    try:
        speculation = {"method": "mtp", "num_speculative_tokens": 1}
        arguments = {"enforce_eager": True, "seed": 0, "speculative_config": speculation, **options}
        config = EngineArgs(model=folder, dtype=dtype, **arguments).create_engine_config()
        draft = config.speculative_config.draft_model_config
        result |= {"quantization": config.model_config.quantization, "architecture": ",".join(draft.architectures)}
        result["stage"] = "model"
        with (
            set_current_vllm_config(config),
            tempfile.TemporaryDirectory() as store,
            set_default_torch_dtype(draft.dtype),
        ):
            init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
            model = initialize_model(config, model_config=draft)
            checks.fill_with_sentinel(model)
            result["stage"] = "weights"
            with torch.no_grad():
                DefaultModelLoader(config.load_config).load_weights(model, draft)
        result["stage"] = "unfilled"
        shared = ("embed_tokens.weight", "lm_head.weight")  # the target's, which vLLM hands on
        if left := [name for name in checks.unfilled(model) if not name.endswith(shared)]:
            raise ValueError(f"{len(left)} parameters are not, or not wholly, filled: {', '.join(left[:6])}")
        result |= {"ok": True, "stage": None}
    except BaseException as error:
        result["error"] = checks.short(error)
    return result


def without_new_kinds(folder: str, error: str | None, place: str) -> str | None:
    """Write a folder like `folder` in `place`, without the kinds of layers that `error` is about; None if it is not."""
    if error is None or not KINDS.search(error):
        return None
    made = Path(place) / Path(folder).parent.name / Path(folder).name
    made.mkdir(parents=True)
    for path in Path(folder).iterdir():
        if path.name != "config.json":
            (made / path.name).symlink_to(path.resolve())
    config = json.loads((Path(folder) / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        for key in [key for key in part if KINDS.fullmatch(key)]:
            del part[key]
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


def furthest(checks: Any, folder: str, *arguments: Any) -> dict[str, Any]:
    """Check a folder, each time with more answers for the GPU, until it opens; return what came furthest.

    The kinds of layers are taken out of config.json if vLLM's transformers does not know them.
    """
    answers: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        opened = folder
        for answered in ((), (answer_for_the_gpu,), (answer_for_the_gpu, without_torchvision)):
            PREPARED[:] = answered
            answers.append(checks(opened, *arguments))
            if opened == folder and (made := without_new_kinds(folder, answers[-1]["error"], place)) is not None:
                opened = made
                answers[-1] = checks(opened, *arguments)
            if answers[-1]["ok"]:
                break
    best = max(answers, key=lambda answer: STAGES.index(answer["stage"]))
    return {**best, "folder": folder, "error": best["error"] and best["error"].replace(opened, folder)}


def main() -> None:
    use_environment()
    sys.path.insert(0, str(TOOLS))
    sys.dont_write_bytecode = True
    import check_folder

    draft = "--draft" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--draft"]
    check, in_child, unfilled = check_folder.check, check_folder.in_child, check_folder.unfilled

    def checked(folder: str, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
        for answer in (*PLUGINS, *PREPARED):
            answer()
        found: dict[str, Any] = (
            load_draft(check_folder, folder, dtype, options) if draft else check(folder, dtype, options)
        )
        return found

    def filled(model: Any) -> dict[str, float]:
        require_head(model)
        found: dict[str, float] = unfilled(model)
        return found

    check_folder.unfilled = filled
    if "quantization=quantkit" in sys.argv:
        sys.path.append(str(Path(__file__).resolve().parents[2]))
        from quantkit.serving.vllm_plugin import register

        PLUGINS.append(register)
        check_folder.unfilled = multiply
    check_folder.check = checked  # in a forked process for each folder
    check_folder.in_child = lambda folder, *arguments: furthest(in_child, folder, *arguments)
    check_folder.main()


if __name__ == "__main__":
    main()
