"""What pip installs: built from the sdist, alone in an environment outside the checkout, the demo runs."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist of this checkout: by `build`'s default, without its isolated environment."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (found,) = out.glob("*.whl")
    return found


def test_everything_travels(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("configs", "quantkit/configs"), ("kernels", "quantkit/kernels/cuda")):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files and {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in files} <= names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "quantkit").rglob("*.py")}
    model = {path.relative_to(ROOT).as_posix() for path in (ROOT / "quantkit/demo_model").iterdir()}
    assert modules | model <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/")) or "__pycache__" in name]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_installed_wheel_runs_the_demo_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    target = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # The dependencies are those of this environment: behind the wheel's own folder, without its editable install.
    Path(target, "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    where = run(python, "-c", "import quantkit, torch; print(quantkit.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(tmp_path)
    code = "from quantkit.kernels import SOURCES, loader; print(loader.source_dir(), *SOURCES)"
    folder, *sources = run(python, "-c", code, cwd=tmp_path).split()
    assert Path(folder).is_relative_to(tmp_path)
    assert all(Path(folder, f"{source}.cu").is_file() for source in sources)
    found = json.loads(run(tmp_path / "venv/bin/quantkit", "demo", "--json", cwd=tmp_path))
    assert len(found["rows"]) == 5
    assert "kind: mean" in run(
        tmp_path / "venv/bin/quantkit", "quantize", "--recipe", "marlin-paper", "--print-recipe", cwd=tmp_path
    )
