"""Train the packaged model, `quantkit/demo_model`, on Python's documentation; needs neither a network nor a GPU.

The training text is the documentation strings of the standard library, numpy and torch, and pydoc's topics. The text
that `quantkit demo` evaluates on is held out. The same versions of Python and packages on the same kind of processor
give the same weights and tokenizer. Twenty minutes on one core.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import platform
import random
import re
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantkit import api
from quantkit.cli.demo import EVALUATION, SHORTEST, WINDOW, texts

PACKAGES = ("numpy", "torch")
LICENCES = {"pydoc topics": "PSF-2.0", "standard library": "PSF-2.0", "numpy": "BSD-3-Clause", "torch": "BSD-3-Clause"}
#: Folders of tests, and of packages that are not the standard library's own.
SKIPPED = {"test", "tests", "testing", "idlelib", "ensurepip", "site-packages", "dist-packages"}
#: A training string that shares this many successive words with the evaluation text is dropped.
SHARED_WORDS = 8
VOCABULARY, END = 2048, "<|endoftext|>"
BATCH, RATE, WARMUP = 4, 3e-3, 100
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
    "rms_norm_eps": 1e-5,
}
CARD = """\
# The demo's model

A tiny causal language model, made for `quantkit demo` to quantize. Its weights are really trained, but it is too small
to write useful text. `benchmarks/train_demo_model.py` wrote this folder, this page included.

| | |
| --- | --- |
| architecture | `LlamaForCausalLM`: 2 layers, hidden 256, intermediate 512, untied `lm_head`, no biases |
| attention | 4 heads of 64, 2 KV heads, context {window} |
| parameters | {parameters:,}, of which {linears:,} are in the linears of the blocks |
| storage | float16 safetensors, one file |
| tokenizer | byte-level BPE of {vocabulary} entries, trained on the same text; it adds no token around a text |
| linear shapes (out × in) | q, o 256×256; k, v 128×256; gate, up 512×256; down 256×512 |

## Training text

| source | licence | documents | characters |
| --- | --- | ---: | ---: |
{sources}

Every source is a part of Python {python} or of a package that quantkit requires. The text is the documentation strings
of modules, classes and functions of at least {shortest} characters, each once. Folders of tests are left out. A few
files of these projects carry another permissive licence, such as MIT or Apache-2.0.

The demo's evaluation text is held out. It is the documentation of these modules:
{held_out}.
Training uses no string from these modules, and no string that shares {shared} successive words with that text.

This folder holds none of the text itself, except the words in the tokenizer's vocabulary. The weights have quantkit's
licence, Apache-2.0.

## Training

The text has {tokens:,} tokens. Training takes {steps} steps of {batch} × {window} tokens, {seen:,} tokens in all. The
optimizer is AdamW: peak learning rate {rate}, {warmup} steps of warm-up, cosine decay to 0, seed 0, float32. The mean
training loss of the last 100 steps is {loss:.3f}.

To reproduce:

```
python benchmarks/train_demo_model.py --steps {steps} -o demo_model
```

The result depends on the versions of the sources, here Python {python}, {packages}.
Another kind of processor rounds differently and gives other weights of the same quality.

## Perplexity

The perplexity of the held-out text is {perplexity:.3f}, with windows and stride of {window} tokens and {predictions:,}
predictions. A unigram model with the same tokenizer and training text has {unigram:.1f}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write the model and tokenizer to")
    args = parser.parse_args()

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    corpus = training_text()
    documents = [document for found in corpus.values() for document in found]
    random.Random(0).shuffle(documents)
    tokenizer = _tokenizer(documents)
    tokens = torch.tensor([token for document in documents for token in tokenizer.encode(document + END)])
    print(f"{len(documents)} documents, {sum(map(len, documents))} characters, {len(tokens)} tokens", flush=True)

    model, loss = _train(tokens, args.steps)
    model.half().eval().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "README.md").write_text(_card(corpus, tokens, model, loss, args.steps, args.out), encoding="utf-8")


def training_text() -> dict[str, list[str]]:
    """Return the documents of each source, one a topic or Python file. None has a string that the demo evaluates on."""
    held_out = word_sequences(texts()[1])
    seen: set[str] = set()

    def documents(files: Iterable[list[str]]) -> list[str]:
        found = []
        for strings in files:
            long = (string for string in strings if len(string) >= SHORTEST)
            fresh = [s for s in dict.fromkeys(long) if s not in seen and held_out.isdisjoint(word_sequences(s))]
            seen.update(fresh)
            found.append("\n\n".join(fresh))
        return list(filter(None, found))

    corpus = {
        "pydoc topics": documents([topics[name]] for name in sorted(topics)),
        "standard library": documents(_docstrings(Path(sysconfig.get_path("stdlib")))),
    }
    for package in PACKAGES:
        (folder,) = find_spec(package).submodule_search_locations
        corpus[package] = documents(_docstrings(Path(folder)))
    return corpus


def _docstrings(root: Path) -> Iterator[list[str]]:
    """Yield the docstrings of each Python file below `root`, except those of tests and evaluated modules."""
    evaluated = tuple(f"{name}." for name in EVALUATION.split())
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED.intersection(parts) or ".".join((*parts, "")).startswith(evaluated):
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        yield [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]


def word_sequences(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[i:] for i in range(SHARED_WORDS)), strict=False))


def _tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END)


def _train(tokens: torch.Tensor, steps: int) -> tuple[LlamaForCausalLM, float]:
    """Train on random windows of `tokens`; return the model and the mean loss of the last 100 steps."""
    config = LlamaConfig(**SHAPE, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = LlamaForCausalLM(config).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    started, losses = time.perf_counter(), []
    for step in range(steps):
        rate = RATE * min(1, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(tokens) - WINDOW, (BATCH,)).tolist()
        batch = torch.stack([tokens[start : start + WINDOW] for start in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses = [*losses[-99:], loss.item()]
        if (step + 1) % 100 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step + 1}: loss {sum(losses) / len(losses):.3f}, {seconds:.0f} s", flush=True)
    return model, sum(losses) / len(losses)


def _card(
    corpus: dict[str, list[str]], tokens: torch.Tensor, model: LlamaForCausalLM, loss: float, steps: int, out: Path
) -> str:
    sources = (
        f"| {name} | {LICENCES[name]} | {len(found):,} | {sum(map(len, found)):,} |" for name, found in corpus.items()
    )
    with tempfile.TemporaryDirectory() as folder:
        held_out = Path(folder, "held_out.txt")
        held_out.write_text(texts()[1], encoding="utf-8")
        measured = api.eval_ppl(out, data=str(held_out), window=WINDOW, device="cpu")
    return CARD.format(
        parameters=sum(p.numel() for p in model.parameters()),
        linears=sum(p.numel() for p in model.model.layers.parameters() if p.ndim > 1),
        sources="\n".join(sources),
        tokens=len(tokens),
        steps=steps,
        batch=BATCH,
        window=WINDOW,
        seen=steps * BATCH * WINDOW,
        rate=RATE,
        warmup=WARMUP,
        loss=loss,
        vocabulary=VOCABULARY,
        shortest=SHORTEST,
        shared=SHARED_WORDS,
        held_out=", ".join(f"`{name}`" for name in EVALUATION.split()),
        python=platform.python_version(),
        packages=" and ".join(f"{package} {version(package).split('+')[0]}" for package in PACKAGES),
        predictions=measured.tokens,
        perplexity=measured.perplexity,
        unigram=_unigram(tokens, out),
    )


def _unigram(tokens: torch.Tensor, folder: Path) -> float:
    """Return the perplexity of the held-out text under the frequencies of `tokens`, with add-one smoothing."""
    counts = torch.bincount(tokens, minlength=VOCABULARY).double() + 1
    held_out = PreTrainedTokenizerFast.from_pretrained(folder).encode(texts()[1])
    return (counts / counts.sum()).log()[torch.tensor(held_out)].mean().neg().exp().item()


if __name__ == "__main__":
    main()
