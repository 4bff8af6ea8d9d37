"""Calibration sequences: lengths, windows and seeds, and too little text is refused."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import CheckpointError, RecipeError
from quantkit.text.sequences import draw_calibration, find_shares
from tests.tiny_models import CHAT_TEMPLATE, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def paragraphs(folder: Path, lengths: list[int]) -> str:
    """Write a file of documents with these lengths in bytes, each of one letter."""
    return write(folder / "text.txt", "\n\n".join(chr(97 + i % 26) * n for i, n in enumerate(lengths)))


def test_own_lengths_are_neither_padded_nor_joined(tmp_path: Path, tokenizer: Any) -> None:
    lengths = [5, 1, 40, 200, 7, 90]
    source = paragraphs(tmp_path, lengths)
    found = draw_calibration(source, tokenizer, samples=5, max_length=64, seed=3)
    assert sorted(len(s) for s in found.sequences) == [5, 7, 40, 64, 64]
    assert all(len(set(s.tolist())) == 1 for s in found.sequences)  # one letter: one document
    facts = found.facts
    assert (facts["sequences"], facts["tokens"], facts["cut"], facts["documents"]) == (5, 180, 2, 6)
    assert facts["skipped"] <= 1  # the one-token document, if it was drawn before the fifth usable one


@pytest.mark.parametrize("lengths", ["own", "fixed"])
def test_too_little_text_of_a_mixture_is_answered_with_samples_of_the_whole(
    lengths: Any, tmp_path: Path, tokenizer: Any
) -> None:
    small, large = (write(tmp_path / f"{n}.txt", "\n\n".join(["0123456789"] * n)) for n in (2, 200))
    draw = partial(draw_calibration, [f"{small}:1", f"{large}:9"], tokenizer, max_length=10, seed=0, lengths=lengths)
    with pytest.raises(CheckpointError, match=r"2.txt: holds 2.* use --samples 20, or") as caught:
        draw(samples=80)
    assert "8 w" in str(caught.value)  # its part of the 80
    assert len(draw(samples=20).sequences) == 20


def test_the_seed_determines_documents_and_windows_that_can_lie_anywhere(tmp_path: Path, tokenizer: Any) -> None:
    source = write(tmp_path / "a.txt", "\n\n".join(f"{i:04}" * (i + 1) for i in range(50)))
    draw = partial(draw_calibration, source, tokenizer, samples=8, max_length=32)
    torch.manual_seed(1)
    first = draw(seed=0).facts["sha256"]
    torch.manual_seed(2)
    assert draw(seed=0).facts["sha256"] == first != draw(seed=1).facts["sha256"]
    source = write(tmp_path / "b.txt", "".join(chr(97 + i % 26) for i in range(20)))
    draw = partial(draw_calibration, source, tokenizer, samples=1, max_length=18)
    starts = {int(draw(seed=seed).sequences[0][0]) for seed in range(20)}
    assert len(starts) == 3  # offsets 0, 1 and 2, the last one included


def test_fixed_windows_are_exact_and_never_overlap(tmp_path: Path, tokenizer: Any) -> None:
    source = paragraphs(tmp_path, [10, 30, 25, 60])
    found = draw_calibration(source, tokenizer, samples=7, max_length=16, seed=0, lengths="fixed")
    assert [len(s) for s in found.sequences] == [16] * 7
    stream = "".join(tokenizer.decode(s) for s in found.sequences)
    assert sum(stream.count(letter) for letter in "abcd") == 112
    assert stream.count("a") <= 10 and stream.count("d") <= 60


@pytest.mark.parametrize("lengths", ["own", "fixed"])
def test_sequences_beyond_the_samples_change_none_and_are_as_many_as_there_are(
    lengths: Any, tmp_path: Path, tokenizer: Any
) -> None:
    options: Any = {"max_length": 16, "seed": 0, "lengths": lengths}
    sources = [paragraphs(tmp_path, [10, 30, 1, 25, 60])]
    alone, both = (draw_calibration(sources, tokenizer, samples=n, **options) for n in (2, 4))
    for more in (2, 99):
        found = draw_calibration(sources, tokenizer, samples=2, more=more, **options)
        assert found.facts == alone.facts and not alone.more
        assert [s.tolist() for s in found.sequences] == [s.tolist() for s in both.sequences[:2]]
        assert [s.tolist() for s in found.more[:2]] == [s.tolist() for s in both.sequences[2:]]
    assert len(found.more) == (2 if lengths == "own" else 126 // 16 - 2)


def test_each_source_holds_out_documents_behind_the_samples_and_calibrates_alike(
    tmp_path: Path, tokenizer: Any
) -> None:
    texts = ["\n\n".join(f"{name}{i:05}" * 40 for i in range(32)) for name in "ab"]
    sources = [write(tmp_path / f"{name}.txt", text) for name, text in zip("ab", texts, strict=True)]
    found = draw_calibration(sources, tokenizer, samples=60, max_length=200, seed=0)  # 30 of 32, 12,000 tokens
    sizes = found.facts["held_out"]
    assert sizes == {source: sum(map(len, each)) for source, each in found.held_out.items()}
    assert set(sizes.values()) == {12000 // 128} and {"a.txt", "b.txt", "packaged code"} <= sizes.keys()
    used = {tuple(sequence[:93].tolist()) for sequence in found.sequences}
    for source in ("a.txt", "b.txt"):
        assert not used & {tuple(each.tolist()) for each in found.held_out[source]}
    assert len(found.every) == 60 + len(sizes)
    whole = draw_calibration(sources, tokenizer, samples=64, max_length=200, seed=0)
    assert "a.txt" not in whole.held_out and "packaged code" in whole.held_out  # no document is left
    assert not draw_calibration(sources, tokenizer, samples=4, max_length=200, seed=0).held_out  # too few tokens


def test_a_text_without_blank_lines_is_cut_into_windows(tmp_path: Path, tokenizer: Any) -> None:
    letters = "".join(chr(97 + i % 26) for i in range(100))
    source = write(tmp_path / "a.txt", letters)
    found = draw_calibration(source, tokenizer, samples=4, max_length=20, seed=0)
    assert {tokenizer.decode(s) for s in found.sequences} < {letters[i : i + 20] for i in range(0, 100, 20)}
    assert found.facts["rule"] == "no blank lines, windows of 20 tokens"
    assert found.notices == ("a.txt: has no blank line between documents: windows of 20 tokens were cut",)
    for text, samples, length, says in (
        (source, 6, 20, "holds 100 tokens, 6 windows of 20 need 120: use --samples 5, or a longer"),
        (source, 2, 200, "2 windows of 200 need 400: use --max-length 50, or"),
        (write(tmp_path / "b.txt", "a"), 1, 200, r"\(the whole text is one document\): use a longer --calib file"),
    ):
        with pytest.raises(CheckpointError, match=says):
            draw_calibration(text, tokenizer, samples=samples, max_length=length, seed=0)
    whole = draw_calibration(source, tokenizer, samples=1, max_length=200, seed=0)
    assert (len(whole.sequences[0]), whole.notices) == (100, ())


draw = partial(draw_calibration, max_length=64, seed=0)


@pytest.fixture
def chatty() -> Any:
    made = byte_tokenizer()
    made.chat_template = CHAT_TEMPLATE
    return made


def chats(path: Path, lengths: list[int]) -> str:
    talks = ([{"role": "user", "content": chr(65 + i) * n}] for i, n in enumerate(lengths))
    return write(path, "\n".join(json.dumps({"messages": talk}) for talk in talks))


def test_conversations_stay_whole_and_begin_at_their_beginning(tmp_path: Path, chatty: Any) -> None:
    found = draw_calibration(chats(tmp_path / "a.jsonl", [5, 9, 300]), chatty, samples=3, max_length=64, seed=0)
    texts = sorted(chatty.decode(s) for s in found.sequences)
    assert texts == [f"<|endoftext|>user:{t}" for t in ("AAAAA\n", "B" * 9 + "\n", "C" * 58)]
    assert (found.facts["cut"], found.facts["rule"], found.notices) == (1, "one conversation (messages) a record", ())


def test_plain_text_for_a_model_that_chats_gets_a_notice(tmp_path: Path, tokenizer: Any, chatty: Any) -> None:
    text, talk = paragraphs(tmp_path, [30, 30]), chats(tmp_path / "a.jsonl", [5, 9])
    options = {"samples": 2, "max_length": 32, "seed": 0}
    (notice,) = draw_calibration(text, chatty, **options).notices
    assert "has a chat template" in notice and f"({Path(text).name})" in notice and "--calib FILE.jsonl" in notice
    assert draw_calibration(text, tokenizer, **options).notices == ()
    assert draw_calibration([text, talk], chatty, **options).notices == ()
    with pytest.raises(CheckpointError, match=r"a\.jsonl: line \d: is a conversation, and the model has no chat temp"):
        draw_calibration(talk, tokenizer, **options)


def test_what_is_not_in_the_text_is_in_a_notice(tmp_path: Path, chatty: Any) -> None:
    parts = [{"type": "text", "text": "Hi?"}, {"type": "image"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "x", "reasoning_content": "hm"}]
    record = {"messages": [None, *talk, {}], "tools": [{"type": "function"}], "id": 7}
    records = [record, {"messages": None}, {"messages": [{}, None]}]
    source = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
    options = {"samples": 1, "max_length": 64, "seed": 0}
    found = draw_calibration(source, chatty, **options, template_args={"enable_thinking": False})
    assert found.notices == (
        "a.jsonl: 2 records were left out: 1 null, 1 empty",
        "a.jsonl: 1 parts of messages are no text and were left out: 1 image",
        "a.jsonl: the model's chat template does not read enable_thinking, tools, reasoning_content",
        "a.jsonl: keys of records that are not given to the chat template: id",
    )
    assert found.facts["sources"][0]["left_out"] == 2
    with pytest.raises(CheckpointError, match=r"2 were asked for \(.*; 2 records left out: 1 null, 1 empty\)"):
        draw_calibration(source, chatty, **{**options, "samples": 2})


@pytest.mark.parametrize("lengths", ["own", "fixed"])
def test_a_record_that_the_template_refuses_counts_as_broken(lengths: Any, tmp_path: Path, chatty: Any) -> None:
    chatty.chat_template = "{{ raise_exception('no') if 'BB' in messages[0].content }}{{ messages[0].content }}"
    source = chats(tmp_path / "a.jsonl", [32, 32, 32])
    options = {"samples": 2, "max_length": 32, "seed": 1, "lengths": lengths}
    found = draw_calibration(source, chatty, **options, skip_bad_records=1)
    assert {chatty.decode(s)[0] for s in found.sequences} == {"A", "C"}
    assert found.notices[0] == "a.jsonl: 1 records were left out: 1 broken"
    assert found.notices[1].endswith(" record: line 2: the model's chat template refuses it (TemplateError no)")
    with pytest.raises(CheckpointError, match=r"line 2: the model's chat template refuses it .*--skip-bad-records N$"):
        draw_calibration(source, chatty, **options)


def test_arguments_of_the_template_change_the_text(tmp_path: Path, chatty: Any) -> None:
    chatty.chat_template = "{{ 'plain' if enable_thinking is false else 'think' }}{{ messages[0].content }}"
    record = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": True}}
    records = [record, {"messages": record["messages"]}]
    source = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
    options = {"samples": 2, "max_length": 64, "seed": 0, "template_args": {"enable_thinking": False}}
    found = draw_calibration(source, chatty, **options)
    assert sorted(chatty.decode(s) for s in found.sequences) == ["plainx", "thinkx"]
    idle = draw_calibration(paragraphs(tmp_path, [30, 30]), chatty, **options)
    assert idle.notices[-1] == "--template-args changes nothing: no source has conversations"


def test_each_source_of_a_mixture_is_drawn_as_if_alone(tmp_path: Path, tokenizer: Any) -> None:
    one = write(tmp_path / "a.txt", "\n\n".join(f"a{i:03}" * 9 for i in range(40)))
    other = write(tmp_path / "b.jsonl", "\n".join(json.dumps({"text": f"b{i:03}" * 9}) for i in range(40)))
    options = {"max_length": 32, "seed": 4}
    found = draw_calibration([f"{one}:0.75", f"{other}:.25"], tokenizer, samples=10, **options)
    alone = [draw_calibration(s, tokenizer, samples=n, **options) for s, n in ((one, 8), (other, 2))]
    assert [s.tolist() for s in found.sequences] == [s.tolist() for part in alone for s in part.sequences]
    facts = found.facts
    shown = [(s["source"], s["share"], s["sequences"], s["sha256"]) for s in facts["sources"]]
    assert shown == [("a.txt", 0.75, 8, alone[0].facts["sha256"]), ("b.jsonl", 0.25, 2, alone[1].facts["sha256"])]
    assert (facts["source"], facts["sequences"], facts["documents"]) == ("a.txt:0.75, b.jsonl:0.25", 10, 80)
    assert facts["tokens"] == sum(map(len, found.sequences)) == sum(s["tokens"] for s in facts["sources"])
    assert facts["rule"] == "one document between blank lines; one document a record"
    again = draw_calibration([f"{one}:3", other], tokenizer, samples=10, **options)
    assert again.facts["sha256"] == facts["sha256"]


def test_weights_become_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    thirds = {"a.txt": Fraction(1, 3), "b.txt": Fraction(1, 3), "org/c:v1": Fraction(1, 3)}
    assert find_shares(["a.txt", "b.txt", "org/c:v1"]) == thirds
    assert find_shares(["a.txt:2", "b.txt:2.0", "org/c:v1:2"]) == thirds
    assert find_shares(["a:1.txt", "C:\\b.txt:3"]) == {"a:1.txt": Fraction(1, 4), "C:\\b.txt": Fraction(3, 4)}
    write(tmp_path / "x:1", "the name of this file ends like a weight")
    assert find_shares(["x:1", "y:1"]) == {"x:1": Fraction(1, 2), "y": Fraction(1, 2)}
    assert find_shares(["x:1:3", "y"]) == {"x:1": Fraction(3, 4), "y": Fraction(1, 4)}


@pytest.mark.parametrize(
    ("sources", "options", "says"),
    [
        (["a.txt:1", "a.txt:2"], {}, "a.txt is named twice"),
        (["a.txt:0", "b.txt"], {}, "a.txt:0: the weight is 0"),
        (["a.txt:1", "b.txt:9"], {"samples": 4}, "a.txt: its share of 4 samples is none"),
        (["text.txt"], {"samples": 0}, "0 samples of at most 32 tokens: use at least 1 sample"),
        (["text.txt"], {"max_length": 1}, "8 samples of at most 1 tokens: use at least 1 sample"),
        (["text.txt"], {"split": "test"}, r"--set calibration\.split=test: no source is a hub data set"),
        (["text.txt"], {"text_column": "x"}, r"--set calibration\.text_column=x: no source has records"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    sources: list[str],
    options: dict[str, Any],
    says: str,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    paragraphs(tmp_path, [30])
    with pytest.raises(RecipeError, match=says):
        draw_calibration(sources, tokenizer, **{"samples": 8, "max_length": 32, "seed": 0, **options})


def test_the_packaged_text_says_that_it_calibrates_and_what_may_do_better(tokenizer: Any) -> None:
    found = draw("packaged", tokenizer, samples=3)
    assert found.facts["source"] == "packaged"
    assert [str(line) for line in found.notices] == [
        "the text that comes with quantkit is used: give text like the model's use with --calib FILE"
    ]
    with pytest.raises(CheckpointError, match=r"packaged: holds .* usable documents, 9999 were asked for"):
        draw_calibration("packaged", tokenizer, samples=9999, max_length=64, seed=0)


def test_a_date_in_the_text_is_in_the_facts_and_in_a_notice(tmp_path: Path, chatty: Any) -> None:
    chatty.chat_template = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
    source = chats(tmp_path / "a.jsonl", [5, 9])
    found = draw(source, chatty, samples=2, date="2026-02-03T00:00:01")
    assert sorted(map(chatty.decode, found.sequences)) == ["03 Feb 2026 AAAAA", "03 Feb 2026 " + "B" * 9]
    assert found.facts["date"] == "2026-02-03T00:00:01"
    assert str(found.notices[-1]).endswith("unless you use --template-args strftime_now=2026-02-03")
    same = draw(source, chatty, samples=2, template_args={"strftime_now": "2026-02-03"})
    assert (same.facts["sha256"], same.notices) == (found.facts["sha256"], ()) and "date" not in same.facts


def test_system_messages_that_the_template_refuses_are_in_a_notice(tmp_path: Path, chatty: Any) -> None:
    chatty.chat_template = "{{ raise_exception('no') if messages[0].role == 'system' }}{{ messages[0].content }}"
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "one two three"}]
    source = write(tmp_path / "a.jsonl", "\n".join([json.dumps({"messages": talk})] * 3))
    found = draw_calibration(source, chatty, samples=3, max_length=64, seed=0)
    assert {chatty.decode(s) for s in found.sequences} == {"S\n\none two three"}
    assert found.notices == (
        "a.jsonl: the model's chat template refuses system messages: those of 3 conversations went into the user's "
        "first turn",
    )


def test_columns_that_were_found_are_printed(tmp_path: Path, tokenizer: Any, chatty: Any) -> None:
    rows = [{"question": f"Q{i}", "answer": "A", "id": 7} for i in range(3)]
    source = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    found = draw(source, chatty, samples=3)
    assert chatty.decode(found.sequences[0]).startswith("<|endoftext|>user:Q") and found.notices == (
        "a.jsonl: questions in question and answers in answer make conversations",
        "a.jsonl: keys of records that are not given to the chat template: id",
    )
    plain = draw(source, tokenizer, samples=3)
    assert sorted(map(tokenizer.decode, plain.sequences)) == [f"Q{i}\n\nA" for i in range(3)]
    assert plain.notices[0].endswith("answers in answer are joined by a blank line, as the model has no chat template")


def test_files_of_one_document_each_are_cut_into_windows_where_they_are_too_few(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "set").mkdir()
    for name in "abc":
        write(tmp_path / "set" / f"{name}.txt", name * 50)
    draw = partial(draw_calibration, str(tmp_path / "set"), tokenizer, max_length=25, seed=0)
    assert draw(samples=3).facts["rule"] == "the whole text is one document; 3 files"
    windows = draw(samples=6)
    assert sorted(map(tokenizer.decode, windows.sequences)) == [letter * 25 for letter in "aabbcc"]
    assert windows.notices == ("set: has no blank line between documents: windows of 25 tokens were cut",)
