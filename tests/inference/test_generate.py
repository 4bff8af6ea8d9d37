"""`generate` writes greedily and checks the positions of the model."""

from __future__ import annotations

import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import RecipeError
from quantkit.inference.generate import generate
from quantkit.models.tokenizer import load_tokenizer
from quantkit.models.whole_model import load_dense_model
from tests.inference import test_load
from tests.inference.test_load import Folders

folder = test_load.folder


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
