"""`generate` writes greedily or draws, in pieces, and checks the positions of the model and its template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from quantkit.checkpoint.reader import Checkpoint
from quantkit.cli.demo import MODEL
from quantkit.errors import CheckpointError, NumericError, RecipeError
from quantkit.inference.generate import generate, writing
from quantkit.inference.load import load_for_evaluation
from quantkit.models.weights import load_dense_model
from quantkit.progress import Progress
from quantkit.text.tokenizer import load_tokenizer
from tests.inference.samples import Folders


def test_generate_is_greedy_and_checks_the_positions(folder: Folders) -> None:
    path = folder("quick", "int4:g32")
    found = generate(path, "abc", max_new_tokens=7, device="cpu")
    ids = load_tokenizer(path)("abc", return_tensors="pt")["input_ids"]
    model = load_dense_model(Checkpoint(path))
    for _ in range(found.tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert found.text == load_tokenizer(path).decode(ids[0, 3:], skip_special_tokens=True) and 1 <= found.tokens <= 7
    assert generate(path, "", max_new_tokens=1, device="cpu").tokens == 1  # an empty prompt becomes BOS
    with pytest.raises(RecipeError, match="--max-new-tokens 509"):
        generate(path, "abc", max_new_tokens=510, device="cpu")


def test_a_model_that_gives_nan_is_no_text(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*args: Any, **options: Any) -> Any:
        model: Any = load_for_evaluation(*args, **options)
        model.model.norm.weight.data.fill_(float("nan"))
        return model

    monkeypatch.setattr("quantkit.inference.generate.load_for_evaluation", damaged)
    for asked in ({}, {"temperature": 1.0}):
        with pytest.raises(NumericError, match="the model gives NaN"):
            generate(tiny_llama, "abc", max_new_tokens=7, device="cpu", **asked)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [129, 500, 1000])
def test_attention_of_one_query_to_many_keys_repeats_on_a_gpu(keys: int) -> None:
    shapes = [(68, 8, length, 64) for length in (1, keys, keys)]
    operands = [torch.randn(shape, device="cuda", dtype=torch.float16) for shape in shapes]
    with writing():
        found = [functional.scaled_dot_product_attention(*operands) for _ in range(30)]
    assert all(torch.equal(each, found[0]) for each in found)  # cuDNN's kernel gave up to six results


def test_pieces_make_the_text_one_token_at_a_time(tiny_llama: Path) -> None:
    pieces: list[str] = []
    found = generate(MODEL, "Return the", max_new_tokens=24, device="cpu", listener=pieces.append)
    assert "".join(pieces) == found.text and len(pieces) > 0.8 * found.tokens > 15
    pieces.clear()  # random bytes, many of which are no character, or a part of one
    found = generate(tiny_llama, "abc", max_new_tokens=60, device="cpu", listener=pieces.append)
    assert "".join(pieces) == found.text


def test_a_draw_repeats_with_its_seed_and_leaves_torchs_generator(tiny_llama: Path) -> None:
    state = torch.get_rng_state()

    def draw(**asked: float) -> str:
        return generate(tiny_llama, "abc", max_new_tokens=16, device="cpu", **asked).text

    drawn = draw(temperature=1.5, seed=1)
    assert drawn == draw(temperature=1.5, seed=1) != draw(temperature=1.5, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn != draw() == draw(top_p=1e-6, seed=1) == draw(temperature=0)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"temperature": 1, "seed": -1}, "seed is -1"),
        ({"seed": 3}, "add --temperature"),
        ({"temperature": 0, "top_p": 0.5}, "add --temperature"),
    ],
)
def test_a_draw_that_is_none_is_refused(asked: dict[str, float], rule: str) -> None:
    with pytest.raises(RecipeError, match=rule):
        generate("missing", "abc", **asked)


def test_a_message_is_answered_through_the_template(templated: Path) -> None:
    found = generate(templated, "one", chat=True, max_new_tokens=5, device="cpu")
    tokenizer, model = load_tokenizer(templated), load_dense_model(Checkpoint(templated))
    ids = tokenizer("uone;a", add_special_tokens=False, return_tensors="pt")["input_ids"]
    length = ids.shape[1]
    for _ in range(found.tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert found.prompt == "one" and found.text == tokenizer.decode(ids[0, length:], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no users') }}", r"refuses it \(no users\): use quantkit generate without --chat"),
        ("{{ messages[0].content | urlencode }}", "the message: .* does not contain the words of the messages: use "),
    ],
)
def test_a_template_that_does_not_show_the_message_is_one_error(template: str, says: str, templated: Path) -> None:
    (templated / "chat_template.jinja").write_text(template)
    with pytest.raises(RecipeError, match=says):
        generate(templated, "a & b", chat=True, device="cpu")


def test_a_chat_is_offered_only_where_a_template_is_the_default(
    templated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (templated / "additional_chat_templates").mkdir()
    (templated / "additional_chat_templates" / "rag.jinja").write_text("{{ messages[0].content }}")
    default = templated / "chat_template.jinja"
    default.write_text("{{ messages[0].content }}")
    for chat in (True, False):
        generate(templated, "one", chat=chat, max_new_tokens=1, device="cpu", progress=Progress())
        assert ("add --chat" in capsys.readouterr().err) != chat
    default.unlink()
    generate(templated, "one", max_new_tokens=1, device="cpu", progress=Progress())
    assert "--chat" not in capsys.readouterr().err
    with pytest.raises(RecipeError, match="has no chat template: use quantkit generate without --chat"):
        generate(templated, "one", chat=True, device="cpu")


@pytest.mark.parametrize("message", ["", "  "])
def test_a_message_without_words_is_a_message(message: str, templated: Path) -> None:
    assert generate(templated, message, chat=True, max_new_tokens=2, device="cpu").tokens


BAD: list[dict[str, Any]] = [
    *({"eos_token_id": [[1]]}, {"repetition_penalty": 0}, {"bad_words_ids": [1, 2]}),
    *({"forced_eos_token_id": 9999}, {"min_length": "5"}, {"stop_strings": [5]}),
]


@pytest.mark.parametrize("stated", BAD, ids=[next(iter(each)) for each in BAD])
def test_a_generation_config_that_cannot_be_followed_is_one_line(
    stated: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match=r"generation_config\.json.* mend it"):
        generate(folder, "one", max_new_tokens=2, device="cpu")
