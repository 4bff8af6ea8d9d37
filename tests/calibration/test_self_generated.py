"""Calibration text that the model writes: equal seeds, turns of a template, loops, refusals."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.census import families
from quantkit.calibration import self_generated
from quantkit.calibration.self_generated import Row, Turns, draw_text, first_token, repeats, turns_of
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, NumericError, QuantkitError
from quantkit.inference.generate import write_rows
from quantkit.models.block_runner import BlockRunner
from quantkit.models.weights import load_dense_model
from quantkit.progress import Progress
from quantkit.recipes.options import Calib
from quantkit.text.tokenizer import load_tokenizer
from tests.calibration.runs import broken
from tests.tiny_models import CHAT_TEMPLATE, byte_tokenizer, write_model

BOS = 256
QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> BlockRunner:
    folder = tmp_path_factory.mktemp("plain") / "model"
    return BlockRunner(Checkpoint(write_model("llama", folder, hidden_size=64, intermediate_size=64)), device="cpu")


@pytest.fixture(scope="module")
def chatty(plain: BlockRunner, tmp_path_factory: pytest.TempPathFactory) -> BlockRunner:
    folder = Path(shutil.copytree(plain.src.path, tmp_path_factory.mktemp("chatty") / "model"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return BlockRunner(Checkpoint(folder), device="cpu")


def own(longest: int, seed: int = 0) -> Calib:
    return Calib(data="self", max_length=longest, seed=seed)


def written(model: BlockRunner, count: int = 4, longest: int = 40, seed: int = 0) -> list[list[int]]:
    return [s.tolist() for s in draw_text(model, own(longest, seed), count, QUIET)[0]]


def test_the_seed_alone_decides_the_tokens(chatty: BlockRunner) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = written(chatty)
    assert torch.equal(torch.get_rng_state(), before)  # a caller's own draws must not change
    torch.manual_seed(6)
    assert written(chatty) == first
    assert written(chatty, seed=1) != first
    assert len({tuple(s) for s in first}) == 4


def test_a_model_writes_without_an_attention_kernel_whose_results_vary(
    plain: BlockRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[bool]()

    def generate(*_: Any, **__: Any) -> None:
        seen.add(torch.backends.cuda.cudnn_sdp_enabled())

    monkeypatch.setattr(type(plain.module), "generate", generate)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    write_rows(plain.module, torch.zeros(1, 1, dtype=torch.int64), 4, torch.add, torch.add, "")
    assert seen == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled() is before, "the caller's setting"


def test_texts_without_a_template_begin_with_the_first_token_and_end_where_the_model_ends_them(
    plain: BlockRunner,
) -> None:
    sequences, facts = draw_text(plain, own(100), 24, QUIET)
    for tokens in sequences:
        assert tokens[0] == BOS and 2 <= len(tokens) <= 100
        assert BOS not in tokens[1:]  # it is the end of a text, too
    assert min(map(len, sequences)) < 100
    assert (facts["conversations"], facts["cut"]) == (0, sum(len(s) == 100 for s in sequences))


def test_half_of_the_texts_are_conversations_as_the_template_writes_them(chatty: BlockRunner) -> None:
    sequences, facts = draw_text(chatty, own(400), 9, QUIET)
    tokenizer = load_tokenizer(chatty.src.path)
    texts = [tokenizer.decode(s.tolist(), errors="replace") for s in sequences]
    talks = [text for text in texts if text.startswith("<|endoftext|>user:")]
    assert facts["conversations"] == len(talks) == 4
    # A user's message has at most 256 tokens, so each conversation reaches the answer.
    assert all(
        "\nassistant:" in text and len(s) == 400 for text, s in zip(texts, sequences, strict=True) if text in talks
    )
    assert any("\nuser:" in text for text in talks)
    assert [text in talks for text in texts] not in ([True] * 4 + [False] * 5, [False] * 5 + [True] * 4)  # mixed


TURNS = Turns([1, 2], ([3, 4], [5]))


def test_a_row_follows_the_template_and_the_model_in_turns() -> None:
    row, ends = Row(TURNS.opening, TURNS), frozenset({3, 9})
    drawn = [7, 7, 9, 8, 8, 3, 7, 7]  # the first is ignored: the template's opening is due
    begins = []
    for token in drawn:
        begins.append(row.begins)
        row.add(token, ends)
    assert row.tokens == [1, 2, 7, 3, 4, 8, 5, 7, 7]
    assert [number for number, begin in enumerate(begins) if begin] == [1, 4, 6]


def test_a_row_knows_a_turn_that_the_model_closes_in_the_words_of_the_template() -> None:
    row = Row(TURNS.opening, TURNS)
    for token in (0, 7, 3, 4, 8):
        row.add(token, frozenset({9}))
    row.add(9, frozenset({9}))
    assert row.tokens == [1, 2, 7, 3, 4, 8, 5]


def test_messages_without_an_end_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_generated, "MESSAGES", (2, 3))
    row = Row(TURNS.opening, TURNS)
    for _ in range(10):
        row.add(7, frozenset())
    assert row.tokens == [1, 2, 7, 7, 3, 4, 7, 7, 7, 5, 7]


def test_a_first_token_that_only_opens_turns_begins_no_plain_text() -> None:
    tokenizer = byte_tokenizer()
    assert first_token(tokenizer, None) == BOS
    assert first_token(tokenizer, Turns([BOS, 1], ([2], [3]))) is None
    tokenizer.bos_token = None
    assert first_token(tokenizer, None) is None


def test_loops_are_recognized() -> None:
    random = torch.randint(256, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    assert not repeats(random) and not repeats(random[:3])
    assert repeats([*random, *[7] * 66]) and repeats([*random, *[1, 2, 3] * 30, *random])
    assert not repeats([*random, *[7] * 40])


def test_loops_are_dropped_counted_and_drawn_again(plain: BlockRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = written(plain, 3)
    monkeypatch.setattr(self_generated, "repeats", lambda tokens: tokens == whole[0])
    sequences, facts = draw_text(plain, own(40), 3, QUIET)
    assert (facts["skipped"], facts["documents"], len(sequences)) == (1, 4, 3)
    assert whole[0] not in [s.tolist() for s in sequences]
    monkeypatch.setattr(self_generated, "repeats", lambda tokens: True)
    with pytest.raises(QuantkitError, match="repeats itself in 12 of 12 texts: use another --calib FILE"):
        written(plain, 3)


@pytest.mark.parametrize("family", ["opt", "gemma2", "gpt2", "mixtral", "nemotron_h", "mamba", "gemma3", "fuyu"])
def test_other_families_write_too(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BlockRunner(Checkpoint(families.write(family, tmp_path / "model")), device="cpu")
    monkeypatch.setitem(self_generated.CACHE_BYTES, "cpu", 1)  # a batch for each text
    first, second = written(model, 2, 6)
    assert 2 <= min(len(first), len(second)) <= max(len(first), len(second)) <= 6 and first != second


def test_logits_that_are_not_finite_are_refused(plain: BlockRunner, tmp_path: Path) -> None:
    folder = broken(plain.src.path, tmp_path / "model", "model.norm.weight", ..., torch.inf)
    with pytest.raises(NumericError, match=r"not finite.*: use another --calib FILE"):
        written(BlockRunner(Checkpoint(folder), device="cpu"))


def test_a_model_that_cannot_write_is_refused_in_one_line(plain: BlockRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, kind, says in (
        (ValueError("needs\npixels"), CheckpointError, r"LlamaForCausalLM cannot write text \(needs pixels\): "),
        (torch.OutOfMemoryError("CUDA out of memory"), QuantkitError, "not enough memory for the text"),
    ):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(type(plain.module), "generate", fail)
        with pytest.raises(kind, match=says):
            written(plain)
    monkeypatch.setattr(type(plain.module), "can_generate", lambda self: False)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM cannot write text: use another --calib FILE"):
        written(plain)


def test_the_model_is_freed_when_it_has_written(plain: BlockRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = []

    def load(*given: Any, **options: Any) -> Any:
        made = load_dense_model(*given, **options)
        models.append(weakref.ref(made))
        return made

    monkeypatch.setattr(self_generated, "load_dense_model", load)
    gc.disable()  # a cycle would keep the weights on a GPU until some later time
    try:
        written(plain, 2, 4)
        assert models[0]() is None
    finally:
        gc.enable()


def test_a_template_that_leaves_turns_out_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(CheckpointError, match="does not write messages one after the other"):
        turns_of(tokenizer)
