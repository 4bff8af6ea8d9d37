"""What a run will write, need and refuse, from config.json and safetensors headers alone.

Every misfit is found here, all at once and before any work. Byte counts are exact because they come from the layout's
own `stored`; memory is an estimate, said as such, with its parts listed.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint import Checkpoint
from quantkit.errors import LayoutError
from quantkit.kernels import MATMULS, NONE_YET
from quantkit.layouts import LAYOUTS, family
from quantkit.layouts.protocol import Layout
from quantkit.memory import Memory, calibrated_memory, streamed_memory
from quantkit.misfits import Misfit, broken_rule, ways_out
from quantkit.recipe import Recipe
from quantkit.report import READERS, size
from quantkit.tensor import FLOATS, Scheme, dtype_name

#: Linears that engines multiply as one: these must share a scheme.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Row:
    """One linear of the plan: shape `[n, k]`, its scheme's label (None: stays dense), its bytes in the output."""

    module: str
    shape: tuple[int, int]
    scheme: str | None
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What `quantize` or `pack` would write; `bytes` are exactly those of the output's tensors.

    A weight that does not fit is counted as if left dense. `ways_out` has one line for each rule that is broken,
    `problems` are reasons to refuse that are no weight's. `remarks` are worth knowing of this model in any layout,
    `layout_remarks` of what reads this layout.
    """

    layout: str
    scheme: str
    rows: tuple[Row, ...]
    bytes: int
    source_bytes: int
    memory: Memory
    misfits: tuple[Misfit, ...] = ()
    ways_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    layout_remarks: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    disk_free: int | None = None

    @property
    def notices(self) -> list[str]:
        """All remarks, and what the free memory of this machine makes doubtful."""
        return [*self.layout_remarks, *self.remarks, *self.memory.notices()]

    @property
    def quantized(self) -> list[Row]:
        return [row for row in self.rows if row.scheme is not None]

    @property
    def packed_bytes(self) -> int:
        return sum(row.bytes for row in self.quantized)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits for each quantized weight, scales and zero points included; None when there is none."""
        weights = sum(prod(row.shape) for row in self.quantized)
        return 8 * self.packed_bytes / weights if weights else None

    def require(self) -> None:
        """Raise one LayoutError with a line for each broken rule and problem; nothing if the plan can be done."""
        lines = [*self.ways_out, *self.problems]
        if lines:
            raise LayoutError("\n".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, the `--json` of `plan`."""
        return {
            "layout": self.layout,
            "scheme": self.scheme,
            "bytes": self.bytes,
            "packed_bytes": self.packed_bytes,
            "dense_bytes": self.bytes - self.packed_bytes,
            "source_bytes": self.source_bytes,
            "bits_per_weight": self.bits_per_weight,
            "peak_memory": self.memory.to_dict(),
            "disk_free": self.disk_free,
            "readers": READERS[self.layout],
            "kernel": self.layout if self.layout in MATMULS else None,
            "misfits": [asdict(misfit) for misfit in self.misfits],
            "ways_out": list(self.ways_out),
            "problems": list(self.problems),
            "notices": self.notices,
            "linears": [asdict(row) for row in self.rows],
        }


def plan_quantize(
    src: Checkpoint,
    linears: Mapping[str, tuple[int, int]],
    recipe: Recipe,
    *,
    schemes: Mapping[str, Scheme | None] | None = None,
    tied: Collection[str] = (),
    out: Path | None = None,
    device: str | None = None,
    act_budget: int | None = None,
) -> Plan:
    """Return the plan of quantizing the `linears` (name -> `(n, k)`) of a dense checkpoint.

    `schemes` has the scheme of each where the recipe's own reading of its name is not meant; `tied` are those that
    share their weight with the embeddings; `out` is where free disk space is looked up; `device` is where the run
    would compute (None: a GPU if there is one).
    """
    layout = LAYOUTS[recipe.layout]
    schemes = {module: recipe.scheme_of(module) for module in linears} if schemes is None else schemes
    stored = set(src.names())
    rows, misfits = [], []
    for module, (n, k) in linears.items():
        scheme = schemes[module]
        here = f"{module}.weight" in stored
        rule = None
        if scheme is not None:
            tied_here = module in tied or not here
            rule = _source_rule(src, module, (n, k), tied_here) or broken_rule(layout, scheme, n, k)
        if scheme is not None and rule is not None:
            misfits.append(Misfit(module, (n, k), scheme.label, rule))
        kept = scheme if rule is None else None
        size_ = stored_bytes(layout, kept, n, k) if kept else src.nbytes(f"{module}.weight") if here else 0
        rows.append(Row(module, (n, k), kept.label if kept else None, size_))
    if recipe.calibrated:
        memory = calibrated_memory(src, linears, recipe, device, act_budget)
    else:
        memory = streamed_memory(src, linears)
    plan = _assembled(src, layout, recipe.scheme, rows, misfits, memory, out)
    ways = ways_out(misfits, schemes, layout, recipe, None)
    return replace(plan, ways_out=ways, remarks=(*plan.remarks, *_fused(schemes)))


def plan_pack(src: Checkpoint, layout: Layout, *, out: Path | None = None) -> Plan:
    """Return the plan of rewriting a quantized checkpoint in another layout; values are looked at only by the run."""
    rows, misfits = [], []
    sizes = {module: src.size(module) for module in src.modules()}
    schemes: dict[str, Scheme | None] = {module: src.scheme(module) for module in sizes}
    for module, (n, k) in sizes.items():
        scheme = src.scheme(module)
        rule = broken_rule(layout, scheme, n, k)
        if rule is not None:
            misfits.append(Misfit(module, (n, k), scheme.label, rule))
        bytes_ = n * k * src.dtype_of_model.itemsize if rule else stored_bytes(layout, scheme, n, k)
        rows.append(Row(module, (n, k), None if rule else scheme.label, bytes_))
    assert src.schemes is not None
    plan = _assembled(src, layout, src.schemes.default, rows, misfits, streamed_memory(src, sizes), out)
    return replace(plan, ways_out=ways_out(misfits, schemes, layout, None, src.layout))


def stored_bytes(layout: Layout, scheme: Scheme, n: int, k: int) -> int:
    """Return the bytes of all tensors that a layout stores for an `[n, k]` weight."""
    return sum(dtype.itemsize * prod(shape) for dtype, shape in layout.stored(scheme, n, k).values())


def _assembled(
    src: Checkpoint,
    layout: Layout,
    scheme: Scheme,
    rows: list[Row],
    misfits: list[Misfit],
    memory: Memory,
    out: Path | None,
) -> Plan:
    """Add everything else that the output holds, and what is worth knowing before it is made."""
    ours = {row.module + ".weight" for row in rows} | {name for m in src.modules() for name in src.parts(m).values()}
    others = sum(src.nbytes(name) for name in src.names() if name not in ours)
    total = others + sum(row.bytes for row in rows)
    free = _free_disk(out)
    problems = []
    if free is not None and free < total:
        problems.append(f"{out}: the output takes {size(total)} and {size(free)} are free: free some or use another -o")
    return Plan(
        layout=layout.NAME,
        scheme=scheme.label,
        rows=tuple(rows),
        bytes=total,
        source_bytes=sum(src.nbytes(name) for name in src.names()),
        memory=memory,
        misfits=tuple(misfits),
        remarks=tuple(src.notices),
        layout_remarks=tuple(_layout_remarks(src, layout, rows)),
        problems=tuple(problems),
        disk_free=free,
    )


def _source_rule(src: Checkpoint, module: str, shape: tuple[int, int], tied: bool) -> str | None:
    """Return what makes a weight no source to quantize, before any layout is asked."""
    name = f"{module}.weight"
    if tied or (src.config.get("tie_word_embeddings") is True and shape[0] == src.config.get("vocab_size")):
        return "a linear tied to the embeddings has no weight of its own, and those stay dense"
    if src.dtype(name) not in FLOATS:
        return (
            f"weights stored as {dtype_name(src.dtype(name))} are not quantized, only "
            f"{', '.join(map(dtype_name, FLOATS))} are"
        )
    if src.shape(name) != shape:
        return f"config.json says {list(shape)}, the checkpoint has {list(src.shape(name))}"
    return None


def _layout_remarks(src: Checkpoint, layout: Layout, rows: list[Row]) -> list[str]:
    """Return what readers of the layout will want to know of this output (LAYOUTS 3.1, 3.5, 9 and 10)."""
    quantized = [row for row in rows if row.scheme is not None]
    asymmetric = any(row.scheme is not None and row.scheme.endswith(":asym") for row in quantized)
    found = []
    left = [row.module for row in rows if row.scheme is None] + list(src.schemes.ignore if src.schemes else ())
    dense = any(module != "lm_head" for module in left)
    mixed = len({row.scheme for row in quantized}) > 1
    if (layout.NAME == "marlin" and (dense or mixed)) or (layout.NAME == "humming" and mixed):
        what = "linears with a scheme of their own" if mixed else "dense linears besides lm_head"
        found.append(f"the public {layout.NAME} config has no place for {what}: only quantkit reads this folder right")
    if layout.NAME == "marlin":
        odd = [row for row in quantized if row.shape[0] % 256]
        if odd:
            found.append(
                f"{len(odd)} weights have n % 256 != 0 (first {odd[0].module} {list(odd[0].shape)}): the published"
                " MARLIN kernel does not take them, readers that ask n % 64 do"
            )
        if src.dtype_of_model != torch.float16:
            found.append("published MARLIN readers run float16 only: load this model with dtype float16")
    if family(layout.NAME) == "gptq":
        if src.dtype_of_model != torch.float16:
            found.append("GPTQ kernels other than MARLIN's run float16 only: load this model with dtype float16 there")
        if asymmetric and layout.NAME == "gptq":
            found.append("gptq (v1) cannot store a zero point of 0: use gptq-v2 if the run stops at one")
    if layout.NAME == "compressed-tensors" and asymmetric:
        found.append("transformers loads asymmetric weights only with CompressedTensorsConfig(dequantize=True)")
    if layout.NAME not in MATMULS:
        found.append(f"{NONE_YET}: {layout.NAME} is multiplied by {READERS[layout.NAME]}")
    return found


def _fused(schemes: Mapping[str, Scheme | None]) -> list[str]:
    """Return a notice for linears that engines fuse and that would have different schemes."""
    found = []
    for parts in FUSED:
        for module in schemes:
            parent, _, leaf = module.rpartition(".")
            together = {schemes[f"{parent}.{part}"] for part in parts if f"{parent}.{part}" in schemes}
            if leaf == parts[0] and len(together) > 1:
                labels = " and ".join(sorted(scheme.label if scheme else "dense" for scheme in together))
                found.append(f"{parent}: {', '.join(parts)} mix {labels}; engines that fuse them will not load this")
    if len(found) > 1:
        return [f"{found[0]} (and {len(found) - 1} more such groups)"]
    return found


def _free_disk(out: Path | None) -> int | None:
    if out is None:
        return None
    existing = next((folder for folder in out.absolute().parents if folder.is_dir()), None)
    return shutil.disk_usage(existing).free if existing else None
