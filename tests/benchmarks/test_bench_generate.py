"""`bench_generate`: the timed calls write the tokens of the plain model."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import bench_generate as generate, decode_graphs
from benchmarks.bench_kernels import SCHEMES
from benchmarks.random_model import DENSE, Variant, build, variants
from tests.benchmarks.samples import LLAMA, QUIET, built, tiny

IDS = torch.randint(257, (3, 11), generator=torch.Generator().manual_seed(1))


def written(turn: Any, prompt: Callable[[], None] | None = None, step: Callable[[], None] | None = None) -> Tensor:
    """Return the six tokens that calls, or the graphs of them, write behind IDS; the cache is rewound, not new."""
    turn.rewind(0)
    (prompt or turn.prompt)()
    found = [turn.token.clone()]
    turn.rewind(IDS.shape[1])
    for _ in range(5):
        (step or turn.step)()
        found.append(turn.token.clone())
    return torch.cat(found, 1)


def test_prompts_and_steps_write_what_the_plain_model_writes() -> None:
    made, plain = (built(tiny(), Variant(DENSE, {})) for _ in range(2))
    wanted = IDS
    with torch.inference_mode():
        for _ in range(6):
            wanted = torch.cat([wanted, plain(wanted, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        turn = decode_graphs.decode_calls(made, IDS, 6)
        for _ in range(2):
            assert torch.equal(written(turn), wanted[:, IDS.shape[1] :])


def test_models_that_cannot_be_measured_end_with_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "mistral", "sliding_window": 64}))
    said = {
        "--model llama9": "unknown model 'llama9': use llama3-8b, llama2-70b, or a config.json",
        "--layout tcfpx --scheme int4:g128": "TC-FPx holds fp6 and fp5, not int4",
        f"--model {tmp_path} --layout marlin --prompt-tokens 9": "a sliding window",
        "--skip qkv": "matches no linear",
        "--new-tokens 8000": "more than the 8192 positions of llama3-8b",
    }
    if not torch.cuda.is_available():
        said["--json"] = "torch sees no CUDA GPU"
    for line, text in said.items():
        monkeypatch.setattr(sys, "argv", ["bench_generate", *line.split()])
        with pytest.raises(SystemExit, match=re.escape(text)):
            generate.main()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_layouts_are_timed_on_a_gpu(
    dtype: str,
    gpu: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": 512, "intermediate_size": 1024}))
    options = ("--batch", 1, "--batch", 3, "--prompt-tokens", 33, "--new-tokens", 7, "--dtype", dtype)
    monkeypatch.setattr(sys, "argv", ["generate", "--model", str(tmp_path), *map(str, options), "--json", "-q"])
    generate.main()
    found = json.loads(capsys.readouterr().out)
    layouts = [DENSE, *SCHEMES]
    assert [(row["layout"], row["batch"]) for row in found["rows"]] == [(name, b) for name in layouts for b in (1, 3)]
    for row in found["rows"]:
        assert 0.01 < row["step_ms"] < 1e3 and 0.01 < row["prompt_ms"] < 1e3 and row["decode_vs_dense"] > 0
        assert row["packed_bytes"] <= row["weight_bytes"] < 1.03 * row["packed_bytes"] + 2**18
        assert row["peak_bytes"] > row["weight_bytes"]
        assert "decoded" not in row["weights"] and math.isfinite(row["floor_tokens_per_s"])
    assert found["notices"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [DENSE, *SCHEMES])
def test_graphs_write_what_calls_write(layout: str, gpu: torch.device) -> None:
    model = tiny(hidden_size=512, intermediate_size=1024)
    found = Variant(DENSE, {}) if layout == DENSE else variants(model, [layout], [], [])[1]
    made, _ = build(model, found, torch.float16, gpu, QUIET)
    with torch.inference_mode():
        turn = decode_graphs.decode_calls(made, IDS.to(gpu), 6)
        wanted = written(turn)
        prompt = generate.graph_of(turn.prompt, lambda: turn.rewind(0))
        step = generate.graph_of(turn.step, lambda: turn.rewind(11))
        assert torch.equal(written(turn, prompt.replay, step.replay), wanted)
