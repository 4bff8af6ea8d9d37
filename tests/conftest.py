"""Fixtures for all tests: reference material beside the checkout, and small generated models (no downloads)."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Spinning threads make a busy machine many times slower; set before torch starts any.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("COLUMNS", None)  # tables wrap there
MEMORY = Path("/dev/shm")
SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--flip-amx", action="store_true", help="let a processor claim AMX, and one that has it claim none"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; one that only hands them to others would import for seconds before it does."""
    # Runs sync each file, which takes 5 to 10 ms on a disk; containers often have 64 MiB of memory for files.
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= 2**31:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    if getattr(config.option, "numprocesses", None):
        return
    import hypothesis
    import torch

    from quantkit.models.weights import is_fast_in_bfloat16
    from quantkit.recipes import schema  # noqa: F401  # with it messages know the keys of --set

    # A shell that runs the tests in the background ignores it, and so would each process that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.flip_amx:
        has_amx = is_fast_in_bfloat16(torch.device("cpu"))
        torch.cpu._is_amx_tile_supported = lambda: not has_amx
        torch.backends.cpu.get_cpu_capability = lambda: "AVX2" if has_amx else "AVX512"
    torch.set_num_threads(1)  # the models here are too small for two
    # The same examples in every run, and no deadline, because other programs may share the machine.
    hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("same")


def pytest_collection_finish() -> None:
    """Leave imports and collected tests, which stay to the end, out of each later garbage collection."""
    gc.freeze()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder with golden vectors, models and text; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("needs the reference material in ../shared (golden vectors, models, text), which is not here")
    return SHARED


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-block Llama with random weights (hidden 128, intermediate 256) in several fp16 shards, with a tokenizer."""
    from tests.tiny_models import write_model

    return write_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def small_llama(tiny_llama: Path) -> Path:
    """Return `tiny_llama`, which was larger once, under its other name."""
    return tiny_llama


@pytest.fixture(scope="session")
def int4(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Round `tiny_llama` without a search of scales. Tests must not change it."""
    from tests.command_line import RTN, call

    out = tmp_path_factory.mktemp("made") / "int4"
    call("quantize", tiny_llama, "-o", out, *RTN)
    return out


@pytest.fixture(scope="session")
def calib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a short calibration text. Tests must not change it."""
    from tests.folders import TEXT

    path = tmp_path_factory.mktemp("text") / "calib.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write one model folder a family on first use. Tests must not change them."""
    from tests.tiny_models import write_model

    root = tmp_path_factory.mktemp("families")

    class Written(dict[str, Path]):
        def __missing__(self, family: str) -> Path:
            self[family] = write_model(family, root / family)
            return self[family]

    return Written()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Catch signals as the command line does, and put the handlers of the tests back."""
    from quantkit.cli.process import STOP, catch_signals

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the tests with nohup ignores it
    catch_signals()
    yield
    STOP.clear()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


#: A template that shows the messages, and refuses a system message.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{{ m.role[0] }}{{ m.content }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture
def templated(tiny_llama: Path, tmp_path: Path) -> Path:
    """Copy `tiny_llama` and give it a chat template."""
    path = Path(shutil.copytree(tiny_llama, tmp_path / "chat"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return path
