"""A wheel built from the sdist runs the demo, with less text, in an environment of its own outside the checkout.

The demo reports what it measured, shares no text between calibration and evaluation, and keeps the folders asked for.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quantkit.checkpoint.reader import Checkpoint
from quantkit.cli import demo
from quantkit.progress import Progress
from tests.kernels.sources import SOURCES

ROOT = Path(__file__).resolve().parents[2]

#: Most of the demo's time is the evaluation of five models on ten modules. Prints where things come from, a line each.
SHORT_DEMO = """
import sys
import quantkit
from quantkit.cli import demo, main
from quantkit.kernels import loader
from quantkit.recipes.files import shipped_recipes
print(quantkit.__file__, loader.source_dir(), sep="\\n", file=sys.stderr)
print(" ".join(shipped_recipes()), file=sys.stderr)
demo.EVALUATION, demo.SAMPLES = "statistics tempfile", 16
main(sys.argv[1:])
"""


def done(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found


def run(*command: object, cwd: Path) -> str:
    return done(*command, cwd=cwd).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from an sdist of this checkout, as `build` does by default but without an isolated environment."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs' folder of an environment with the wheel and this environment's dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    target = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # Behind the wheel's own folder, without this environment's editable install.
    Path(target, "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python.parent


def test_the_wheel_holds_all_files(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("configs", "quantkit/configs"), ("kernels", "quantkit/kernels/cuda")):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files and {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in files} <= names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "quantkit").rglob("*.py")}
    data = (path for name in ("demo_model", "calibration_text") for path in (ROOT / "quantkit" / name).iterdir())
    page = {f"quantkit/reporting/{name}" for name in ("page.css", "page.js", "page.html.jinja")}
    assert modules | {path.relative_to(ROOT).as_posix() for path in data} | page | {"quantkit/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/")) or "__pycache__" in name]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_texts_share_no_documentation_string() -> None:
    documents, text = demo.texts()
    assert len(documents) >= demo.SAMPLES
    assert not any(string in text for document in documents for string in document.split("\n\n") if len(string) > 300)


def test_the_demo_measures_all_its_rows_and_keeps_its_checkpoints(installed: Path, tmp_path: Path) -> None:
    """One test, because two processes that share these tests would each run the demo."""
    out = tmp_path / "out"
    finished = done(installed / "python", "-c", SHORT_DEMO, "demo", "-o", out, "--json", cwd=tmp_path)
    where, folder, recipes, *_ = finished.stderr.splitlines()
    assert Path(where).is_relative_to(installed.parent) and Path(folder).is_relative_to(installed.parent)
    assert SOURCES and all(Path(folder, f"{source}.cu").is_file() for source in SOURCES)
    assert sorted(recipes.split()) == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    found = json.loads(finished.stdout)
    dense, rtn, gptq, packed, fp6 = found["rows"]
    assert [row["layout"] for row in found["rows"]] == ["-", *["compressed-tensors"] * 2, "marlin", "humming"]
    # GPTQ and FP6 are too near the dense model for an order on a short text, which each Python has its own of.
    assert max(row["perplexity"] for row in (dense, gptq, fp6)) < rtn["perplexity"]
    assert packed["perplexity"] == gptq["perplexity"]  # packing changes no value
    assert 4 < packed["bits_per_weight"] < 4.2 and 6 < fp6["bits_per_weight"] < 6.1
    assert rtn["change"] == rtn["perplexity"] / dense["perplexity"] - 1

    assert Checkpoint(out / demo.PACKED).modules() == Checkpoint(out / demo.SOURCE).modules()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "verify    int4-gptq-marlin" in finished.stderr

    lines = demo.format_demo(found, Progress()).splitlines()
    assert len(lines) == 1 + len(found["rows"]) + 2
    assert lines[1].endswith(f"{dense['perplexity']:.3f}") and lines[2].endswith(" %")
    quiet = demo.format_demo(found, Progress(quiet=True))
    assert quiet.startswith(f"verified; perplexity {dense['perplexity']:.3f}, int4") and "\n" not in quiet


def test_the_packaged_model_names_its_training_data() -> None:
    card = (demo.MODEL / "README.md").read_text()
    for name in ("pydoc topics", "standard library", "PSF-2.0", "numpy", "torch", "BSD-3-Clause"):
        assert f"| {name} |" in card
    assert all(f"`{name}`" in card for name in demo.EVALUATION.split())  # held out
