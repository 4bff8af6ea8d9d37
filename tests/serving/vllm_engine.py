"""vLLM's loader as if a GPU were here: configure a folder, load a model as one of several ranks, damage a folder.

vLLM is imported inside functions, so that the names of checks can be read without it.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.census import vllm_without_gpu

SETTINGS = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    **{"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}
_FOLDERS: list[Path] = []


def served(name: str) -> Path:
    """Name one of the folders that `test_vllm.py` makes."""
    return _FOLDERS[0] / name


def start(folders: str) -> None:
    """Import vLLM as if a GPU were here, let it find and register the plug-in, and begin a group of one process."""
    _FOLDERS.append(Path(folders))
    os.environ.update(SETTINGS, VLLM_CACHE_ROOT=tempfile.mkdtemp())
    vllm_without_gpu.pretend()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.plugins import load_general_plugins

    from quantkit.serving.vllm_plugin import register

    load_general_plugins()
    register()  # vLLM calls it in each process, perhaps several times
    with set_current_vllm_config(configured(served("experts"))):  # for a group of experts too
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
        initialize_model_parallel(1, 1)


@contextlib.contextmanager
def ranks(rank: int = 0, size: int = 1) -> Iterator[None]:
    """Let vLLM's layers be built as on one of several ranks; nothing is exchanged while a model is built and loaded."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    group.rank_in_group, group.world_size = rank, size
    try:
        yield
    finally:
        group.rank_in_group, group.world_size = 0, 1


def configured(folder: Path, dtype: str = "float16", **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(folder), dtype=dtype, enforce_eager=True, seed=0, **options).create_engine_config()


def loaded(config: Any, rank: int = 0, size: int = 1, finish: bool = True) -> Any:
    """Build and load a model by vLLM's own loader, as one of several ranks; `finish` its weights, on a CPU."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    try:
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), ranks(rank, size):
            model = initialize_model(config)
            with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
                DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
            if finish:
                process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)  # vLLM leaves it after an error
    return model


def error_of(function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except Exception as error:
        return str(error)
    return "no error"


def damaged(name: str, change: Any) -> Path:
    folder = Path(tempfile.mkdtemp()) / name
    shutil.copytree(served(name), folder)
    change(folder)
    return folder


def flip(folder: Path, offset: int = -64) -> None:
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
