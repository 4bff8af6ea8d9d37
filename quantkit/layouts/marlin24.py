"""Sparse-MARLIN: 2:4-sparse symmetric INT4, the two kept codes of each four as MARLIN fragments
(docs/layouts.md 5).

The metadata, which say where the kept codes belong, are computed from the codes and stored beside
them. Files whose metadata came from a pruning mask are read too, with the same values. Written
again, they get the metadata of docs/layouts.md 4.1, and `verify` reports it.

The variant of compressed-tensors holds the same bytes under other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import aligned
from quantkit.errors import CheckpointError, LayoutError, Setting, Words
from quantkit.layouts import compressed_tensors, marlin, sparse24, validation
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.base import Layout, Packing, SideFile, Stored, Unpacking
from quantkit.layouts.schemes import Schemes

#: The public name of the format, and vLLM's own name of the method.
FORMAT, METHOD = "marlin_24", "gptq_marlin_24"

KEPT = Arrangement("N a:8 b:2 j:4", "K h:2 q:4 e:2", "K N a q j e b h")
GROUPED_SCALES = Arrangement("G", "N b:2 c:4", "G N c b")


class Marlin24(Layout):
    """Sparse-MARLIN: groups of 128 or one scale per row, n % 128 == 0 and k % 128 == 0."""

    NAME = "marlin24"
    QUANT_METHODS: ClassVar[tuple[str, ...]] = ("gptq", METHOD)
    #: Kept codes, metadata and scales, in this order.
    TENSORS = ("B_24", "B_meta", "s")
    MARKER = "B_24"
    SIDE_FILE: ClassVar[SideFile | None] = SideFile("quantize_config.json")
    TITLE, MULTIPLES = "Sparse-MARLIN", (128, 128)
    STACKING_UNIT = 128

    def check_scheme(self, scheme: Scheme) -> None:
        super().check_scheme(scheme)
        if scheme.sparsity is None:
            raise LayoutError(
                "Sparse-MARLIN holds 2:4 weights only, two of four along k",
                Words("quantize with", Setting("prune", "2:4")),
                Words("use", Setting("layout", "marlin")),
            )
        marlin.check_group_size(self.TITLE, scheme)

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        kept, metadata, scales = self.TENSORS
        return {
            kept: (torch.int32, (k // 32, 2 * n)),
            metadata: (torch.int16, (k // 32, 2 * n)),
            scales: (torch.float16, (scheme.groups(k), n)),
        }

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        rows, columns = validation.matrix(shapes, self.TENSORS[0])
        return columns // 2, 32 * rows

    def packing(
        self, scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None
    ) -> Packing:
        n, k = shape
        self.check(scheme, n, k)
        rows = validation.half(scales).t()
        words, meta = (
            torch.empty([n * k // size], dtype=torch.int32, device=scales.device)
            for size in (16, 32)
        )
        pack_kept = KEPT.packer(words, 4, (n, k // 2))
        pack_metadata = sparse24.SPARSE_MARLIN.packer(meta, 4, (n, k // 4))

        def add(first: int, codes: Tensor) -> None:
            kept, metadata = sparse24.compress(codes, INT4.zero_code)
            pack_kept(first, kept)
            pack_metadata(first, metadata)

        tensors = (
            words.view(k // 32, 2 * n),
            meta.view(torch.int16).view(k // 32, 2 * n),
            GROUPED_SCALES(rows).view(rows.shape) if len(rows) > 1 else rows.contiguous(),
        )
        return Packing(dict(zip(self.TENSORS, tensors, strict=True)), add)

    def unpacking(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
        """Make a row-wise unpacker, which raises LayoutError for metadata that does not describe
        two of four.

        The library of compressed-tensors left the scales of k = 256 in groups of 128 unpermuted,
        which nothing in the file shows. They are read as the kernel reads them, permuted
        (docs/layouts.md 5.5).
        """
        n, k = self.check_tensors(tensors, scheme)
        words, meta, scales = (tensors[name] for name in self.TENSORS)
        fill_kept = KEPT.unpacker(words, 4, (n, k // 2))
        fill_metadata = sparse24.SPARSE_MARLIN.unpacker(
            aligned(meta).view(torch.int32), 4, (n, k // 4)
        )

        def fill(first: int, codes: Tensor) -> None:
            kept, metadata = (codes.new_empty(len(codes), k // size) for size in (2, 4))
            fill_kept(first, kept)
            fill_metadata(first, metadata)
            sparse24.expand(kept, metadata, INT4.zero_code, out=codes)

        if len(scales) > 1:  # the number of rows decides, as in MARLIN (docs/layouts.md 5.2)
            scales = GROUPED_SCALES.inverse(scales, (len(scales), n))
        return Unpacking(scheme, (n, k), validation.half(scales.t()), None, fill)

    def write_config(self, schemes: Schemes) -> dict[str, Any]:
        """Make the config of docs/layouts.md 5.4.

        Overrides and dense linears other than `lm_head` are in the `quantkit` key only. The method
        is not METHOD, because readers that do not know it take it for a dense model.
        """
        self.check_all(schemes)
        return {**marlin.gptq_config(schemes, FORMAT), "lm_head": schemes.quantizes_head}

    def read_config(self, config: Mapping[str, Any]) -> Schemes | None:
        """Read the schemes of a Sparse-MARLIN config, by its format or vLLM's method; None for
        another layout.
        """
        method = config.get("quant_method")
        marked = FORMAT in (config.get("checkpoint_format"), config.get("format"))
        if method != METHOD and not (method == "gptq" and marked):
            return None
        scheme = marlin.read_scheme(config, self.TITLE, "quantkit reads 4, 128 or -1, and true")
        return Schemes(replace(scheme, sparsity="2:4"), ignore=validation.dense_head(config))


class Marlin24CompressedTensors(Marlin24):
    """Sparse-MARLIN as compressed-tensors stores it, format `marlin-24` (docs/layouts.md 5.1)."""

    NAME = "marlin24-ct"
    VARIANT_OF = Marlin24.NAME
    QUANT_METHODS = (compressed_tensors.METHOD,)
    TENSORS = ("weight_packed", "meta", "scale_packed")
    MARKER = "scale_packed"
    SIDE_FILE = None

    def write_config(self, schemes: Schemes) -> dict[str, Any]:
        """Make the config of docs/layouts.md 5.4.

        The format is in every config group too: a library that cannot read it then refuses it by
        name. Otherwise it would take the tensors for `pack-quantized`.
        """
        self.check_all(schemes)
        config = compressed_tensors.CompressedTensors().write_config(schemes)
        fmt = {"format": compressed_tensors.MARLIN24}
        groups = {name: group | fmt for name, group in config["config_groups"].items()}
        return config | fmt | {"config_groups": groups}

    def read_config(self, config: Mapping[str, Any]) -> Schemes | None:
        fmt = compressed_tensors.MARLIN24
        if config.get("quant_method") != compressed_tensors.METHOD or config.get("format") != fmt:
            return None
        sparse = validation.entry(config, "sparsity_config", dict, type(None), default=None) or {}
        if sparse.get("format", "dense") not in (
            "dense",
            fmt,
        ):  # it may say 2:4, and that nothing more was packed
            raise CheckpointError(
                f"a {fmt} checkpoint with sparsity {str(sparse['format'])!r:.40}: only dense is "
                "read, "
                f"{validation.ORIGINAL}"
            )
        schemes = compressed_tensors.schemes_of({**config, "sparsity_config": None}, fmt)
        overrides = tuple((pattern, self._sparse(scheme)) for pattern, scheme in schemes.overrides)
        return Schemes(self._sparse(schemes.default), overrides, schemes.ignore)

    def _sparse(self, scheme: Scheme) -> Scheme:
        try:
            if not scheme.symmetric:
                raise LayoutError(
                    "Sparse-MARLIN is symmetric only, and the config says asymmetric",
                    "quantize again",
                )
            sparse = replace(scheme, sparsity="2:4")
            self.check_scheme(sparse)
        except LayoutError as error:
            raise CheckpointError(error.rule, *error.ways_out) from error
        return sparse
