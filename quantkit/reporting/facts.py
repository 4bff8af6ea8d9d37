"""The facts of a report in words, shared by the closing table and the model card."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from quantkit.checkpoint.report import ROW_SUM, WORDS
from quantkit.core.threads import grouped
from quantkit.core.units import counted, format_bytes
from quantkit.engines.tables import BY_QUANTKIT, UNTRIED
from quantkit.errors import FILE, Setting, Words, more_samples
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import key_of
from quantkit.names import JsonView
from quantkit.reporting import layer_errors as errors

#: Meaning of each fact of a layer that is an event; closing table and model card count every one.
EVENTS = {
    "restated_from": "hold the same values in another scheme, before it was",
    "requantized_from": "were rounded a second time, which is lossy, from",
    "rungs": "needed more damping than asked",
    "reason": "were rounded to nearest although the recipe calibrates",
    "by_magnitude": "were pruned by magnitude although the method calibrates",
    "dead_columns": (
        "have input channels that no calibration token reached (kept, rounded to nearest)"
    ),
    "few_routed": (
        "belong to experts that see too few tokens, and were calibrated on all tokens of their "
        "layer"
    ),
    "guard_rows": "have rows where rounding was better than GPTQ and was kept",
    "raised_scales": (
        "have rows with larger scales, so that vLLM's Humming kernels can hold their sums in "
        "float16"
    ),
    "floored_scales": "have scales raised to 2^-20",
    "subnormal_scales": "have scales below the normal float16 range",
    "zeroed": "have weights that became 0, below 2^-20 of the largest of their group",
    "zero_scales": "have rows whose stored scale is 0",
    "all_zero": "are 0 throughout in the source, as a broken merge leaves them",
}
#: The scheme that is suggested for embeddings and heads: the least loss of the usual ones.
SAVING = "int8:channel"
#: The least ratio in a geometric mean.
_TINY = 1e-9
_COUNTED = re.compile(r"(\d+) tokens for (\d+) input channels")


def schemes(report: JsonView) -> str:
    """Name the scheme of the linears; if there are several, each with its number of linears.
    Embeddings and heads are named.
    """
    counts = Counter(
        (str(layer["scheme"]), layer["name"].rpartition(".")[2] if key_of(layer["name"]) else "")
        for layer in report.get("layers", [])
        if "scheme" in layer
    )
    if len(counts) < 2:
        return str(report.get("scheme"))
    return " + ".join(
        f"{scheme} ({leaf or count})" for (scheme, leaf), count in counts.most_common()
    )


def same_values(report: JsonView) -> tuple[str, str]:
    """Say how many packed weights a conversion left with the same values; ("", "") if nothing was
    converted.
    """
    same, count = report.get("same_values"), len(report.get("layers", []))
    if same is None:
        return "", ""
    return (
        "lossless" if same == count else "lossy",
        f"{same} of {count} tensors represent the same values",
    )


def sizes(totals: JsonView) -> str:
    """Describe the bytes before and after, and the bits per weight."""
    bits, before, after = (totals.get(key) for key in ("bits_per_weight", "source_bytes", "bytes"))
    parts = [
        f"{format_bytes(before)} before, {format_bytes(after)} after" if before and after else "",
        f"{bits:.3f} bits per quantized weight with scales" if bits else "",
    ]
    return ", ".join(filter(None, parts))


def dense(totals: JsonView) -> str:
    """Describe the tensors that stay dense, the largest by name, empty if the report
    does not know.
    """
    size, bits, largest = (
        totals.get(key) for key in ("dense_bytes", "dense_bits", "dense_largest")
    )
    if not isinstance(size, int) or not size or not isinstance(largest, Mapping):
        return ""
    named = [
        f"{name} {format_bytes(count)}" for name, count in largest.items() if isinstance(count, int)
    ]
    tied = ["the head is tied to it"] if totals.get("tied_head") else []
    return f"{format_bytes(size)} of it, in {bits} bits: {', '.join([*named, *tied])}"


def explained_size(report: JsonView) -> Iterator[str]:
    """Explain an output that is larger than its source, and one of which dense tensors outside the
    blocks take over a quarter.
    """
    totals = report.get("totals", {})
    before, after, bits = (
        errors.number(totals.get(key)) for key in ("source_bytes", "bytes", "dense_bits")
    )
    if not before or not after:
        return
    if after > 1.01 * before:
        low_bit = (report.get("source") or {}).get("weights")
        why, way = "scales are stored beside the codes", "use fewer bits"
        if low_bit or same_values(report)[0] == "lossy":
            why = f"whose weights have few bits already{f' ({low_bit})' if low_bit else ''}"
            way = "quantize the original model, or keep the source where only its size counts"
        elif same_values(report)[0] == "lossless":
            why, way = "which holds the same values", "convert only for a reader that needs it"
        ratio = f"{after / before:.2f} times as large as its source"
        yield f"the output is {ratio}, {why}: {way}"
    outside = {
        str(name): size
        for name, size in (totals.get("dense_largest") or {}).items()
        if ".N." not in str(name) and isinstance(size, int)
    }
    part = sum(outside.values())
    if bits and part > after / 4:
        gathers = getattr(LAYOUTS.get(report.get("layout", "")), "GATHERS", False)
        packable = {
            name: Setting(key, SAVING)
            for name in outside
            if (key := key_of(name)) and (gathers or key == "head")
        }
        ways: list[Any] = ["in a larger model this part is smaller"]
        if packable:
            less = format_bytes(round((1 - 8 / bits) * sum(map(outside.__getitem__, packable))))
            for_whom = f"to save {less}, for readers that open them"
            ways = ["quantize with", *dict.fromkeys(packable.values()), for_whom]
        if bits > 16:
            ways = ["store them in half the space with", Setting("dense_dtype", "bfloat16")]
        verb = "take" if len(outside) > 1 else "takes"
        what = f"{' and '.join(outside)} {verb} {100 * part / after:.0f} % of the output, in"
        yield Words(f"{what} {bits:.0f} bits:", *ways)


def share(report: JsonView) -> str:
    """Describe how much of the decoder is quantized or pruned, empty if the report does
    not know.
    """
    found = report.get("totals", {}).get("share")
    return "" if found is None else f"{100 * found:.2f} % of the decoder's weights"


def readers(report: JsonView) -> list[tuple[str, str]]:
    """List the programs that load the folder: tried on it before it was published, known to, and
    said to by their documentation.
    """
    labels = [str(reader) for reader in report.get("readers", [])]
    untried = [label.removesuffix(UNTRIED) for label in labels if label.endswith(UNTRIED)]
    known = [label for label in labels if not label.endswith(UNTRIED)]
    tried = [str(reader) for reader in report.get("opened_by", [])]
    here = [next((label for label in known if label.startswith(name)), name) for name in tried]
    others = ", ".join(label for label in known if label not in here)
    if here:
        others = "; ".join(filter(None, [f"{', '.join(here)}, tried on this folder", others]))
    elif "opened_by" in report:
        others = "; ".join(filter(None, [others, "none was tried on this folder, see the notes"]))
    by_pages = f"{', '.join(untried)}: by documentation, not tried" if untried else ""
    return [("loads in", others), ("perhaps in", by_pages)]


def methods(layers: Iterable[JsonView]) -> str:
    """List the methods of the linears."""
    return (
        ", ".join(sorted({str(layer["method"]) for layer in layers if layer.get("method")}))
        or "as in the source"
    )


def weight_error(layers: Sequence[JsonView]) -> str:
    """Describe the mean and the worst relative error of the weights, empty if no layer has it."""
    found = errors.worst(layers, errors.weight_error, len(layers))
    if not found:
        return ""
    worst, layer = found[0]
    mean = sum(value for value, _ in found) / len(found)
    return f"relative, mean {mean:.4g}, worst {worst:.4g} ({layer.get('name')})"


def sparsity(layers: Iterable[JsonView]) -> str:
    """Describe the 2:4 pruning, empty if no layer was pruned."""
    pruned = [layer for layer in layers if layer.get("zeros") is not None]
    zeros, kept = (sum(layer.get(key) or 0 for layer in pruned) for key in ("zeros", "kept"))
    rules = ", ".join(sorted({str(layer.get("prune") or layer.get("method")) for layer in pruned}))
    share = f"{100 * zeros / max(1, zeros + kept):.2f} % of their weights are zero"
    return (
        f"{len(pruned)} linears by {rules}, {share}, at most two of four are not" if pruned else ""
    )


def ratios(layers: Iterable[JsonView], over: str = "rtn_loss") -> list[tuple[float, str]]:
    """List (loss / `over`, name) of each layer that has both figures; `rtn_loss` is the loss of
    rounding to nearest.
    """
    return [
        (float(layer["loss"]) / float(layer[over]), str(layer.get("name")))
        for layer in layers
        if layer.get("loss") is not None and layer.get(over)
    ]


def losses(layers: Iterable[JsonView]) -> str:
    """Describe the output losses relative to rounding to nearest, or to the outputs of a pruned
    model.
    """
    found, whose = ratios(layers), "rounding's"
    if not found:  # a pruned model was not rounded
        found, whose = ratios(layers, "norm"), "the outputs' own squares"
    if not found:
        return ""
    worst, name = max(found)
    return (
        f"{sum(r for r, _ in found) / len(found):.3f} of {whose} on average, worst {worst:.3f} "
        f"({name})"
    )


def held_out(layers: Iterable[JsonView]) -> str:
    """Describe the losses on text that did not calibrate, relative to rounding's, by source."""
    means = (
        f"{source} {math.exp(sum(math.log(max(r, _TINY)) for r, _ in found) / len(found)):.3f}"
        for source, found in _by_source(layers).items()
    )
    text = ", ".join(means)
    return text and f"{text} of rounding's, in the geometric mean over linears"


def tuned_scales(report: JsonView) -> str:
    """Describe the tuning of the scales of the whole model; losses are of before."""
    found = report.get("tuned_scales")
    if not found or "reason" in found:
        return f"unchanged: {found['reason']}" if found else ""
    text = f"divergence on held-out sequences {found['before']:.4g}"
    if not found["steps"]:
        return f"{text}, which tuning the whole model did not lower: unchanged"
    return f"{text}, after {found['steps']} steps on the whole model {found['after']:.4g}"


def _by_source(layers: Iterable[JsonView]) -> dict[str, list[tuple[float, str]]]:
    """List (ratio, name) of the linears for each held-out source, the worst first."""
    found = grouped(
        (source, (ratio, str(layer.get("name"))))
        for layer in layers
        for source, ratio in layer.get("held_out", {}).items()
    )
    return {source: sorted(each, reverse=True) for source, each in found.items()}


def _behind(layers: Iterable[JsonView]) -> Iterator[str]:
    """Warn of the linears that are behind rounding on a held-out source, in one line for each."""
    for source, found in _by_source(layers).items():
        names = [f"{name} {ratio:.2f}" for ratio, name in found if ratio > 1]
        if names:
            yield Words(
                f"{len(names)} of {len(found)} linears are behind rounding on {source}:",
                f"{_listed(names)}; if such text matters, add it with",
                Setting("calib", FILE),
            )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


def protocol(report: JsonView) -> str:
    """Describe the calibration text."""
    facts = report.get("calibration") or {}
    if not facts:
        return "None: every weight was done by itself, no text was read."
    text = (
        f"{facts.get('sequences', '?')} sequences, {facts.get('tokens', '?')} tokens of "
        f"{facts.get('source', '?')}"
        f" ({facts.get('rule', 'unknown rule')}), lengths {facts.get('lengths', '?')} up to"
        f" {facts.get('max_length', '?')}, seed {facts.get('seed', '?')}"
    )
    parts = [f"{text}; {facts.get('cut', 0)} documents cut, {facts.get('skipped', 0)} skipped"]
    sources = facts.get("sources", [])
    for each in sources if len(sources) > 1 else []:
        share, digest = 100 * (each.get("share") or 0), str(each.get("sha256", "?"))[:16]
        name, sequences, tokens = (each.get(key, "?") for key in ("source", "sequences", "tokens"))
        parts.append(
            f"{share:.4g} % of them from {name}: {sequences} sequences, {tokens} tokens, SHA-256 "
            f"{digest}"
        )
    return "; ".join(parts)


def fit(report: JsonView) -> str:
    """Describe the choice of schemes for a target size, empty if there was no target."""
    found = report.get("fit", {})
    kld, size, bits = found.get("kld", {}), found.get("target_size"), found.get("target_bits")
    if not kld or not (size or bits):
        return ""
    asked = format_bytes(size) if size else f"{bits:g} bits per weight"
    held = found.get("held_out", {})
    judged = ", ".join(f"{name} {value:.6f}" for name, value in kld.items())
    if found.get("best_uniform") is None:
        judged += "; no uniform scheme fits"
    return (
        f"{asked} asked, {found.get('chosen')} chosen: KL divergence on {held.get('tokens', '?')} "
        f"held-out tokens of {held.get('source', '?')}: {judged}"
    )


def evaluation(report: JsonView) -> str:
    """Describe perplexity before and after, the KL divergence and their protocol, empty if nothing
    was evaluated.
    """
    found = report.get("evaluation", {})
    before, after, kld, top1 = (found.get(key) for key in ("before", "after", "kld", "top1"))
    if not before or not after or kld is None or top1 is None:
        return ""
    more = ", ".join(f"{label} {value}" for label, value in tails(found))
    rule = f" ({found['bos_rule']})" if found.get("bos_rule") else ""
    windows = counted(found.get("windows", "?"), "window")
    pieces = (
        f"the first {windows} of {found.get('window', '?')} tokens "
        f"{'with' if found.get('bos') else 'without'} BOS{rule}"
    )
    return (
        f"perplexity {before:.4f} before, {after:.4f} after ({100 * (after / before - 1):+.2f} %), "
        f"KL divergence {kld:.6f} nats{f' ({more})' if more else ''}, top-1 agreement "
        f"{100 * top1:.2f} %, on {found.get('data', '?')}: {pieces}, {found.get('tokens', '?')} "
        f"predictions; {found.get('weights', 'unknown products')}"
    )


def tails(found: JsonView) -> list[tuple[str, str]]:
    """List the interval and the tails of a KL divergence in nats, each with its label. Older
    reports have none.
    """
    low, high = found.get("kld_low"), found.get("kld_high")
    shown = {} if low is None or high is None else {"95 % interval": f"{low:.6f} to {high:.6f}"}
    quantiles = {"median": "kld_median", "p99": "kld_p99", "p99.9": "kld_p999"}
    shown |= {
        label: f"{found[key]:.6f}" for label, key in quantiles.items() if found.get(key) is not None
    }
    if found.get("kld_above") is not None:
        shown["above 0.1 nat"] = f"{100 * found['kld_above']:.3f} %"
    return list(shown.items())


def left_out(report: JsonView) -> str:
    """List the files of the source that did not go along, empty if there are none."""
    names = [str(name) for name in report.get("left_out", [])]
    return f"{_listed(names)}: no data that belongs to these weights" if names else ""


def events(report: JsonView) -> list[str]:
    """List one line for each notice, for the dense linears, and for each kind of event."""
    found = [str(notice) for key in ("layout_notices", "notices") for notice in report.get(key, [])]
    dense = [str(name) for name in report.get("dense", [])]
    if dense:
        found.append(f"left dense: {_listed(dense)}")
    layers = report.get("layers", [])
    for fact, meaning in EVENTS.items():
        hit = [layer for layer in layers if _count(fact, layer.get(fact))]
        if hit:
            total = (
                hit[0][fact] if fact in WORDS else sum(_count(fact, layer[fact]) for layer in hit)
            )
            line = f"{len(hit)} of {len(layers)} linears {meaning}: {total}, first {hit[0]['name']}"
            found.append(Words(line, *_way_out(fact, hit, report.get("calibration") or {})))
    return [*found, *_behind(layers), *_row_sums(layers, len(layers))]


def _row_sums(layers: Iterable[JsonView], count: int) -> list[str]:
    """Warn in one line of sums near the most that vLLM's kernel holds, if any of `count` layers has
    them (ROW_SUM).
    """
    hit = [(layer, found) for layer in layers if (found := errors.number(layer.get(ROW_SUM)))]
    if not hit:
        return []
    layer, most = max(hit, key=lambda each: each[1])
    ways: list[Any] = [f"serve it with vLLM's {BY_QUANTKIT} or use", Setting("layout", "tcfpx")]
    if not all(str(layer.get("scheme")).startswith("fp") for layer, _ in hit):
        ways = ["quantize in groups, like", Setting("group_size", 64)]
    what = (
        f"{len(hit)} of {count} linears sum to {most:.0f} before a row's scale is applied (worst "
        f"{layer['name']});"
    )
    why = "vLLM's Humming kernels hold at most 65504 there in float16, and give NaN beyond:"
    return [Words(what, why, *ways)]


def _way_out(fact: str, hit: Iterable[JsonView], calibration: JsonView) -> list[str]:
    """Compute the number of samples with which each expert would see a token for each channel, from
    the facts of a report.
    """
    if fact != "few_routed":
        return []
    counted = [_COUNTED.match(str(layer[fact])) for layer in hit]
    ratios = [Fraction(int(each[2]), int(each[1])) for each in counted if each and int(each[1])]
    sequences = calibration.get("sequences")
    if not ratios or not isinstance(sequences, int):
        return []
    most = max(ratios)
    texts = calibration.get("sources", [])
    held = sum(each["documents"] for each in texts) if texts else None
    return [":", more_samples(sequences, most.denominator, most.numerator, held)]


def _count(fact: str, value: Any) -> int:
    """Count how often an event happened; of the dampings tried, the first is no event, and a text
    counts once.
    """
    if isinstance(value, list):
        return max(0, len(value) - (fact == "rungs"))
    return int(bool(value)) if isinstance(value, str) else int(value or 0)
