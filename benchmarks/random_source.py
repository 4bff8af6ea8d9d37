"""Write a model folder with random weights, and text for its calibration, from a config.json alone."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_model import Outline
from quantkit.checkpoint.reader import CONFIG
from quantkit.errors import RecipeError
from quantkit.io import files
from quantkit.io.json_files import dump_json
from quantkit.io.model_folder import INDEX
from quantkit.io.safetensors_files import SafetensorsWriter, header_bytes
from quantkit.models.meta_model import skeleton
from quantkit.models.modules import find_blocks
from quantkit.text.tokenizer import load_tokenizer, token_ids

#: The most words of the tokenizer.
WORDS = 4096
#: Files written at the same time.
WRITERS = 4
#: Rows of random weights drawn at the same time.
ROWS = 4096


def blocks_of(model: Outline) -> int:
    """Count the blocks of a model."""
    return len(find_blocks(skeleton(model, torch.bfloat16)))


def shortened(model: Outline, blocks: int) -> Outline:
    """Make a model of the same shapes with fewer blocks."""
    config = copy.deepcopy(model.config) | {"dtype": "bfloat16"}
    config.pop("quantization_config", None)
    text = config.get("text_config", config)
    before = blocks_of(model)
    # Each family has its own key for the number, and some list a type for each block.
    for key, value in text.items():
        if key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") and value == before:
            text[key] = blocks
        elif isinstance(value, list) and len(value) == before:
            text[key] = value[:blocks]
    text.setdefault("num_hidden_layers", blocks)
    return Outline(model.name, model.path, config)


def write_model(folder: Path, model: Outline, device: torch.device) -> None:
    """Write a folder of random bfloat16 weights, one shard a block, with a tokenizer of the words w0, w1 and so on.

    RecipeError for a family whose tokenizer cannot be one of words.
    """
    built = skeleton(model, torch.bfloat16)
    words = min(WORDS, built.get_input_embeddings().get_parameter("weight").shape[0])
    _write(folder, CONFIG, model.config)
    _write(folder, "tokenizer.json", word_tokenizer(words))
    _write(folder, "tokenizer_config.json", {"tokenizer_class": "TokenizersBackend", "eos_token": "w0"})
    if token_ids(load_tokenizer(folder), "w1 w2", special=False).tolist() != [1, 2]:
        family = model.config.get("model_type")
        raise RecipeError(
            f"{model.name}: transformers gives {family} models a tokenizer that random words do not fit: use a config "
            "of the same sizes with model_type llama"
        )
    paths = [f"{path}." for path in find_blocks(built)]
    shards: dict[str, list[str]] = {}
    for name, _ in built.named_parameters():  # tied weights are listed once
        block = next((number for number, path in enumerate(paths) if name.startswith(path)), len(paths))
        shards.setdefault(f"model-{block + 1:05}.safetensors", []).append(name)

    def write_shard(file: str) -> None:
        random = torch.Generator(device).manual_seed(sorted(shards).index(file))
        shard = SafetensorsWriter(folder / file, header_bytes(shards[file]))
        for name in shards[file]:
            shard.add(name, random_weight(built.get_parameter(name), random).to("cpu"))
        shard.close()

    with ThreadPoolExecutor(WRITERS, "quantkit-source") as pool:
        list(pool.map(write_shard, shards))
    weight_map = {name: file for file, names in sorted(shards.items()) for name in names}
    _write(folder, INDEX, {"metadata": {}, "weight_map": weight_map})


def draw_text(path: Path, samples: int, length: int, words: int) -> None:
    """Write documents of `length` random words each, with blank lines in between."""
    drawn = torch.randint(words, (samples, length), generator=torch.Generator().manual_seed(0))
    text = "\n\n".join(" ".join(f"w{word}" for word in row) for row in drawn.tolist())
    files.write_atomic(path, text.encode())


def random_weight(like: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Draw weights whose products are about as large as their inputs; vectors are ones."""
    made = torch.ones(like.shape, dtype=torch.bfloat16, device=random.device)
    if like.ndim > 1:
        for rows in made.split(ROWS):  # in parts: random numbers are drawn in float32
            rows.copy_(torch.randn(rows.shape, generator=random, device=random.device) * like.shape[-1] ** -0.5)
    return made


def word_tokenizer(words: int) -> dict[str, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found: dict[str, Any] = json.loads(vocabulary.to_str())
    return found


def _write(folder: Path, name: str, value: dict[str, Any]) -> None:
    files.write_atomic(folder / name, dump_json(value, special_floats=True))
