"""A model in memory: its device and its dtype there, and the weights of one block, of the modules
outside the blocks while they are needed, or of the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.memory_limits import unused_memory
from quantkit.errors import Option, RecipeError, Words
from quantkit.models.meta_model import float32_states, generation_config_of, skeleton
from quantkit.models.modules import computed, get_tensor, path_of, put_tensor
from quantkit.models.outline import LanguageModel, Outline
from quantkit.models.outside import require_complete

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Pinned memory that a block read ahead takes, as a multiple of its bytes: torch makes tensors of
#: 2^n bytes there, and keeps them.
PINNED = 4 / 3


class BlockWeights:
    """Load weights of a matched model from its checkpoint to a device, in the model's dtype, and
    free them.
    """

    def __init__(self, model: LanguageModel, device: torch.device) -> None:
        self._model, self._device = model, device
        self._in_float32 = float32_states(model.module, model.dtype)
        self._inside = tuple(f"{path}." for path in model.blocks)
        self._ahead: dict[int, Future[dict[str, Tensor]]] = {}
        self._reading = ThreadPoolExecutor(2, "quantkit-read")  # starts no thread until it is used

    def load_before_blocks(self) -> None:
        """Load everything outside the blocks except the output head, and move buffers to the
        device.
        """
        module, text = self._model.module, self._model.text
        table, head = text.get_input_embeddings(), text.get_output_embeddings()
        last = path_of(module, None if head is table else head)
        excluded = (*self._inside, f"{last}.") if last else self._inside
        self._load(lambda state: not state.startswith(excluded))
        for name, buffer in module.named_buffers():
            if buffer.device.type != "meta":
                put_tensor(module, name, buffer.to(self._device))

    def load_head(self) -> None:
        """Load the modules after the blocks; `load_before_blocks` has loaded the others."""
        module = self._model.module
        self._load(lambda s: not s.startswith(self._inside) and get_tensor(module, s).is_meta)

    def drop_head(self) -> None:
        """Free the weights of the output head."""
        head = self._model.text.get_output_embeddings()
        if head is not None:
            for name, parameter in head.named_parameters():
                put_tensor(head, name, parameter.to("meta"))

    def load_block(self, index: int) -> None:
        """Load a block's weights."""
        ready = self._ahead.pop(index).result() if index in self._ahead else {}
        self._load(lambda state: state.startswith(self._inside[index]), ready)

    def read_ahead(self, index: int) -> None:
        """Begin to read a block into RAM in the background. `load_block` raises the errors.

        For a GPU the weights are in pinned memory, if available, from which `load_block` copies
        several times as fast.
        """

        def read(name: str) -> Tensor:
            tensor = self._model.src.get(name)
            with suppress(RuntimeError):  # a limit of locked memory
                return tensor.pin_memory() if self._device.type == "cuda" else tensor
            return tensor

        names = self._model.stored(index)
        self._ahead[index] = self._reading.submit(lambda: {name: read(name) for name in names})

    def beside(self, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Begin to read a file in the background, after the blocks that are read ahead. Returns a
        function that waits for the file.
        """
        return self._reading.submit(read).result

    def unload_block(self, index: int) -> None:
        """Free a block's weights."""
        path = self._model.blocks[index]
        for state, parameter in self._model.module.get_submodule(path).named_parameters():
            put_tensor(self._model.module, f"{path}.{state}", parameter.to("meta"))

    def replace(self, linear: str, weight: Tensor) -> None:
        """Put a solved weight `[n, k]` in the place of a loaded one."""
        put_tensor(
            self._model.module,
            f"{self._model.places[linear]}.weight",
            weight.to(self._device, self._model.dtype),
        )

    def source(self, linear: str) -> Tensor:
        """Return a linear's stored weight `[n, k]` on the device. It is read if it is not loaded,
        or if its dtype was changed.
        """
        loaded, src, name = self._of(linear), self._model.src, f"{linear}.weight"
        same = loaded.dtype == src.dtype(name) and loaded.shape == src.shape(name)
        if same and not loaded.is_meta:
            return loaded.detach()
        return src.get(name).to(self._device)

    def replaced(self, index: int, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Let tensors take the place of weights of a block's linears, wherever the block uses
        these.

        `functional_call` would look for them in the whole model at each call, which takes longer
        than a small block.
        """
        return replaced(
            self._model.module.get_submodule(self._model.blocks[index]),
            {id(self._of(name)): new for name, new in weights.items()},
        )

    def _of(self, linear: str) -> Tensor:
        return get_tensor(self._model.module, f"{self._model.places[linear]}.weight")

    def _load(
        self, wanted: Callable[[str], bool], ready: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        """Take the wanted states from the tensors that are `ready`, else from the checkpoint."""

        def read(name: str) -> Tensor:
            return ready[name] if name in ready else self._model.src.get(name)

        for state, name in self._model.states.stored.items():
            if wanted(state):
                self._put(state, read(name))
        for each in self._model.states.merged:
            if wanted(each.states[0]):
                for state, tensor in each.convert([read(name) for name in each.names]).items():
                    self._put(state, tensor)

    def _put(self, state: str, tensor: Tensor) -> None:
        dtype = torch.float32 if self._in_float32.search(state) else self._model.dtype
        kind = dtype if tensor.is_floating_point() else None
        put_tensor(self._model.module, state, tensor.to(self._device, kind, non_blocking=True))


@contextmanager
def replaced(module: nn.Module, instead: Mapping[int, Tensor]) -> Iterator[None]:
    """Let tensors take the place of parameters of a module, by the parameters' ids."""
    places: list[tuple[dict[str, Any], str, Any]] = [
        (each._parameters, name, old)
        for each in module.modules()
        for name, old in each._parameters.items()
        if id(old) in instead
    ]
    try:
        for parameters, name, old in places:
            parameters[name] = instead[id(old)]
        yield
    finally:
        for parameters, name, old in places:
            parameters[name] = old


def load_dense_model(
    src: Checkpoint,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Load the whole model of a dense or quantized checkpoint, every weight decoded to `dtype`.

    CheckpointError for a tensor that is missing, of another shape, or not part of the model.
    Tensors that only its class or config.json declares are left out.
    """
    model = Outline(src, skeleton(src, dtype), as_matrices=True)
    module, (stored, merged, *_) = model.module, model.states
    module.generation_config = generation_config_of(src)
    missing = model.states.missing(module)
    for state in missing:
        if (table := computed(module, state)) is not None:
            put_tensor(module, state, table.to(dtype))
    require_complete(
        model.names,
        src,
        [state for state in missing if get_tensor(module, state).is_meta],
        model.states.outside,
    )
    target = device_of(device)

    def read(name: str, state: str) -> Tensor:
        # Decoded to `dtype` directly, not rounded to the model's dtype first.
        return src.dense(name, dtype if get_tensor(module, state).is_floating_point() else None)

    once = {name: state for state, name in reversed(stored.items())}
    for name, state in once.items():
        put_tensor(module, state, read(name, state).to(target))
    for each in merged:
        for state, tensor in each.convert(
            [read(name, each.states[0]) for name in each.names]
        ).items():
            put_tensor(module, state, tensor.to(target))
    module.tie_weights(missing_keys=set(stored) - set(once.values()), recompute_mapping=False)
    nn.Module.to(module, target)
    return module


_MIB = 2**20
#: Bytes that the CUDA runtime and its libraries add on the device.
CUDA_DEVICE = 800 * _MIB
#: Bytes of Python, torch, transformers and datasets imported, and the skeleton of the model
#: (measured: 540 MB); those that a torch built for CUDA adds where nothing is computed on a GPU
#: (measured: 360 MB of its libraries), and where something is; what gradients and optimizers
#: import, and what the heap keeps of small matrices.
_PROGRAM, _CUDA_BUILD, _CUDA_HOST, _TRAINING = 600 * _MIB, 400 * _MIB, 1700 * _MIB, 100 * _MIB
#: Bytes of each linear's modules, names and forms, and of trying transformers' quantizer on them
#: (measured: 27 KB to 35 KB of 36,000 to 92,000 experts' linears).
_LINEAR = 36_000


def program_bytes(cuda: bool, training: bool = False, linears: int = 0) -> int:
    """Compute the bytes of RAM of Python and its libraries in a run on a GPU or a CPU, and of a
    model without its weights.
    """
    libraries = _CUDA_HOST if cuda else _CUDA_BUILD if torch.version.cuda else 0
    return _PROGRAM + libraries + (_TRAINING if training else 0) + linears * _LINEAR


def device_of(name: str) -> torch.device:
    """Return the device called `auto`, `cpu`, `cuda` or `cuda:1`; RecipeError if this machine does
    not have it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"unknown device {name!r}", "use auto, cpu or cuda") from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count()}
    if (device.index or 0) >= counts.get(device.type, 0):
        raise RecipeError(
            f"device {name} cannot be used here", Words("use", Option("device", "cpu"))
        )
    if device.type == "cuda":
        # cuBLAS reads this when it starts; without a fixed workspace equal runs may differ in the
        # last bits.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return device


def free_gpu_memory(device: torch.device) -> int:
    """Count the bytes of a GPU that this process can allocate, torch's own cache included."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def free_bytes(device: torch.device) -> float:
    """Count the bytes that this process can take on a GPU, or with swap on a CPU."""
    return unused_memory(swap=True) if device.type == "cpu" else free_gpu_memory(device)


def compute_dtype(model: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the compute dtype for a model's dtype: float32 on a CPU, bfloat16 if it has AMX, the
    model's on a GPU.
    """
    if device.type == "cuda":
        return model
    return (
        torch.bfloat16 if model == torch.bfloat16 and is_fast_in_bfloat16(device) else torch.float32
    )


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Return True if products in bfloat16 are faster than in float32: on a GPU, and on a CPU with
    AMX.
    """
    # ATEN_CPU_CAPABILITY may turn off the instructions that a product in bfloat16 needs.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return device.type == "cuda" or (
        torch.backends.cpu.get_cpu_capability() == "AVX512" and bool(has_amx())
    )
