"""A recipe: the `Recipe` dataclass, its YAML form, the goal of each linear, and the refusal of
patterns without effect.

Command-line options are merged over a recipe's mapping before it is read. An option thus overrides
its key, and one function, `from_mapping`, checks both. Unknown keys are errors. Defaults depend on
the format (ALGORITHMS 0).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import yaml

from quantkit.algorithms.options import Options
from quantkit.algorithms.pruning import check_fixed
from quantkit.algorithms.scale_search import check_signed, takes_signed
from quantkit.core.formats import FORMATS
from quantkit.core.quantized_tensor import Goal, Scheme, is_sparse, label
from quantkit.engines.joined import treat_alike
from quantkit.errors import RecipeError, Setting, Words
from quantkit.keys import Key, keys_of, read
from quantkit.layouts import LAYOUTS, Layout
from quantkit.layouts.recast import fitting
from quantkit.layouts.schemes import EMBEDDINGS, HEADS, compiled, key_of, matches as matches_whole
from quantkit.models.experts import ROUTER
from quantkit.names import Json, JsonView, Method, Rule
from quantkit.recipes.options import AUTO, DENSE, Calib
from quantkit.recipes.schema import RecipeKeys, pruning_keys
from quantkit.text.sources import name_of_text

#: Passes of descent where they are the default.
DESCENT = 3
#: Damping of 2:4 weights, whose survivors must move further; and by another unit than the median.
SPARSE_DAMP, OTHER_DAMP = 0.3, 0.01
#: The most similar names that a message gives.
SHOWN = 3
#: The keys that give a scheme to linears of some names, as overrides before all others.
KEYED = {"embeddings": EMBEDDINGS, "head": "|".join(HEADS)}


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeKeys):
    """Hold everything that decides the bytes of a quantized or pruned checkpoint, besides its
    source.

    `scheme` is the goal of every linear, and `layout` how its codes are stored. For 2:4 without
    codes, the weights stay dense: there is no `layout`, and `method` and `prune` choose the mask.
    With a scheme and no `layout`, the output has the decoded values. docs/recipes.md describes each
    key. A group size that is not `size_stated` may change to fit the model, and a layout that is
    not `layout_stated` to fit a target size. `unstated` are the amounts of calibration text that
    may change to fit a machine without a GPU.
    """

    size_stated: bool = field(default=True, compare=False)
    layout_stated: bool = field(default=True, compare=False)
    unstated: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def calibrated(self) -> bool:
        """Whether activations are needed: by GPTQ, a scale search that uses the Hessian, wanda's
        mask, or tuning.
        """
        searched = self.clip == "search" and self.metric != "mse"
        return self.factored or searched or self.prune == "wanda"

    @property
    def factored(self) -> bool:
        """Whether the Hessian is factored."""
        return self.method in ("gptq", "sparsegpt")

    @property
    def only_prunes(self) -> bool:
        """Whether weights become 2:4 and stay dense."""
        return not isinstance(self.scheme, Scheme)

    @property
    def keyed(self) -> dict[str, str]:
        """The overrides that keys of their own make: pattern -> key."""
        return {
            pattern: key
            for key, pattern in KEYED.items()
            if getattr(self, key) not in (DENSE, AUTO)
        }

    @property
    def title(self) -> str:
        """The recipe in a few words."""
        layout = f", in the layout {self.layout}" if self.layout else ""
        return f"{label(self.scheme)} by {self.method}{layout}"

    @property
    def output_layout(self) -> Layout | None:
        """The layout that the output is stored in; None if weights stay dense."""
        return None if self.layout is None else LAYOUTS[self.layout]

    @property
    def schemes(self) -> list[Scheme]:
        """All schemes that linears may get."""
        return [
            goal
            for goal in (self.scheme, *(scheme for _, scheme in self.overrides))
            if isinstance(goal, Scheme)
        ]

    def scheme_of(self, module: str) -> Goal | None:
        """Return the goal of the linear called `module`, None if it is skipped."""
        if any(matches(pattern, module) for pattern in self.skip):
            return None
        return next(
            (scheme for pattern, scheme in self.overrides if matches(pattern, module)), self.scheme
        )

    def key_of(self, modules: Iterable[str]) -> str | None:
        """Return the key that gives all of these linears their scheme; None if none does."""
        key, *others = set(map(key_of, modules))
        return key if key and not others and getattr(self, key) != DENSE else None

    def solving(self, goal: Goal) -> Recipe:
        """Return the recipe that linears of a goal are solved by: signed scales are for symmetric
        only for integers.
        """
        if not self.signed or not isinstance(goal, Scheme) or takes_signed(goal):
            return self
        return replace(self, signed=False, gptq=replace(self.gptq, signed=False))

    def to_mapping(self) -> Json:
        """Return a mapping of which `from_mapping`, or `pruning_from_mapping`, makes an equal
        recipe.
        """
        keys = pruning_keys(type(self)) if self.only_prunes else keys_of(type(self))
        found: Json = {}
        for key in keys:
            value = self._written(key)
            if not (key.may_lack and value == key.default):
                (found.setdefault(key.path[0], {}) if len(key.path) > 1 else found)[
                    key.path[-1]
                ] = value
        return found

    def _written(self, key: Key) -> Any:
        """Return the value of a key as a file has it."""
        first = getattr(self, key.path[0])
        if isinstance(first, Scheme):
            return written(first)[key.path[-1]]
        if key.path == ("overrides",):
            return {
                pattern: scheme.label
                for pattern, scheme in self.overrides
                if pattern not in self.keyed
            }
        value = getattr(first, key.path[-1]) if len(key.path) > 1 else first
        return list(value) if isinstance(value, tuple) else value

    def to_yaml(self) -> str:
        """Return the recipe as a YAML file."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False)

    def sha256(self) -> str:
        """Return the hash that names this recipe in reports and journals."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()


def goal_of(recipe: Recipe, name: str, path: str) -> Goal | None:
    """Return the goal of a linear, None if it is skipped.

    A recipe may call it by its `name` in the checkpoint or its `path` in the model, which differ in
    a few families.
    """
    by_path, by_name = recipe.scheme_of(path), recipe.scheme_of(name)
    return (
        None
        if by_path is None or by_name is None
        else by_path
        if by_name == recipe.scheme
        else by_name
    )


def goals_of(
    recipe: Recipe,
    paths: Mapping[str, str],
    kept_dense: Mapping[str, str],
    tables: Mapping[str, str] | None = None,
) -> dict[str, Goal | None]:
    """Return the goal of every linear, by its name in the checkpoint; None for a dense linear.

    `paths`: name -> path in the model. `kept_dense`: name -> reason, for dense matrices, linears or
    not. `tables`: name -> path of the embeddings; only those that get codes are in the result. An
    override may match only these. RecipeError if such an override names a router.
    """
    goals = {
        name: goal_of(recipe, name, path) for name, path in paths.items() if name not in kept_dense
    }
    others = {name: paths.get(name, name) for name in kept_dense} | dict(tables or {})
    named: dict[str, Goal] = {}
    for pattern, scheme in recipe.overrides:
        if any(matches(pattern, each) for name in goals for each in (name, paths[name])):
            continue
        for name, path in others.items():
            is_named = matches(pattern, name) or matches(pattern, path)
            if is_named and recipe.scheme_of(name) is not None:
                why = kept_dense.get(name)
                if why == ROUTER or (why is not None and name not in paths):
                    raise RecipeError(
                        f"override {pattern!r} names {name}, {why}, which stays dense",
                        "drop the override",
                    )
                named.setdefault(name, scheme)
    goals |= {name: named.get(name) for name in kept_dense}
    goals = treat_alike(goals) if recipe.fused_alike else goals
    return goals | {name: named[name] for name in tables or () if name in named}


def without_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with the names of its calibration files in the place of their paths."""
    data = recipe.calibration.data
    names = name_of_text(data) if isinstance(data, str) else tuple(map(name_of_text, data))
    return (
        recipe
        if names == data
        else replace(recipe, calibration=replace(recipe.calibration, data=names))
    )


def stored_shape(recipe: Recipe, goal: Goal, n: int, k: int) -> tuple[int, int]:
    """Return the stored shape of an `[n, k]` weight: its own, or the padded one if the recipe pads.

    If no shape fits, it is the weight's own; the plan then refuses the weight.
    """
    layout = recipe.output_layout
    if layout is None or not isinstance(goal, Scheme):
        return n, k
    return fitting(layout, goal, n, k, pad=recipe.pad) or (n, k)


def matches(pattern: str, module: str) -> bool:
    """Return True if a skip or override pattern matches the name `module`, or its end after a dot.

    CheckpointError if that takes too long.
    """
    return matches_whole(rf"(?:.*\.)?(?:{pattern})", module)


def require_effect(recipe: Recipe, linears: Collection[str], dense: Collection[str]) -> list[str]:
    """Raise RecipeError with a line for each skip or override that changes nothing.

    `linears` names all linears, and `dense` the other dense matrices, which a skip may name too.
    The default skip may match nothing, as not every model has such a linear: a remark for each such
    pattern is returned.
    """
    names = (*linears, *dense)
    idle = [each for each in recipe.skip if not any(matches(each, name) for name in names)]
    remarks = [f"skip {each!r} matches no linear" for each in idle if each in Recipe.skip]
    lines = [
        f"skip '{each}' matches no linear: {_meant(each, linears)}"
        for each in idle
        if each not in Recipe.skip
    ]
    quantized = [
        name for name in linears if not any(matches(pattern, name) for pattern in recipe.skip)
    ]
    for pattern, scheme in recipe.overrides:
        if not any(matches(pattern, name) for name in quantized):
            key = recipe.keyed.get(pattern)
            named = key or f"override '{pattern}'"  # as it was typed, no backslash doubled
            what = f"{named} to {scheme.label} matches"
            if any(matches(pattern, name) for name in linears):
                lines.append(
                    f"{what} only linears that are skipped: drop {key or 'the override'}, or the "
                    "skip"
                )
            elif key is not None:
                lines.append(f"{what} nothing, this model has none of the usual names: drop {key}")
            else:
                lines.append(f"{what} no linear: {_meant(pattern, linears)}")
    if lines:
        raise RecipeError("\n".join(lines))
    return remarks


def nearest_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Find names similar to a regular expression, or their last parts if the pattern has fewer
    parts.
    """
    plain = re.sub(r"\\(?=\W)", "", re.sub(r"\.[*+?]|[\^$()\[\]{}|*+?]", "", pattern)).strip(".")
    depth = plain.count(".") + 1
    ends = dict.fromkeys(".".join(name.split(".")[-depth:]) for name in names)
    return get_close_matches(plain, ends, SHOWN, cutoff=0.5) or list(ends)[:SHOWN]


def _meant(pattern: str, linears: Iterable[str]) -> str:
    if any(matches(f"{pattern}.*", name) for name in linears):
        return f"it has to reach the end of a name: write '{pattern}.*'"
    return (
        f"the nearest names are {', '.join(nearest_names(pattern, linears))}: correct the pattern, "
        "or drop it"
    )


def skip_pattern(modules: Collection[str], schemes: Mapping[str, Goal | None]) -> str:
    """Make a --skip pattern for exactly these linears. It uses the last parts of their names if no
    other linear has these.
    """
    leaves = sorted({module.rpartition(".")[2] for module in modules})
    same = {
        m for m, scheme in schemes.items() if scheme is not None and m.rpartition(".")[2] in leaves
    }
    return "|".join(
        re.escape(name) for name in (leaves if same == set(modules) else sorted(modules))
    )


def written(scheme: Scheme) -> Json:
    """Return a scheme as the section of a recipe."""
    return {
        "format": scheme.format.name,
        "group_size": scheme.group_size or "channel",
        "symmetric": scheme.symmetric,
        "sparsity": scheme.sparsity,
    }


def pruning_from_mapping(mapping: JsonView) -> Recipe:
    """Read a recipe that prunes; RecipeError names an unknown key or a wrong value."""
    asked = read(mapping, pruning_keys(Recipe))
    rule: Rule = asked.pop("method", "sparsegpt")
    solver = _with_usual_damp(asked.pop("gptq", {}), rule != "magnitude")
    gptq = Options(**{"descent": DESCENT, **solver}, prune=rule)
    return Recipe(
        scheme="2:4",
        method=rule,
        prune=rule,
        clip="none",
        metric="mse",
        gptq=gptq,
        layout=None,
        **_read_shared(asked),
    )


def from_mapping(mapping: JsonView, kind: type[Recipe] = Recipe) -> Recipe:
    """Read a recipe, with the defaults of its format; RecipeError names an unknown key or a wrong
    value.
    """
    asked = read(mapping, keys_of(kind))
    form = asked.pop("scheme", {})
    scheme = _scheme(**form)
    integer = not scheme.format.is_float
    method: Method = asked.setdefault("method", "gptq")
    asked.setdefault("clip", "search" if integer or method == "gptq" else "none")
    asked.setdefault("metric", "block" if method == "gptq" else "mse")
    stated: Any = {"size_stated": "group_size" in form, "layout_stated": "layout" in asked}
    asked.setdefault("layout", scheme.format.layout)
    keyed = {
        pattern: asked[key]
        for key, pattern in KEYED.items()
        if asked.get(key, DENSE) not in (DENSE, AUTO)
    }
    labels = {**keyed, **(asked.pop("overrides", None) or {}), **keyed}
    overrides = tuple((_pattern(p), Scheme.parse(label)) for p, label in labels.items())
    if any(pattern.endswith(HEADS) for pattern, _ in overrides):  # it is skipped by default
        skip = Counter[str](asked.get("skip", RecipeKeys.skip)) - Counter(RecipeKeys.skip)
        asked["skip"] = [*skip.elements()]  # it stays if it is stated too
    schemes = [scheme, *(other for _, other in overrides)]
    refined = method == "gptq" and any(map(takes_signed, schemes))
    asked.setdefault("signed", refined)
    asked["prune"] = _prune_rule(asked.get("prune"), method, schemes)
    fixed = {
        name: asked[name]
        for name in ("clip", "metric", "signed", "prune")
        if asked[name] is not None
    }
    solver = asked.pop("gptq", {})
    descends = method == "gptq" and any(s.format.is_microscaled for s in schemes)
    if (refined or descends) and solver.setdefault("descent", DESCENT):
        solver.setdefault("refit", refined)
    sparse = method == "gptq" and any(map(is_sparse, schemes))
    gptq = Options(**_with_usual_damp(solver, sparse), **fixed)
    found = kind(scheme=scheme, overrides=overrides, gptq=gptq, **stated, **_read_shared(asked))
    _check(found)
    return found


def _with_usual_damp(solver: Json, sparse: bool) -> Json:
    """Add the usual damping of 2:4, or of another unit than the median, unless one is stated."""
    if solver.get("damp_kind", "median") != "median":
        return {"damp": OTHER_DAMP, **solver}
    return {"damp": SPARSE_DAMP, **solver} if sparse else solver


def _scheme(
    format: str = "int4", group_size: Any = ..., symmetric: bool = True, sparsity: Any = None
) -> Scheme:
    number = FORMATS[format]
    size = number.group_size if group_size is ... else group_size
    return Scheme(number, None if size == "channel" else size, symmetric, sparsity)


def _read_shared(asked: Json) -> Json:
    """Make the calibration text and the patterns that stay dense from the values read."""
    calib = asked.get("calibration", {})
    if len(calib.get("data", ())) == 1:  # a list of one source
        calib = {**calib, "data": calib["data"][0]}
    skip = tuple(map(_pattern, asked.get("skip", RecipeKeys.skip)))
    unstated = frozenset({"samples", "max_length"} - calib.keys())
    return {**asked, "calibration": Calib(**calib), "skip": skip, "unstated": unstated}


def _check(recipe: Recipe) -> None:
    """Raise RecipeError for keys that contradict each other."""
    method, gptq = recipe.method, recipe.gptq
    values = {"refit": gptq.refit, "descent": gptq.descent, "tune": recipe.tune}
    values["tune_scales"] = recipe.tune_scales
    refining = {name: type(value)(0) for name, value in values.items() if value}
    if method != "gptq" and refining:
        off = {**refining, "output_aware": False} if recipe.output_aware else refining
        raise RecipeError(
            Words(
                Setting(next(iter(refining))),
                f"starts from the codes of gptq, the method is {method}",
            ),
            Words("use", Setting("method", "gptq")),
            Words("use", *(Setting(name, value) for name, value in off.items())),
        )
    if recipe.output_aware and not recipe.tune:
        raise RecipeError(
            Words(Setting("output_aware"), "weighs the error of", Setting("tune")),
            Words("add", Setting("tune", 200)),
            Words("use", Setting("output_aware", False)),
        )
    if recipe.schemes and not any(map(takes_signed, recipe.schemes)):
        check_signed(recipe.schemes[0], recipe.signed)


def _prune_rule(asked: Rule | None, method: Method, schemes: list[Scheme]) -> Rule | None:
    """Return the rule for 2:4 masks, None if no scheme is 2:4."""
    if not any(is_sparse(scheme) for scheme in schemes):
        if asked is not None:
            raise RecipeError(
                Words(Setting("prune_method"), "is for 2:4, which is not asked for"),
                Words("add", Setting("prune", "2:4")),
                Words("drop", Setting("prune_method")),
            )
        return None
    rule: Rule = asked or ("sparsegpt" if method == "gptq" else "magnitude")
    if method == "rtn":
        check_fixed(rule)
    return rule


def _pattern(pattern: str) -> str:
    try:
        compiled(pattern)  # by itself, so that positions in a message are the user's
        matches(pattern, "")
    except ValueError as error:
        raise RecipeError(
            f"{pattern!r} is not a regular expression ({error})", "write it like '.*k_proj'"
        ) from error
    return pattern
