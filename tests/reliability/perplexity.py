"""The protocol of perplexity is held, or its breach is said (Q1)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

import quantkit
from tests.promises.model import tokenizer
from tests.reliability import samples
from tests.reliability.campaign import Family, Run

WINDOW = 64
#: The largest relative difference from the reference.
CLOSE = 1e-4


def reference(model: Path, text: str, window: int, stride: int, bos: bool) -> float:
    """Compute the perplexity in float64 from transformers' logits, with no code of quantkit.

    The tokenizer of the samples has one token a byte, in the order of their letters.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = words(text, add_special_tokens=False)["input_ids"]
    total, count = 0.0, 0
    for start in range(0, len(ids) - window + 1, stride):
        part = ([256] if bos else []) + ids[start : start + window]
        with torch.no_grad():
            logits = network(torch.tensor([part])).logits[0].double()
        losses = -logits.log_softmax(-1)[:-1].gather(1, torch.tensor(part)[1:, None])[:, 0]
        new = losses if start == 0 else losses[-stride:]
        total, count = total + float(new.sum()), count + len(new)
    return math.exp(total / count)


def attack(found: Run) -> None:
    folder = found.folder
    model, words = samples.model(folder / "model", blocks=1), samples.text(folder / "text.txt")
    text = words.read_text()[:2000]
    words.write_text(text)
    quantkit.quantize(model, folder / "int4", method="rtn")

    def measured(*options: object, where: Path = model) -> dict[str, Any]:
        line = ("eval", "ppl", where, "--data", words, "--window", WINDOW, "--json", *options)
        result: dict[str, Any] = json.loads(samples.quantkit(folder, *line).stdout)
        return result

    def refused(*options: object, says: str, where: Path = model, data: Path = words) -> None:
        ended = samples.quantkit(folder, "eval", "ppl", where, "--data", data, "-q", *options, code=None)
        samples.one_line(ended)
        assert says in ended.stderr, ended.stderr

    def changed_copy(name: str, **entries: Any) -> Path:
        """Copy the model with other entries in its tokenizer.json."""
        other = samples.model(folder / name, blocks=1)
        (other / "tokenizer.json").write_text(json.dumps(tokenizer() | entries))
        return other

    for name, options, stride, bos in (
        ("no BOS", (), WINDOW, False),
        ("BOS", ("--bos",), WINDOW, True),
        ("overlapping windows", ("--stride", 16), 16, False),
        ("overlapping windows with BOS", ("--stride", 48, "--bos"), 48, True),
    ):
        with found.case(name):
            figure = measured(*options)
            expected = reference(model, text, WINDOW, stride, bos)
            assert math.isclose(figure["perplexity"], expected, rel_tol=CLOSE), (figure["perplexity"], expected)
            assert (figure["window"], figure["stride"], figure["bos"]) == (WINDOW, stride, bos)
    with found.case("a tokenizer that adds BOS itself"):
        end = {"id": "<|endoftext|>", "type_id": 0}
        special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}}
        single = [{"SpecialToken": end}, {"Sequence": {"id": "A", "type_id": 0}}]
        twice = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
        adding = changed_copy("adding", post_processor=twice)
        # Its rule holds unless an option says otherwise, and never gives two.
        for options, same in (((), ("--bos",)), (("--bos",), ("--bos",)), (("--no-bos",), ())):
            assert measured(*options, where=adding)["perplexity"] == measured(*same)["perplexity"]
    with found.case("a tokenizer with tokens that the model lacks"):
        ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
        small = samples.model(folder / "small", blocks=1, vocab_size=64, **ids)
        refused("--window", WINDOW, says="do not belong together", where=small)
    with found.case("no tokenizer"):
        bare = samples.model(folder / "bare", blocks=1)
        for path in bare.glob("*token*"):
            path.unlink()
        refused("--window", WINDOW, says="no tokenizer", where=bare)
    with found.case("another vocabulary"):
        other = samples.model(folder / "other", blocks=1, vocab_size=300)
        line = ("eval", "kld", other, "--against", model, "--data", words, "--window", WINDOW, "-q")
        ended = samples.quantkit(folder, *line, code=1)
        samples.one_line(ended)
        assert "vocabularies" in ended.stderr
    with found.case("a text shorter than the window"):
        short = folder / "short.txt"
        short.write_text(text[: WINDOW - 1])
        refused("--window", WINDOW, says="less than one window", data=short)
    with found.case("a text of one token, and of none"):
        for content in ("a", "", "\n \n"):
            (folder / "tiny.txt").write_text(content)
            refused("--window", 2, says="text", data=folder / "tiny.txt")
    with found.case("windows and strides that cannot be"):
        refused("--window", 513, says="512 positions")
        refused("--window", 512, "--bos", says="--window 511")
        refused("--window", WINDOW, "--stride", WINDOW + 1, says="stride")
    with found.case("a packed model, beside its decoded weights"):
        packed = measured(where=folder / "int4")["perplexity"]
        loaded = quantkit.load(folder / "int4", device="cpu")
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(folder / "int4")(text, add_special_tokens=False)["input_ids"]
        parts = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
        with torch.no_grad():
            losses = [float(loaded(torch.tensor([p]), labels=torch.tensor([p])).loss.double()) for p in parts]
        assert math.isclose(packed, math.exp(sum(losses) / len(losses)), rel_tol=CLOSE), packed
        assert packed != measured()["perplexity"]


FAMILIES = [Family("Q1", "perplexity against float64, and protocols that do not hold", (12, 12, 12), attack)]
