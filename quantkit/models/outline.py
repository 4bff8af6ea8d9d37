"""A checkpoint in its model: the state, linear, block or expert of each stored tensor.

Only headers are read, and no code here knows an architecture. Quantizing, loading, evaluation and
the checks of completeness read the same `Outline`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.stored_tensors import Derived, Read
from quantkit.core.formats import FLOATS, dtype_name
from quantkit.core.threads import grouped
from quantkit.errors import CheckpointError, NumericError, Setting, Words
from quantkit.layouts.schemes import ORIGINAL, is_embedding, is_head
from quantkit.models.experts import (
    ROUTER,
    Expert,
    UnfusedExperts,
    find_experts,
    find_routers,
    unfuse_experts,
)
from quantkit.models.families import HEAD, INDEXER, NEVER_CALLED, TOWER, UNCALLED
from quantkit.models.meta_model import skeleton
from quantkit.models.modules import (
    computed,
    find_blocks,
    find_towers,
    get_tensor,
    input_embeddings,
    is_linear,
    is_table,
    language_model,
    path_of,
    replace_transposed,
    size_of,
    text_encoder,
    text_model,
    wrong_shape,
)
from quantkit.models.outside import Outside, class_without_head, require_complete
from quantkit.models.state_names import Match, StateNames, head_state
from quantkit.models.stored_rows import follow_storage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: `Outline.max_length` of a model without a limit of positions.
UNLIMITED = 2**31
#: Rows of two matrices that are compared at a time.
ROWS = 4096
#: Linears with fewer inputs or outputs stay dense unless a recipe names them: gates and small
#: mixers, which engines keep dense.
FEWEST = 64


class Outline:
    """Match the states of a model on the meta device with the tensors of its checkpoint.

    Modules of the model are replaced first, so that each linear has its stored form: experts are
    unfused, linears are stacked or split as they are stored. With `as_matrices`, `src` presents
    tensors of many experts as one matrix a linear, and weights of Conv1D as their transposes.
    Without this, transformers loads the model from the unchanged folder.

    `module`: the model. `names`: transformers' rules for its states. `states`: the source of each
    state. `sliced`: stored tensors that hold several experts. `held`: paths of linears whose rows
    other linears of the model return. CheckpointError if a stored tensor has another shape than
    the model.
    """

    def __init__(self, src: Checkpoint, module: PreTrainedModel, *, as_matrices: bool) -> None:
        self.src, self.module, self.names = src, module, StateNames(module)
        if src.unlisted:
            lacking = set(self.names.match(src).missing(module))
            src.admit([n for n in src.unlisted if not lacking.isdisjoint(self.names.place(n)[0])])
        self.sliced = unfuse_experts(self.names, src, slices=as_matrices)
        self.states = self.names.match(src)
        self.held = follow_storage(self.names, src, self.states.merged)
        if self.held:
            self.states = self.names.match(src)
        weights, strays = set(src.logical()), self.states.strays
        biases = [name for name in strays if f"{name.removesuffix('.bias')}.weight" in weights]
        if zeros := [name for name in biases if not src.get(name).any()]:  # of early GPTQ tools
            src.derive({}, zeros)
            src.notices.append(
                f"{zeros[0]}: left out, as it is zero and the model has no such bias "
                f"({len(zeros)} in all)"
            )
            self.states = self.names.match(src)
        packed = {f"{module}.weight" for module in src.modules()}
        if as_matrices:
            self._name_table(packed)
        for state, name in self.states.stored.items():
            if name not in packed:
                self._require_form(state, name)
        if as_matrices:
            replace_transposed(module, self.states.stored, src)

    def _name_table(self, packed: Collection[str]) -> None:
        """Give a table that is stored as the output head alone the name of the embeddings, under
        which engines look for it: safetensors keeps the first name of a shared tensor.
        """
        for head, table in self.module.all_tied_weights_keys.items():
            is_alone = self.states.stored.get(table) == head and head not in packed
            if is_alone and is_head(head.removesuffix(".weight")):
                shape, dtype = self.src.shape(head), self.src.dtype(head)
                self.src.derive({table: Derived(shape, dtype, (head,), partial(_read, head))})
                self.src.notices.append(f"{head} is written as {table}, to which it is tied")
                self.states = self.names.match(self.src)

    def require_complete(self) -> None:
        """Raise CheckpointError unless the checkpoint has exactly the tensors of its model, and
        others that the model's class or config.json declares.
        """
        absent = [re.compile(each) for each in self.module._keys_to_ignore_on_load_missing or ()]
        missing = [
            state
            for state in self.states.missing(self.module)
            if computed(self.module, state) is None and not any(p.search(state) for p in absent)
        ]
        require_complete(self.names, self.src, missing, self.states.strays)

    def require_tied(self) -> None:
        """Raise CheckpointError if a head and embeddings that the configuration ties are both
        stored, and differ: some readers take the first, some the second. Their values are read.
        A packed head beside dense embeddings is taken by all, and the other way round.
        """
        src, head = self.src, head_state(self.module)
        pairs = self.module.all_tied_weights_keys.items()
        tied = next((pair for pair in pairs if head in pair), ())
        stored = (self.states.stored.get(state) for state in tied)
        names = list(dict.fromkeys(name for name in stored if name is not None))
        of = [
            src.parts(m) if (m := n.removesuffix(".weight")) in src.modules() else {"": n}
            for n in names
        ]
        if len(of) < 2 or ("" in of[0]) != ("" in of[1]):
            return
        are_equal = of[0].keys() == of[1].keys() and all(
            torch.equal(*(src.get(name, slice(at, at + ROWS)).double() for name in pair))
            for pair in zip(of[0].values(), of[1].values(), strict=True)
            for at in range(0, src.shape(pair[0])[0], ROWS)
        )
        if not are_equal:
            raise CheckpointError(
                f"{names[0]} and {names[1]} differ, and the configuration has "
                "tie_word_embeddings: true",
                "set it to false in config.json",
                "remove the one that is wrong",
                subject=src.path,
            )

    def require_fit(self, quantized: Collection[str]) -> None:
        """Raise NumericError if a tensor of no `quantized` linear overflows in the dtype in which
        it is to be stored.
        """
        for name in self.src.names() if self.src.written_dtype == torch.float16 else ():
            cast = self.src.form_written(name)[0] != self.src.dtype(name)
            if cast and self.src.nbytes(name) and name.removesuffix(".weight") not in quantized:
                largest = self.src.get(name).abs().max()
                if largest.isfinite() and largest.half().isinf():
                    raise NumericError(
                        f"its value {largest.item():g} is beyond 65504, where float16 ends",
                        Words("use", Setting("dense_dtype", "bfloat16")),
                        subject=name,
                    )

    def take_parts(self, paths: Mapping[str, str]) -> None:
        """Match the tensors of packed linears, which are in the model now; `paths` maps each packed
        module of the checkpoint to its path.
        """
        stored, _, outside, strays = self.states
        self.names.refresh()
        ties = self.module.all_tied_weights_keys
        weights = {f"{module}.weight" for module in paths}
        for state in [state for state, name in stored.items() if name in weights]:
            del stored[state]
        for module, path in paths.items():
            for suffix, name in self.src.parts(module).items():
                if self.names.state_of(name) == f"{path}.{suffix}":
                    stored[f"{path}.{suffix}"] = name
                else:
                    strays.append(name)
                for shared in (a for a, b in ties.items() if b == f"{path}.{suffix}"):
                    stored[shared] = name
            bias = f"{module}.bias"
            if bias in strays and f"{path}.bias" in self.names.states:
                strays.remove(bias)
                outside.remove(bias)
                stored[f"{path}.bias"] = bias
                self._require_form(f"{path}.bias", bias)

    @cached_property
    def outside(self) -> Outside:
        """The tensors that the model does not have, such as draft layers."""
        return Outside.of(self.src, self.states.outside)

    def _require_form(self, state: str, name: str) -> None:
        wanted, shape = get_tensor(self.module, state), self.src.shape(name)
        asked, dtype = tuple(wanted.shape), self.src.dtype(name)
        if wanted.is_floating_point() and dtype not in FLOATS:
            raise CheckpointError(
                f"{name} is stored as {dtype_name(dtype)}, and no quantization_config explains it",
                "restore it in config.json",
                ORIGINAL,
                subject=self.src.path,
            )
        # An earlier model of this checkpoint may have transposed the tensor.
        if shape != asked and not (self.src.is_presented_otherwise(name) and shape[::-1] == asked):
            raise wrong_shape(self.src.path, name, shape, asked)


def _read(name: str, read: Read, index: int | slice | None) -> torch.Tensor:
    return read(name, index)


class LanguageModel(Outline):
    """Outline a dense checkpoint as a model whose linears are chosen and whose blocks are run.

    `dtype`: of the weights in memory. `blocks`: module paths of the transformer blocks, in order.
    `linears`: name in the checkpoint -> `(n, k)` of every linear. `paths`: the same names -> module
    paths, which differ in a few published families. `tied`: linears that share their weight with
    the embeddings. `kept_dense`: name -> reason, of matrices that stay dense unless a recipe names
    them. `tables`: name -> module path of the token embeddings, which only a recipe that names them
    packs. `sizes`, `places`: of linears and tables together. `head`: the linear, or the
    table tied to it, that makes the logits; its place is the linear. None if there is none.
    `experts`: name -> the expert that a linear belongs to. `notices`: matrices that stay dense
    without being skipped. `max_length`: the most tokens of a sequence. `text`: the module whose
    forward is run: the outermost module that runs on tokens only; `text_path`: its path.

    CheckpointError if transformers cannot build the model, or a stored tensor has another shape
    than it.
    """

    def __init__(self, src: Checkpoint, dtype: torch.dtype) -> None:
        super().__init__(src, skeleton(src, dtype), as_matrices=True)
        self.dtype = dtype
        decoder, module = language_model(self.module)
        self.blocks = [f"{decoder}.{path}" if decoder else path for path in find_blocks(module)]
        if not self.blocks:
            raise CheckpointError(
                f"{type(self.module).__name__} has no list of blocks with nn.Linear",
                "use another model",
                subject=src.path,
            )
        self._block_of = _blocks_of_names(self.blocks, self.states)
        self.paths, self.tied, self.notices = find_linears(self.module, self.states.stored)
        self.linears = {
            name: size_of(self.module.get_submodule(path)) for name, path in self.paths.items()
        }
        self.kept_dense = _kept_dense(self.module, decoder, self.tied, self.states.stored)
        self.tables = dict[str, str]()
        for path, found in self.module.named_modules():
            if is_table(found) and is_embedding(name := self._name_of(path)):
                self.tables.setdefault(name, path)
        self.sizes = self.linears | {
            name: size_of(self.module.get_submodule(path)) for name, path in self.tables.items()
        }
        of_path = find_experts(self.module)
        self.experts = {name: of_path[path] for name, path in self.paths.items() if path in of_path}
        self.notices += self.outside.notices()
        if named := class_without_head(self.module, src):
            self.notices.append(
                f"config.json names {named}, which engines open and which writes no text: name "
                f"{type(self.module).__name__} there, as which it is quantized, if it is to write"
            )
        positions = (
            getattr(self.module.config.get_text_config(), "max_position_embeddings", None)
            or UNLIMITED
        )
        self.max_length: int = positions if positions > 0 else UNLIMITED
        self.text_path = text_model(self.module, self.blocks)
        self.text = cast("PreTrainedModel", self.module.get_submodule(self.text_path))
        path, name = self.ends[1]
        self.head = name if name in self.sizes else None
        self.places = self.tables | self.paths | ({name: path} if self.head else {})

    def stored(self, block: int | None) -> list[str]:
        """List a block's tensors in checkpoint order; with None, all tensors outside the blocks."""
        return [name for name in self.src.names() if self._block_of.get(name) == block]

    def targets(self, block: int) -> list[str]:
        """List the checkpoint names of a block's linears, in module order."""
        inside = set(self.stored(block))
        return [name for name in self.linears if f"{name}.weight" in inside]

    @cached_property
    def ends(self) -> list[tuple[str, str]]:
        """The paths of the input embeddings and of the head, each with the stored name of its
        weight, which is the same for tied ones; empty for what the model lacks.
        """
        ends = (input_embeddings(self.text), self.text.get_output_embeddings())
        paths = [path_of(self.module, each) for each in ends]
        return [(path, self._name_of(path)) for path in paths]

    def _name_of(self, path: str) -> str:
        """Return the stored name of the weight of the module at `path`, empty if it has none."""
        return self.states.stored.get(f"{path}.weight", "").removesuffix(".weight")

    def dense_embeddings(self, packed: Collection[str]) -> list[str]:
        """List the paths and stored names of the embeddings that stay dense beside the tables
        `packed`, because a config may state embeddings by their class. Empty if none is packed.
        """
        names = dict[str, None]()
        for path, found in self.module.named_modules() if packed else ():
            if isinstance(found, nn.Embedding) and (name := self._name_of(path)) not in packed:
                names |= {path: None, name or path: None}
        return [*names]

    def why_uncalled(self, linear: str) -> str | None:
        """Give the reason why a text-only pass never calls a linear; None if it may."""
        owner = self.experts[linear].owner if linear in self.experts else ""
        # experts may be stored under another path than their owner's
        places = f".{self.paths[linear]}. .{owner}."
        part = next((words for pattern, words in UNCALLED.items() if pattern.search(places)), None)
        return None if part is None else f"text alone never calls {part}"

    def run_on_all_tokens(self, experts: Iterable[Expert]) -> None:
        """Let only these experts also run on tokens that are routed elsewhere."""
        chosen = grouped((expert.owner, expert.number) for expert in experts)
        for owner in {expert.owner for expert in self.experts.values()}:
            module = self.module.get_submodule(owner)
            assert isinstance(module, UnfusedExperts)
            module.on_all_tokens = frozenset(chosen.get(owner, ()))


def _blocks_of_names(blocks: Iterable[str], states: Match) -> dict[str, int]:
    """Map stored name to the number of its block, the first one if blocks share the tensor."""
    numbers = {path: index for index, path in enumerate(blocks)}
    found: dict[str, int] = {}
    merged = [(each.states[0], name) for each in states.merged for name in each.names]
    for state, name in [*states.stored.items(), *merged]:
        parts = state.split(".")
        path = next(
            (path for cut in range(len(parts)) if (path := ".".join(parts[:cut])) in numbers), None
        )
        if path is not None:
            found[name] = min(found.get(name, numbers[path]), numbers[path])
    return found


def _kept_dense(
    module: PreTrainedModel, decoder: str, tied: set[str], stored: dict[str, str]
) -> dict[str, str]:
    """Map stored name to reason, for matrices that stay dense: routers, towers of other inputs,
    small linears.
    """
    routers, head = find_routers(module), module.get_output_embeddings()
    towers = tuple(f"{path}." for path in find_towers(module))
    reads_text = (
        tuple(f"{path}." for path in (decoder, text_encoder(module)) if path) if decoder else ("",)
    )
    shared = set(module.all_tied_weights_keys.values())
    kept: dict[str, str] = {}
    for path, found in module.named_modules():
        name = path if path in tied else stored.get(f"{path}.weight", "").removesuffix(".weight")
        if not name:
            continue
        if path in routers:
            kept[name] = ROUTER
        elif not is_linear(found):
            if isinstance(found, nn.Linear):
                kept[name] = "no plain linear"
        elif found is head or (
            isinstance(head, nn.Embedding) and size_of(found) == head.weight.shape
        ):  # FSMT
            if HEAD not in (name.rpartition(".")[2], path.rpartition(".")[2]):
                kept[name] = "the output head"
        elif path in tied or f"{path}.weight" in shared:
            kept[name] = "its weight is shared"
        elif not path.startswith(reads_text) or path.startswith(towers):
            kept[name] = "outside the language model"
        elif INDEXER.search(name):
            kept[name] = "engines join it with others of its indexer, and keep them dense"
        elif min(size_of(found)) < FEWEST:
            kept[name] = f"fewer than {FEWEST} inputs or outputs"
        elif path.rpartition(".")[2] in NEVER_CALLED:
            kept[name] = "its weight is used without calling it"
    return kept


def find_linears(
    module: PreTrainedModel, stored: dict[str, str]
) -> tuple[dict[str, str], set[str], list[str]]:
    """Return stored name -> module path of every linear, the tied linears, and notices of dense
    matrices.

    `stored` maps each state to its name in the checkpoint.
    """
    linears = [path for path, found in module.named_modules() if is_linear(found)]
    tied = {path for path in linears if f"{path}.weight" in module.all_tied_weights_keys}
    names = {
        path: path if path in tied else stored.get(f"{path}.weight", "").removesuffix(".weight")
        for path in linears
    }
    what = "linear that transformers makes from other stored tensors,"
    others = grouped((what, path) for path, name in names.items() if not name)
    paths = {name: path for path, name in names.items() if name}
    return paths, tied, _notices(others) + dense_matrices(module)


def dense_matrices(module: PreTrainedModel) -> list[str]:
    """Return notices of matrices outside linears, such as experts in one parameter, which stay
    dense.
    """
    routers = find_routers(module)
    others = grouped(
        (f"parameter of {type(found).__name__}, which is no nn.Linear,", f"{path}.{name}")
        for path, found in module.named_modules()
        if not is_linear(found) and not isinstance(found, nn.Embedding) and path not in routers
        for name, parameter in found.named_parameters(recurse=False)
        if parameter.ndim > 1
    )
    return _notices(others)


def _notices(others: dict[str, list[str]]) -> list[str]:
    return [
        f"{names[0]}: {what} left dense ({len(names)} in all)" for what, names in others.items()
    ]


def decoder_weights(src: Checkpoint, inside: Collection[str] | None = None) -> dict[str, int]:
    """Return name -> elements of each tensor of two or more dimensions in the decoder's blocks,
    named as in `logical`.

    `inside` names the tensors of the blocks, as a built model knows them. Without it, the blocks
    are the largest numbered list, by elements, that is not named as a tower.
    """
    shapes = {name: src.true_shape(name) for name in src.logical()}
    sizes = {name: prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    if inside is not None:
        return {name: size for name, size in sizes.items() if name in inside}
    numbered = ((re.match(r"(.+?)\.\d+\.", name), name) for name in sizes)
    lists = grouped((found[1], name) for found, name in numbered if found)
    best = max(
        lists,
        key=lambda path: (not TOWER.search(path), sum(sizes[name] for name in lists[path])),
        default="",
    )
    return {name: sizes[name] for name in lists.get(best, ())}


def share_of(weights: Mapping[str, int], modules: Collection[str]) -> float | None:
    """Return the share of a decoder's weights that belong to `modules`; None without any."""
    total = sum(weights.values())
    return sum(weights.get(f"{module}.weight", 0) for module in modules) / total if total else None


def largest_others(weights: Mapping[str, int], modules: Collection[str]) -> list[tuple[str, float]]:
    """Return the weights outside `modules`, summed over all blocks: name of the first, and share of
    the whole.
    """
    total, inside = sum(weights.values()), {f"{module}.weight" for module in modules}
    others = (name for name in weights if name not in inside)
    kinds = grouped((re.sub(r"\.\d+\.", ".N.", name), name) for name in others)
    found = Counter({names[0]: sum(weights[name] for name in names) for names in kinds.values()})
    return [(first, size / total) for first, size in found.most_common()]
