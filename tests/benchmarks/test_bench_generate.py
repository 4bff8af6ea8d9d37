"""`bench_generate`: the timed calls write the tokens of the plain model, and figures follow from times."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import bench_generate as generate, decode_graphs, timing
from benchmarks.bench_generate import Pace, format_paces
from benchmarks.bench_kernels import SCHEMES
from benchmarks.random_model import DENSE, Outline, Sizes, Variant, Workload, build, variants
from benchmarks.timing import Device
from quantkit.models.modules import find_blocks
from tests.benchmarks.samples import FAMILIES, LLAMA, QUIET, built, tiny

H200 = Device("H200", "2.11", "13.0", "13.0", "float16", copy=4e12, rate=740e12)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_steps_write_what_the_plain_model_writes(family: str) -> None:
    model = Outline(family, Path(family), FAMILIES[family])
    made, plain = (built(model, Variant(DENSE, {})) for _ in range(2))
    wanted = IDS
    with torch.inference_mode():
        for _ in range(6):
            wanted = torch.cat([wanted, plain(wanted, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        turn = decode_graphs.decode_calls(made, IDS, 6)
        for _ in range(2):
            assert torch.equal(written(turn), wanted[:, IDS.shape[1] :])


def test_fused_blocks_write_the_same_and_are_compiled_once_for_all() -> None:
    """If the compiled code depended on the number of a block, a model of 80 blocks would be compiled 80 times."""
    made = built(tiny(num_hidden_layers=7), Variant(DENSE, {}))
    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.inference_mode():
        wanted = written(decode_graphs.decode_calls(made, IDS, 6))
        with decode_graphs.fused(made, find_blocks(made), counted):
            assert torch.equal(written(decode_graphs.decode_calls(made, IDS, 6)), wanted)
        count = len(graphs)
        again = written(decode_graphs.decode_calls(made, IDS, 6))
        assert torch.equal(again, wanted) and len(graphs) == count, "what was compiled is left behind"
    assert 1 <= count < 7


class _Uncapturable(TorchDispatchMode):
    """Lists operators that a CUDA graph cannot hold: those that copy a value to the CPU or from it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "unique"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_call_does_not_synchronise(family: str) -> None:
    model = Outline(family, Path(family), FAMILIES[family])
    made = built(model, Variant(DENSE, {}))
    ids = torch.arange(22).view(2, 11)
    with torch.inference_mode():
        turn = decode_graphs.decode_calls(made, ids, 6)
        turn.rewind(0)
        turn.prompt()  # the call before the capture makes the cache
        for tokens, each in ((0, turn.prompt), (11, turn.step)):
            turn.rewind(tokens)
            with _Uncapturable() as mode:
                each()
            assert mode.found == []


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_attention_in_one_kernel_agrees_with_two_products(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(3, 8, 1, 16, generator=random)
    key, value = (torch.randn(3, kv_heads, 11, 16, generator=random) for _ in range(2))
    mask = torch.where(torch.arange(11) < 7, 0.0, float("-inf")).view(1, 1, 1, -1)
    found = []
    for crowd in (1, 1000):
        monkeypatch.setattr(decode_graphs, "MANY_HEADS", crowd)
        found.append(decode_graphs.attention(nn.Module(), query, key, value, mask)[0])
    assert found[0].shape == (3, 1, 8, 16)
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("vocabulary", [257, 512, 1000])
def test_the_likeliest_token_is_the_argmax_and_the_first_of_equals(vocabulary: int) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randint(40, (64, vocabulary), generator=random).float()
    assert torch.equal(decode_graphs.likeliest(logits), logits.argmax(-1, keepdim=True))


SIZES = Sizes(6_000_000_000, 4_000_000_000)
PACE = Pace("marlin", "int4:g128", "weights by the marlin kernel, float16", 16, 0.5, 2e-3, 6_000_100_000, 7**11, SIZES)
PLAIN = replace(PACE, layout=DENSE, scheme="", prompt_s=0.25, step_s=5e-3)
ROWS = generate.rows(
    "llama3-8b",
    Workload((1, 16), 512, 64, torch.float16),
    H200,
    (PLAIN, PACE, replace(PACE, batch=1, prompt_s=0.1)),
)


def test_figures_come_from_times_and_ratios_from_the_dense_model_in_the_same_batch() -> None:
    dense, row, single = ROWS
    assert dense["decode_vs_dense"] == dense["prompt_vs_dense"] == 1
    assert (row["prompt_tokens_per_s"], row["decode_tokens_per_s"]) == (16 * 512 / 0.5, 8000)
    assert (row["prompt_vs_dense"], row["decode_vs_dense"]) == (0.5, 2.5)
    assert row["floor_tokens_per_s"] == pytest.approx(16_000) and row["pct_of_floor"] == pytest.approx(50)
    assert (row["weight_bytes"], row["packed_bytes"]) == (6_000_100_000, 6_000_000_000)
    assert single["decode_vs_dense"] is None and single["floor_tokens_per_s"] == pytest.approx(1000)


def test_table_csv_and_json_agree() -> None:
    found = {"device": asdict(H200), "notices": ["something is left out"], "rows": ROWS}
    text = format_paces(found)
    line = next(line for line in text.splitlines() if line.startswith("marlin  int4:g128     16"))
    assert line.split()[3:10] == ["16384", "0.50", "8000.0", "2.50", "16000.0", "50", "%"]
    assert "note: something is left out" in text and "4000 GB/s" in text and "prompts of 512 tokens" in text
    assert "marlin int4:g128: weights by the marlin kernel, float16" in text
    back = list(csv.DictReader(io.StringIO(timing.table(ROWS).decode())))
    assert [row["decode_vs_dense"] for row in back] == ["1", "2.5", ""]
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["rows"][2]["decode_vs_dense"] is None and again["device"]["copy"] == 4e12
    assert back[0].keys() == again["rows"][0].keys()


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
