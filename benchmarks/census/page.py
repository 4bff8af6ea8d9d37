"""docs/models.md from the rows of a census: python -m benchmarks.census.page census.json docs/models.md."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.census import drafts
from benchmarks.census.engine import OK, is_refusal
from benchmarks.census.run import METHODS

SHARE = 0.98
PAGE = """# Model families

Generated on {date} by `make census`, with quantkit {quantkit}, transformers {transformers}, torch {torch} and
compressed-tensors {compressed_tensors}. The raw file is `benchmarks/census.json`.

For each family of causal LMs and image-text models that transformers knows, and for encoder-decoders of text and
Whisper, a tiny model with random weights is quantized to INT4 in groups of 64, in the layout compressed-tensors, or
awq where transformers would read that with random weights. `:seq2seq` ends the name of an encoder-decoder whose model
type has a causal LM too. A model has two blocks, or one of each kind, of width 128, and a draft layer (MTP) where the
configuration counts some or released models have some: {drafted} families. Released checkpoints of a family can differ
from its default configuration, and no accuracy is measured here.

- **RTN**, **GPTQ**: the share of the decoder's weights that is quantized. Matrices and experts of its blocks count if
  they have 64 rows and columns. Embeddings, `lm_head`, convolutions, routers, towers, draft layers, block-diagonal
  matrices and an indexer's `wk`, which engines keep dense, do not. The layout is named if it is not compressed-tensors.
- **layouts**: those that hold every linear, in INT4 or FP6 as each layout has it.
- **opens in**: the readers that give the same logits as transformers gives for the same values stored dense in float32:
  `quantkit.load`, and transformers with its own compressed-tensors loader. "Same" means that logits differ by at most
  {tolerance:g} of their standard deviation.
{engine}

{summary}
"""
ASKED = """\
- **vLLM**: whether vLLM {vllm} takes the output of RTN. Its configuration, model class and loader run on a CPU, with
  transformers {vllm_transformers}; nothing is computed. Kinds of layers that this transformers does not know are taken
  out of config.json before. "No class": vLLM has no class of its own that generates with this family. "Too new": that
  transformers does not know the family. "Refused, dense too": vLLM refuses the dense tiny model as well. Then the tiny
  model or this environment is the reason, and nothing is known of the output. "+ embeddings", "+ head": it also opens
  packed embeddings that are not the head too, or a packed head. It opens no family with embeddings that are both.
  "+ tied, with quantkit": quantkit's plug-in serves these; few families were asked."""
READERS = """## Readers that were asked

| reader | version | what was asked | of | date |
|---|---|---|---|---|
| `quantkit.load` | {quantkit} | equal logits | each family, RTN and GPTQ | {date} |
| transformers with compressed-tensors | {transformers}, {compressed_tensors} | equal logits | the same | {date} |
"""
READER_VLLM = """\
| vLLM | {vllm}, transformers {vllm_transformers} | its loader on a CPU | each output of RTN | {vllm_date} |
"""
READER_DRAFTS = """\
| vLLM, draft models | {vllm}, transformers {vllm_transformers} | its loader on a CPU | the last table | {date} |
"""
READER_ENDS = """\
| vLLM, embeddings, heads | {vllm}, transformers {vllm_transformers} | its loader on a CPU | each "ok" below | {date} |
"""
READERS_END = """
GPTQModel was not asked, SGLang only about Llama, Qwen2 and Phi-3: reports mark both elsewhere. Reports name vLLM by
the layout and the schemes of a folder, unless vLLM refuses the family (below). Only this page tells whether vLLM has
a class for the family, and takes all linears of the output. {named}
"""
DRAFTS = """## Draft models in vLLM

Tiny models with one draft layer, whose tensors stay dense, by RTN on {date}. vLLM {vllm} opens each folder on a CPU
twice: as the target, and as the draft of speculative decoding. "ok" means that both open.

| family | {layouts} |
|---|{rules}
"""
NOT_ASKED = "- **vLLM** was not asked."
HEAD = "| family | class | kind | RTN | GPTQ | layouts | opens in | vLLM |\n|---|---|---|---|---|---|---|---|"
REST = "| family | class | kind | RTN | GPTQ | opens in | vLLM | reason |\n|---|---|---|---|---|---|---|---|"
REFUSED = "| family | dense model | vLLM's reason |\n|---|---|---|"
ABSENT = "| family | class | reason |\n|---|---|---|"


def markdown(census: dict[str, Any]) -> str:
    """Return the page for `census`: its date, versions and rows."""
    rows = census["families"]
    built = [row for row in rows if "outcome" not in row]
    good = [row for row in built if all(is_good(row[method]) for method in METHODS)]
    others = [row for row in built if row not in good]
    absent = [row for row in rows if "outcome" in row]
    counts = [f"{len(good)} of {len(built)} families are quantized in full by RTN and by GPTQ, with equal logits."]
    for method in METHODS:
        refused, bugs = (sum(key in row[method] for row in built) for key in ("error", "traceback"))
        counts.append(f"{method.upper()} refuses {refused}" + (f", and fails in {bugs} by a bug." if bugs else "."))
    asked = [row for row in built if "vllm" in row]
    if asked:
        found = Counter(_vllm(row).partition(" + ")[0] for row in asked)
        unknown = len(asked) - found["ok"] - found["refused"] - found["no class"]
        counts.append(
            f"vLLM opens {found['ok']}, refuses {found['refused']} and has no class for {found['no class']}; "
            f"nothing is known of the other {unknown}."
        )
        ends = Counter(end for row in asked for end in opened_ends(row))
        counts.append(f"It takes packed embeddings of {ends['embeddings']} and packed heads of {ends['head']}.")
    engine = ASKED.format(**census["versions"]) if asked else NOT_ASKED
    drafted = sum(bool(row["rtn"].get("outside")) and row["family"] in drafts.DRAFTS for row in built)
    facts = {"tolerance": census["tolerance"], "engine": engine, "summary": "\n".join(counts), "drafted": drafted}
    parts = [PAGE.format(**census["versions"], **facts), _asked_readers(census, built)]
    if good:
        parts.append("## Quantized in full\n\n" + "\n".join([HEAD, *map(_good, good)]) + "\n")
    if others:
        parts.append("## In part, or refused\n\n" + "\n".join([REST, *map(_other, others)]) + "\n")
    if absent:
        lines = (f"| {row['family']} | {row['class']} | {_cell(row.get('reason', row['outcome']))} |" for row in absent)
        parts.append("## Without a tiny model\n\n" + "\n".join([ABSENT, *lines]) + "\n")
    refusals = sorted((row for row in asked if is_refusal(row["vllm"])), key=_dense_too)
    if refusals:
        lines = (
            f"| {row['family']} | {'refused' if _dense_too(row) else 'opens'} | {_cell(row['vllm'])} |"
            for row in refusals
        )
        parts.append("## Refused by vLLM\n\n" + "\n".join([REFUSED, *lines]) + "\n")
    if "drafts" in census:
        parts.append(_drafts(census["drafts"]))
    return "\n".join(parts)


def is_good(result: dict[str, Any]) -> bool:
    """Return whether a method quantized a model in full, and `quantkit.load` gives equal logits."""
    return result["exit"] == 0 and result["share"] >= SHARE and result.get("load") == "equal"


def named_wrongly(row: dict[str, Any]) -> list[str]:
    """List the methods after which the report of a family names transformers, though its logits differ."""
    found = []
    for method in METHODS:
        named, opened = row[method].get("named", []), row[method].get("transformers", "equal")
        if "transformers (with compressed-tensors)" in named and opened != "equal":
            found.append(f"transformers after {method.upper()}")
    return found


def _asked_readers(census: dict[str, Any], built: list[dict[str, Any]]) -> str:
    """Return the table of the readers that were asked, and whether reports name others than those that open."""
    table = READERS.format(**census["versions"])
    if any("vllm" in row for row in built):
        table += READER_VLLM.format(**{"vllm_date": census["versions"]["date"], **census["versions"]})
    if "ends" in census:
        table += READER_ENDS.format(**census["ends"])
    if "drafts" in census:
        table += READER_DRAFTS.format(**census["drafts"])
    wrong = [f"{row['family']} ({', '.join(found)})" for row in built if (found := named_wrongly(row))]
    named = "No report names transformers where it gives other logits."
    return table + READERS_END.format(named=named if not wrong else f"Reports name wrongly: {'; '.join(wrong)}.")


def _drafts(asked: dict[str, Any]) -> str:
    """Return the table of draft models: "ok", or what vLLM does not open and why."""
    layouts = list(next(iter(asked["families"].values())))
    head = {"layouts": " | ".join(layouts), "rules": "---|" * len(layouts)}
    lines = []
    for family, found in asked["families"].items():
        cells = []
        for layout in layouts:
            bad = [f"{kind}: {verdict}" for kind, verdict in found[layout].items() if verdict != OK]
            cells.append(_cell("; ".join(bad)) if bad else OK)
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return DRAFTS.format(**asked, **head) + "\n".join(lines) + "\n"


def _good(row: dict[str, Any]) -> str:
    layouts = row["layouts"]
    holding = [name for name, found in layouts.items() if found == "all"]
    held = "all" if len(holding) == len(layouts) else ", ".join(holding)
    return f"{_start(row)} | {held} | {', '.join(_readers(row['gptq']))} | {_vllm(row)} |"


def _other(row: dict[str, Any]) -> str:
    readers = [name for name in _readers(row["rtn"]) if row["gptq"]["exit"] or name in _readers(row["gptq"])]
    return f"{_start(row)} | {', '.join(readers)} | {_vllm(row)} | {_cell(reason(row))} |"


def _start(row: dict[str, Any]) -> str:
    shares = " | ".join(_share(row[method]) for method in METHODS)
    return f"| {row['family']} | {row['class']} | {row['kind']} | {shares}"


def _share(result: dict[str, Any]) -> str:
    if result["exit"]:
        return "bug" if "traceback" in result else "refused"
    layout = "" if result["layout"] == "compressed-tensors" else f" ({result['layout']})"
    return f"{result['share']:.1%}".replace(".0%", "%") + layout


def _readers(result: dict[str, Any]) -> list[str]:
    found = {"quantkit": result.get("load"), "transformers": result.get("transformers")}
    return [name for name, verdict in found.items() if verdict == "equal"]


def _vllm(row: dict[str, Any]) -> str:
    """Return vLLM's verdict in few words, nothing if it was not asked."""
    verdict: str = row.get("vllm", "")
    if not verdict or not is_refusal(verdict):
        return " + ".join([verdict, *opened_ends(row)])
    return "refused, dense too" if _dense_too(row) else "refused"


def opened_ends(row: dict[str, Any]) -> list[str]:
    """List what vLLM opens packed besides the linears of a family: "embeddings", "head", "tied"."""
    return [end for end, verdict in row.get("ends", {}).items() if verdict == OK]


def _dense_too(row: dict[str, Any]) -> bool:
    return bool(row.get("vllm_dense") != "ok")


def reason(row: dict[str, Any]) -> str:
    """Return in one line why a family is not quantized in full by both methods."""
    for method in METHODS:
        result = row[method]
        for key, prefix in (("traceback", ""), ("error", ""), ("reference", "not compared: "), ("load", "load: ")):
            if result.get(key, "equal") != "equal":
                return f"{method.upper()}: {prefix}{result[key]}"
        if result["share"] < SHARE:
            names = list(result["dense"])[:2]
            notes = (note.partition(": left dense, ") for note in result["why_dense"])
            why = {re.sub(r"\.\d+\b", ".#", module): reason for module, _, reason in notes}
            reasons = [reason for module, reason in why.items() if f"{module}.weight" in result["dense"]]
            return f"{method.upper()} leaves dense {', '.join(names)}: {'; '.join(reasons)}"
    return ""


def _cell(text: str) -> str:
    line = re.sub(r"\bError: ", "", text.split("\n")[0]).replace("/model: ", "")
    return line.replace("|", "\\|").replace("<", "&lt;")[:220]


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(markdown(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")
