"""Plans: exact bytes, all misfits at once, and suggestions that work."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from quantkit.calibration import loop
from quantkit.checkpoint import writer
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import Item
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError, LayoutError, QuantkitError
from quantkit.io.safetensors_files import RESERVED
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import Schemes
from quantkit.models.outside import Outside
from quantkit.pipeline import convert, quantize
from quantkit.pipeline.inspection import describe
from quantkit.planning.needs import Memory
from quantkit.planning.plan import plan_pack, plan_quantize
from quantkit.planning.survey import plan
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping, pruning_from_mapping
from tests.layouts.samples import write_folder
from tests.tiny_models import write_model


def tensor_bytes(folder: Path) -> int:
    """Count the tensor bytes of an output with the safetensors library."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                total += tensor.numel() * tensor.element_size()
    return total


def recipe(layout: str | None = None, **keys: Any) -> Any:
    scheme = {key: keys.pop(key) for key in ("format", "group_size", "symmetric") if key in keys}
    chosen = {} if layout is None else {"layout": layout}
    return from_mapping({"scheme": scheme, "method": "rtn", "clip": "none", **chosen, **keys})


def sparse(folder: Path, linears: dict[str, tuple[int, int]], **config: Any) -> Checkpoint:
    """Write a checkpoint of any size as a sparse file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float16", **config}))
    header, end = {}, 0
    for module, (n, k) in linears.items():
        header[f"{module}.weight"] = {"dtype": "F16", "shape": [n, k], "data_offsets": [end, end + 2 * n * k]}
        end += 2 * n * k
    data = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data)
    os.truncate(path, 8 + len(data) + end)
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    small = {"num_hidden_layers": 1, "vocab_size": 257}
    return {
        "llama": write_model("llama", folder / "llama", **small),
        "qwen2": write_model("qwen2", folder / "qwen2", torch.bfloat16, **small),
        "opt": write_model("opt", folder / "opt", torch.float32, **small),
    }


COMBINATIONS = [
    ("llama", recipe()),
    ("llama", recipe("gptq-v2", group_size=64, symmetric=False)),
    ("llama", recipe(group_size=64, symmetric=False, skip=["lm_head", "down_proj"])),
    ("llama", recipe(skip=[])),
    ("llama", recipe("gptq", overrides={"k_proj": "int4:g32", ".*mlp.*": "int4:channel"})),
    ("qwen2", recipe("marlin", skip=["lm_head", "[kv]_proj"])),
    ("qwen2", recipe(format="fp5")),
    ("opt", recipe("gptq", group_size="channel")),
]


@pytest.mark.parametrize(("model", "asked"), COMBINATIONS, ids=lambda x: x if isinstance(x, str) else x.scheme.label)
def test_planned_bytes_equal_those_of_the_output(
    model: str, asked: Any, sources: dict[str, Path], tmp_path: Path
) -> None:
    planned = plan(sources[model], asked)
    planned.require()
    report = quantize.quantize(sources[model], tmp_path / "out", asked, run=RunOptions(device="cpu", min_share=0))
    assert planned.output.bytes == tensor_bytes(tmp_path / "out")
    weights = sum(size for name, size in planned.files.items() if name.endswith(".safetensors"))
    assert weights == report["totals"]["bytes"]
    assert planned.bits_per_weight == pytest.approx(report["totals"]["bits_per_weight"], rel=1e-12)
    assert [row.module for row in planned.output.quantized] == [layer["name"] for layer in report["layers"]] or (
        sorted(row.module for row in planned.output.quantized) == sorted(layer["name"] for layer in report["layers"])
    )
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert 0 < sizes.pop("quantkit_report.json") + sizes.pop("README.md") <= planned.output.files.report_bytes
    assert sizes == planned.files
    found = describe(Checkpoint(tmp_path / "out"))
    assert found["bytes"]["total"] == planned.output.bytes
    assert found["bits_per_weight"] == pytest.approx(planned.bits_per_weight)
    assert json.dumps(planned.to_dict()) and json.dumps(found)


@pytest.fixture(scope="module")
def packed(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "gptq"
    schemes = Schemes(Scheme.parse("int4:g128"), ignore=("lm_head",))
    write_folder(sources["llama"], folder, "gptq", schemes, key=False)
    return folder


@pytest.mark.parametrize("target", ["marlin", "gptq", "gptq-v2", "compressed-tensors"])
def test_planned_bytes_of_a_conversion(target: str, packed: Path, tmp_path: Path) -> None:
    planned = plan_pack(Checkpoint(packed), LAYOUTS[target], outside=Outside([], []))
    planned.require()
    convert.pack(packed, tmp_path / "b", target)
    assert planned.output.bytes == tensor_bytes(tmp_path / "b")


def test_every_misfit_is_found_at_once_with_suggestions_that_work(tmp_path: Path) -> None:
    linears = {
        **{f"model.layers.{i}.self_attn.k_proj": (1152 + 32, 4096) for i in range(28)},
        **{f"model.layers.{i}.self_attn.q_proj": (4096, 4096) for i in range(28)},
        **{f"model.layers.{i}.mlp.down_proj": (4096, 4096 if i else 4032) for i in range(28)},
    }
    src = sparse(tmp_path / "m", linears)
    planned = plan_quantize(src, linears, recipe("marlin"))
    assert len(planned.verdict.misfits) == 29
    assert {misfit.module for misfit in planned.verdict.misfits} == {m for m in linears if "k_proj" in m} | {
        "model.layers.0.mlp.down_proj"
    }
    with pytest.raises(LayoutError) as error:
        planned.require()
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert "model.layers.0.self_attn.k_proj is [1184, 4096] (and 27 more)" in lines[0]
    assert "model.layers.0.mlp.down_proj is [4096, 4032]" in lines[1]
    assert all(line.endswith("or add --set pad=true to fill it up with zeros") for line in lines)
    assert not plan_quantize(src, linears, recipe("marlin", pad=True)).verdict.misfits


@pytest.mark.parametrize(
    ("asked", "change"),
    [
        ({"layout": "marlin", "group_size": 64}, {"layout": "marlin", "group_size": 128}),
        ({"layout": "marlin", "symmetric": False}, {"layout": "marlin"}),
        ({"layout": "marlin", "format": "fp6"}, {"layout": "tcfpx", "format": "fp6"}),
        ({"layout": "gptq", "group_size": 96}, {"layout": "gptq", "group_size": 128}),
    ],
)
def test_suggestions_for_a_scheme_that_fits_no_weight(asked: Any, change: Any, tmp_path: Path) -> None:
    linears = {"model.layers.0.mlp.up_proj": (512, 256), "model.layers.0.mlp.down_proj": (256, 512)}
    src = sparse(tmp_path / "m", linears)
    planned = plan_quantize(src, linears, recipe(**asked))
    assert len(planned.verdict.misfits) == 2
    with pytest.raises(LayoutError, match=r"--layout|--group-size|--asym") as error:
        planned.require()
    assert "--skip" not in str(error.value), "skipping every weight is no help"
    for flag, value in change.items():
        if value != asked.get(flag) and flag != "format":
            assert f"--{flag.replace('_', '-')} {value}" in str(error.value)
    assert not plan_quantize(src, linears, recipe(**change)).verdict.misfits


def test_a_tied_lm_head_is_never_quantized_as_a_second_version(sources: dict[str, Path], tmp_path: Path) -> None:
    planned = plan(sources["qwen2"], recipe(skip=[]))
    assert [misfit.module for misfit in planned.verdict.misfits] == ["lm_head"]
    with pytest.raises(LayoutError, match=r"\[257, 128\]: leave them dense with --skip lm_head$"):
        planned.require()
    both = dict.fromkeys(("model.embed_tokens", "lm_head"), (256, 64))
    twice = sparse(tmp_path / "m", both, tie_word_embeddings=True, vocab_size=256)
    planned = plan_quantize(twice, {"lm_head": (256, 64)}, recipe(skip=[], group_size=64), tied={"lm_head"})
    assert [misfit.module for misfit in planned.verdict.misfits] == ["lm_head"]
    as_wide = plan_quantize(twice, {"lm_head": (256, 64)}, recipe(skip=[], group_size=64))
    assert not as_wide.verdict.misfits  # as many outputs as tokens do not make a linear tied


def test_notices_name_the_limits_of_readers(tmp_path: Path) -> None:
    linears = {f"model.layers.0.self_attn.{p}_proj": (512 if p == "q" else 64, 256) for p in "qkv"}
    linears |= {f"model.layers.0.mlp.{p}_proj": (512, 256) for p in ("gate", "up")}
    src = sparse(tmp_path / "m", linears, dtype="bfloat16")
    overrides = {"k_proj": "int4:channel"}
    notices = "\n".join(plan_quantize(src, linears, recipe("marlin", overrides=overrides)).notices)
    assert "2 weights have n % 256 != 0" in notices
    assert "float16 only" in notices
    assert "q_proj, k_proj, v_proj mix int4:channel and int4:g128" in notices
    assert "gate_proj" not in notices
    notices = "\n".join(plan_quantize(src, linears, recipe("gptq", symmetric=False, skip=["up_proj"])).notices)
    readers = "vLLM and SGLang (by its documentation, not tried)"
    assert f"{readers} will not open this folder because of zero points" in notices
    assert "gate_proj, up_proj mix dense and int4:g128:asym" in notices
    assert "zero point of 0" in notices
    assert "load it with CompressedTensorsConfig(dequantize=True)" in "\n".join(
        plan_quantize(src, linears, recipe(symmetric=False)).notices
    )


def test_a_conversion_lists_every_weight_that_the_target_cannot_hold(sources: dict[str, Path], tmp_path: Path) -> None:
    for name, layout, scheme in (("asym", "gptq-v2", "int4:g128:asym"), ("fp6", "humming", "fp6:channel")):
        schemes = Schemes(Scheme.parse(scheme), ignore=("lm_head",))
        write_folder(sources["llama"], tmp_path / name, layout, schemes)
    cases = (("fp6", "marlin", "tcfpx or"), ("fp6", "gptq", "compressed-tensors"), ("asym", "tcfpx", "compressed"))
    for source, target, other in cases:
        src = Checkpoint(tmp_path / source)
        planned = plan_pack(src, LAYOUTS[target], outside=Outside([], []))
        assert {misfit.module for misfit in planned.verdict.misfits} == set(src.modules())
        with pytest.raises(LayoutError, match=f"--layout {other}") as error:
            planned.require()
        assert "--skip" not in str(error.value)
        with pytest.raises(LayoutError):
            convert.pack(tmp_path / source, tmp_path / "out", target)
        assert not (tmp_path / "out").exists()


def test_files_of_calibrated_committed_and_pruned_runs(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"This is paragraph {i} of a text for calibration." for i in range(20)))
    calibration = {"data": str(text), "samples": 2, "max_length": 32}
    monkeypatch.setattr(loop, "COMMIT_BYTES", 50_000)  # several commits without activations too
    monkeypatch.setattr(writer, "SHARD_BYTES", 100_000)
    monkeypatch.setitem(writer.CheckpointWriter.__init__.__kwdefaults__, "max_shard_bytes", 100_000)
    wanted = {
        "gptq": from_mapping({"calibration": calibration}),
        "padded": recipe("marlin", pad=True, overrides={"k_proj": "int4:channel"}),
        "pruned": pruning_from_mapping({"method": "magnitude"}),
    }
    for name, asked in wanted.items():
        planned = plan(sources["qwen2"], asked, run=RunOptions(min_share=0, device="cpu"))
        quantize.quantize(sources["qwen2"], tmp_path / name, asked, run=RunOptions(min_share=0, device="cpu"))
        sizes = {path.name: path.stat().st_size for path in (tmp_path / name).iterdir()}
        assert 0 < sizes.pop("quantkit_report.json") + sizes.pop("README.md") <= planned.output.files.report_bytes
        assert sizes == planned.files, name
        assert sum(file.endswith(".safetensors") for file in sizes) > 1


def test_a_new_file_begins_where_the_writer_begins_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 1000)
    sizes = {"a": 600, "b": 500, "c": 400, "d": 2000, "e": 8}
    assert [names for _, names in writer.planned_shards(sizes).values()] == [["a"], ["b", "c"], ["d"], ["e"]]
    monkeypatch.setattr(writer, "MOST_HEADER_BYTES", RESERVED)
    many = {f"model.layers.{i}." + "x" * 400: 8 for i in range(150)}  # more names than one header holds
    folder = tmp_path / "out"
    folder.mkdir()
    src = sparse(tmp_path / "m", {"model.layers.0.mlp.up_proj": (64, 64)})
    filled = writer.CheckpointWriter(folder, like=src, layout=None, max_shard_bytes=1000, expected=many)
    for name in many:
        filled.add(Item(name, torch.zeros(1, dtype=torch.int64)))
    filled.arrange()
    made = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert made == {name: size for name, (size, _) in writer.planned_shards(many).items()} and len(made) > 1


def test_a_disk_that_is_too_small_for_a_conversion_is_a_problem(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    planned = plan_pack(
        Checkpoint(packed), LAYOUTS["marlin"], outside=Outside([], []), out=tmp_path / "not" / "there" / "yet"
    )
    assert planned.needs.disk_free == 1000
    with pytest.raises(LayoutError, match="free some"):
        planned.require()


def test_memory_grows_with_the_run_and_stops_at_the_budget(tmp_path: Path) -> None:
    linears = {f"model.layers.{i}.mlp.up_proj": (1024, 512) for i in range(4)}
    src = sparse(tmp_path / "m", linears, hidden_size=512, max_position_embeddings=2048)

    def ram(act_budget: int | None = None, **calibration: Any) -> int:
        asked = from_mapping({"calibration": calibration})
        memory = plan_quantize(src, linears, asked, device="cpu", act_budget=act_budget).needs.memory.to_dict()
        assert memory["ram"] == sum(memory["ram_parts"].values())
        return memory["ram"]

    assert ram(samples=256) - ram(samples=128) == 128 * 2048 * 512 * 4
    assert ram(samples=256, max_length=10**6) == ram(samples=256)
    assert ram(act_budget=2**20) - 2**20 == ram(act_budget=2**21) - 2**21
    assert plan_quantize(src, linears, recipe()).needs.memory.to_dict()["ram"] < ram()
    vram = plan_quantize(src, linears, from_mapping({}), device="cuda").needs.memory.to_dict()
    assert vram["vram"] > 0


def test_passes_that_wait_take_what_is_left_and_no_more(tmp_path: Path) -> None:
    linears = {f"model.layers.{i}.mlp.down_proj": (512, 1024) for i in range(4)}
    src = sparse(tmp_path / "m", linears, hidden_size=512, max_position_embeddings=2048)

    def part(device: str, gpu_memory: int | None = None, act_budget: int | None = None, **asked: Any) -> int:
        options: Any = {"device": device, "gpu_memory": gpu_memory, "act_budget": act_budget}
        memory = plan_quantize(src, linears, from_mapping(asked), **options).needs.memory.of_sequences(1000, act_budget)
        return {**memory.ram, **memory.vram}.get("passes that wait", 0)

    assert part("cpu") == 1000 * 4 * (3 * 512 + 1024) == 2 * part("cuda", 80 * 10**9)
    assert part("cpu", act_budget=2**20) == part("cpu", true_sequential=False) == part("cuda", 10**8) == 0


@pytest.mark.parametrize(("device", "kind", "width"), [("cpu", "ram", 4), ("cuda", "vram", 2)])
def test_gradients_count_once_there_are_some_and_grow_no_further(
    device: str, kind: str, width: int, tmp_path: Path
) -> None:
    linears = {f"model.layers.{i}.mlp.up_proj": (8192, 512) for i in range(4)}
    src = sparse(tmp_path / "m", linears, hidden_size=512, max_position_embeddings=1024, vocab_size=2**18)

    def memory(samples: int, aware: bool = True) -> dict[str, Any]:
        asked = {"output_aware": aware, "tune": 2, "calibration": {"samples": samples}, "true_sequential": False}
        found = plan_quantize(src, linears, from_mapping(asked), device=device, gpu_memory=80 * 10**9)
        return found.needs.memory.to_dict()

    few, found = memory(32), memory(256)
    assert few[f"{kind}_parts"]["output gradients"] == 32 * 1024 * 512 * width
    assert found[f"{kind}_parts"]["output gradients"] == (2**16 + 1024) * 512 * width
    assert found[kind] == memory(512)[kind] > memory(512, aware=False)[kind]


def test_gradients_that_are_too_large_name_the_way_out() -> None:
    memory = Memory({"program": 1}, others=(Memory({"program": 1, "output gradients": 10**18}),))
    with pytest.raises(QuantkitError, match=r"allows .* GB: use --set output_aware=false or "):
        memory.require()


@pytest.mark.parametrize("value", ["many", None, [], {}, True])
def test_hostile_config_values_do_not_break_the_estimate(value: Any, tmp_path: Path) -> None:
    linears = {"model.layers.0.mlp.up_proj": (512, 256)}
    config = {"hidden_size": value, "max_position_embeddings": value, "text_config": value, "vocab_size": value}
    src = sparse(tmp_path / "m", linears, tie_word_embeddings=value, **config)
    assert not plan_quantize(src, linears, from_mapping({})).verdict.misfits


def test_a_size_that_the_files_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'hidden_size' is 1e\+300, and the weight files hold 262144 bytes"):
        sparse(tmp_path / "m", {"model.layers.0.mlp.up_proj": (512, 256)}, hidden_size=1e300)
