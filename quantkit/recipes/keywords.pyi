"""The keywords of the API, typed for editors: made from the schema by `make docs`; do not edit."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

class Settings(TypedDict, total=False):
    """The options of a run."""

    revision: str | None
    device: str
    resume: bool
    overwrite: bool
    trust_remote_code: bool
    act_budget: int | None
    min_share: float

class FitKeywords(TypedDict, total=False):
    """The options of a target size."""

    target_size: int | None
    target_bits: float | None
    allowed: str | None
    target: str | None

class SharedKeywords(TypedDict, total=False):
    """The keys of recipes that `prune` has too."""

    damp: float | None
    damp_kind: Literal["median", "own", "mean"] | None
    act_order: Literal["static", "off"] | None
    true_sequential: bool | None
    calib: str | Path | Iterable[str | Path] | None
    samples: int | None
    max_length: int | None
    calib_tokens: int | None
    seed: int | None
    lengths: Literal["own", "fixed"] | None
    moe_calibration: Literal["routed", "all"] | None
    text_column: str | None
    split: str | None
    template_args: Mapping[str, Any] | None
    skip_bad_records: int | None
    dense_dtype: Literal["bfloat16", "float16"] | None
    skip: str | Iterable[str] | None

class RecipeKeywords(SharedKeywords, total=False):
    """The keys of a recipe; None leaves the recipe's value."""

    format: str | None
    group_size: int | Literal["channel"] | None
    asym: bool | None
    prune: Literal["2:4"] | None
    prune_method: Literal["magnitude", "wanda", "sparsegpt"] | None
    method: Literal["gptq", "rtn"] | None
    clip: Literal["none", "search"] | None
    metric: Literal["mse", "diag", "block"] | None
    signed: bool | None
    on_unsolvable: Literal["stop", "rtn"] | None
    refit: bool | None
    descent: int | None
    output_aware: bool | None
    tune: int | None
    tune_scales: int | None
    layout: str | None
    pad: bool | None
    fused_alike: bool | None
    override: Mapping[str, str] | None
    embeddings: str | None
    head: str | None

class PruningKeywords(SharedKeywords, total=False):
    """The keys of `prune`; None leaves the default."""

    method: Literal["magnitude", "wanda", "sparsegpt"] | None

class LoadKeywords(TypedDict, total=False):
    """The options of loading a model."""

    device: str
    revision: str | None
    trust_remote_code: bool
    check: bool

class PlanOnlyKeywords(TypedDict, total=False):
    """The options of a plan for another machine."""

    gpu: str | None
    gpu_memory: int | None
    probe: bool

class PackKeywords(TypedDict, total=False):
    """The options of `pack` and `convert`."""

    pad: bool
    requantize: bool
    requantize_scales: bool
    max_shard_size: int
    overwrite: bool
    trust_remote_code: bool

class VerifyKeywords(TypedDict, total=False):
    """The options of `verify`."""

    device: str
    unsealed: bool
    engine: Literal["vllm"] | None
    engine_args: Mapping[str, Any] | None
    trust_remote_code: bool

class TextKeywords(LoadKeywords, total=False):
    """The options of `eval_ppl` and `eval_kld`."""

    data: str | Path
    tokens: int | None
    window: int | None
    stride: int | None
    bos: bool | None

class TaskKeywords(LoadKeywords, total=False):
    """The options of `eval_tasks`."""

    data: str | Path | None
    against: str | Path | None
    limit: int | None
    shots: int | None
    chat_template: bool
    seed: int
    batch_size: int
    journal: str | Path | None

class CompareKeywords(TypedDict, total=False):
    """The options of `compare`."""

    device: str
    calib: str | Iterable[str]
    seeds: Iterable[int]
    text: str | Iterable[str]
    window: int | None
    tokens: int | None
    tasks: str | Iterable[str]
    data: str | Path | None
    shots: int | None
    limit: int | None
    batch_size: int
    revision: str | None
    trust_remote_code: bool

class QuantizeKeywords(RecipeKeywords, FitKeywords, Settings, total=False):
    """The keywords of `quantize`."""

class PruneKeywords(PruningKeywords, Settings, total=False):
    """The keywords of `prune`."""

class PlanKeywords(RecipeKeywords, FitKeywords, PlanOnlyKeywords, Settings, total=False):
    """The keywords of `plan`."""
