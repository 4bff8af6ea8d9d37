"""Quantizing whole folders: round trips through layouts, repeatable bytes, kill and resume, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.census import families
from quantkit.calibration import loop
from quantkit.calibration.budget import SAVED_BLOCKS
from quantkit.checkpoint import writer
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT, digest
from quantkit.errors import CheckpointError, NumericError
from quantkit.inference.load import load
from quantkit.io import files
from quantkit.io.json_files import load_json
from quantkit.io.staging import JOURNAL, append_journal, read_journal
from quantkit.pipeline import quantize as job
from quantkit.pipeline.convert import pack
from quantkit.pipeline.quantize import quantize
from quantkit.planning.survey import plan
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import Recipe, from_mapping, pruning_from_mapping
from quantkit.reporting.summary import summary
from quantkit.text import sequences
from tests.faults import Killed, faults, killer, stop_at
from tests.folders import TEXT, edit, gptq, hashes, restate, tensors
from tests.tiny_models import write_model


def test_work_beside_the_computing_changes_no_byte_and_no_fact(
    small_llama: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    for beside, budget in ((False, None), (True, 0)):
        monkeypatch.setitem(job.BESIDE, "cpu", beside)
        out = tmp_path / f"{beside}-{budget}"
        reports.append(quantize(small_llama, out, from_mapping(gptq(str(calib))), run=RunOptions(act_budget=budget)))
        assert hashes(out) == hashes(tmp_path / "False-None")
    assert len({digest(report) for report in reports}) == 1


@pytest.mark.gpu
def test_on_a_gpu_what_runs_beside_and_what_runs_ahead_changes_no_byte(
    small_llama: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ahead in (False, True):
        monkeypatch.setitem(job.BESIDE, "cuda", ahead)
        monkeypatch.setitem(SAVED_BLOCKS, "cuda", 1)
        quantize(
            small_llama, tmp_path / f"{ahead}", from_mapping(gptq(str(calib), gptq={})), run=RunOptions(device="cuda")
        )
    assert hashes(tmp_path / "True") == hashes(tmp_path / "False")


def test_a_nan_found_beside_the_computing_ends_the_run_with_its_own_line(
    small_llama: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(job.BESIDE, "cpu", True)
    broken = tmp_path / "broken"
    shutil.copytree(small_llama, broken)
    name = "model.layers.0.mlp.up_proj.weight"  # whose activations are not finite either
    edit(broken, lambda found: found[name][3, 5].fill_(torch.nan))
    with pytest.raises(NumericError, match=rf"^{name}: 1 of \d+ weights are NaN or infinite, the first \[3, 5\]"):
        quantize(broken, tmp_path / "out", from_mapping(gptq(str(calib))))
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@pytest.mark.parametrize("beside", [False, True])
def test_activations_that_overflow_late_leave_the_finished_blocks_for_resume(
    beside: bool, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(job.BESIDE, "cpu", beside)
    model = write_model("llama", tmp_path / "model", torch.float32, num_hidden_layers=3)
    name = "model.layers.1.mlp.down_proj.weight"
    edit(model, lambda found: found[name].fill_(3e38))
    recipe = from_mapping(gptq(str(calib), skip=[".*layers.1.mlp.down_proj", "lm_head"]))
    with pytest.raises(NumericError, match=r"^model\.layers\.2\.self_attn\.q_proj, calibration document \d: "):
        quantize(model, tmp_path / "out", recipe, run=RunOptions(min_share=0))
    (partial,) = tmp_path.glob("out.partial-*")
    assert [line["facts"]["block"] for line in read_journal(partial / JOURNAL)[1:]] == [0, 1]
    found = load_json(partial / REPORT)
    assert "calibration document" in found["failed"] and summary(found).startswith("failed ")
    assert len(found["layers"]) == 7 + 6


def test_a_kill_while_a_file_is_half_written_costs_no_byte(
    calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(job.BESIDE, "cpu", True)
    monkeypatch.setattr(writer, "SHARD_BYTES", 2**17)
    monkeypatch.setitem(writer.CheckpointWriter.__init__.__kwdefaults__, "max_shard_bytes", 2**17)
    model = write_model("llama", tmp_path / "model", torch.bfloat16, num_hidden_layers=4)
    recipe, seen = from_mapping(gptq(str(calib))), list[tuple[str, str]]()
    with faults(lambda what, path: seen.append((what, path.name))):
        quantize(model, tmp_path / "whole", recipe)
    assert sum(name.endswith(".safetensors") for name in hashes(tmp_path / "whole")) > 2
    writes = [i for i, (what, name) in enumerate(seen) if what == "write" and name.endswith(".safetensors")]
    outside, last = writes[1], writes[-1]
    for step in (outside, last):
        out = tmp_path / f"{step}"
        for stop in (step, outside):  # once more while the resumed run goes on
            with faults(killer(stop)), pytest.raises(Killed):
                quantize(model, out, recipe, run=RunOptions(resume=True))
        quantize(model, out, recipe, run=RunOptions(resume=True))
        assert hashes(out) == hashes(tmp_path / "whole")


def refusal(model: Path, out: Path, recipe: Recipe) -> str:
    """Resume a run that cannot be resumed; return what the message says after the folder's name."""
    with pytest.raises(CheckpointError) as error:
        quantize(model, out, recipe, run=RunOptions(resume=True))
    return str(error.value).partition(" was begun with other settings, ")[2]


def test_resuming_with_another_recipe_names_each_value_and_the_options_that_bring_it_back(
    small_llama: Path, calib: Path, tmp_path: Path
) -> None:
    def recipe(calibration: dict[str, object] | None = None, **options: object) -> Recipe:
        text = {"data": str(calib), "samples": 8, "max_length": 128, **(calibration or {})}
        return from_mapping({"calibration": text, "skip": ["lm_head", "0.*k_proj"], "method": "rtn", **options})

    out = tmp_path / "out"
    with faults(stop_at("rename", "config.json")), pytest.raises(Killed):
        quantize(small_llama, out, recipe())
    assert refusal(small_llama, out, recipe({"seed": 1}, pad=True, overrides={"v_proj": "int4:g64"})) == (
        "seed was 0 and is now 1, pad was off and is now on, override was none and is now v_proj=int4:g64: "
        "use --set calibration.seed=0 --set pad=false and drop --override, or use --overwrite"
    )
    assert refusal(small_llama, out, recipe(skip=["lm_head"], gptq={"block": 64}, fused_alike=True)) == (
        "gptq.block was 128 and is now 64, skip was lm_head, 0.*k_proj and is now lm_head, fused-alike was off and is "
        "now on: use --skip '0.*k_proj' --set fused_alike=false and set gptq.block to 128 in the recipe, or use "
        "--overwrite"
    )
    assert refusal(small_llama, out, recipe({"samples": 9}, scheme={"sparsity": "2:4"})) == (
        "samples was 8 and is now 9, prune was none and is now 2:4: "
        "use --samples 8 and drop --prune, or use --overwrite"
    )
    magnitude = pruning_from_mapping({"method": "magnitude"})
    assert refusal(small_llama, out, magnitude) == (
        "the command was quantize: use quantkit quantize, or use --overwrite"
    )
    report = quantize(small_llama, out, recipe(), run=RunOptions(resume=True))
    assert sum(report["phases"].values()) == pytest.approx(report["totals"]["seconds"]), "the phases add up"


def test_the_date_in_a_chat_template_is_that_of_the_beginning(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(small_llama, tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}")
    talks = ([{"role": "user", "content": f"{n}: {'some words ' * n}"}] for n in range(9))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    recipe, out = from_mapping(gptq(str(tmp_path / "a.jsonl"))), tmp_path / "out"
    monkeypatch.setattr(sequences, "present_date", lambda: "2026-12-31T23:59:58")
    whole = quantize(model, tmp_path / "whole", recipe)
    assert whole["calibration"]["date"] == "2026-12-31T23:59:58"
    with faults(stop_at("rename", "config.json")), pytest.raises(Killed):
        quantize(model, out, recipe)
    monkeypatch.setattr(sequences, "present_date", lambda: "2027-01-01T06:00:00")
    assert plan(model, recipe, out=out, run=RunOptions(resume=True)).refusal is None
    assert quantize(model, out, recipe, run=RunOptions(resume=True))["calibration"] == whole["calibration"]
    assert tensors(out) == tensors(tmp_path / "whole")


def test_resuming_with_other_versions_files_or_text_says_which(small_llama: Path, calib: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small_llama, tmp_path / "model"))
    text = Path(shutil.copy(calib, tmp_path / "text.txt"))
    recipe, out = from_mapping(gptq(str(text))), tmp_path / "out"
    with faults(stop_at("rename", "config.json")), pytest.raises(Killed):
        quantize(model, out, recipe)
    journal = next(tmp_path.glob("out.partial-*")) / JOURNAL
    begun, *commits = read_journal(journal)

    def rewrite(**changed: object) -> None:
        """Let the journal be one of another machine, or of a version without a key."""
        stated = {key: value for key, value in {**begun, **changed}.items() if value is not None}
        files.remove(journal)
        for line in (stated, *commits):
            append_journal(journal, line)

    rewrite(torch="2.0.1", device="NVIDIA H200", compute_dtype="float16")
    assert refusal(model, out, recipe) == (
        f"torch was 2.0.1 and is now {torch.__version__}, device was NVIDIA H200 and is now cpu: "
        "install torch 2.0.1 and run on NVIDIA H200, or use --overwrite"
    )
    rewrite(recipe=None, recipe_sha256="0" * 64)
    assert refusal(model, out, recipe) == "the recipe was another: use the options of then, or use --overwrite"
    rewrite(recipe=None)
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config + "\n")
    text.write_text(TEXT.replace("brown", "green"))
    assert refusal(model, out, recipe) == (
        "the calibration text or the tokenizer has changed: restore the text, or use --overwrite"
    )
    text.write_text(TEXT)
    assert refusal(model, out, recipe) == (
        "of the source config.json has changed: restore the source, or use --overwrite"
    )
    (model / "config.json").write_text(config)
    quantize(model, out, recipe, run=RunOptions(resume=True))


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_another_number_of_threads_is_refused_where_the_forward_may_depend_on_it(
    method: str, small_llama: Path, calib: Path, tmp_path: Path
) -> None:
    recipe, threads = from_mapping(gptq(str(calib), method=method)), torch.get_num_threads()
    with faults(stop_at("rename", "config.json")), pytest.raises(Killed):
        quantize(small_llama, tmp_path / "out", recipe)
    try:
        torch.set_num_threads(threads + 1)
        if method == "gptq":
            with pytest.raises(CheckpointError, match="OMP_NUM_THREADS"):
                quantize(small_llama, tmp_path / "out", recipe, run=RunOptions(resume=True))
            torch.set_num_threads(threads)
        quantize(small_llama, tmp_path / "out", recipe, run=RunOptions(resume=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("number", [0, -1])
def test_a_resumed_run_is_compared_by_the_shards_that_it_has_used(
    number: int, small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "COMMIT_BYTES", 1)
    source, recipe = Path(shutil.copytree(small_llama, tmp_path / "source")), from_mapping({"method": "rtn"})

    with faults(stop_at("open", JOURNAL, 4)), pytest.raises(Killed):
        quantize(source, tmp_path / "out", recipe)
    shard = Checkpoint(source).files()[number]
    data = bytearray(shard.read_bytes())
    data[-2] ^= 1
    shard.write_bytes(data)
    if number == 0:
        assert refusal(source, tmp_path / "out", recipe).startswith(f"of the source {shard.name} has changed: ")
    else:
        found = quantize(source, tmp_path / "out", recipe, run=RunOptions(resume=True))["source"]["files"]
        assert found == Checkpoint(source).hashes()


def test_infinite_numbers_and_code_for_a_known_family_in_config_are_no_obstacle(
    small_llama: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(small_llama, tmp_path / "source"))
    odd = {"time_step_limit": [0.0, float("inf")], "floor": {"__float__": "-Infinity"}, "unset": float("nan")}
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_llama.Mine"}}
    restate(source / "config.json", **odd, **code)
    report = quantize(source, tmp_path / "out", from_mapping({"method": "rtn"}))
    text = (tmp_path / "out" / "config.json").read_text()
    written = json.loads(text)
    assert "auto_map" not in text and any("auto_map is ignored" in line for line in report["notices"])
    assert written["time_step_limit"] == [0.0, float("inf")] and written["floor"] == {"__float__": "-Infinity"}
    assert '"unset": NaN' in text
    pack(tmp_path / "out", tmp_path / "marlin", "marlin")
    assert '"unset": NaN' in (tmp_path / "marlin" / "config.json").read_text()
    model = load(tmp_path / "out", device="cpu")
    assert model.config.floor == float("-inf") and model.config.time_step_limit[1] == float("inf")


def test_a_model_calibrated_through_its_language_model_says_so(calib: Path, tmp_path: Path) -> None:
    folder = families.write("kosmos-2", tmp_path / "model")
    remark = "calibrated through text_model, on text alone: Kosmos2ForConditionalGeneration asks for other inputs"
    for method in ("gptq", "rtn"):
        planned = plan(
            folder,
            from_mapping(gptq(str(calib), method=method, scheme={"group_size": 64})),
            run=RunOptions(device="cpu"),
        )
        assert (remark in planned.verdict.remarks) == (method == "gptq")
