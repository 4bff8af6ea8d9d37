"""Compare conversations with plain text as calibration data of a small chat model; needs neither a network nor a GPU.

The packaged model is fine-tuned on conversations about Python's standard library, written by this script from its
documentation, with a chat template of two new special tokens. GPTQ then quantizes it to INT4 with conversations and
with plain text of other modules: the same number of documents, each of the same length in tokens. The divergence from
the fine-tuned model is measured on conversations, and on plain text, about modules that nothing else has seen. Some
ten minutes on one core.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit import api
from quantkit.cli.demo import CALIBRATION, EVALUATION, MODEL, WINDOW

#: Modules of the fine-tuning conversations; the demo's own modules calibrate and evaluate.
TRAINING = """
    ast asyncio base64 binascii bisect builtins bz2 cProfile cgi chunk code colorsys compileall contextvars ctypes
    curses dataclasses distutils email encodings filecmp fnmatch formatter getpass graphlib hashlib hmac imghdr
    importlib importlib.metadata importlib.resources ipaddress itertools keyword linecache locale lzma mailcap math
    mimetypes mmap modulefinder multiprocessing netrc nntplib operator optparse os os.path pdb pipes pkgutil
    platform plistlib poplib pprint profile queue quopri sched secrets select selectors shelve shlex shutil signal
    site smtplib socket socketserver sqlite3 ssl stat string struct subprocess symtable sys sysconfig tabnanny
    tarfile telnetlib threading time timeit tkinter token tokenize trace tracemalloc types typing unittest
    unittest.mock uuid venv warnings wave weakref webbrowser wsgiref xml.dom.minidom xml.etree.ElementTree xml.sax
    xmlrpc.client xmlrpc.server zipapp zipimport zlib
"""
START, STOP = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = "You are a helpful assistant who explains Python."
FIRST = ("What is {}?", "What does {} do?", "Explain {} to me, please.", "How do I use {}?", "Tell me about {}.")
NEXT = ("And {}?", "Thanks! What about {}?", "How does {} differ?", "I also saw {}. What is it for?")
#: Characters of an answer, turns of a conversation, and conversations that calibrate.
ANSWER, TURNS, SAMPLES = 400, 3, 96
BATCH, RATE, WARMUP = 4, 1e-3, 30
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("-o", "--out", type=Path, default=Path("benchmarks/cpu/chat_calibration.json"))
    args = parser.parse_args()

    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), args.steps)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["summary"], indent=1))


def run(work: Path, steps: int) -> dict[str, Any]:
    """Fine-tune, quantize with both kinds of text and every seed, and measure the divergences."""
    learned, calibrating, held_out = (list(conversations(m)) for m in (TRAINING, CALIBRATION, EVALUATION))
    model, loss = fine_tune(work / "chat", learned, steps)
    tokenizer = AutoTokenizer.from_pretrained(work / "chat")
    texts = {
        "conversations": "".join(tokenizer.apply_chat_template(talk, tokenize=False) for talk in held_out),
        "plain text": "\n\n".join(text for text in documentation(EVALUATION)),
    }
    for name, text in texts.items():
        (work / f"{name}.txt").write_text(text, encoding="utf-8")
    with (work / "chat.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": talk}) + "\n" for talk in calibrating)

    rows = []
    for seed in SEEDS:
        options = {"samples": SAMPLES, "max_length": WINDOW, "seed": seed, "device": "cpu"}
        made = api.quantize(model, work / f"chat-{seed}", calib=str(work / "chat.jsonl"), **options)
        lengths = [len(talk) for talk in _drawn(tokenizer, work / "chat.jsonl", seed)]
        plain = work / f"plain-{seed}.jsonl"
        equal_text(tokenizer, plain, lengths, seed)
        other = api.quantize(model, work / f"plain-{seed}-out", calib=str(plain), **options)
        assert made["calibration"]["tokens"] == other["calibration"]["tokens"]
        for kind, out, report in (("conversations", f"chat-{seed}", made), ("plain text", f"plain-{seed}-out", other)):
            for text in texts:
                found = api.eval_kld(work / out, model, data=str(work / f"{text}.txt"), window=WINDOW, device="cpu")
                rows.append(
                    {
                        "calibrated_on": kind,
                        "evaluated_on": text,
                        "seed": seed,
                        "sequences": report["calibration"]["sequences"],
                        "tokens": report["calibration"]["tokens"],
                        "kld": found.kld,
                        "top1": found.top1,
                        "predictions": found.tokens,
                    }
                )
                print(rows[-1], flush=True)
    before = api.eval_ppl(model, data=str(work / "conversations.txt"), window=WINDOW, device="cpu")
    base = api.eval_ppl(MODEL, data=str(work / "conversations.txt"), window=WINDOW, device="cpu")
    summary = {
        f"calibrated on {kind}, evaluated on {text}": statistics.mean(
            row["kld"] for row in rows if (row["calibrated_on"], row["evaluated_on"]) == (kind, text)
        )
        for text in texts
        for kind in texts
    }
    return {
        "command": f"python benchmarks/chat_calibration.py --steps {steps}",
        "training": {"steps": steps, "tokens": steps * BATCH * WINDOW, "loss": loss, "conversations": len(learned)},
        "perplexity_on_conversations": {"fine-tuned": before.perplexity, "packaged model": base.perplexity},
        "summary": summary,
        "rows": rows,
    }


def documentation(modules: str) -> Iterator[str]:
    """Yield the documentation strings of the public classes and functions of modules, in a fixed order."""
    for _, _, text in _documented(modules):
        yield text


def conversations(modules: str) -> Iterator[list[dict[str, str]]]:
    """Yield conversations of up to `TURNS` questions about names of one module, answered by its documentation."""
    dice = random.Random(0)
    named: dict[str, list[tuple[str, str]]] = {}
    for module, name, text in _documented(modules):
        named.setdefault(module, []).append((name, text[:ANSWER].rsplit(" ", 1)[0]))
    for found in named.values():
        while found:
            talk = [{"role": "system", "content": SYSTEM}] if dice.random() < 0.5 else []
            turns = dice.randint(1, TURNS)
            for turn, (name, answer) in enumerate(found[:turns]):
                question = dice.choice(NEXT if turn else FIRST).format(name)
                talk += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            found = found[turns:]
            yield talk


def _documented(modules: str) -> Iterator[tuple[str, str, str]]:
    """Yield module, name and documentation string; modules that this Python does not have are left out."""
    seen = set()
    for module in modules.split():
        try:
            members = vars(import_module(module))
        except ImportError:
            continue
        for name, value in sorted(members.items()):
            own = inspect.isroutine(value) or inspect.isclass(value)
            text = inspect.cleandoc(value.__doc__) if own and isinstance(value.__doc__, str) else ""
            if len(text) >= 60 and text not in seen and not name.startswith("_"):
                seen.add(text)
                yield module, f"{module}.{name}", text


def fine_tune(folder: Path, talks: list[list[dict[str, str]]], steps: int) -> tuple[Path, float]:
    """Train the packaged model on conversations into `folder`; return it and the mean loss of the last 50 steps."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, STOP]})
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train()
    model.resize_token_embeddings(len(tokenizer))
    random.Random(0).shuffle(talks)
    rendered = "".join(tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks)
    tokens = torch.tensor(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
    print(f"{len(talks)} conversations, {len(tokens)} tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
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
        losses = [*losses[-49:], loss.item()]
        if (step + 1) % 50 == 0:
            print(
                f"step {step + 1}: loss {statistics.mean(losses):.3f}, {time.perf_counter() - started:.0f} s",
                flush=True,
            )
    model.half().eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, statistics.mean(losses)


def _drawn(tokenizer: Any, path: Path, seed: int) -> list[torch.Tensor]:
    from quantkit.text.sequences import draw_calibration

    return draw_calibration(str(path), tokenizer, samples=SAMPLES, max_length=WINDOW, seed=seed).sequences


def equal_text(tokenizer: Any, path: Path, lengths: list[int], seed: int) -> None:
    """Write plain documents of exactly these lengths in tokens, cut from the documentation that calibrates."""
    dice = random.Random(seed)
    ids = tokenizer("\n\n".join(documentation(CALIBRATION)), add_special_tokens=False, verbose=False)["input_ids"]
    with path.open("w", encoding="utf-8") as file:
        for length in lengths:
            while True:  # a cut inside a character or a word can change the number of tokens
                start = dice.randrange(len(ids) - length)
                text = tokenizer.decode(ids[start : start + length])
                if len(tokenizer(text)["input_ids"]) == length:
                    break
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
