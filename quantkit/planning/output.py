"""The folder that a run writes, before any of it is written: linears, tensors, files and bytes.

The parts that write a folder predict their files here: the writer its shards, the layout its side
file, the pipeline config.json. Only report and model card hold measured values; their size has an
upper bound.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from quantkit.checkpoint.origin import companions_of
from quantkit.checkpoint.reader import CONFIG, Checkpoint
from quantkit.checkpoint.writer import planned_shards, texts_beside
from quantkit.core.quantized_tensor import Goal, Scheme, Shape, label
from quantkit.core.threads import grouped
from quantkit.engines import readers
from quantkit.engines.joined import is_expert, joined_name, output_config
from quantkit.engines.readers import Folder
from quantkit.errors import Option, ThresholdError, Words
from quantkit.io.files import guarded
from quantkit.io.json_files import dump_json
from quantkit.io.model_folder import RECIPE, inside
from quantkit.kernels import MATMULS
from quantkit.layouts.base import Layout
from quantkit.layouts.schemes import EMBEDDINGS, HEADS, Schemes, is_embedding, is_head
from quantkit.models.outline import largest_others, share_of
from quantkit.models.outside import Outside
from quantkit.names import Json
from quantkit.recipes.recipe import Recipe, without_paths
from quantkit.reporting import facts

#: The layout name of a pruned model that is not quantized.
DENSE = "dense"
#: The most kinds of dense tensors that a report names as the largest.
MOST_KINDS = 3
#: Upper bounds of the bytes of report and model card: for a model, for each changed linear, for
#: each other tensor or file.
REPORT_BYTES, LINEAR_BYTES, NAME_BYTES = 32 * 2**10, 1024, 192

#: The dtype and shape of tensors, by name.
Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def dense_totals(
    stored: Mapping[str, Shape], packed: Collection[str], dense: Iterable[str]
) -> Json:
    """Add up the bytes of the tensors that stay dense, and name the largest kinds: the same tensor
    of all blocks.

    `stored` has the bytes and the bits of an element of each tensor of the output. `packed` are its
    packed linears, and `dense` the others.
    """
    sizes, widths = Counter[str](), Counter[int]()
    for name, (size, bits) in stored.items():
        if name.rpartition(".")[0] not in packed:
            sizes[re.sub(r"\.\d+\.", ".N.", name).removesuffix(".weight")] += size
            widths[bits] += size
    tied = any(f"{name}.weight" not in stored for name in dense)
    total, most = sizes.total(), sizes.most_common(MOST_KINDS)
    return {
        "dense_bytes": total,
        "dense_bits": widths.most_common(1)[0][0] if widths else None,
        "dense_largest": {name: size for name, size in most if size >= total / 10},
        "tied_head": tied and not any(map(is_embedding, packed)),
    }


def bytes_of(forms: Forms) -> int:
    """Add up the bytes of tensors."""
    return sum(dtype.itemsize * prod(shape) for dtype, shape in forms.values())


@dataclass(frozen=True)
class Row:
    """One linear: shape `[n, k]`, its goal (None: it stays dense), and the tensors that it becomes.

    `stored` is the shape in the output, padding included.
    """

    module: str
    shape: Shape
    goal: Goal | None
    stored: Shape
    tensors: Forms

    @classmethod
    def dense(cls, forms: Forms, module: str, shape: Shape, goal: Goal | None = None) -> Row:
        """Make the row of a linear without codes; a tied one has none of the source's `forms`."""
        name = f"{module}.weight"
        return cls(module, shape, goal, shape, {name: forms[name]} if name in forms else {})

    @classmethod
    def packed(
        cls,
        layout: Layout,
        module: str,
        shape: Shape,
        scheme: Scheme,
        stored: Shape,
    ) -> Row:
        """Make the row of a linear with codes in a layout."""
        forms = layout.stored(scheme, *stored).items()
        tensors = {f"{module}.{suffix}": (dtype, tuple(size)) for suffix, (dtype, size) in forms}
        return cls(module, shape, scheme, stored, tensors)

    @property
    def scheme(self) -> str | None:
        """The label of the goal; None for a linear that stays dense."""
        return None if self.goal is None else label(self.goal)

    @cached_property
    def bytes(self) -> int:
        """The bytes in the output."""
        return bytes_of(self.tensors)

    @property
    def padded(self) -> Shape | None:
        """The stored shape, if zeros are added."""
        return None if self.stored == self.shape else self.stored

    def to_dict(self) -> Json:
        """Return the row as `plan --json` prints it."""
        return {
            "module": self.module,
            "shape": self.shape,
            "scheme": self.scheme,
            "bytes": self.bytes,
            "padded": self.padded,
        }


@dataclass(frozen=True)
class Files:
    """The exact bytes of every file except report and model card, which together take at most
    `report_bytes`.

    `before_last` are the bytes of tensors that are written before the last block.
    """

    sizes: Mapping[str, int]
    report_bytes: int
    before_last: int

    @property
    def total(self) -> int:
        """The bytes of all files, with upper bounds for report and model card."""
        return sum(self.sizes.values()) + self.report_bytes


@dataclass(frozen=True)
class Output:
    """The folder that a run writes. A linear that does not fit counts as dense.

    `scheme` is the label of most linears. `tensors` has the outcome for each tensor of the source,
    by the names of `Checkpoint.logical`. `decoder` has the elements of each matrix in the decoder's
    blocks. `folder` has the facts on which readers depend, and `readers` are the programs that open
    it. `schemes`, `config`, `files` and the `size_notes` that explain a size are known if all
    linears fit; the layout and `schemes` are None for a dense output.
    """

    layout: Layout | None
    scheme: str
    rows: tuple[Row, ...]
    tensors: Mapping[str, Forms]
    source_bytes: int
    decoder: Mapping[str, int]
    folder: Folder | None
    readers: tuple[str, ...]
    schemes: Schemes | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Files | None = None
    size_notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        src: Checkpoint,
        layout: Layout | None,
        rows: Sequence[Row],
        forms: Forms,
        usual: Goal,
        decoder: Mapping[str, int],
    ) -> Output:
        """Join the rows and the other tensors of a source, which has these `forms`.

        `usual` is the goal if no linear is quantized.
        """
        labels = Counter(row.scheme for row in rows if row.scheme is not None)
        linears = {f"{row.module}.weight": row.tensors for row in rows}
        folder = None if layout is None else _folder(src, layout, rows)
        return cls(
            layout,
            labels.most_common(1)[0][0] if labels else label(usual),
            tuple(rows),
            {name: linears.get(name) or {name: forms[name]} for name in src.logical()},
            sum(src.sizes().values()),
            decoder,
            folder,
            () if folder is None else tuple(readers.opened_by(folder)),
        )

    @property
    def layout_name(self) -> str:
        """The name of the layout, or DENSE."""
        return DENSE if self.layout is None else self.layout.NAME

    @cached_property
    def forms(self) -> Forms:
        """The tensors of the output, in the order in which they are written."""
        return {name: form for each in self.tensors.values() for name, form in each.items()}

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return bytes_of(self.forms)

    @cached_property
    def quantized(self) -> list[Row]:
        """The rows that do not stay dense."""
        return [row for row in self.rows if row.goal is not None]

    @property
    def packed_bytes(self) -> int:
        """The bytes of all rows that do not stay dense."""
        return sum(row.bytes for row in self.quantized)

    @property
    def weights(self) -> int:
        """The number of weights that do not stay dense."""
        return sum(prod(row.shape) for row in self.quantized)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per quantized weight, scales and zero points included; None without any."""
        return 8 * self.packed_bytes / self.weights if self.weights else None

    @property
    def share(self) -> float | None:
        """The share of the decoder's weights that do not stay dense; None without any blocks."""
        return share_of(self.decoder, [row.module for row in self.quantized])

    def share_error(self, least: float) -> ThresholdError | None:
        """Make the error for a share below `least`. It names the largest dense weights."""
        if self.share is None or self.share >= least:
            return None
        done = "pruned" if self.layout is None else "quantized"
        linears = {f"{row.module}.weight" for row in self.rows}
        others = [
            f"{name} and its like in other blocks ({100 * share:.1f} %, "
            f"{'skipped' if name in linears else 'no linear'})"
            for name, share in largest_others(self.decoder, [row.module for row in self.quantized])
        ]
        more = f" and {len(others) - 3} more kinds" if len(others) > 3 else ""
        stays = f"{', '.join(others[:3])}{more} stay dense"
        share, asked = f"{100 * self.share:.1f} %", Option("min_share")
        rule = Words(
            f"{share} of the decoder's weights would be {done},",
            asked,
            f"asks for {100 * least:g} %: {stays}",
        )
        return ThresholdError(rule, "skip fewer linears", Words("lower", asked))

    def with_files(
        self,
        src: Checkpoint,
        schemes: Schemes | None,
        recipe: Recipe,
        units: Iterable[Iterable[str]],
        lines: Iterable[str],
    ) -> Output:
        """Add config.json and the bytes of every file. `units` are the tensors of the source by
        commit, in the order of writing, `lines` the run's lines in the report.
        """
        recipe, (companions, left_out) = without_paths(recipe), companions_of(src)
        true_shapes = {row.module: row.shape if row.padded else None for row in self.quantized}
        config = output_config(src, self.layout, schemes, true_shapes, recipe.sha256())
        written = [
            {
                name: form[0].itemsize * prod(form[1])
                for source in unit
                for name, form in self.tensors[source].items()
            }
            for unit in units
        ]
        shards = planned_shards({name: size for unit in written for name, size in unit.items()})
        weight_map = {name: file for file, (_, names) in shards.items() for name in names}
        texts = {
            **texts_beside(weight_map, self.bytes, self.layout, config),
            **({} if recipe.layout is None else {RECIPE: recipe.to_yaml().encode()}),
            CONFIG: dump_json(config, special_floats=True),
        }
        with guarded(src.path):
            copied = {
                name: inside(src.path, name).stat().st_size if changed is None else len(changed)
                for name, changed in companions.items()
            }
        sizes = {name: size for name, (size, _) in shards.items()} | copied
        sizes |= {name: len(text) for name, text in texts.items()}
        names = 2 * sum(map(len, src.names())) + sum(map(len, left_out))
        entries = len(src.files()) + len(sizes) + len(left_out)
        report = REPORT_BYTES + LINEAR_BYTES * len(self.quantized) + NAME_BYTES * entries + names
        report += 4 * sum(map(len, (*lines, *self.readers)))
        files = Files(sizes, report, before_last=sum(sum(unit.values()) for unit in written[:-1]))
        notes: Iterable[str] = ()
        if self.layout is not None:
            stored = {
                name: (dtype.itemsize * prod(shape), 8 * dtype.itemsize)
                for name, (dtype, shape) in self.forms.items()
            }
            left = [row.module for row in self.rows if row.goal is None]
            totals = {
                "source_bytes": self.source_bytes,
                "bytes": sum(size for size, _ in shards.values()),
                **dense_totals(stored, {row.module for row in self.quantized}, left),
            }
            low_bit = {"weights": f"{src.low_bit}, dequantized"} if src.low_bit else {}
            notes = facts.explained_size(
                {"totals": totals, "source": low_bit, "layout": self.layout.NAME}
            )
        return replace(self, schemes=schemes, config=config, files=files, size_notes=tuple(notes))

    def to_dict(self) -> Json:
        """Return the output as `plan --json` prints it."""
        files = self.files
        return {
            "layout": self.layout_name,
            "scheme": self.scheme,
            "bytes": self.bytes,
            "packed_bytes": self.packed_bytes,
            "dense_bytes": self.bytes - self.packed_bytes,
            "source_bytes": self.source_bytes,
            "files": None
            if files is None
            else {
                "total": files.total,
                "exact": sum(files.sizes.values()),
                "report_and_card": files.report_bytes,
                "each": [{"name": name, "bytes": size} for name, size in files.sizes.items()],
            },
            "bits_per_weight": self.bits_per_weight,
            "share": self.share,
            "readers": ", ".join(self.readers),
            "kernel": self.layout_name if self.layout_name in MATMULS else None,
            "linears": [row.to_dict() for row in self.rows],
        }


def _folder(src: Checkpoint, layout: Layout, rows: Iterable[Row]) -> Folder:
    """Collect the output's facts for its readers. Dense linears of a packed source are known only
    by name.

    A source's config may leave out dense linears, so the other members of each fused group are
    looked up in its files.
    """
    linears = {row.module: (row.goal, row.stored) for row in rows if isinstance(row.goal, Scheme)}
    dense = dict.fromkeys(row.module for row in rows if row.goal is None)
    if src.schemes is not None:
        stored = (name.removesuffix(".weight") for name in src.names() if name.endswith(".weight"))
        dense |= dict.fromkeys(src.schemes.ignore)
        dense |= dict.fromkeys(name for name in stored if joined_name(name) and name not in linears)
    is_half = (src.written_dtype or src.dtype_of_model) == torch.float16
    padded = any(row.padded for row in rows)
    return Folder(layout.NAME, linears, tuple(dense), padded, src.config, is_half, src.is_tied)


def schemes_of(
    recipe: Recipe,
    goals: Mapping[str, Goal | None],
    paths: Mapping[str, str],
    outside: Iterable[str],
) -> Schemes | None:
    """State the schemes of a dense source's output, with every exception under its exact name; None
    if weights stay dense.

    In a few families a linear has another name in the model (`paths`) than in the checkpoint.
    Public readers go by the model's. `outside` are dense entries besides the linears.
    """
    usual = recipe.scheme
    if not isinstance(usual, Scheme) or recipe.layout is None:
        return None
    named = [
        (name, scheme)
        for module, scheme in goals.items()
        for name in dict.fromkeys((module, paths.get(module, module)))
    ]
    overrides = tuple(
        (re.escape(name), s)
        for name, s in named
        if isinstance(s, Scheme) and (s != usual or is_embedding(name))
    )
    return Schemes(usual, overrides, (*(name for name, s in named if s is None), *outside))


def converted_schemes(src: Checkpoint, rows: Iterable[Row], outside: Outside) -> Schemes:
    """Map the schemes of a packed source to the output's: by the same patterns where possible, else
    by exact names.
    """
    assert src.schemes is not None
    now = {row.module: row.goal for row in rows if isinstance(row.goal, Scheme)}
    became = grouped((src.scheme(module), scheme) for module, scheme in now.items())
    one = {before: after[0] for before, after in became.items() if len({*after}) == 1}
    default, overrides = src.schemes.default, src.schemes.overrides
    dense = [*src.schemes.ignore, *_unstated(src), *outside.dense_entries(src)]
    ignore = tuple(dict.fromkeys(dense))
    if len(one) == len(became) and default in one:
        others = (each for each in overrides if each[0] != EMBEDDINGS)  # a class: name its members
        kept = {pattern: one[scheme] for pattern, scheme in others if scheme in one}
        kept |= {re.escape(module): now[module] for module in now if is_embedding(module)}
        stated = Schemes(one[default], (*kept.items(),), ignore)
        if all(stated.of(module) == scheme for module, scheme in now.items()):
            return stated
    most = Counter(now.values()).most_common(1)[0][0] if now else default
    exact = tuple(
        (re.escape(module), scheme)
        for module, scheme in now.items()
        if scheme != most or is_embedding(module)
    )
    return Schemes(most, exact, ignore)


def _unstated(src: Checkpoint) -> Iterator[str]:
    """Name the dense matrices beside packed experts, and a dense or tied output head. Some tools
    leave them out of a config, but engines need them.
    """
    packed = set(src.modules())
    if src.config.get("tie_word_embeddings") and not any(map(is_head, packed)):
        yield HEADS[0]
    parents = {module.partition(".experts.")[0] for module in packed if is_expert(module)}
    for name in src.names():
        module = name.removesuffix(".weight")
        known = is_head(module) or module.rpartition(".")[0] in parents
        if module != name and module not in packed and known:
            yield from [module] if len(src.shape(name)) == 2 else []
