"""Test that doctor works in a broken installation, and that the commands it names are exact."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkit import kernels
from quantkit.cli import doctor, gpu_diagnosis
from quantkit.cli.doctor import at_least, package
from quantkit.kernels.loader import toolchain
from quantkit.names import OPTIONAL

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_the_pythons_and_extras_are_those_of_the_project_file() -> None:
    text = PROJECT.read_text()
    low, high = (".".join(map(str, version)) for version in doctor.PYTHON)
    assert f'requires-python = ">={low},<{high}"' in text
    for name, (lowest, _) in OPTIONAL.items():
        assert f'"{name}>={lowest}' in text


def test_this_environment_is_complete() -> None:
    found = doctor.diagnose()
    assert found["ok"], found["fixes"]
    assert json.loads(json.dumps(found)) == found
    names = [check["name"] for check in found["checks"]]
    assert {"python", "torch", "transformers", "datasets", "safetensors", "cupy", "compressed-tensors"} <= set(names)
    assert found["machine"]["free_disk"] > 0 and found["machine"]["threads"] >= 1
    able = any(gpu["problem"] is None for gpu in found["gpus"])
    assert found["kernels"]["here"] == (["marlin", "marlin24", "marlin24-ct", "quick", "tcfpx"] if able else [])
    assert found["kernels"]["note"].startswith("for marlin, " if able else "none run here: ")
    assert bool(found["gpus"]) == torch.cuda.is_available()


def test_a_needed_package_of_which_a_release_is_left_out_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = ["scipy!=1.17.1,>=1.11", "torch>=2.10", 'gguf>=0.18; extra == "gguf"', 'scipy!=2,>=1; extra == "x"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: stated)
    monkeypatch.setattr(doctor, "installed_version", lambda name: "1")
    assert doctor.required() == {"scipy": "1.11", "torch": "2.10"}


def test_a_missing_or_old_package_has_a_fix() -> None:
    missing = package("no-such-package-here", "1.2")
    assert (missing.ok, missing.found) == (False, None)
    assert missing.fix == "pip install --upgrade 'no-such-package-here>=1.2'"
    old = package("torch", "999.0")
    assert old.ok is False and old.fix == "pip install --upgrade 'torch>=999.0'"
    assert package("no-such-package-here", "1", "for x").ok is None


def test_each_optional_package_that_is_missing_has_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """quantkit may come from a wheel: no command relies on its name or its extras."""
    there = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name in OPTIONAL else there(name))
    found = doctor.diagnose()
    lines = doctor.format_diagnosis(found).splitlines()
    for name, (lowest, _) in OPTIONAL.items():
        expected = f"optional       pip install --upgrade '{name}>={lowest}'"
        assert name.startswith("cupy") or expected in lines
    assert not [line for line in lines if "install quantkit" in line or "quantkit[" in line]
    assert found["ok"] or torch.cuda.is_available()


@pytest.mark.parametrize(
    ("version", "lowest", "enough"),
    [
        ("2.13.0+cpu", "2.10", True),
        ("2.9.1", "2.10", False),
        ("2.10.0rc1", "2.10", True),
        ("5.15.0.dev0", "5.15", True),
        ("10.0", "9.99", True),
        ("2024.1+cu130.git1234567", "2024.2", False),
    ],
)
def test_versions_are_compared_as_numbers(version: str, lowest: str, enough: bool) -> None:
    assert at_least(version, lowest) is enough


@pytest.mark.parametrize(
    "failure", ["raise ImportError('libcuda.so.1: cannot open')", "raise RuntimeError('no driver')"]
)
def test_a_cupy_that_does_not_load_is_diagnosed(failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(failure)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name == "cupy" or name.startswith("cupy.")]:
        monkeypatch.delitem(sys.modules, name)
    state = toolchain()
    assert state["cupy"] is None and state["nvrtc"] is None
    assert re.search(r"libcuda|no driver", str(state["problem"]))
    check = gpu_diagnosis.cupy()
    assert check.ok is (False if torch.cuda.is_available() else None)
    assert re.search(r"cupy-cuda1[23]x>=13.6", str(check.fix))


def pretend(monkeypatch: pytest.MonkeyPatch, *gpus: SimpleNamespace) -> None:
    """Let torch see other GPUs than those of this machine."""
    at = {key: index for index in range(len(gpus)) for key in (index, torch.device("cuda", index))}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: gpus[at[gpu]])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (gpus[at[gpu]].major, gpus[at[gpu]].minor))


T4 = SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=16 << 30)
A100 = SimpleNamespace(name="A100", major=8, minor=0, total_memory=80 << 30)


def test_only_kernels_that_run_on_this_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    assert gpu_diagnosis.kernels()["here"] == []
    assert gpu_diagnosis.kernels()["note"].startswith("none run here: torch sees no CUDA GPU; verify")
    pretend(monkeypatch, T4)
    assert gpu_diagnosis.kernels()["here"] == []
    assert "none run here: this GPU has compute capability 7.5" in gpu_diagnosis.kernels()["note"]
    monkeypatch.setattr(kernels.loader, "toolchain", lambda: {"problem": None})
    pretend(monkeypatch, T4, A100)
    assert gpu_diagnosis.kernels()["here"] == sorted(kernels.MATMULS)
    assert ", on A100; other programs multiply compressed-tensors, gptq, " in gpu_diagnosis.kernels()["note"]


def test_kernels_without_cupy_are_not_named_but_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, A100)
    state = {"cupy": None, "nvrtc": None, "problem": "no module named 'cupy'"}
    monkeypatch.setattr(kernels.loader, "toolchain", lambda: state)
    found = doctor.diagnose()
    install = kernels.loader.install()
    assert found["kernels"]["here"] == [] and not found["ok"]
    assert found["kernels"]["note"] == (
        f"none run here: CuPy does not load (no module named 'cupy'): {install}; verify proves the bits without them"
    )
    assert any(fix.endswith(install) for fix in found["fixes"])


def test_a_gpu_too_old_for_the_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, T4, A100)
    found = doctor.diagnose()
    assert [gpu["name"] for gpu in found["gpus"]] == ["Tesla T4", "A100"]
    assert "need 8.0 (Ampere) or newer" in found["gpus"][0]["problem"] and found["gpus"][1]["problem"] is None
    line = next(line for line in doctor.format_diagnosis(found).splitlines() if line.startswith("GPU"))
    assert "sm_75 (this GPU has compute capability 7.5" in line and line.endswith("sm_80")


@pytest.mark.parametrize(
    ("blocked", "raised", "fix"),
    [
        ("torch", "OSError('libtorch.so: cannot open shared object file')", "torch"),
        ("numpy", "ImportError('numpy: no attribute multiarray', name='numpy')", "numpy"),
    ],
)
def test_a_package_that_does_not_load_is_named(blocked: str, raised: str, fix: str) -> None:
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "{blocked}":
            raise {raised}
sys.meta_path.insert(0, Blocked())
from quantkit.cli import main
main(["doctor"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT.parent)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("MISSING") and blocked in line and "does not load: " in line for line in lines)
    assert f"fix            pip install --force-reinstall --no-cache-dir {fix}" in lines
    assert any(line.startswith("kernels        unknown: ") for line in lines)
