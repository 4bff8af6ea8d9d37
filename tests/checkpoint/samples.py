"""Small folders, and the shortest loop that writes one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import CheckpointWriter, Item
from quantkit.core.formats import FP6, INT4
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.io.model_folder import INDEX
from quantkit.io.staging import is_complete, publish, staging
from quantkit.layouts import LAYOUTS, quantkit_key
from quantkit.layouts.base import Layout
from quantkit.layouts.schemes import Schemes
from tests.layouts.samples import record, tame

ONE = {"a.weight": torch.arange(6, dtype=torch.float16), "b.bias": torch.ones(3)}
TWO = {"c.weight": torch.arange(4.0).view(2, 2)}


def dense_folder(folder: Path, config: dict[str, Any] | None = None, index: bool = True) -> Path:
    """Two shards with an index, or one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
    (folder / "tokenizer.json").write_text("{}")
    if not index:
        save_file({**ONE, **TWO}, folder / "model.safetensors")
        return folder
    save_file(ONE, folder / "x-00001-of-00002.safetensors")
    save_file(TWO, folder / "x-00002-of-00002.safetensors")
    names = {name: "x-00001-of-00002.safetensors" for name in ONE} | {"c.weight": "x-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 12 + 12 + 16}, "weight_map": names}))
    return folder


def copy_all(
    source: Checkpoint,
    out: Path,
    layout: Layout | None = None,
    *,
    config: dict[str, Any] | None = None,
    resume: bool = False,
    every: int = 2,
    shard: int = 2**20,
) -> dict[str, str]:
    """The smallest writer loop: every item, a commit after `every` items."""
    with staging(out, resume=resume, source=source.path) as partial:
        if is_complete(partial):
            publish(partial, out)
            return {}
        writer = CheckpointWriter(partial, source, layout, max_shard_bytes=shard, expected=source.names())
        writer.identify({"source": source.hashes(), "version": 1}, keys_that_differ)
        done = writer.items_done()
        packed = {f"{module}.weight": module for module in source.modules()}
        for number, name in enumerate(source.logical(), 1):
            if name not in done:
                writer.add(Item(name, source.quantized(packed[name]) if name in packed else source.get(name)))
                if number % every == 0:
                    writer.commit({"number": number})
        writer.commit({})
        hashes = writer.finish(config or source.config, lambda: {"README.md": b"a card\n"})
        publish(partial, out)
    return hashes


def keys_that_differ(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    return " and ".join(key for key in now if before[key] != now[key]) or None


Q = "model.layers.0.self_attn.q_proj"

SPARSE = Scheme(INT4, 128, sparsity="2:4")

SCHEMES = {"humming": Scheme(FP6), "tcfpx": Scheme(FP6), "marlin": Scheme(INT4, 128)}

SCHEMES |= {"marlin24": SPARSE, "marlin24-ct": SPARSE}


def packed_folder(folder: Path, name: str) -> tuple[Path, QuantizedTensor]:
    """A packed weight with a bias, between two dense tensors, written with the library rather than with our writer."""
    layout = LAYOUTS[name]
    q = tame(record(SCHEMES.get(name, Scheme(INT4, 64)), 256, 256), torch.float16)
    schemes = Schemes(q.scheme, ignore=("lm_head",))
    config = {**layout.write_config(schemes), "quantkit": quantkit_key(name, schemes, "1", None)}
    tensors = {f"{Q}.{suffix}": tensor for suffix, tensor in layout.pack(q).items()}
    dense = {
        "model.embed_tokens.weight": torch.ones(4, 4),
        "model.norm.weight": torch.ones(4),
        f"{Q}.bias": torch.ones(256),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": config, "dtype": "float16"}))
    save_file({**tensors, **dense}, folder / "model.safetensors")
    return folder, q
