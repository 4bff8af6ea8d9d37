"""The cache of compiled kernels never returns a stale, damaged or half-written binary."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.io import files
from quantkit.kernels import MATMULS, gptq, loader, missing
from tests import ranks as processes

SOURCE = '#include "shared.cuh"\ntemplate <int N> __global__ void f(float *y) { *y = N + SHARED; }\n'
INSTANCES = ("f<1>", "f<2>")


@pytest.fixture
def sources(nvrtc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources, and a cache of its own."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources/f.cu").write_text(SOURCE)
    (tmp_path / "sources/shared.cuh").write_text("#define SHARED 3\n")
    monkeypatch.setattr(loader, "source_dir", lambda: tmp_path / "sources")
    return tmp_path / "sources"


def entries() -> list[Path]:
    return sorted(loader.cache_dir().iterdir()) if loader.cache_dir().is_dir() else []


def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the name of every real compilation."""
    seen: list[str] = []
    real = loader.compile

    def count(name: str, *rest: object) -> loader.Binary:
        seen.append(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "compile", count)
    return seen


def test_a_binary_is_compiled_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = compiled(monkeypatch)
    first = loader.cached("f", INSTANCES, "sm_90a")
    assert loader.cached("f", INSTANCES, "sm_90a") == first
    assert seen == ["f"] and len(entries()) == 1
    assert first.cubin.startswith(b"\x7fELF") and first.names.keys() == set(INSTANCES)


def test_each_input_of_the_compiler_changes_the_key_by_itself(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiler, options and the text of any header: otherwise an update would still use the old binaries."""

    def key(instances: tuple[str, ...] = INSTANCES, arch: str = "sm_90a") -> str:
        return loader.cache_key("f", instances, arch)

    found = [key(), key(INSTANCES[:1]), key(arch="sm_80")]
    for name, other in (
        ("cupy.cuda.nvrtc.getVersion", lambda: (99, 1)),
        ("cupy.cuda.nvrtc.getVersion", lambda: (99, 2)),
        ("quantkit.kernels.loader.OPTIONS", (*loader.OPTIONS, "--use_fast_math")),
        ("quantkit.kernels.loader.OPTIONS", loader.OPTIONS[1:]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, other)
            found.append(key())
        assert key() == found[0], "the same things give the same key"
    for name in ("f.cu", "shared.cuh", "new.cuh"):  # a new one may stand in the way of another that was found before
        (sources / name).write_text("#define SHARED 3 \n")
        found.append(key())
    (sources / "new.cuh").rename(sources / "newer.cuh")
    found.append(key())
    assert len(set(found)) == len(found) == 11


@pytest.mark.parametrize("damage", ["a bit", "cut off", "emptied", "foreign"])
def test_a_damaged_entry_is_compiled_again(damage: str, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = loader.cached("f", INSTANCES, "sm_80")
    (entry,) = entries()
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes({"a bit": data, "cut off": data[:-1], "emptied": b"", "foreign": b"\x7fELF" * 100}[damage])
    seen = compiled(monkeypatch)
    assert loader.cached("f", INSTANCES, "sm_80") == good
    assert loader.cached("f", INSTANCES, "sm_80") == good
    assert seen == ["f"], "it was not put right on the disk"


def test_an_entry_that_is_a_link_or_a_folder_is_not_read(sources: Path, tmp_path: Path) -> None:
    good = loader.cached("f", INSTANCES, "sm_80")
    (entry,) = entries()
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert loader.cached("f", INSTANCES, "sm_80") == good
    entry.unlink()
    entry.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert loader.cached("f", INSTANCES, "sm_80") == good


def test_processes_that_start_at_once_all_get_the_binary(sources: Path, tmp_path: Path) -> None:
    def work() -> None:
        found = loader.cached("f", INSTANCES, "sm_80")
        assert found.cubin.startswith(b"\x7fELF") and found.names.keys() == set(INSTANCES)

    ended = processes.run([work] * 4, tmp_path)
    assert [each.code for each in ended] == [0] * 4, ended
    assert len(entries()) == 1, "left over beside the entry"


def test_a_wait_is_only_announced_for_binaries_that_are_not_on_the_disk(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "arch_of", lambda device: "sm_80")
    assert loader.uncompiled("f", INSTANCES, torch.device("cuda", 0)) == [*INSTANCES]
    loader.cached("f", INSTANCES[:1], "sm_80")
    assert loader.uncompiled("f", INSTANCES, torch.device("cuda", 0)) == [*INSTANCES[1:]]


def test_a_writer_that_dies_leaves_no_entry(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(operation: str, path: Path) -> None:
        if operation == "rename":
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "FAULT", killed)
    with pytest.raises(KeyboardInterrupt):
        loader.cached("f", INSTANCES, "sm_80")
    assert entries() == []


def test_a_cache_that_cannot_be_written_is_reported_once(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "file/below"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = loader.cached("f", INSTANCES, "sm_80")
        assert loader.cached("f", INSTANCES, "sm_80") == first
    (warning,) = caught
    assert "QUANTKIT_CACHE" in str(warning.message) and str(tmp_path / "file/below") in str(warning.message)


def test_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("QUANTKIT_CACHE", raising=False)
    assert loader.cache_dir() == Path("/home/someone/.cache/quantkit/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert loader.cache_dir() == Path("/caches/quantkit/kernels")
    monkeypatch.setenv("QUANTKIT_CACHE", "/mine")
    assert loader.cache_dir() == Path("/mine/kernels")


def test_an_error_in_a_source_is_one_line_with_its_position(sources: Path) -> None:
    (sources / "f.cu").write_text(SOURCE.replace("SHARED", "SHARD"))
    with pytest.raises(KernelError, match=r"f.cu does not compile for sm_80 .*SHARD") as caught:
        loader.cached("f", INSTANCES, "sm_80")
    assert "\n" not in str(caught.value)
    (sources / "f.cu").write_text(SOURCE)
    for instances, arch in ((("g<1>",), "sm_80"), (INSTANCES, "sm_10")):
        with pytest.raises(KernelError, match="does not compile") as caught:
            loader.cached("f", instances, arch)
        assert "\n" not in str(caught.value)
    assert entries() == []


def test_architectures_are_named_as_nvrtc_names_them() -> None:
    names = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120"}
    assert {capability: loader.arch_name(*capability) for capability in names} == names
    for old in ((7, 5), (7, 0), (6, 1)):
        with pytest.raises(KernelError, match="need 8") as caught:
            loader.arch_name(*old)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("version", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13"), (None, "cuda13")])
def test_the_extra_follows_the_build_of_torch(version: str | None, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert loader.extra() == extra
    assert loader.install() == f"pip install 'cupy-{extra}x>=13.6'"


def test_without_cupy_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy/__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name == "cupy" or name.startswith("cupy.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(KernelError, match=r"libcuda.*pip install 'cupy-cuda1[23]x>=13.6'"):
        loader.compile("marlin", (), "sm_80")
    assert "pip install" in str(missing("marlin", torch.device("cuda", 0)))


def test_layouts_without_a_kernel_and_devices_without_a_gpu_are_reported() -> None:
    assert "multiplies gptq" in str(missing("gptq", torch.device("cpu")))
    for layout in MATMULS:
        assert "GPU" in str(missing(layout, torch.device("cpu")))


def test_kernels_that_are_loaded_beside_other_work_leave_their_errors_to_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, torch.device]] = []

    def load(name: str, instances: object, device: torch.device) -> None:
        seen.append((name, device))
        raise RuntimeError("no driver")

    monkeypatch.setattr(loader, "load", load)
    gptq.load_beside(torch.device("cpu"))
    monkeypatch.setattr(gptq, "runs_on", lambda device: True)
    gptq.load_beside(torch.device("cuda", 1))
    for thread in threading.enumerate():
        if thread.name == "quantkit-compile":
            thread.join()
    assert seen == [("gptq_sweep", torch.device("cuda", 1))]
