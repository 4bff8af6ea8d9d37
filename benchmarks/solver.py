"""Time GPTQ of single weights on a CPU with the default settings, for any version of quantkit that PYTHONPATH names.

Weights and inputs are random, with a common direction so that inputs are correlated. Prints one JSON object: seconds of
each call by weight.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from quantkit.algorithms.gptq import quantize
from quantkit.algorithms.options import Options
from quantkit.core.scheme import Scheme

SHAPES = ((1024, 1024), (2048, 1024))


def seconds(n: int, k: int, rounds: int) -> list[float]:
    """Return the seconds of each call, after one that warms up."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * k, k, generator=generator) + torch.randn(2 * k, 1, generator=generator)
    h, weight, scheme = x.T @ x, torch.randn(n, k, generator=generator), Scheme.parse("int4:g128")
    found = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        quantize(weight, scheme, h, Options())
        found.append(time.perf_counter() - started)
    return found[1:]


def main() -> None:
    """Read the arguments and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps({f"{n}x{k}": seconds(n, k, args.rounds) for n, k in SHAPES}))


if __name__ == "__main__":
    main()
