"""What a run will write, need and refuse, from config.json and safetensors headers alone.

Every misfit is found here, all at once and before any work. Byte counts are exact because they come from the layout's
own `stored`; memory is an estimate, said as such, with its parts listed.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
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
from quantkit.recipe import Recipe
from quantkit.report import READERS, size
from quantkit.tensor import FLOATS, Scheme, dtype_name

#: What a way out offers, the finest last but one scale per row, which every k allows.
GROUP_SIZES = (128, 64, 32, None)
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
class Misfit:
    """A linear that cannot be done as asked, and the rule that it breaks."""

    module: str
    shape: tuple[int, int]
    scheme: str
    rule: str


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
        size_ = stored_bytes(layout, kept, n, k) if kept else _bytes(src, f"{module}.weight") if here else 0
        rows.append(Row(module, (n, k), kept.label if kept else None, size_))
    if recipe.calibrated:
        memory = calibrated_memory(src, linears, recipe, device, act_budget)
    else:
        memory = streamed_memory(src, linears)
    plan = _assembled(src, layout, recipe.scheme, rows, misfits, memory, out)
    ways = _ways_out(misfits, schemes, layout, recipe, None)
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
    return replace(plan, ways_out=_ways_out(misfits, schemes, layout, None, src.layout))


def stored_bytes(layout: Layout, scheme: Scheme, n: int, k: int) -> int:
    """Return the bytes of all tensors that a layout stores for an `[n, k]` weight."""
    return sum(dtype.itemsize * prod(shape) for dtype, shape in layout.stored(scheme, n, k).values())


def broken_rule(layout: Layout, scheme: Scheme, n: int, k: int) -> str | None:
    """Return the rule that a weight breaks in a layout, without its way out; None if it fits."""
    try:
        layout.check(scheme, n, k)
    except LayoutError as error:
        return str(error).split(": ")[0]
    return None


def describe(src: Checkpoint) -> dict[str, Any]:
    """Return layout, schemes, counts, sizes and shapes of any checkpoint, from its headers alone (`inspect`)."""
    modules = {module: (src.scheme(module), src.size(module)) for module in src.modules()}
    packed = {name: suffix for module in modules for suffix, name in src.parts(module).items()}
    every = {name: _bytes(src, name) for name in src.names()}
    suffixes: Counter[str] = Counter()
    for name, suffix in packed.items():
        suffixes[suffix] += every[name]
    dense = [name for name in every if name not in packed]
    weights = sum(n * k for _, (n, k) in modules.values())
    shapes = Counter(f"[{n}, {k}] {scheme.label}" for scheme, (n, k) in modules.values())
    shapes.update(f"{list(src.shape(name))} {dtype_name(src.dtype(name))}" for name in dense)
    parameters = weights + sum(prod(src.shape(name)) for name in dense)
    return {
        "path": str(src.path),
        "model_type": src.config.get("model_type"),
        "dtype": dtype_name(src.dtype_of_model),
        "layout": src.layout.NAME if src.layout else None,
        "schemes": dict(Counter(scheme.label for scheme, _ in modules.values())),
        "quantized_linears": len(modules),
        "dense_tensors": len(dense),
        "parameters": parameters,
        "quantized_weights": weights,
        "bits_per_weight": 8 * sum(suffixes.values()) / weights if weights else None,
        "bits_per_parameter": 8 * sum(every.values()) / parameters if parameters else None,
        "bytes": {"total": sum(every.values()), "dense": sum(every[name] for name in dense), "packed": dict(suffixes)},
        "shapes": dict(shapes),
        "files": {path.name: path.stat().st_size for path in src.files()},
        "readers": READERS[src.layout.NAME] if src.layout else "anything that reads Hugging Face folders",
        "notices": list(src.notices),
    }


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
    others = sum(_bytes(src, name) for name in src.names() if name not in ours)
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
        source_bytes=sum(_bytes(src, name) for name in src.names()),
        memory=memory,
        misfits=tuple(misfits),
        remarks=tuple(src.notices),
        layout_remarks=tuple(_layout_remarks(src, layout, rows)),
        problems=tuple(problems),
        disk_free=free,
    )


def _bytes(src: Checkpoint, name: str) -> int:
    return prod(src.shape(name)) * src.dtype(name).itemsize


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


def _ways_out(
    misfits: list[Misfit],
    schemes: Mapping[str, Scheme | None],
    layout: Layout,
    recipe: Recipe | None,
    source: Layout | None,
) -> tuple[str, ...]:
    """Return a line for each broken rule: the weights by shape, and what to type; only what was tried is offered."""
    rules: dict[str, list[Misfit]] = {}
    for misfit in misfits:
        rules.setdefault(misfit.rule, []).append(misfit)
    everything = len(misfits) == sum(scheme is not None for scheme in schemes.values())
    lines = []
    for rule, group in rules.items():
        shapes: dict[tuple[int, int], list[str]] = {}
        for misfit in group:
            shapes.setdefault(misfit.shape, []).append(misfit.module)
        which = ", ".join(
            f"{modules[0]} is {list(shape)}{f' (and {len(modules) - 1} more)' if len(modules) > 1 else ''}"
            for shape, modules in shapes.items()
        )
        ways = _other_ways(group, layout, recipe, source) or _two_changes(misfits, recipe)
        if recipe is not None and not everything:
            ways.append(f"leave them dense with --skip '{_skip_pattern(group, schemes)}'")
        last = "quantize the original model in another way" if recipe is None else "download or convert the model again"
        lines.append(f"{rule}: {which}: {', or '.join(ways) or last}")
    return tuple(lines)


def _other_ways(group: list[Misfit], layout: Layout, recipe: Recipe | None, source: Layout | None) -> list[str]:
    """Return the options with which a layout would hold all weights of a group; of a source at fault there are none."""
    if _fits(group, layout):
        return []
    ways = []
    if recipe is not None:
        size_ = next((g for g in GROUP_SIZES if _fits(group, layout, group_size=g)), ...)
        ways += [] if size_ is ... else [f"use --group-size {size_ or 'channel'}"]
        asymmetric = any(not Scheme.parse(misfit.scheme).symmetric for misfit in group)
        ways += ["drop --asym"] if asymmetric and _fits(group, layout, symmetric=True) else []
    other = next((name for name, other in LAYOUTS.items() if other is not source and _fits(group, other)), None)
    return ways + ([f"use --layout {other}"] if other else [])


def _two_changes(misfits: list[Misfit], recipe: Recipe | None) -> list[str]:
    """Return a layout and a group size that together hold all misfits, where one change does not help."""
    if recipe is None or _fits(misfits, LAYOUTS[recipe.layout]):
        return []
    both = ((name, g) for name, layout in LAYOUTS.items() for g in GROUP_SIZES if _fits(misfits, layout, group_size=g))
    return [f"use --layout {name} --group-size {g or 'channel'}" for name, g in islice(both, 1)]


def _fits(misfits: list[Misfit], layout: Layout, **change: Any) -> bool:
    asked = {(replace(Scheme.parse(misfit.scheme), **change), *misfit.shape) for misfit in misfits}
    return all(broken_rule(layout, scheme, n, k) is None for scheme, n, k in asked)


def _skip_pattern(group: list[Misfit], schemes: Mapping[str, Scheme | None]) -> str:
    """Return a --skip pattern for exactly this group: by the names' ends where that meets no other linear."""
    modules = {misfit.module for misfit in group}
    leaves = sorted({module.rpartition(".")[2] for module in modules})
    same = {m for m, scheme in schemes.items() if scheme is not None and m.rpartition(".")[2] in leaves}
    return "|".join(re.escape(name) for name in (leaves if same == modules else sorted(modules)))


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
