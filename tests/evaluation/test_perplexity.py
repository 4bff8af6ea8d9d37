"""Perplexity equals its definition and carries its protocol."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, NumericError, RecipeError
from quantkit.evaluation.divergence import kld
from quantkit.evaluation.perplexity import perplexity
from quantkit.models.weights import load_dense_model
from quantkit.text.sources import load_evaluation_text
from quantkit.text.tokenizer import load_tokenizer
from tests.command_line import call, refused
from tests.evaluation.conftest import TEXT
from tests.folders import restate
from tests.tiny_models import byte_tokenizer


def losses(model: Any, ids: list[int]) -> Tensor:
    """Negative log-likelihood of each token but the first, in float64, from one forward."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
    return -logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]


def test_equal_logits_give_the_size_of_the_vocabulary(model: Any, bytes_: Any) -> None:
    model.lm_head.weight.data.zero_()
    found = perplexity(model, bytes_, TEXT, window=64, data="letters")
    assert found.perplexity == pytest.approx(257, rel=1e-6)
    assert (found.tokens, found.windows, found.window, found.stride) == (4 * 63, 4, 64, 64)
    assert (found.bos, found.data, found.text_tokens) == (False, "letters", 300)


def test_every_target_is_counted_once_and_the_short_remainder_dropped(model: Any, bytes_: Any) -> None:
    ids = bytes_(TEXT)["input_ids"]
    expected = torch.cat([losses(model, ids[a : a + 64]) for a in (0, 64, 128, 192)])
    found = perplexity(model, bytes_, TEXT, window=64)
    assert found.nll == pytest.approx(float(expected.mean()), rel=1e-6)
    assert found.perplexity == math.exp(found.nll)


def with_template(template: str) -> Any:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<|endoftext|>", 256)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("template", "adds", "asked"),
    [
        ("<|endoftext|> $A", True, None),
        ("<|endoftext|> $A <|endoftext|>", True, None),
        ("$A <|endoftext|>", False, None),
        ("<|endoftext|> $A", True, False),
        ("$A", False, True),
    ],
)
def test_bos_is_not_lost_where_the_tokenizer_adds_it(
    template: str, adds: bool, asked: bool | None, model: Any, bytes_: Any
) -> None:
    found = perplexity(model, with_template(template), TEXT, window=64, bos=asked)
    assert found.bos is (adds if asked is None else asked)
    assert found.bos_rule == ("the tokenizer's rule" if asked is None else "as asked")
    assert found.nll == perplexity(model, bytes_, TEXT, window=64, bos=found.bos).nll


def test_a_window_begins_by_the_tokens_that_the_tokenizer_adds_though_none_is_bos(model: Any) -> None:
    words = with_template("<|endoftext|> <|endoftext|> $A")
    words.bos_token = None
    found = perplexity(model, words, TEXT, window=64)
    with torch.inference_mode():
        ids = torch.tensor([[256, 256, *words(TEXT, add_special_tokens=False)["input_ids"][:64]]])
        expected = torch.nn.functional.cross_entropy(model(ids).logits[0, 1:-1], ids[0, 2:])
    one = perplexity(model, words, TEXT, window=64, tokens=64)
    assert found.bos and (one.tokens, one.windows) == (64, 1) and one.nll == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("tokens", "window", "windows"), [(200, 64, 3), (100, None, 1), (10**9, 64, 4)])
def test_the_first_tokens_are_read_in_whole_windows(
    tokens: int, window: int | None, windows: int, model: Any, bytes_: Any
) -> None:
    found = perplexity(model, bytes_, TEXT, window=window, tokens=tokens)
    assert (found.windows, found.window, found.text_tokens) == (windows, window or 100, min(tokens, 300))
    assert found.nll == perplexity(model, bytes_, TEXT[: windows * found.window], window=found.window).nll


def test_a_text_of_one_token_is_not_sent_to_the_window_that_it_has(model: Any, bytes_: Any) -> None:
    with pytest.raises(CheckpointError, match="has 1 tokens, less than one window of 2: use a longer text"):
        perplexity(model, bytes_, "a")


def test_bos_without_a_bos_token_is_refused(model: Any) -> None:
    none = byte_tokenizer()
    none.bos_token = None
    with pytest.raises(RecipeError, match="no BOS"):
        perplexity(model, none, TEXT, window=64, bos=True)


def test_damaged_weights_raise_an_error(model: Any, bytes_: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.data[3, 3] = math.nan
    with pytest.raises(NumericError, match="window 0"):
        perplexity(model, bytes_, TEXT, window=64)
    with pytest.raises(NumericError, match="window 0"):
        kld(model, model, bytes_, TEXT, window=64)


def test_the_published_protocol_gives_the_reference_value(shared: Path) -> None:
    """The value is that of transformers' own loss over the first 12 windows."""
    folder = shared / "models" / "tiny-llama-1m"
    text, _ = load_evaluation_text(str(shared / "data" / "wikitext2" / "test.txt"))
    words = load_tokenizer(folder)
    ids = words(text[:60_000], add_special_tokens=False)["input_ids"][: 12 * 1024]
    start = words.decode(ids)
    assert text.startswith(start)
    found = perplexity(load_dense_model(Checkpoint(folder)), words, start, window=1024)
    assert (found.windows, found.tokens) == (12, 12 * 1023)
    assert found.perplexity == pytest.approx(16.125969, rel=1e-4)


def test_a_model_that_reads_in_both_directions_is_not_judged_by_what_it_saw(tmp_path: Path) -> None:
    folder, text = families.write("bert", tmp_path / "m"), tmp_path / "text.txt"
    text.write_text(TEXT)
    says = "bert reads a text in both directions, and continues none: if it was trained as a decoder, set is_decoder"
    assert says in refused("eval", "ppl", folder, "--data", text)
    assert says in refused("generate", folder, "one")
    rounding = ("--method", "rtn", "--group-size", 64)
    assert says in refused("quantize", folder, *rounding, "--eval", text, out=tmp_path / "out")
    call("quantize", folder, *rounding, "-o", tmp_path / "out")
    restate(folder / "config.json", is_decoder=True)
    call("eval", "ppl", folder, "--data", text)


def test_what_a_config_asks_a_forward_to_return_changes_nothing(tmp_path: Path) -> None:
    folder, text = families.write("llama", tmp_path / "m"), tmp_path / "text.txt"
    text.write_text(TEXT)
    plain = call("eval", "ppl", folder, "--data", text, "--json").stdout
    returned = {"return_dict": False, "torchscript": True, "output_attentions": True, "output_hidden_states": True}
    restate(folder / "config.json", **returned)
    assert json.loads(call("eval", "ppl", folder, "--data", text, "--json").stdout) == json.loads(plain)
    call("generate", folder, "one", "--max-new-tokens", 2)
