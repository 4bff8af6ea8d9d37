"""Ask the newest vLLM and SGLang, on a CPU, whether quantkit's plug-ins still fit them: `make engines`.

    python -m benchmarks.engines.watch docs/serving.md    # writes the table between the page's two marks

Of a wheel only the Python files are fetched, by ranges of bytes. tests/serving has the questions, and $VLLM_CHECK the
environment in which they run; without it, one is made of what the newest vLLM and quantkit ask for, less CUDA's. Exit
code 1 if a check fails, or is not run.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from datetime import date
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build/engines"
BEGIN, END = "<!-- make engines -->\n", "<!-- end -->\n"
HEAD = (
    "| newest release | asked on | asks for | lists methods for | checks of `tests/serving` |\n|---|---|---|---|---|\n"
)
#: engine -> its title, the variable by which tests/serving finds its code, and the file and the start of its methods
ENGINES = {
    "vllm": ("vLLM", "VLLM_RELEASE", "vllm/model_executor/layers/quantization/__init__.py", "QuantizationMethods ="),
    "sglang": ("SGLang", "SGLANG_CHECK", "sglang/srt/layers/quantization/__init__.py", "BASE_QUANTIZATION_METHODS"),
}
OURS = ("compressed-tensors", "gptq", "gptq_marlin", "awq", "humming")
KEPT = re.compile(r"\.(py|json|jinja|txt)$|(METADATA|entry_points\.txt)$|^sglang/kernels/jit/.*(?<!\.so)$")
#: packages that need CUDA, and that no engine imports to load a model
CUDA = re.compile(r"(nvidia-(?!ml)|nccl|cuda-(?!bind|pathf)|torch|flashinfer|tilelang|quack|tokenspeed|opencv|numba).*")
#: what an engine imports, and an environment made for another release lacks
BESIDE = {"vllm": ("humming-kernels",), "sglang": ("orjson", "IPython", "traitlets", "torchvision", "gguf")}


class Remote(io.RawIOBase):
    """A file behind an address, read by blocks of 2 MiB."""

    BLOCK = 2**21

    def __init__(self, url: str) -> None:
        self.url, self.at, self.block = url, 0, cache(self.fetch)
        with urlopen(Request(url, method="HEAD")) as answer:
            self.size = int(answer.headers["Content-Length"])

    def fetch(self, number: int) -> bytes:
        last = (number + 1) * self.BLOCK - 1
        with urlopen(Request(self.url, headers={"Range": f"bytes={number * self.BLOCK}-{last}"})) as answer:
            return bytes(answer.read())

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        end, found = self.size if size < 0 else min(self.size, self.at + size), b""
        while self.at < end:
            number, start = divmod(self.at, self.BLOCK)
            found += self.block(number)[start : start + end - self.at]
            self.at = min(end, (number + 1) * self.BLOCK)
        return found


def pip(python: Path | str, *options: Path | str) -> str:
    command = [python, "-m", "pip", "install", "-q", "--only-binary", ":all:", *options]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def newest(*options: str) -> dict[str, dict[str, Any]]:
    """Return name -> pip's facts about the wheel that it would install."""
    found = json.loads(pip(sys.executable, "--dry-run", "--ignore-installed", "--report", "-", *options))["install"]
    return {package["metadata"]["name"]: package for package in found}


def needs(package: dict[str, Any]) -> list[str]:
    """List the requirements of a package, without extras and markers."""
    return [re.sub(r"\[.*?\]|;.*", "", need).strip() for need in package["metadata"].get("requires_dist", ())]


def fetched(name: str, package: dict[str, Any]) -> Path:
    """Return a folder with the Python files of an engine, and what it imports besides."""
    place = PLACE / f"{name}-{package['metadata']['version']}"
    if not place.is_dir():
        made = place.with_name(f"{place.name}.part")
        with zipfile.ZipFile(remote := Remote(package["download_info"]["url"])) as wheel:
            wheel.extractall(made, filter(KEPT.search, wheel.namelist()))
        print(f"{place.name}: {remote.block.cache_info().misses} of {remote.size // Remote.BLOCK + 1} blocks fetched")
        asked = {re.split(r"[^\w-]", need)[0]: need for need in needs(package)}
        pip(sys.executable, "--no-deps", "--target", made, *(asked.get(each, each) for each in BESIDE[name]))
        if name == "sglang":  # without a GPU it takes an operator of vLLM's
            (made / "vllm").symlink_to(max(PLACE.glob("vllm-*/vllm"), key=os.path.getmtime))
        made.rename(place)
    return place


def environment() -> Path:
    """Return the environment in which vLLM's Python code runs; make it if $VLLM_CHECK names none."""
    home = Path(os.environ.get("VLLM_CHECK") or PLACE / "python")
    if not home.is_dir():
        ours = [need for need in requires("quantkit") or () if "extra ==" not in need]
        found = newest("vllm", *ours)
        asked = {name: package["metadata"]["version"] for name, package in found.items() if name != "vllm"}
        venv.create(made := PLACE / "made", with_pip=True, clear=True)
        pip(made / "bin/python", "--constraint", ROOT / "constraints.txt", "torch")
        kept = (f"{name}=={version}" for name, version in asked.items() if not CUDA.fullmatch(name.lower()))
        pip(made / "bin/python", "--no-deps", *kept)
        made.rename(home)
    return home


def failures(name: str, place: Path, home: Path) -> tuple[int, list[str]]:
    """Run the checks of tests/serving on an engine's code; return their number, and those that did not pass."""
    report = PLACE / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", ROOT / f"tests/serving/test_{name}.py", "--junitxml", report]
    subprocess.run(command, env={**os.environ, "VLLM_CHECK": str(home), ENGINES[name][1]: str(place)}, cwd=ROOT)
    checks = [case for case in ElementTree.parse(report).iter("testcase") if "[check_" in case.attrib["name"]]
    wrong = [case for case in checks if any(child.tag in ("failure", "error", "skipped") for child in case)]
    return len(checks), [re.sub(r".*\[check_|\]", "", case.attrib["name"]) for case in wrong]


def row(name: str, package: dict[str, Any], home: Path) -> tuple[str, bool]:
    """Return a row of the table, and whether all is well."""
    place, (title, _, file, start) = fetched(name, package), ENGINES[name]
    methods = re.search(rf"{start}.*?\n[\]}}]", (place / file).read_text(encoding="utf-8"), re.DOTALL)
    listed = [method for method in OURS if methods and f'"{method}"' in methods[0]]
    asks = [need for need in needs(package) if re.match(r"(torch|transformers|compressed-tensors)\b(?!-)", need)]
    count, wrong = failures(name, place, home)
    said = f"{count - len(wrong)} of {count} pass" + (f"; not {', '.join(wrong[:9])}" if wrong else "")
    cells = (f"{title} {package['metadata']['version']}", str(date.today()), ", ".join(asks), ", ".join(listed), said)
    return f"| {' | '.join(cells)} |\n", count > 0 and not wrong


def main(page: Path) -> int:
    home, packages = environment(), {name: newest("--no-deps", name)[name] for name in ENGINES}
    rows, well = zip(*(row(name, package, home) for name, package in packages.items()), strict=True)
    start, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(start + BEGIN + HEAD + "".join(rows) + END + rest.partition(END)[2], encoding="utf-8")
    return 1 - all(well)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
