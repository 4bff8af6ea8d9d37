"""Bad operands on a GPU are one clear error, and the process goes on, for the naive and fast kernels of all layouts.

A CUDA error would end the process. test_contract.py tests the errors that need no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.errors import KernelError, QuantkitError
from quantkit.evaluation.verify import verify
from quantkit.kernels import MATMULS, loader, missing, proof
from quantkit.pipeline import quantize
from quantkit.recipes.recipe import from_mapping
from tests.kernels.calls import KERNELS, LAYOUTS, calls, unfit
from tests.kernels.operands import ONE_EACH, weight
from tests.kernels.products import on_gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that every GPU has compute capability 7.5, and that nothing is loaded."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    loader.loaded.cache_clear()


@pytest.mark.gpu
@KERNELS
@LAYOUTS
def test_bad_operands_are_one_error_and_the_process_goes_on(
    gpu: None, table: dict[str, Callable[..., Tensor]], layout: str, label: str, n: int, k: int
) -> None:
    tensors, q = on_gpu(layout, weight(label, n, k))
    x = proof.activations(q.dequantize(), 4, torch.float16)
    codes = next(iter(tensors))
    call = calls(table[layout], x, tensors, q.scheme, n, k)
    cases = [
        *unfit(call, layout, x, tensors, n, k),
        ("activations must be on a CUDA device, not on cpu", call(x.cpu())),
        ("activations must be on a CUDA device, not on meta", call(x.to("meta"))),
        ("must be on a CUDA device, not on cpu", call(**{codes: tensors[codes].cpu()})),
        ("bias must be on a CUDA device", call(bias=torch.zeros(n).half())),
        ("out must be on a CUDA device", call(out=torch.empty(4, n).half())),
    ]
    if table is MATMULS:
        cases.append(("write float16 as their activations are", call(out=torch.empty(4, n, device="cuda"))))
    good = call()()
    for pattern, bad in cases:
        with pytest.raises(QuantkitError, match=pattern) as caught:
            bad()
        assert "\n" not in str(caught.value)
    torch.cuda.synchronize()
    assert torch.equal(call()(), good)


@pytest.mark.gpu
@KERNELS
@LAYOUTS
def test_operands_on_two_gpus_are_refused(
    gpu: None, table: dict[str, Callable[..., Tensor]], layout: str, label: str, n: int, k: int
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors, q = on_gpu(layout, weight(label, n, k))
    x = torch.ones(2, k, dtype=torch.float16, device="cuda:1")
    with pytest.raises(KernelError, match="must be on cuda:1 as the activations are, not on cuda:0"):
        table[layout](x, tensors, q.scheme, n, k)
    there = {name: tensor.to(x.device) for name, tensor in tensors.items()}
    y = table[layout](x, there, q.scheme, n, k)
    assert torch.equal(y.cpu(), table[layout](x.to("cuda:0"), tensors, q.scheme, n, k).cpu())


@pytest.mark.parametrize("layout", MATMULS)
def test_an_old_gpu_is_reported_before_anything_is_compiled(layout: str, old: None) -> None:
    if loader.toolchain()["problem"] is not None:
        pytest.skip("needs CuPy, whose absence is said first")
    said = str(missing(layout, torch.device("cuda", 0)))
    assert "compute capability 7.5" in said and "need 8.0" in said and "--device cpu" in said and "\n" not in said


@pytest.mark.gpu
@KERNELS
@LAYOUTS
def test_an_old_gpu_is_one_error_and_the_process_goes_on(
    gpu: None, table: dict[str, Callable[..., Tensor]], layout: str, label: str, n: int, k: int
) -> None:
    n *= 5  # no other test plans launches of this size, and a plan is made once
    tensors, q = on_gpu(layout, weight(label, n, k))
    x = proof.activations(q.dequantize(), 4, torch.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
        loader.loaded.cache_clear()
        with pytest.raises(KernelError, match=r"compute capability 7.5.*need 8.0") as caught:
            table[layout](x, tensors, q.scheme, n, k)
        assert "\n" not in str(caught.value)
    good = table[layout](x, tensors, q.scheme, n, k)
    assert torch.equal(table[layout](x, tensors, q.scheme, n, k), good)


@pytest.mark.gpu
def test_on_an_old_gpu_verify_proves_the_bits(gpu: None, old: None, tiny_llama: Path, tmp_path: Path) -> None:
    recipe = from_mapping({"scheme": {"format": "int4"}, "method": "rtn", "clip": "none", "layout": "marlin"})
    quantize.quantize(tiny_llama, tmp_path / "out", recipe, device="cpu")
    found = verify(tmp_path / "out")
    assert found.ok and found.kernel is None and "compute capability 7.5" in found.note
    with pytest.raises(KernelError, match=r"cannot be multiplied on cuda: this GPU has compute capability 7.5"):
        verify(tmp_path / "out", device="cuda")


@pytest.mark.gpu
def test_a_gpu_without_cupy_is_one_error_that_names_the_extra(gpu: None, tmp_path: Path) -> None:
    """Without CuPy, kernels and `doctor` say what to install, and torch still works."""
    code = """
import torch
from quantkit.errors import KernelError
from quantkit.kernels import JUDGES, MATMULS
from tests.kernels.operands import ONE_EACH, weight
from tests.kernels.products import on_gpu

for layout, label, n, k in ONE_EACH:
    tensors, q = on_gpu(layout, weight(label, n, k))
    for table in (JUDGES, MATMULS):
        try:
            table[layout](torch.ones(2, k, device="cuda").half(), tensors, q.scheme, n, k)
        except KernelError as error:
            print(error)
print(float(torch.ones(3, device="cuda").sum()))
"""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy/__init__.py").write_text("raise ImportError('there is none')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    run = {"env": environment, "cwd": ROOT, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **run)  # type: ignore[call-overload]
    *said, sound = done.stdout.splitlines()
    assert done.returncode == 0 and sound == "3.0", done.stderr
    assert len(said) == 2 * len(ONE_EACH)
    assert all("there is none" in line and f"pip install 'quantkit[{loader.extra()}]'" in line for line in said), said
    doctor = subprocess.run([sys.executable, "-m", "quantkit", "doctor"], **run)  # type: ignore[call-overload]
    assert doctor.returncode != 0 and f"quantkit[{loader.extra()}]" in doctor.stdout
