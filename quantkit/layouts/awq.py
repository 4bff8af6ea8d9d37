"""AWQ checkpoints in the GEMM packing: eight neighbouring outputs a word, interleaved
(docs/layouts.md 2).

Zero points are always stored, without an offset. They are all 8 for a symmetric weight, and its
config says `zero_point` too. Only vLLM reads one scale per row; AutoAWQ's own packing fails on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import validation
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.base import Layout, Packing, Stored, Unpacking
from quantkit.layouts.expressions import literal
from quantkit.layouts.gptq import zero_points
from quantkit.layouts.schemes import Schemes

#: Codes `[n, k]` and zero points `[n, g]`: the even outputs of eight lie in the low half of a word.
WORDS = Arrangement("N h:4 o:2", "K", "K N o h")


class Awq(Layout):
    """AWQ in the GEMM packing. The reference writer takes only multiples of 32; `check` has the
    rule of the readers.
    """

    NAME = "awq"
    QUANT_METHODS = ("awq",)
    TENSORS = ("qweight", "qzeros", "scales")
    MARKER = "qweight"
    TITLE, MULTIPLES = "the AWQ layout", (8, 1)

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        g = scheme.groups(k)
        return {
            "qweight": (torch.int32, (k, n // 8)),
            "qzeros": (torch.int32, (g, n // 8)),
            "scales": (torch.float16, (g, n)),
        }

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        k, words = validation.matrix(shapes, "qweight")
        return 8 * words, k

    def packing(
        self, scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None
    ) -> Packing:
        n, k = shape
        self.check(scheme, n, k)
        words = torch.empty([n * k // 8], dtype=torch.int32, device=scales.device)
        tensors = {
            "qweight": words.view(k, n // 8),
            "qzeros": WORDS.pack(zero_points(scales, zeros), 4).view(-1, n // 8),
            "scales": validation.half(scales).t().contiguous(),
        }
        return Packing(tensors, WORDS.packer(words, 4, shape))

    def unpacking(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
        n, k = self.check_tensors(tensors, scheme)
        zeros = zeros_of_record(WORDS.unpack(tensors["qzeros"], 4, (n, scheme.groups(k))), scheme)
        fill = WORDS.unpacker(tensors["qweight"], 4, (n, k))
        return Unpacking(scheme, (n, k), validation.half(tensors["scales"].t()), zeros, fill)

    def write_config(self, schemes: Schemes) -> dict[str, Any]:
        """Make the config of docs/layouts.md 2; overrides are in the `quantkit` key only."""
        self.check_all(schemes)
        return config_of(schemes, "gemm")

    def read_config(self, config: Mapping[str, Any]) -> Schemes | None:
        """Read the schemes of a GEMM config with the newer or the older keys; None for another
        method or QUICK.

        CheckpointError for any other version of AWQ, because its words are in another order.
        `zero_point` false, which no GEMM packer writes, reads as symmetric: `unpack` then refuses
        zero points other than 8.
        """
        version = version_of(config)
        if version in (None, "quick"):
            return None
        if version != "gemm" or config.get("backend") == "llm-awq":
            raise CheckpointError(
                f"an AWQ checkpoint of version {version!r:.40}, backend "
                f"{str(config.get('backend'))!r:.40}: "
                "quantkit reads the versions gemm and quick, export it in one of them, or "
                f"{validation.ORIGINAL}"
            )
        return schemes_of(config)


def zeros_of_record(zeros: Tensor, scheme: Scheme) -> Tensor | None:
    """Return zero points `[n, g]`, None if the scheme is symmetric; raise LayoutError if they are
    then not all 8.
    """
    if not scheme.symmetric:
        return zeros
    other = zeros != INT4.zero_code
    if bool(other.any()):
        row, group = other.nonzero()[0].tolist()
        raise LayoutError(
            f"the config says symmetric, and the zero point of row {row}, group {group} is "
            f"{int(zeros[row, group])}, "
            "not 8: the config or the tensors are wrong, fetch both again"
        )
    return None


def config_of(schemes: Schemes, version: str) -> dict[str, Any]:
    """Make AWQ's config with `version`; dense linears but the head go to `modules_to_not_convert`.

    That is a list of substrings, so only those patterns of `ignore` that match a substring are in
    it.
    """
    dense = [
        _substring(module) for module in schemes.ignore if module != "lm_head"
    ]  # which readers expect dense
    config: dict[str, Any] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": schemes.default.group_size or -1,
        "zero_point": True,
        "version": version,
        "modules_to_not_convert": [part for part in dense if part] or None,
    }
    return config | ({"lm_head": True} if schemes.quantizes_head else {})


def version_of(config: Mapping[str, Any]) -> str | None:
    """Read the version of an AWQ config in small letters, `gemm` if it states none; None for other
    methods.
    """
    if config.get("quant_method") != "awq":
        return None
    older, newer = (
        validation.entry(config, key, str, type(None), default=None)
        for key in ("version", "format")
    )
    return (older or newer or "gemm").lower()


def schemes_of(config: Mapping[str, Any]) -> Schemes:
    """Read the schemes of an AWQ config, also with the older keys `w_bit` and `q_group_size`."""
    bits = validation.entry(config, "w_bit" if "w_bit" in config else "bits", int)
    group = validation.entry(
        config, "q_group_size" if "q_group_size" in config else "group_size", int
    )
    if bits != 4:
        raise CheckpointError(
            f"an AWQ checkpoint of {bits} bits: quantkit reads 4, {validation.ORIGINAL}"
        )
    group_size = validation.group_size(group, "AWQ")
    dense = [
        part for part in validation.strings(config, "modules_to_not_convert") if part != "lm_head"
    ]
    ignore = (*validation.dense_head(config), *(f"re:.*{re.escape(part)}.*" for part in dense))
    symmetric = not validation.entry(config, "zero_point", bool, default=True)
    return Schemes(Scheme(INT4, group_size, symmetric=symmetric), ignore=ignore)


def _substring(module: str) -> str | None:
    """Give the substring that an entry of `ignore` matches, None for other patterns."""
    if not module.startswith("re:"):
        return module
    inner = module.removeprefix("re:")
    is_substring = inner.startswith(".*") and inner.endswith(".*") and len(inner) > 4
    return literal(inner[2:-2]) if is_substring else None
