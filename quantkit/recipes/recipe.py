"""A recipe: the `Recipe` dataclass, and its YAML form.

Command-line options are merged over a recipe's mapping before it is read. An option thus overrides its key, and one
function, `from_mapping`, checks both. Unknown keys are errors. Defaults depend on the format (ALGORITHMS 0).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from quantkit.algorithms.masks import check_fixed
from quantkit.algorithms.options import Options
from quantkit.algorithms.scale_search import check_signed
from quantkit.core.formats import FORMATS
from quantkit.core.scheme import Scheme
from quantkit.errors import RecipeError, reason, require_known
from quantkit.layouts import LAYOUTS, expressions
from quantkit.layouts.base import Layout
from quantkit.layouts.recast import fitting
from quantkit.models.experts import ROUTER
from quantkit.names import Clip, Method, Metric, Rule
from quantkit.recipes.calibration_options import CALIBRATION_KEYS, COLUMN_KEYS, Calib
from quantkit.recipes.goals import Goal, is_sparse, treat_alike
from quantkit.text.sources import name_of_text

SCHEME_KEYS = ("format", "group_size", "symmetric", "sparsity")
#: Keys of the `gptq` section; scale search and sign are keys of the recipe, because RTN uses them too.
GPTQ_KEYS = tuple(f.name for f in dataclasses.fields(Options) if f.name not in ("clip", "metric", "signed", "prune"))
#: Keys of that section that pruning uses.
PRUNING_KEYS = ("damp", "damp_kind", "block", "act_order")
#: Passes of descent where they are the default.
DESCENT = 3
#: option -> its place in a recipe's mapping. `api.build_recipe` places `asym`, `skip` and `override`.
KEYS: dict[str, tuple[str, ...]] = {
    "format": ("scheme", "format"),
    "group_size": ("scheme", "group_size"),
    "prune": ("scheme", "sparsity"),
    "prune_method": ("prune",),
    "method": ("method",),
    "clip": ("clip",),
    "metric": ("metric",),
    "damp": ("gptq", "damp"),
    "damp_kind": ("gptq", "damp_kind"),
    "act_order": ("gptq", "act_order"),
    "on_unsolvable": ("gptq", "on_unsolvable"),
    "signed": ("signed",),
    "refit": ("gptq", "refit"),
    "descent": ("gptq", "descent"),
    "output_aware": ("output_aware",),
    "tune": ("tune",),
    "distill": ("distill",),
    "distill_codes": ("distill_codes",),
    "true_sequential": ("true_sequential",),
    "calib": ("calibration", "data"),
    "samples": ("calibration", "samples"),
    "max_length": ("calibration", "max_length"),
    "lengths": ("calibration", "lengths"),
    "text_column": ("calibration", "text_column"),
    "split": ("calibration", "split"),
    "moe_calibration": ("calibration", "moe"),
    "seed": ("calibration", "seed"),
    "layout": ("layout",),
    "pad": ("pad",),
    "fused_alike": ("fused_alike",),
}


@dataclass(frozen=True)
class Recipe:
    """Hold everything that decides the bytes of a quantized or pruned checkpoint, besides its source.

    `scheme` is the goal of every linear, and `layout` how its codes are stored. If the goal is 2:4 without codes, the
    weights stay dense: there is no `layout`, and `method` and `prune` are the rule that chooses the mask.

    `skip` has regular expressions of linears left dense, matched against the module name or its end after a dot.
    `overrides` give other linears their own scheme; the first match wins. `prune` chooses the masks of 2:4 schemes, and
    is None without any. `pad` adds zeros to weights whose shape the layout does not hold. `fused_alike` gives linears
    that engines join the widest treatment among them. `tune` is the number of steps that tune each block. With
    `output_aware`, gradients of the likelihood weigh the errors of outputs, in rounding and in tuning (ALGORITHMS 8.3).
    `distill` steps tune scales and norms against the unquantized model, and the codes as well with `distill_codes`
    (ALGORITHMS 8.2).
    """

    scheme: Goal
    method: Method | Rule
    clip: Clip
    metric: Metric
    gptq: Options
    layout: str | None
    pad: bool = False
    fused_alike: bool = False
    signed: bool = False
    prune: Rule | None = None
    output_aware: bool = False
    tune: int = 0
    true_sequential: bool = True
    distill: int = 0
    distill_codes: bool = False
    calibration: Calib = field(default_factory=Calib)
    skip: tuple[str, ...] = ("lm_head",)
    overrides: tuple[tuple[str, Scheme], ...] = ()

    @property
    def calibrated(self) -> bool:
        """Whether activations are needed: by GPTQ, a scale search that uses the Hessian, wanda's mask, or tuning."""
        searched = self.clip == "search" and self.metric != "mse"
        return self.factored or searched or self.prune == "wanda" or self.distill > 0

    @property
    def factored(self) -> bool:
        """Whether the Hessian is factored."""
        return self.method in ("gptq", "sparsegpt")

    @property
    def output_layout(self) -> Layout | None:
        """The layout that the output is stored in; None if weights stay dense."""
        return None if self.layout is None else LAYOUTS[self.layout]

    @property
    def schemes(self) -> list[Scheme]:
        """All schemes that linears may get."""
        return [goal for goal in (self.scheme, *(scheme for _, scheme in self.overrides)) if isinstance(goal, Scheme)]

    @property
    def descends_by_default(self) -> bool:
        """Whether descent has the passes that it has by default (ALGORITHMS 0)."""
        return self.gptq.descent == (DESCENT if _refined_by_default(self.method, self.schemes) else 0)

    def scheme_of(self, module: str) -> Goal | None:
        """Return the goal of the linear called `module`, None if it is skipped."""
        if any(matches(pattern, module) for pattern in self.skip):
            return None
        return next((scheme for pattern, scheme in self.overrides if matches(pattern, module)), self.scheme)

    def to_mapping(self) -> dict[str, Any]:
        """Return the mapping from which `from_mapping`, or `pruning_from_mapping`, makes an equal recipe."""
        if not isinstance(self.scheme, Scheme):
            return {
                "method": self.method,
                "gptq": {name: getattr(self.gptq, name) for name in PRUNING_KEYS},
                "true_sequential": self.true_sequential,
                "calibration": self.calibration.to_mapping(),
                "skip": list(self.skip),
            }
        return {
            "scheme": {
                "format": self.scheme.format.name,
                "group_size": self.scheme.group_size or "channel",
                "symmetric": self.scheme.symmetric,
                **({"sparsity": self.scheme.sparsity} if self.scheme.sparsity else {}),
            },
            **({"prune": self.prune} if self.prune else {}),
            "method": self.method,
            "clip": self.clip,
            "metric": self.metric,
            "signed": self.signed,
            "gptq": {name: getattr(self.gptq, name) for name in GPTQ_KEYS},
            **({"output_aware": True} if self.output_aware else {}),
            **({"tune": self.tune} if self.tune else {}),
            "true_sequential": self.true_sequential,
            **({"distill": self.distill} if self.distill else {}),
            **({"distill_codes": True} if self.distill_codes else {}),
            "calibration": self.calibration.to_mapping(),
            "layout": self.layout,
            "pad": self.pad,
            **({"fused_alike": True} if self.fused_alike else {}),
            "skip": list(self.skip),
            "overrides": {pattern: scheme.label for pattern, scheme in self.overrides},
        }

    def to_yaml(self) -> str:
        """Return the recipe as a YAML file."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False)

    def sha256(self) -> str:
        """Return the hash that names this recipe in reports and journals."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()


def goal_of(recipe: Recipe, name: str, path: str) -> Goal | None:
    """Return the goal of a linear, None if it is skipped.

    A recipe may call it by its `name` in the checkpoint or its `path` in the model, which differ in a few families.
    """
    by_path, by_name = recipe.scheme_of(path), recipe.scheme_of(name)
    return None if by_path is None or by_name is None else by_path if by_name == recipe.scheme else by_name


def goals_of(recipe: Recipe, paths: Mapping[str, str], kept_dense: Mapping[str, str]) -> dict[str, Goal | None]:
    """Return the goal of every linear, by its name in the checkpoint; None for one that stays dense.

    `paths`: name -> path in the model. `kept_dense`: name -> reason, of matrices that stay dense, linears or not; an
    override that matches no other linear is for them. RecipeError if such an override names a router.
    """
    goals = {name: goal_of(recipe, name, path) for name, path in paths.items() if name not in kept_dense}
    named: dict[str, Goal] = {}
    for pattern, scheme in recipe.overrides:
        if any(matches(pattern, each) for name in goals for each in (name, paths[name])):
            continue
        for name, why in kept_dense.items():
            if not matches(pattern, name) and not matches(pattern, paths.get(name, name)):
                continue
            if name not in paths or why == ROUTER:
                raise RecipeError(f"override {pattern!r} names {name}, {why}, which stays dense: drop the override")
            named.setdefault(name, scheme)
    goals |= {name: named.get(name) for name in kept_dense}
    return treat_alike(goals) if recipe.fused_alike else goals


def without_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with the names of its calibration files in the place of their paths."""
    data = recipe.calibration.data
    names = name_of_text(data) if isinstance(data, str) else tuple(map(name_of_text, data))
    return dataclasses.replace(recipe, calibration=dataclasses.replace(recipe.calibration, data=names))


def stored_shape(recipe: Recipe, goal: Goal, n: int, k: int) -> tuple[int, int]:
    """Return the stored shape of an `[n, k]` weight: its own, or the padded one if the recipe pads.

    If no shape fits, it is the weight's own; the plan then refuses the weight.
    """
    layout = recipe.output_layout
    if layout is None or not isinstance(goal, Scheme):
        return n, k
    return fitting(layout, goal, n, k, pad=recipe.pad) or (n, k)


def matches(pattern: str, module: str) -> bool:
    """Return whether a skip or override pattern matches the name `module`, or its end after a dot.

    CheckpointError if that takes too long.
    """
    return expressions.matches(rf"(?:.*\.)?(?:{pattern})", module)


def pruning_from_mapping(mapping: Mapping[str, Any]) -> Recipe:
    """Read a recipe that prunes; RecipeError names an unknown key or a wrong value."""
    _refuse_unknown(mapping, ("method", "gptq", "true_sequential", "calibration", "skip"), "the options of prune")
    rule = _choice(mapping, "method", Rule, "sparsegpt")
    return Recipe(
        scheme="2:4",
        method=rule,
        clip="none",
        metric="mse",
        layout=None,
        prune=rule,
        gptq=_build(Options, _section(mapping, "gptq"), PRUNING_KEYS, "gptq", prune=rule),
        **_shared(mapping),
    )


def _shared(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Read the keys that quantizing and pruning share: order of work, calibration text, skipped linears."""
    return {
        "true_sequential": _typed(mapping.get("true_sequential", True), bool, "true_sequential"),
        "calibration": _calibration(_section(mapping, "calibration")),
        "skip": tuple(_pattern(p) for p in _typed(mapping.get("skip", ["lm_head"]), list, "skip")),
    }


def _calibration(section: Mapping[str, Any]) -> Calib:
    _refuse_unknown(section, CALIBRATION_KEYS, "calibration")
    data = section.get("data", Calib.data)
    sources = tuple(_typed(s, str, "calibration.data") for s in (data if isinstance(data, (list, tuple)) else [data]))
    if not sources:
        raise RecipeError("calibration.data is an empty list: name a data set or file, or leave it out")
    columns = {k: _typed(section[k], str, f"calibration.{k}") for k in COLUMN_KEYS if section.get(k) is not None}
    return _build(  # type: ignore[no-any-return]
        Calib,
        {key: value for key, value in section.items() if key not in ("data", *COLUMN_KEYS)},
        CALIBRATION_KEYS,
        "calibration",
        data=sources[0] if len(sources) == 1 else sources,
        chosen="data" in section,
        **columns,
    )


def _prune_rule(mapping: Mapping[str, Any], method: Method, schemes: list[Scheme]) -> Rule | None:
    """Return the rule for 2:4 masks, None if no scheme is 2:4."""
    if not any(is_sparse(scheme) for scheme in schemes):
        if mapping.get("prune") is not None:
            raise RecipeError(
                "--prune-method is for 2:4, which is not asked for: add --prune 2:4, or drop --prune-method"
            )
        return None
    rule: Rule = _choice(mapping, "prune", Rule, "sparsegpt" if method == "gptq" else "magnitude")
    if method == "rtn":
        check_fixed(rule)
    return rule


def _refined_by_default(method: Method | Rule, schemes: list[Scheme]) -> bool:
    """Return whether signed scales and descent are the default: by GPTQ, if all linears are dense symmetric INT4."""
    return method == "gptq" and all(s.symmetric and not s.format.is_float and not is_sparse(s) for s in schemes)


def from_mapping(mapping: Mapping[str, Any]) -> Recipe:
    """Read a recipe, with the defaults of its format; RecipeError names an unknown key or a wrong value."""
    known = [f.name for f in dataclasses.fields(Recipe)]
    _refuse_unknown(mapping, known, "the recipe")
    scheme = _scheme(_section(mapping, "scheme"))
    integer = not scheme.format.is_float
    method = _choice(mapping, "method", Method, "gptq" if integer else "rtn")
    clip = _choice(mapping, "clip", Clip, "search" if integer or method == "gptq" else "none")
    metric = _choice(mapping, "metric", Metric, "block" if method == "gptq" else "mse")
    overrides = tuple((_pattern(p), Scheme.parse(_typed(s, str, p))) for p, s in _section(mapping, "overrides").items())
    schemes = [scheme, *(other for _, other in overrides)]
    refined = _refined_by_default(method, schemes)
    signed = _typed(mapping.get("signed", refined), bool, "signed")
    prune = _prune_rule(mapping, method, schemes)
    fixed = {"clip": clip, "metric": metric, "signed": signed, **({"prune": prune} if prune else {})}
    section = {"descent": DESCENT if refined else 0, **_section(mapping, "gptq")}
    gptq = _build(Options, section, GPTQ_KEYS, "gptq", **fixed)
    if method != "gptq" and (gptq.refit or gptq.descent):
        raise RecipeError(
            f"--refit and --descent refine the codes of gptq, the method is {method}: use --method gptq, or drop them"
        )
    tune = _typed(mapping.get("tune", 0), int, "tune")
    if tune < 0:
        raise RecipeError(f"tune is {tune}: use 0 for none, or 200 steps")
    if method != "gptq" and tune:
        raise RecipeError(
            f"--tune starts from the codes of gptq, the method is {method}: use --method gptq, or drop --tune"
        )
    output_aware = _typed(mapping.get("output_aware", False), bool, "output_aware")
    if method != "gptq" and output_aware:
        raise RecipeError(
            f"--output-aware weighs the errors of gptq, the method is {method}: use --method gptq, or drop it"
        )
    # The humming layout stores formats in their true bits, and engines read it.
    layout = mapping.get("layout", scheme.format.layout)
    require_known("layout", layout, LAYOUTS)
    for each in schemes:
        check_signed(each, signed)
    distill = _typed(mapping.get("distill", 0), int, "distill")
    codes = _typed(mapping.get("distill_codes", False), bool, "distill_codes")
    if distill < 0:
        raise RecipeError(f"distill {distill} is negative: use 0 for none, or some hundred steps")
    if codes and not distill:
        raise RecipeError("--distill-codes is for --distill, which is off: add --distill 200, or drop --distill-codes")
    return Recipe(
        scheme=scheme,
        method=method,
        clip=clip,
        metric=metric,
        gptq=gptq,
        layout=layout,
        pad=_typed(mapping.get("pad", False), bool, "pad"),
        fused_alike=_typed(mapping.get("fused_alike", False), bool, "fused_alike"),
        signed=signed,
        prune=prune,
        output_aware=output_aware,
        tune=tune,
        distill=distill,
        distill_codes=codes,
        overrides=overrides,
        **_shared(mapping),
    )


def gptq_of(scheme: Scheme) -> dict[str, Any]:
    """Return the mapping of the recipe that quantizes to a scheme by GPTQ with the default settings."""
    return {
        "scheme": {
            "format": scheme.format.name,
            "group_size": scheme.group_size or "channel",
            "symmetric": scheme.symmetric,
            "sparsity": scheme.sparsity,
        },
        "method": "gptq",
    }


def load(path: Path) -> dict[str, Any]:
    """Read the mapping of a recipe file; RecipeError if it is no YAML mapping or repeats a key."""
    try:
        with path.open(encoding="utf-8") as file:  # yaml names the file in its messages
            mapping = yaml.load(file, Loader=_StrictLoader)
    except OSError as error:
        raise RecipeError(f"{path}: cannot read the recipe ({error.strerror}): give the path of a YAML file") from error
    except Exception as error:  # yaml also raises errors of int(), date() and recursion
        raise RecipeError(
            f"{path}: not a YAML recipe ({reason(error)}): compare with quantize --print-recipe"
        ) from error
    if not isinstance(mapping, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys: compare with quantize --print-recipe")
    return mapping


def merge(base: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `flags` merged over it, section by section; flags that are None change nothing."""
    merged = dict(base)
    for key, value in flags.items():
        if isinstance(value, Mapping):
            inner = merge(_section(merged, key), value)
            if inner:
                merged[key] = inner
        elif value is not None:
            merged[key] = value
    return merged


class _StrictLoader(yaml.SafeLoader):
    """Refuse repeated keys, which the standard loader resolves silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key is repeated", node.start_mark)
        return mapping


def _scheme(section: Mapping[str, Any]) -> Scheme:
    _refuse_unknown(section, SCHEME_KEYS, "scheme")
    name = section.get("format", "int4")
    if not isinstance(name, str) or name not in FORMATS:
        raise RecipeError(f"unknown format {name!r}: use one of {', '.join(FORMATS)}")
    fmt = FORMATS[name]
    group_size = section.get("group_size", fmt.group_size or "channel")
    group_size = None if group_size in ("channel", None) else _typed(group_size, int, "group_size")
    symmetric = _typed(section.get("symmetric", True), bool, "symmetric")
    sparsity = section.get("sparsity")
    if sparsity not in (None, "2:4"):
        raise RecipeError(f"sparsity is {sparsity!r}: use '2:4' (quoted, YAML reads 2:4 as a number), or leave it out")
    return Scheme(fmt, group_size, symmetric, sparsity)


def _build(cls: Any, section: Mapping[str, Any], keys: Any, where: str, **fixed: Any) -> Any:
    """Make a dataclass `cls` from a section; check each value against the type of its field."""
    _refuse_unknown(section, keys, where)
    hints = get_type_hints(cls)
    values = {}
    for key, value in section.items():
        choices = get_args(hints[key])
        values[key] = (
            _choice(section, key, hints[key], value) if choices else _typed(value, hints[key], f"{where}.{key}")
        )
    return cls(**values, **fixed)


def _choice(mapping: Mapping[str, Any], key: str, choices: Any, default: str) -> Any:
    value = mapping.get(key, default)
    if value is False and "off" in get_args(choices):
        return "off"  # YAML reads an unquoted off as False
    if value not in get_args(choices):
        raise RecipeError(f"{key} is {value!r}: use one of {', '.join(get_args(choices))}")
    return value


def _typed(value: Any, kind: type, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise RecipeError(f"{where} is {value!r}: it must be of type {kind.__name__}")
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):  # a file name that is not UTF-8
        raise RecipeError(f"{where} is {value!r}: it goes into the report, which is UTF-8: rename it")
    return value


def _pattern(pattern: Any) -> str:
    try:
        # Alone, so that positions in a message are the user's.
        expressions.compiled(_typed(pattern, str, "a skip or override pattern"))
        matches(pattern, "")
    except ValueError as error:
        raise RecipeError(f"{pattern!r} is not a regular expression ({error}): write it like '.*k_proj'") from error
    return str(pattern)


def _section(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = {} if mapping.get(key) is None else mapping[key]
    if not isinstance(section, Mapping):
        raise RecipeError(f"{key} is {section!r}: it must be a section of keys")
    return section


def _refuse_unknown(mapping: Mapping[str, Any], known: Any, where: str) -> None:
    unknown = [str(key) for key in mapping if key not in known]
    if unknown:
        raise RecipeError(f"unknown key {unknown[0]!r} in {where}: known are {', '.join(known)}")
