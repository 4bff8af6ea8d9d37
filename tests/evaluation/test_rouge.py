"""ROUGE equals cases counted by hand, loses no document silently, and continues where it stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.rouge import eval_rouge, score
from quantkit.inference.batches import BatchWriter
from quantkit.inference.generate import Sampling, generate
from quantkit.models.whole_model import load_dense_model
from quantkit.text.tokenizer import load_tokenizer, token_ids
from tests.command_line import call, refused
from tests.evaluation.folders import written

RECORDS = [{"document": f"The {word} fell for days.", "summary": f"{word} fell"} for word in ("rain", "hail", "x")]


@pytest.mark.parametrize(
    ("reference", "text", "rouge1", "rouge2", "rougeL"),
    [
        ("the cat sat", "the cat sat", 1, 1, 1),
        # 2 of 2 and 2 of 3 words, one of one and of two pairs: 2pr / (p + r).
        ("the cat sat", "the cat", 0.8, 2 / 3, 0.8),
        # All words, no pair, and of the longest common subsequence one word.
        ("one two three", "three two one", 1, 0, 1 / 3),
        # Stems: "runs" and "running" are one word.
        ("he runs", "he running", 1, 1, 1),
        ("the cat", "a dog", 0, 0, 0),
        ("the cat", "", 0, 0, 0),
    ],
)
def test_a_score_is_the_one_counted_by_hand(
    reference: str, text: str, rouge1: float, rouge2: float, rougeL: float
) -> None:
    found = score([reference], [text])
    assert (found["rouge1"], found["rouge2"], found["rougeL"]) == pytest.approx((rouge1, rouge2, rougeL))
    assert found["rouge1_low"] is None  # one record says nothing about chance


def test_a_mean_over_records_has_an_interval_around_it() -> None:
    found = score(["a b", "a b", "a b", "c d"], ["a b", "x y", "a x", "c d"])
    assert found["rouge1"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert found["rouge1_low"] < found["rouge1"] < found["rouge1_high"]  # type: ignore[operator]


def test_a_batch_writes_what_each_prompt_alone_gives(small_llama: Path) -> None:
    model, tokenizer = load_dense_model(Checkpoint(small_llama)), load_tokenizer(small_llama)
    prompts = ["The rain", "A", "Snow fell for many days"]
    ids = [token_ids(tokenizer, prompt, special=True) for prompt in prompts]
    together = BatchWriter(model, tokenizer, 12).write(ids)
    assert together == [generate(small_llama, prompt, max_new_tokens=12, device="cpu").text for prompt in prompts]
    assert any(together)


def test_a_text_ends_at_its_first_stop_and_the_others_go_on(small_llama: Path) -> None:
    model, tokenizer = load_dense_model(Checkpoint(small_llama)), load_tokenizer(small_llama)
    ids = [token_ids(tokenizer, prompt, special=True) for prompt in ("The rain", "Snow")]
    whole = BatchWriter(model, tokenizer, 24).write(ids)
    stop = whole[0][6:9]
    cut = BatchWriter(model, tokenizer, 24, stops=(stop, "never")).write(ids)
    assert cut[0] == whole[0][: whole[0].index(stop)] and cut[1] == whole[1].partition(stop)[0]


def test_draws_follow_the_seed_and_leave_the_generators_of_others_alone(small_llama: Path) -> None:
    model, tokenizer = load_dense_model(Checkpoint(small_llama)), load_tokenizer(small_llama)
    ids = [token_ids(tokenizer, "The", special=True)] * 2
    before = torch.random.get_rng_state()
    first, again, other = (
        BatchWriter(model, tokenizer, 12, Sampling(0.9, 0.95, seed)).write(ids) for seed in (1, 1, 2)
    )
    assert first == again and first != other and first[0] != first[1]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_long_document_is_cut_and_counted(small_llama: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "data.jsonl", {"document": "rain " * 200, "summary": "rain"}, *RECORDS)
    found = eval_rouge(small_llama, data=data, max_new_tokens=4, limit=2, device="cpu")
    assert (found.records, found.truncated) == (2, 1)
    with pytest.raises(quantkit.QuantkitError, match="leaves no room for a document in 2 tokens"):
        eval_rouge(small_llama, data=data, max_new_tokens=510, device="cpu")


def test_a_run_that_was_killed_continues_with_the_next_batch(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, options = written(tmp_path / "data.jsonl", *RECORDS), {"max_new_tokens": 4, "batch_size": 2, "device": "cpu"}
    whole: Any = eval_rouge(small_llama, data=data, **options)
    own, batches = BatchWriter.write, []

    def write(self: BatchWriter, prompts: Any) -> list[str]:
        batches.append(len(prompts))
        if len(batches) == 2:
            raise KeyboardInterrupt
        return own(self, prompts)

    monkeypatch.setattr(BatchWriter, "write", write)
    with pytest.raises(KeyboardInterrupt):
        eval_rouge(small_llama, data=data, journal=tmp_path / "kept", **options)
    assert eval_rouge(small_llama, data=data, journal=tmp_path / "kept", **options) == whole
    assert batches == [2, 1, 1]
    with pytest.raises(quantkit.QuantkitError, match=r"another run \(max_new_tokens differ\)"):
        eval_rouge(small_llama, data=data, journal=tmp_path / "kept", **{**options, "max_new_tokens": 5})


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ('{"document": "a"}', (), "data.jsonl: line 1: needs the keys document, summary: found the keys document"),
        ('{"document": "a", "summary": 3}', (), "summary is no text, or empty"),
        ('{"document": "  ", "summary": "a"}', (), "document is no text, or empty"),
        ('{"document": ', (), "line 1: is not JSON"),
        ("[1]", (), "it is no object with keys"),
        ("", (), "has no records"),
        (
            '{"document": "Шёл дождь весь день.", "summary": "В 2009 шёл дождь."}',
            (),
            "summary has few words that ROUGE",
        ),
        ('{"document": "a", "summary": "..."}', (), "summary has few words that ROUGE counts"),
        (json.dumps(RECORDS[0]), ("--max-new-tokens", 512), "the model has 512 positions"),
    ],
)
def test_bad_input_is_one_line_before_any_weight_is_read(
    content: str, options: Any, says: str, small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.evaluation.opened.load_for_evaluation", lambda *_, **__: pytest.fail("read"))
    (tmp_path / "data.jsonl").write_text(content)
    assert says in refused("eval", "rouge", small_llama, "--data", tmp_path / "data.jsonl", *options, code=None)


@pytest.mark.parametrize(
    ("kind", "says"), [("Whisper", "reads input_features, and no text"), ("ViT", "no model that writes text")]
)
def test_a_model_that_reads_or_writes_no_text_is_refused(
    kind: str, says: str, small_llama: Path, tmp_path: Path
) -> None:
    import transformers

    folder = Path(shutil.copytree(small_llama, tmp_path / kind))
    getattr(transformers, f"{kind}Config")().save_pretrained(folder)
    data = written(tmp_path / "data.jsonl", *RECORDS)
    assert says in refused("eval", "rouge", folder, "--data", data)


def test_the_table_and_the_json_say_the_same(small_llama: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "data.jsonl", {**RECORDS[0], "summary": "ROUGE"}, *RECORDS)
    words = ("eval", "rouge", small_llama, "--data", data, "--max-new-tokens", 4, "--device", "cpu")
    found, text = json.loads(call(*words, "--json").stdout), call(*words).stdout
    assert f"{100 * found['rouge1']:.2f}" in text and "on data.jsonl: 4 records, at most 4 new tokens" in text
    assert len(call(*words, "-q").stdout.splitlines()) == 1
