"""No output file names a folder of this machine, whatever the command and the paths it was given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quantkit.checkpoint import report
from tests.command_line import RTN, call
from tests.folders import TEXT

#: The name of the folder that everything lies in.
SECRET = "a-customer-whose-name-nobody-may-know"
CALIB = ("--samples", 4, "--max-length", 64)
FAST = ("--set", "clip=none", "--set", "gptq.descent=0")


@pytest.fixture(scope="module")
def root(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose own files name the folder that it was read from, and a text."""
    folder = tmp_path_factory.mktemp("work") / SECRET
    shutil.copytree(small_llama, folder / "model")
    (folder / "calib.txt").write_text(TEXT)
    (folder / "undivided.txt").write_text(TEXT.replace("\n", " "))
    for name, key in (("config.json", "_name_or_path"), ("tokenizer_config.json", "name_or_path")):
        stated = json.loads((folder / "model" / name).read_text())
        stated |= {key: str(folder / "model"), "nested": {"_name_or_path": f"./{SECRET}/model", "x": 1}}
        if name == "tokenizer_config.json":  # of earlier releases
            stated |= {"tokenizer_file": str(folder / "tokenizer.json"), "extra": [{"dir": f"C:\\x\\{SECRET}"}]}
        (folder / "model" / name).write_text(json.dumps(stated))
    state = {"best_model_checkpoint": str(folder / "checkpoint-5"), "log_history": [{"loss": float("nan")}], "epoch": 1}
    (folder / "model" / "trainer_state.json").write_text(json.dumps(state))
    (folder / "model" / "mergekit_config.yml").write_text(f"models:\n  - model: {folder}/one\n")
    (folder / "model" / "logging.jsonl").write_text(json.dumps({"last_model_checkpoint": str(folder / "b-5")}))
    (folder / "model" / "requirements.txt").write_text(f"torch @ file:///home/{SECRET}/torch.whl\n")
    (folder / "model" / "Modelfile").write_text(f"FROM C:\\Users\\{SECRET}\\model.gguf\n")
    (folder / "model" / "USE.md").write_text("Give the folder, like /path/to/model, to your engine.\n")
    (folder / "model" / "README.md").write_text(f"# of /home/{SECRET}/model\n")
    (folder / "model" / "merge.yaml").write_text("models:\n  - model: org/one  # 1 / 2 / 3\n")
    return folder


def require_no_secret(out: Path) -> None:
    found = [path for path in out.rglob("*") if path.is_file()]
    assert found
    for path in found:
        assert SECRET.encode() not in path.read_bytes(), path.name
        assert SECRET not in path.name


def test_no_file_of_any_output_names_a_local_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calib = root / "model", ("--calib", root / "calib.txt", *CALIB)
    call("quantize", model, "-o", root / "int4", *calib, *FAST, "--eval", root / "calib.txt", "-q")
    each = json.loads(call("plan", model, "-o", root / "planned", *calib, *FAST, "--json").stdout)["files"]["each"]
    planned = {file["name"]: file["bytes"] for file in each}
    written = {path.name: path.stat().st_size for path in (root / "int4").iterdir()}
    assert planned == {name: size for name, size in written.items() if name not in ("README.md", report.REPORT)}
    mixture = ("--calib", f"{root}/calib.txt:0.5", "--calib", f"{root}/undivided.txt:0.5", *CALIB)
    call("quantize", model, "-o", root / "mixed", *mixture, *FAST, "-q")
    call("pack", root / "int4", "--layout", "gptq", "-o", root / "gptq", "-q")
    call("convert", "gptq-to-marlin", root / "gptq", "-o", root / "marlin", "-q")
    call("prune", model, "-o", root / "pruned", *calib, "-q")
    call("verify", root / "marlin", "--against", root / "int4", "-q")
    monkeypatch.chdir(root / "model")
    call("quantize", f"../../{SECRET}/model", "-o", f"../../{SECRET}/fp6", "--format", "fp6", "--method", "rtn", "-q")
    for out in ("int4", "mixed", "gptq", "marlin", "pruned", "fp6"):
        require_no_secret(root / out)
    found = report.load(root / "int4")
    assert found["calibration"]["source"] == found["recipe"]["calibration"]["data"] == "calib.txt"
    assert found["evaluation"]["data"] == "calib.txt (as it is)"
    notices = report.load(root / "mixed")["notices"]
    assert any(notice.startswith("undivided.txt: has no blank line") for notice in notices)
    assert "data: calib.txt\n" in (root / "int4" / "quantkit_recipe.yaml").read_text()
    assert found["source"]["name"] == found["base"]["name"] == "model"
    assert json.loads((root / "int4" / "tokenizer_config.json").read_text())["nested"] == {"x": 1}
    assert json.loads((root / "int4" / "trainer_state.json").read_text())["epoch"] == 1
    assert all((root / "int4" / name).exists() for name in ("merge.yaml", "USE.md"))
    assert found["left_out"] == ["logging.jsonl", "mergekit_config.yml", "Modelfile", "requirements.txt"]
    assert json.loads((root / "marlin" / "verify.json").read_text())["against"] == "int4"


def test_the_proof_of_a_damaged_folder_names_no_local_folder(root: Path) -> None:
    call("quantize", root / "model", "-o", root / "bad", *RTN, "-q")
    next((root / "bad").glob("*.safetensors")).write_bytes(b"x")
    assert SECRET in call("verify", root / "bad", code=3).stdout, "a user is told where the folder is"
    require_no_secret(root / "bad")


def test_a_text_that_lies_elsewhere_makes_the_same_recipe(root: Path) -> None:
    """Rounding records the text, and does not read it."""
    (root / "deeper").mkdir()
    shutil.copy(root / "calib.txt", root / "deeper" / "calib.txt")
    for place, out in ((root, "a"), (root / "deeper", "b")):
        call("quantize", root / "model", *RTN, "-o", root / out, "--calib", place / "calib.txt", "-q")
    assert (root / "a" / "README.md").read_bytes() == (root / "b" / "README.md").read_bytes()
    one, other = (report.load(root / out) for out in "ab")
    assert one["recipe_sha256"] == other["recipe_sha256"] and one["files"] == other["files"]
