"""Launchers refuse bad operands in one line before anything is launched, and the process goes on.

A kernel that read past its operands would end the process by a CUDA error. Operands on a CPU show most errors, because
the device is checked last.
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

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError, QuantkitError
from quantkit.evaluation.options import VerifyOptions
from quantkit.evaluation.verify import verify
from quantkit.kernels import JUDGES, MATMULS, loader, missing, proof
from quantkit.pipeline import quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from tests.kernels.operands import ONE_EACH, packed, weight
from tests.kernels.products import on_gpu

ROOT = Path(__file__).resolve().parents[2]
KERNELS = pytest.mark.parametrize("table", [MATMULS, JUDGES], ids=["fast", "naive"])
LAYOUTS = pytest.mark.parametrize(("layout", "label", "n", "k"), ONE_EACH)

Kernel = Callable[..., Tensor]
#: Returns a call of a kernel with some operands changed.
Change = Callable[..., Callable[[], Tensor]]


def off_by_one(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Copy `like` into a contiguous tensor of another shape, misaligned by one element."""
    whole = torch.zeros(like.numel() + 1, dtype=like.dtype, device=like.device)
    count = torch.Size(shape).numel()
    whole[1 : 1 + count].copy_(like.reshape(-1)[:count])
    return whole[1 : 1 + count].view(shape)


def scattered(tensor: Tensor) -> Tensor:
    """Make a strided tensor of the same values, with a gap behind each."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]


def calls(kernel: Kernel, x: Tensor, tensors: dict[str, Tensor], scheme: Scheme, n: int, k: int) -> Change:
    """Make a function that builds calls of a kernel with some of these operands replaced."""

    def call(
        x: Tensor = x,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        scheme: Scheme = scheme,
        n: int = n,
        k: int = k,
        **changed: Tensor,
    ) -> Callable[[], Tensor]:
        return lambda: kernel(x, {**tensors, **changed}, scheme, n, k, bias, out)

    return call


def unfit(
    call: Change, layout: str, x: Tensor, tensors: dict[str, Tensor], n: int, k: int
) -> list[tuple[str, Callable[[], Tensor]]]:
    """List error patterns and calls for all kinds of bad operands, for activations [4, k]."""
    codes, scales = next(iter(tensors)), list(tensors)[-1]
    zeros = torch.zeros(2 * n, dtype=x.dtype, device=x.device)
    out = zeros.new_empty(4, n)
    return [
        ("m >= 1", call(x[:0])),
        (rf"\[m, {k}\]", call(x[:, :-16].contiguous())),
        (rf"\[m, {k}\]", call(x[0])),
        (rf"\[m, {k}\]", call(x[None])),
        *(
            ("activations must be float16 or bfloat16", call(x.to(t)))
            for t in (torch.float32, torch.float64, torch.int16)
        ),
        ("activations must be contiguous", call(torch.empty_like(x.t().contiguous()).t())),
        ("activations must be contiguous", call(scattered(x))),
        ("activations must be contiguous", call(x[:1].expand(4, k))),
        ("activations must begin at a multiple of 16", call(off_by_one((4, k), x))),
        ("must be int32", call(**{codes: tensors[codes].to(torch.int64)})),
        ("must be float16, not bfloat16", call(**{scales: tensors[scales].bfloat16()})),
        ("must have shape", call(**{codes: tensors[codes][:-1]})),
        ("must have shape", call(**{scales: tensors[scales].reshape(-1)[:-1]})),
        *(
            (f"{name} must be contiguous", call(**{name: scattered(tensor)}))
            for name, tensor in tensors.items()
            if layout != "marlin24-ct"  # whose tensors go by their other names
        ),
        ("must begin at a multiple of 16", call(**{codes: off_by_one(tensors[codes].shape, tensors[codes])})),
        ("must begin at a multiple of 16", call(**{scales: off_by_one(tensors[scales].shape, tensors[scales])})),
        ("bias must be float16", call(bias=zeros[:n].float())),
        ("bias must have shape", call(bias=zeros[: n - 1])),
        ("bias must be contiguous", call(bias=zeros[::2])),
        ("out must have shape", call(out=out[:3])),
        ("out must be float16 or float32", call(out=out.bfloat16())),
        ("out must be contiguous", call(out=zeros.new_empty(n, 4).t())),
        ("out must begin at a multiple of 16", call(out=off_by_one((4, n), out))),
        ("n to be a multiple", call(n=n - 8)),
        ("n to be a multiple", call(n=0)),
        ("multiple of|does not divide", call(k=k + 8)),
        ("kernel takes", call(scheme=Scheme.parse("int4:g16"))),
    ]


@KERNELS
@LAYOUTS
def test_operands_that_no_kernel_takes_are_one_clear_line(
    table: dict[str, Kernel], layout: str, label: str, n: int, k: int
) -> None:
    q = weight(label, n, k)
    tensors, x = packed(layout, q), torch.ones(4, k, dtype=torch.float16)
    call = calls(table[layout], x, tensors, q.scheme, n, k)
    on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    elsewhere = {
        "cpu": [call(), call(bias=x.new_zeros(n)), call(out=x.new_zeros(4, n)), call(**on_meta)],
        "meta": [call(x.to("meta")), call(x.to("meta"), **on_meta)],
    }
    says = "activations must be on a CUDA device, not on {}: move it"  # wherever the other operands are
    cases = [(says.format(device), bad) for device, each in elsewhere.items() for bad in each]
    for pattern, bad in [*unfit(call, layout, x, tensors, n, k), *cases]:
        with pytest.raises(QuantkitError, match=pattern) as caught:
            bad()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "label"),
    [
        ("marlin", "int4:g128:asym"),
        ("marlin", "int4:g256"),
        ("marlin", "fp6:channel"),
        ("marlin24", "int4:g128"),
        ("marlin24", "int4:g64:24"),
        ("tcfpx", "int4:channel"),
        ("tcfpx", "fp6:g128"),
        ("quick", "int4:channel"),
        ("quick", "int4:g16"),
        ("quick", "fp5:channel"),
    ],
)
def test_a_scheme_that_a_kernel_would_read_wrongly_is_refused(layout: str, label: str) -> None:
    with pytest.raises(QuantkitError, match=f"the {layout} kernel takes .*, not {label}"):
        JUDGES[layout](torch.ones(1, 256, dtype=torch.float16), {}, Scheme.parse(label), 256, 256)


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that every GPU has compute capability 7.5, and that nothing is loaded."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    loader.loaded.cache_clear()


@pytest.mark.gpu
@KERNELS
@LAYOUTS
def test_bad_operands_are_one_error_and_the_process_goes_on(
    gpu: None, table: dict[str, Kernel], layout: str, label: str, n: int, k: int
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
    gpu: None, table: dict[str, Kernel], layout: str, label: str, n: int, k: int
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
def test_on_an_old_gpu_verify_proves_the_bits(gpu: None, old: None, tiny_llama: Path, tmp_path: Path) -> None:
    recipe = from_mapping({"scheme": {"format": "int4"}, "method": "rtn", "clip": "none", "layout": "marlin"})
    quantize.quantize(tiny_llama, tmp_path / "out", recipe, run=RunOptions(device="cpu"))
    found = verify(tmp_path / "out")
    assert found.ok and found.kernel is None and "compute capability 7.5" in found.note
    with pytest.raises(KernelError, match=r"cannot be multiplied on cuda: this GPU has compute capability 7.5"):
        verify(tmp_path / "out", asked=VerifyOptions(device="cuda"))


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
    assert all("there is none" in line and loader.install() in line for line in said), said
    doctor = subprocess.run([sys.executable, "-m", "quantkit", "doctor"], **run)  # type: ignore[call-overload]
    assert doctor.returncode != 0 and loader.install() in doctor.stdout
