"""The protocol of perplexity is held, or its breach is said (Q1)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

import quantkit
from tests.reliability import samples
from tests.reliability.campaign import Family, Run

WINDOW = 64
#: The largest relative difference from the reference.
CLOSE = 1e-4


def reference(model: Path, text: str, window: int, stride: int, bos: bool, loaded: Any = None) -> float:
    """Compute the perplexity in float64 from transformers' logits, with no code of quantkit.

    The tokenizer of the samples has one token a byte, in the order of their letters.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = AutoTokenizer.from_pretrained(model)
    network = loaded or AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
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

    def refused(says: str, where: Path, *options: object, kind: str = "ppl") -> None:
        line = ("eval", kind, where, "--data", words, "-q", *options)
        samples.one_line(samples.quantkit(folder, *line, code=None), says)

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
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1)
    small = samples.model(folder / "small", blocks=1, vocab_size=64, **ids)
    bare, other = samples.model(folder / "bare", blocks=1), samples.model(folder / "other", blocks=1, vocab_size=300)
    for path in bare.glob("*token*"):
        path.unlink()
    window = ("--window", WINDOW)
    with found.case("a tokenizer with tokens that the model lacks"):
        refused("do not belong together", small, *window)
    with found.case("no tokenizer"):
        refused("no tokenizer", bare, *window)
    with found.case("another vocabulary"):
        refused("vocabularies", other, "--against", model, *window, kind="kld")
    with found.case("a stride that cannot be"):
        refused("stride", model, *window, "--stride", WINDOW + 1)
    with found.case("a packed model, beside its decoded weights"):
        packed = measured(where=folder / "int4")["perplexity"]
        loaded = quantkit.load(folder / "int4", device="cpu")
        expected = reference(model, text, WINDOW, WINDOW, False, loaded)
        assert math.isclose(packed, expected, rel_tol=CLOSE), packed
        assert packed != measured()["perplexity"]


FAMILIES = [Family("Q1", "perplexity against float64, and protocols that do not hold", (9, 9, 9), attack)]
