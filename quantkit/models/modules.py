"""The modules of a model: its linears, norms, blocks and towers, and their paths.

Quantizing and loading share these predicates. No code here knows an architecture.

Where gradients flow through a block on a GPU, torch's own kernel computes its RMS norms (`fused`).
The model's code passes over the hidden states ten times in a norm, and some fifteen times in its
gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.stored_tensors import Derived, Read
from quantkit.errors import CheckpointError
from quantkit.models.families import COMPUTES, family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The code of a model may round to bfloat16 before it multiplies with the weight, and once more.
ROUNDING = 2**-6
#: A norm and its epsilon.
Norm = tuple[nn.Module, float]


def is_linear(module: nn.Module) -> bool:
    """Return True if a module multiplies by its `weight` and adds its `bias`, and does nothing
    else.

    True for `nn.Linear`, subclasses that compute the same, and transformers' Conv1D, whose weight
    is `[k, n]`.
    """
    return is_transposed(module) or (
        isinstance(module, nn.Linear) and _computes_linear(type(module))
    )


def is_transposed(module: nn.Module) -> bool:
    """Return True for transformers' Conv1D, a linear with a weight `[k, n]`."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def is_table(module: nn.Module) -> bool:
    """Return True if a module looks up the rows of its `weight` by the numbers of tokens, and at
    most changes each row by itself.

    True for `nn.Embedding` and subclasses that scale it. Tables of positions get more arguments.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    plain = [name for name, _ in module.named_parameters()] == ["weight"]
    return plain and len(inspect.signature(module.forward).parameters) == 1


def reads_weight(owner: nn.Module, leaf: str) -> bool:
    """Return True if the forward of a module uses the weight of its linear `leaf` itself, or asks
    for its dtype.
    """
    return f"{leaf}.weight" in _source(type(owner).forward)


@cache
def _source(forward: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(forward)
    except (OSError, TypeError):  # it has no file
        return ""


def is_norm(module: nn.Module) -> bool:
    """Tell a norm by the name of its class."""
    return "norm" in type(module).__name__.lower()


def rms_norms(block: nn.Module) -> list[Norm]:
    """Find the norms of a loaded block that compute an RMS norm, up to rounding."""
    norms = [(module, _epsilon(module)) for module in block.modules() if is_norm(module)]
    return [
        (module, epsilon) for module, epsilon in norms if epsilon and _is_rms_norm(module, epsilon)
    ]


@contextmanager
def fused(norms: Iterable[Norm]) -> Iterator[None]:
    """Run `norms` as one kernel each, which rounds once."""
    with ExitStack() as stack:
        for module, epsilon in norms:
            module.forward = partial(_rms_norm, module, epsilon, module.forward)
            stack.callback(delattr, module, "forward")
        yield


def _epsilon(module: nn.Module) -> float | None:
    """Return a norm's only number that is called epsilon, if it has a weight and nothing else."""
    found = [
        value for name, value in vars(module).items() if "eps" in name and isinstance(value, float)
    ]
    is_plain = [name for name, _ in module.named_parameters()] == [
        "weight"
    ] and "forward" not in vars(module)
    return found[0] if len(found) == 1 and is_plain else None


@torch.no_grad()
def _is_rms_norm(module: nn.Module, epsilon: float) -> bool:
    """Compare outputs for large inputs, and for inputs so small that epsilon counts; the mean of
    all is not zero.
    """
    weight = module.get_parameter("weight")
    sizes = torch.tensor([1.0, epsilon**0.5], device=weight.device)
    x = torch.arange(weight.numel(), device=weight.device).sin().add(1.0).view(weight.shape)
    x = (sizes.view(-1, *[1] * weight.ndim) * x).to(weight.dtype)
    try:
        own = module(x)
    except Exception:  # it takes more than one tensor
        return False
    return own.shape == x.shape and torch.allclose(
        own,
        nn.functional.rms_norm(x, weight.shape, weight, epsilon).to(own.dtype),
        rtol=ROUNDING,
        atol=0,
    )


def _rms_norm(
    module: nn.Module, epsilon: float, forward: Callable[..., Tensor], *given: Any, **named: Any
) -> Tensor:
    weight = module.get_parameter("weight")
    if len(given) != 1 or named or given[0].dtype != weight.dtype:
        return forward(*given, **named)
    with torch.autocast(weight.device.type, enabled=False):  # it would compute in float32
        return nn.functional.rms_norm(given[0], weight.shape, weight, epsilon)


def size_of(linear: nn.Module) -> tuple[int, int]:
    """Return `(n, k)` of a linear."""
    rows, columns = linear.get_parameter("weight").shape
    return (columns, rows) if is_transposed(linear) else (rows, columns)


def replace_transposed(model: nn.Module, stored: dict[str, str], src: Checkpoint) -> None:
    """Replace each Conv1D of a model on the meta device by an `nn.Linear`, and present its weight
    in `src` as `[n, k]`.

    `stored` maps each state to its name in `src`. A dense weight is written in its stored form. A
    packed weight is `[n, k]` in each layout.
    """
    packed = {f"{module}.weight" for module in src.modules()}
    derived: dict[str, Derived] = {}
    for path, module in list(model.named_modules()):
        name = stored.get(f"{path}.weight")
        if not is_transposed(module) or name is None:
            continue
        weight = module.get_parameter("weight")
        k, n = weight.shape
        bias = isinstance(module.bias, nn.Parameter)
        model.set_submodule(path, nn.Linear(k, n, bias, device=weight.device, dtype=weight.dtype))
        # An earlier model of the same source may have presented the weight already.
        if name not in packed and not src.is_presented_otherwise(name):
            derived[name] = _transposed(name, src)
    src.derive(derived)


def _transposed(name: str, src: Checkpoint) -> Derived:
    """Describe the transpose `[n, k]` of a stored matrix `[k, n]`."""
    k, n = src.shape(name)

    def compute(read: Read, index: int | slice | None) -> torch.Tensor:
        whole = read(name, None).T.contiguous()
        return whole if index is None else whole[index]

    return Derived(
        (n, k), src.dtype(name), (name,), compute, restore=lambda weight: weight.T.contiguous()
    )


def _computes_linear(cls: type[nn.Linear]) -> bool:
    """Return True if the forward of a class equals that of `nn.Linear` on a small example."""
    if cls.forward is nn.Linear.forward:
        return True
    weight, x = (
        torch.tensor([[1.0, -2.0], [3.0, 5.0], [-7.0, 11.0]]),
        torch.tensor([[[0.5, 2.0], [-1.0, 0.25]]]),
    )
    for bias in (None, torch.tensor([1.0, -1.0, 2.0])):
        example = SimpleNamespace(
            weight=weight, bias=bias, in_features=2, out_features=3, training=False
        )
        try:
            found = cls.forward(example, x)  # type: ignore[arg-type]
        except Exception:  # it needs more than a linear has
            return False
        if not isinstance(found, torch.Tensor) or not torch.equal(
            found, nn.functional.linear(x, weight, bias)
        ):
            return False
    return True


def is_free(model: nn.Module, path: str) -> bool:
    """Return True if `add_module` can add a module at a path: no attribute of a module on the way
    has its name.
    """
    for part in path.split("."):
        if part not in model._modules:
            return not hasattr(model, part)
        model = model.get_submodule(part)
    return False


def add_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Add a module at a path that `is_free`, inside empty modules where the model has none."""
    *owners, leaf = path.split(".")
    for part in owners:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model.get_submodule(part)
    model.add_module(leaf, module)


def path_of(module: nn.Module, inner: nn.Module | None) -> str:
    """Find the path of a module inside another; "" if it is the other itself, or none."""
    return next((path for path, found in module.named_modules() if found is inner), "")


def input_embeddings(module: PreTrainedModel) -> nn.Module | None:
    """Return a model's input embeddings, None for an encoder-decoder of which transformers names
    none. CheckpointError for any other such model.
    """
    try:
        return module.get_input_embeddings()
    except NotImplementedError:
        if module.config.is_encoder_decoder:
            return None
        raise CheckpointError(
            f"transformers names no embeddings of {type(module).__name__}",
            "use a model that reads and writes text alone",
        ) from None


def language_model(module: PreTrainedModel) -> tuple[str, nn.Module]:
    """Return the path and the module of the decoder that reads tokens, without the towers of other
    inputs.
    """
    decoder = module.get_decoder()
    path = path_of(module, decoder)
    return (path, decoder) if path and find_blocks(decoder) else ("", module)


def text_encoder(module: PreTrainedModel) -> str:
    """Return the path of an encoder-decoder's encoder, if it reads tokens; "" without one."""
    path = path_of(module, module.get_encoder()) if module.config.is_encoder_decoder else ""
    return "" if path in find_towers(module) else path


def find_towers(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the models inside a model that take other inputs than text: encoders of
    images or sound.
    """
    from transformers import PreTrainedModel

    return tuple(
        path
        for path, found in module.named_modules()
        if path
        and isinstance(found, PreTrainedModel)
        and not {"input_ids", "decoder_input_ids", "inputs_embeds", "args"} & _inputs(found).keys()
    )


def text_model(module: PreTrainedModel, blocks: Sequence[str]) -> str:
    """Return the path of the outermost model around the blocks that needs only tokens; "" for the
    whole.

    It embeds tokens as the whole model does. It is also "" if there is no such model, and for an
    encoder-decoder.
    """
    from transformers import PreTrainedModel

    if module.config.is_encoder_decoder:
        return ""
    asking = family_of(module.config.model_type).asks_for_images
    for path, found in module.named_modules():
        around = all(block.startswith(f"{path}." if path else "") for block in blocks)
        if not around or not isinstance(found, PreTrainedModel) or (asking and not path):
            continue
        inputs = _inputs(found)
        runs = "input_ids" in inputs and all(
            may for name, may in inputs.items() if name != "input_ids"
        )
        if runs and input_embeddings(found) is input_embeddings(module):
            return str(path)
    return ""


def _inputs(module: nn.Module) -> dict[str, bool]:
    """Return the arguments of a model's forward, and whether each may be absent."""
    return {
        each.name: each.default is not each.empty or each.kind is each.VAR_POSITIONAL
        for each in inspect.signature(module.forward).parameters.values()
        if each.kind is not each.VAR_KEYWORD
    }


def find_blocks(module: nn.Module) -> list[str]:
    """Return the paths of the transformer blocks: the largest list of modules that hold linears.

    Blocks may be of several classes, as in models that mix attention and state spaces.
    """
    towers = tuple(f"{path}." for path in find_towers(module))
    lists = {
        path: found
        for path, found in module.named_modules()
        if isinstance(found, nn.ModuleList)
        and not path.startswith(towers)
        and any(map(is_linear, found.modules()))
    }
    size = {path: sum(p.numel() for p in found.parameters()) for path, found in lists.items()}
    best = max(lists, key=size.__getitem__, default="")
    return [f"{best}.{i}" for i in range(len(lists.get(best, ())))]


def lists_beside(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return the module lists that run parallel to the blocks, with linears, if both hold parts of
    layers.

    XLM keeps attention and feed-forward of its layers in two lists, and adds and normalizes between
    them.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    own = blocks[0].rpartition(".")[0]
    owner = own.rpartition(".")[0]
    return [
        f"{owner}.{name}" if owner else name
        for name, found in module.get_submodule(owner).named_children()
        if isinstance(found, nn.ModuleList)
        and len(found) == len(blocks)
        and name != own.rpartition(".")[2]
        if any(is_linear(inner) for inner in found.modules())
        if not any(isinstance(part, GradientCheckpointingLayer) for part in found)  # a whole layer
    ]


def computed(module: nn.Module, state: str) -> Tensor | None:
    """Compute a state that a checkpoint may lack, such as sinusoidal positions; None if its module
    cannot, or is not there any more: unfused experts have other ones.
    """
    owner: nn.Module | None = None
    with suppress(AttributeError):
        owner = module.get_submodule(state.rpartition(".")[0])
    compute = getattr(owner, COMPUTES, None)
    return compute().detach() if compute is not None else None


def get_tensor(module: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer called `name`."""
    path, _, leaf = name.rpartition(".")
    return cast("Tensor", getattr(module.get_submodule(path), leaf))


def put_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` the parameter or buffer called `name`; CheckpointError if its shape differs."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    expected = getattr(owner, leaf).shape
    if tensor.shape != expected:
        raise CheckpointError(
            f"is {list(tensor.shape)} in the checkpoint, config.json asks for {list(expected)}",
            subject=name,
        )
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def wrong_shape(
    folder: Path, name: str, shape: tuple[int, ...], asked: tuple[int, ...]
) -> CheckpointError:
    """Make the error for a stored tensor of another shape than the model's."""
    return CheckpointError(
        f"{name} is {list(shape)}, config.json asks for {list(asked)}",
        "mend config.json",
        "fetch the folder again",
        subject=folder,
    )
