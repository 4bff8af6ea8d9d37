"""Prove and time packed encoder-decoders on a GPU, in published shapes with random weights.

    python benchmarks/encoder_decoders.py --csv benchmarks/gpu/encoder_decoders.csv

`logits_error` is the norm of the difference to the logits of the decoded model in float32, relative to theirs, and
`decoded_error` that of the decoded model in `dtype`, whose greedy tokens agree in `same_tokens` of 64. `eager_ms` is a
call of `generate` that reads two inputs and writes 32 tokens each, `graph_ms` the same work as one CUDA graph. T5 is in
bfloat16: transformers keeps half of its feed-forward weights in float32 in a float16 model, which no kernel multiplies.
"""

import argparse
import csv
import timeit
from copy import deepcopy
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

import quantkit
from benchmarks import timing
from benchmarks.bench_generate import graph_of
from quantkit.checkpoint.reader import Checkpoint

HALVES, SIZES = ("encoder", "decoder"), (("layers", 12), ("attention_heads", 12), ("ffn_dim", 3072))
#: Classes, and what their configs' defaults lack. BartConfig's are facebook/bart-large, T5Config's t5-small.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart-large": ("Bart", {}),
    "t5-small": ("T5", {"decoder_start_token_id": 0}),
    "t5-small gated": ("T5", {"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"}),
    "whisper-small": ("Whisper", {"d_model": 768} | {f"{half}_{key}": n for half in HALVES for key, n in SIZES}),
}
VARIANTS = (("marlin", {"group_size": 128}), ("tcfpx", {"format": "fp6"}), ("tcfpx", {"format": "fp5"}))
BATCH, READ, NEW, ROUNDS = 2, 512, 32, 5
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "min_new_tokens": NEW, "max_new_tokens": NEW}


@torch.no_grad()
def measured(name: str, work: Path, where: str) -> Any:
    torch.manual_seed(0)
    (kind, options), dtype = MODELS[name], torch.bfloat16 if "t5" in name else torch.float16
    with torch.device(where):
        config = getattr(transformers, f"{kind}Config")(**options)
        dense: Any = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval().to(dtype)
        sound, ids, words = torch.randn(BATCH, 80, 3000).to(dtype), *torch.randint(3, 4000, (2, BATCH, READ))
    dense.save_pretrained(work / "dense")
    inputs, words = {"input_features": sound} if "whisper" in name else {"input_ids": ids}, words[:, :NEW]
    usual, asked = timed(dense, inputs), inputs | {"decoder_input_ids": words}
    for number, (layout, options) in enumerate(VARIANTS):
        folder = work / str(number)
        quantkit.quantize(work / "dense", folder, method="rtn", layout=layout, device=where, **options)
        proof, src, decoded = quantkit.verify(folder, device=where), Checkpoint(folder), deepcopy(dense).float()
        decoded.load_state_dict({each: src.dense(each, torch.float32) for each in src.logical()}, strict=False)
        exact = decoded(**{key: each.float() if each.dtype == dtype else each for key, each in asked.items()}).logits
        packed, decoded = quantkit.load(folder, device=where, dtype=dtype), decoded.to(dtype)
        written, same = (model.generate(**inputs, **GREEDY)[:, -NEW:] for model in (packed, decoded))
        row = {"model": name, "dtype": str(dtype), "layout": layout, "scheme": proof.rows[0].scheme}
        row |= {"weights": proof.weights, "multiplied": proof.multiplied, "verified": proof.ok, "bound": proof.bound}
        for key, model in (("logits_error", packed), ("decoded_error", decoded)):
            row[key] = float((model(**asked).logits - exact).norm() / exact.norm())
        row |= {"largest_error": max(proof.errors, default=None), "same_tokens": int((written == same).sum())}
        row |= zip(("eager_ms", "graph_ms", "bytes"), timed(packed, inputs), strict=True)
        row |= zip(("eager_16bit_ms", "graph_16bit_ms", "bytes_16bit"), usual, strict=True)
        yield row | {"gpu": torch.cuda.get_device_name() if where == "cuda" else "", "torch": torch.__version__}


@torch.inference_mode()
def timed(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, float | None, int]:
    """Return the median milliseconds of `generate`, and of its products as one CUDA graph, and the bytes of weights."""

    def work() -> None:
        hidden = BaseModelOutput(model.get_encoder()(*inputs.values()).last_hidden_state)
        cache, token = EncoderDecoderCache(DynamicCache(), DynamicCache()), torch.zeros_like(ids)
        for _ in range(NEW):
            token = model(encoder_outputs=hidden, decoder_input_ids=token, past_key_values=cache).logits.argmax(-1)

    ids = model.generate(**inputs, **GREEDY)[:, :1]
    # The list waits for the GPU.
    times = timeit.repeat(lambda: model.generate(**inputs, **GREEDY).tolist(), number=1, repeat=ROUNDS)
    graph = graph_of(work, lambda: None) if model.device.type == "cuda" else work()
    replayed = median(timing.seconds(graph.replay) * 1e3 for _ in range(ROUNDS)) if graph else None
    return median(times) * 1e3, replayed, sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    args, rows = parser.parse_args(), []
    for name in MODELS:
        with TemporaryDirectory() as work:
            for row in measured(name, Path(work), args.device):
                rows.append([list(row), list(row.values())])
                with args.csv.open("w", newline="") as file:
                    csv.writer(file).writerows([rows[0][0], *(values for _, values in rows)])
