"""Closing table and model card show every event, and print every name as data."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from quantkit.engines.tables import ENGINES
from quantkit.reporting.facts import EVENTS
from quantkit.reporting.model_card import model_card
from quantkit.reporting.summary import line, summary
from tests.reporting.samples import HOSTILE, example, layer

TIED = {
    **{**example()["totals"], "dense_bytes": 335_000_000, "dense_bits": 16, "tied_head": True},
    "dense_largest": {"model.embed_tokens": 334_000_000},
}
USES = {name: use for engine in ENGINES for name, use in engine.uses.items()}


def test_the_closing_table_has_every_figure() -> None:
    text = summary(example())
    for part in (
        "2 linears, int4:g128, marlin",
        "4.5 MB before, 2.7 MB after, 4.125 bits",
        "mean 0.15, worst 0.2 (a.k_proj)",
        "0.700 of rounding's on average, worst 0.900 (a.k_proj)",
        "8 sequences, 2048 tokens of c4",
        "5 documents cut, 2 skipped",
        "5.0 s (forward 1.5 s, solve 2.2 s)",
        "400.0 MB RAM, 1.0 GB VRAM",
        "left dense: lm_head",
        "something was left as it is",
    ):
        assert part in text, part


@pytest.mark.parametrize("fact", EVENTS)
def test_closing_table_and_card_count_every_event(fact: str) -> None:
    report = example()
    quiet = summary(report) + model_card(report)
    assert EVENTS[fact] not in quiet
    value: Any = {"rungs": [0.01, 0.1, 1.0], "reason": "no calibration token came here"}.get(fact, 7)
    report["layers"][1][fact] = value
    counted = {"rungs": "2", "reason": "no calibration token came here"}.get(fact, "7")
    for text in (summary(report), model_card(report)):
        assert f"1 of 2 linears {EVENTS[fact]}: {counted}, first a.k_proj" in text


DENSE = "335.0 MB of it, in 16 bits: model.embed_tokens 334.0 MB, the head is tied to it"


@pytest.mark.parametrize(
    ("facts", "closing", "card"),
    [
        ({"layers": [layer("a"), layer("b", scheme="fp6:channel")]}, "2 linears, int4:g128 (1) + fp6:channel (1)", ""),
        ({"same_values": 2}, "lossless      2 of 2 tensors", ""),
        ({"same_values": 1}, "lossy         1 of 2 tensors", ""),
        ({"dense": [f"l{i}" for i in range(9)]}, "l0, l1, l2, l3, l4 and 4 more", ""),
        ({"left_out": ["original/", "model.gguf"]}, "original/, model.gguf", "original/, model.gguf"),
        ({"left_out": [f"{i}.pth" for i in range(9)]}, "3.pth, 4.pth and 4 more", "3.pth, 4.pth and 4 more"),
        ({"totals": TIED}, f"dense         {DENSE}", f"| dense | {DENSE} |"),
        ({"chat_template": True}, "", "tokenizer.apply_chat_template(messages"),
    ],
)
def test_a_fact_is_told_where_it_is_one(facts: dict[str, Any], closing: str, card: str) -> None:
    plain, report = example(), {**example(), **facts}
    for write, words in ((summary, closing), (model_card, card)):
        assert words in write(report) and (not words or words not in write(plain))


def test_linears_behind_rounding_on_held_out_text_are_named_by_source() -> None:
    report = example()
    assert "held out" not in summary(report) and "behind rounding" not in summary(report)
    for linear, figures in zip(report["layers"], ((0.5, 0.8), (2.0, 1.25)), strict=True):
        linear["held_out"] = dict(zip(("talks", "code"), figures, strict=True))
    report["layers"][0]["held_out"]["code"] = 1.5
    for text in (" ".join(summary(report).split()), model_card(report)):
        assert "talks 1.000, code 1.369 of rounding's, in the geometric mean" in text
        assert "1 of 2 linears are behind rounding on talks: a.k_proj 2.00; if such text matters" in text
        assert "2 of 2 linears are behind rounding on code: a.q_proj 1.50, a.k_proj 1.25;" in text


def test_experts_with_few_tokens_name_the_samples_that_they_need(samples: int = 7) -> None:
    """Eight sequences gave the worst of them 750 tokens; a tenth is to spare."""
    report, fact = example(), "few_routed"
    report["layers"][0][fact] = "1000 tokens for 512 input channels"
    report["layers"][1][fact] = "750 tokens for 512 input channels"
    assert f"first a.q_proj: use --samples {samples}" in " ".join(summary(report).split())
    for documents, longer in ((samples, False), (samples - 1, True)):
        report["calibration"]["sources"] = [{"source": "text.txt", "documents": documents}]
        says = f"use --samples {samples} and, if the text has fewer, a longer --calib"
        assert (says in " ".join(summary(report).split())) is longer
    report["layers"][1][fact] = "0 tokens for 512 input channels"
    report["calibration"] = {}
    assert "--samples" not in summary(report)


@pytest.mark.parametrize(
    ("source", "totals", "says"),
    [
        (
            {"weights": "Q4_K (GGUF), dequantized"},
            {"bytes": 5_000_000},
            "1.11 times as large as its source, whose weights have few bits already (Q4_K (GGUF), dequantized)",
        ),
        ({}, {"dense_largest": {"norm": 900_000}}, "norm takes 33 % of the output, in 16 bits: in a larger model"),
        (
            {},
            {"dense_largest": {"wte": 700_000, "lm_head": 600_000}},
            "quantize with --embeddings int8:channel --head int8:channel to save 650.0 kB, for readers that open them",
        ),
        ({}, {"dense_largest": {"wte": 900_000}, "dense_bits": 32}, "with --dense-dtype bfloat16"),
    ],
)
def test_a_size_that_disappoints_is_explained(source: dict[str, str], totals: dict[str, Any], says: str) -> None:
    report = example()
    report["source"] |= source
    report |= {"layout": "compressed-tensors", "totals": {**report["totals"], "dense_bits": 16, **totals}}
    assert says in " ".join(summary(report).split())
    report["same_values"] = 0
    assert "which holds the same values" not in summary(report)
    report["totals"]["dense_largest"] = {"h.N.mlp.c_fc": 2_600_000, "wte": 600_000}
    report["totals"]["bytes"] = report["totals"]["source_bytes"]
    assert "in 16 bits" not in summary(report) and "as large as its source" not in summary(report)


@pytest.mark.parametrize(
    ("command", "signed", "readers", "told"),
    [("quantize", True, ["vLLM", "SGLang"], 1), ("pack", True, ["SGLang"], 0), ("pack", False, ["vLLM"], 0)],
)
def test_a_card_says_in_which_use_negative_scales_break(
    command: str, signed: bool, readers: list[str], told: int
) -> None:
    report = {**example(), "command": command, "recipe": {"signed": signed}, "layout": "gptq", "readers": readers}
    lines = [line for line in model_card(report).splitlines() if "VLLM_MARLIN_INPUT_DTYPE=int8" in line]
    assert len(lines) == told and all("quantize with --set signed=false (https://" in line for line in lines)


def test_the_model_card_opens_with_metadata_that_yaml_reads() -> None:
    card = model_card(example())
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "some/model",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["quantized", "quantkit", "marlin", "int4"],
    }
    parts = "some/model", "revision abc", "4.125 bits", "| loads in | quantkit.load |", "quantkit verify", "2048 tokens"
    assert all(part in body for part in parts)
    assert '"method": "gptq"' in body and "f" * 64 in body
    assert "| a.k_proj | 0.20000 | 0.900 |" in body
    assert "5.0 s" not in card, "a time would make the card differ from run to run"
    assert card == model_card(example())


def test_a_hostile_name_is_printed_as_data() -> None:
    report = example()
    stated = {"base_model": HOSTILE, "license": HOSTILE, "tags": [HOSTILE], "language": {"a": 1}}
    report["base"] = {"name": HOSTILE, **stated}
    report["left_out"] = [HOSTILE]
    report["evaluation"] = {"before": 2.0, "after": 3.0, "kld": 0.5, "top1": 0.5, "data": HOSTILE}
    report["dense"] = report["notices"] = [HOSTILE]
    report["layers"][0]["name"] = HOSTILE
    card = model_card(report)
    _, front, body = card.split("---\n", 2)
    stated = yaml.safe_load(front)
    assert stated["base_model"] == stated["license"] == stated["tags"][-1] == HOSTILE
    assert "language" not in stated, "only words are taken over"
    assert "<script>" not in body
    assert not any(line.strip() == "---" for line in body.splitlines())
    assert HOSTILE not in (text := summary(report)) and "left dense: evil --- name: `x` <script>" in text
    plain = {**example(), "notices": ["x"], "left_out": ["x"], "evaluation": {**report["evaluation"], "data": "x"}}
    assert len(text.splitlines()) == len(summary(plain).splitlines())
    report["notices"] = ["\x1b[2Jx\x1b]0;title\x07\u202ey"]  # a terminal would obey these
    assert "[2Jx]0;titley" in summary(report) and summary(report).replace("\n", "").isprintable()


def test_closing_table_and_card_have_the_evaluation_with_its_protocol() -> None:
    report = example()
    assert "perplexity" not in summary(report) and "## Evaluation" not in model_card(report)
    protocol = {"data": "held-out.txt (as it is)", "window": 2048, "windows": 16, "tokens": 32752, "weights": "decoded"}
    report["evaluation"] = {"before": 10.0, "after": 10.25, "kld": 0.0125, "top1": 0.94, **protocol}
    for text in (summary(report), model_card(report).split("## Evaluation")[1]):
        assert "perplexity 10.0000 before, 10.2500 after (+2.50 %), KL divergence 0.012500 nats" in text
        assert "94.00 %, on held-out.txt (as it is): the first 16 windows of 2048 tokens without BOS, 32752" in text
    report["evaluation"] |= {"kld_low": None, "kld_high": None, "kld_p999": 3.5, "kld_above": 0.012, "bos": True}
    report["evaluation"] |= {"bos_rule": "as asked"}
    for text in (summary(report), model_card(report).split("## Evaluation")[1]):
        assert "0.012500 nats (p99.9 3.500000, above 0.1 nat 1.200 %), top-1" in text
        assert "of 2048 tokens with BOS (as asked), 32752" in text


def test_the_card_keeps_licence_language_and_tags_of_the_source() -> None:
    report = example()
    kept = {"license": "other", "license_name": "acme", "license_link": "LICENSE", "language": ["en", "de"]}
    report["base"] |= {**kept, "pipeline_tag": "image-text-to-text", "tags": ["chat", "int4"]}
    stated = yaml.safe_load(model_card(report).split("---\n", 2)[1])
    assert stated.items() >= {**kept, "pipeline_tag": "image-text-to-text"}.items()
    assert stated["tags"] == ["quantized", "quantkit", "marlin", "int4", "chat"]


def test_a_base_without_a_hub_id_is_named_in_the_text_alone() -> None:
    report = example()
    report["base"] = {"name": "my-folder", "revision": None}
    _, front, body = model_card(report).split("---\n", 2)
    assert "base_model" not in yaml.safe_load(front) and "base_model_relation" not in front
    assert "Quantized from `my-folder`" in body
    report["base"] |= {"name": "tuned", "base_model": "some/ancestor"}  # of the model card in a folder of another model
    assert "some/ancestor" not in model_card(report).split("---")[2] and "from `tuned` with" in model_card(report)
    stated = yaml.safe_load(model_card(report).split("---\n", 2)[1])
    assert stated["base_model"] == "some/ancestor" and "base_model_relation" not in stated


def test_every_reader_has_commands_or_is_known_to_have_none() -> None:
    without = {"GPTQModel", "SqueezeBits' fork of AutoAWQ", "vLLM up to 0.10.1", "vLLM up to 0.14"}
    assert {reader.name for engine in ENGINES for reader in engine.readers} == USES.keys() | without


@pytest.mark.parametrize("reader", USES)
def test_the_card_has_the_commands_of_each_reader(reader: str) -> None:
    report = {**example(), "readers": [reader]}
    title, language, text = USES[reader]
    assert f"With {title}:\n\n```{language}\n{text}\n```" in model_card(report)
    if language == "python":
        compile(text, reader, "exec")


@pytest.mark.parametrize("command", ["pack", "quantize"])
def test_a_report_with_few_entries_can_be_printed(command: str) -> None:
    report = {"command": command, "layout": "gptq", "scheme": "int4:g64", "layers": [{"name": "x"}], "totals": {}}
    assert "1 linears" in summary(report)
    assert "no text was read" in model_card(report)
    assert model_card({}) and summary({})


def test_the_one_line_counts_the_notes_that_the_table_lists() -> None:
    report = {**example(), "totals": {**TIED, "bytes": 600_000_000, "source_bytes": 500_000_000}}
    notes = summary(report).count("\nnote ")
    assert notes > 3 and f"; {notes} notes, which quantkit report prints" in line(report)
    quiet = {**example(), "dense": [], "notices": ["one"]}
    assert line(quiet).endswith("; 1 note, which quantkit report prints")


def test_a_folder_that_was_rounded_again_is_not_said_to_be_larger_for_its_scales() -> None:
    report = {**example(), "command": "pack", "same_values": 0}
    report["totals"] = {**report["totals"], "bytes": 5_000_000}
    assert "1.11 times as large as its source, whose weights have few bits already: quantize the" in summary(report)
