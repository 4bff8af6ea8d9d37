"""Time GPTQ's solver on single weights, by phase, with the default settings.

Weights and activations are random, with a common direction so that inputs are correlated. `factor` is the factorisation
of the Hessian, `search` the choice of scales, `sweep` the columns, `descent` one pass over the codes of the sweep,
`losses` the guard's proxy losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quantkit.algorithms import coordinate_descent
from quantkit.algorithms.cholesky import factorize
from quantkit.algorithms.gptq import quantize
from quantkit.algorithms.hessian import row_losses
from quantkit.algorithms.rtn import quantize as round_to_nearest
from quantkit.algorithms.scale_search import choose_scales, group_errors
from quantkit.algorithms.sweep import sweep
from quantkit.core.scheme import Scheme
from quantkit.models.devices import device_of
from quantkit.pipeline.profile import median_seconds
from quantkit.progress import Progress
from quantkit.recipes.recipe import from_mapping, gptq_of

#: What is timed without `--shape` and `--scheme`.
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
SCHEMES = ("int4:g128", "int4:g128:asym", "fp6:channel")


def measure(
    shapes: Sequence[tuple[int, int]], schemes: Sequence[Scheme], device: str, progress: Progress
) -> list[dict[str, Any]]:
    """Return a row of median seconds for each weight `(n, k)` in each scheme; RecipeError for an unknown device."""
    where, cases = device_of(device), [(n, k, scheme) for n, k in shapes for scheme in schemes]
    return [_timed(n, k, scheme, where) for n, k, scheme in progress.bar(cases, "solve", len(cases))]


def _timed(n: int, k: int, scheme: Scheme, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(2 * k, k, generator=generator, device=device)
    x += torch.randn(2 * k, 1, generator=generator, device=device)
    h, options = x.T @ x, from_mapping(gptq_of(scheme)).gptq
    del x
    weight = torch.randn(n, k, generator=generator, device=device).to(torch.bfloat16)
    factor = factorize(h, options)

    def errors() -> Any:
        return group_errors(h, factor.diagonal, scheme.groups(k), options.metric, torch.float32)

    grid = choose_scales(weight, scheme, options.clip, errors(), options.signed)
    plain, _ = round_to_nearest(weight, scheme)
    swept = sweep(weight, scheme, factor, options, grid)
    steps: dict[str, Callable[[], object]] = {
        "factor": lambda: factorize(h, options),
        "search": lambda: choose_scales(weight, scheme, options.clip, errors(), options.signed),
        "sweep": lambda: sweep(weight, scheme, factor, options, grid),
        "descent": lambda: coordinate_descent.descend(weight, swept, h),
        "losses": lambda: [row_losses(weight, tensor, h) for tensor in (plain, plain, None)],
        "all": lambda: quantize(weight, scheme, h, options),
    }
    found = {f"{name}_s": median_seconds(step, device) for name, step in steps.items()}
    solution = quantize(weight, scheme, h, options)
    return {
        "gpu": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "torch": str(torch.__version__),
        "rows": n,
        "columns": k,
        "scheme": scheme.label,
        **found,
        "loss_of_rounding": float(solution.loss.sum() / solution.rtn_loss.sum()),
    }
