"""Test which modules import third-party packages, and that the start is quick. import-linter holds the layers."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "quantkit"

#: Third-party package -> the packages or modules of quantkit that import it.
IMPORTERS = {
    "transformers": {
        "checkpoint.gguf_config",
        "checkpoint.gguf_source",
        "checkpoint.gguf_tokenizer",
        "engines.readers",
        "models",
        "inference",
        "io.json_files",
        "text",
    },
    "accelerate": {"checkpoint.gguf_source", "models"},
    "gguf": {"checkpoint.gguf_source"},
    "tokenizers": {"checkpoint.gguf_tokenizer", "text"},
    "datasets": {"text", "evaluation.task_list"},
    "pyarrow": {"text.records"},  # which datasets depends on
    "cupy": {"kernels"},
    "safetensors": {"checkpoint"},
    "huggingface_hub": {"io.hub", "serving.engine_config"},
    "msgspec": {"keys", "checkpoint.report", "algorithms.options", "kernels.loader", "layouts", "recipes"},
    "yaml": {"recipes.files", "recipes.recipe", "io.model_folder"},
    "lm_eval": {"evaluation.tasks", "evaluation.task_list"},
    "compressed_tensors": {"inference.load"},
    "jinja2": {"reporting.charts"},
    "markupsafe": {"reporting"},
    "tqdm": {"progress"},
    "blake3": {"io.files"},
    "xxhash": {"core"},
    "regex": {"layouts.schemes"},
    "vllm": {
        "evaluation.engine_child",
        "serving.vllm_quantization",
        "serving.vllm_layers",
        "serving.vllm_plugin",
    },
    "sglang": {"serving.sglang_plugin", "serving.sglang_quantization"},
    "numpy": {"evaluation", "core", "io", "planning.fit", "text"},
    "scipy": {"planning.fit"},
    "click": {"cli"},
    "filelock": {"io.staging"},
    "greenlet": {"calibration.run"},
    "typing_extensions": {"api", "evaluation.verify", "pipeline", "planning.survey"},
}
#: Imported inside functions only. The plugin is an exception: its classes derive from those of transformers.
LATE = {
    "transformers",
    "datasets",
    "cupy",
    "compressed_tensors",
    "jinja2",
    "markupsafe",
    "accelerate",
    "gguf",
    "lm_eval",
    "huggingface_hub",
    "tokenizers",
    "scipy",
}
PLUGIN = "inference.transformers_plugin"


def imports(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield (package, is it inside a function) of each import, except those for type checkers only."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    if isinstance(node, ast.Import):
        yield from ((alias.name.split(".")[0], inside) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, "relative imports hide the package"
        yield node.module.split(".")[0], inside
    for child in ast.iter_child_nodes(node):
        yield from imports(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def test_third_party_packages_are_imported_in_few_places() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for package, inside in imports(ast.parse(path.read_text())):
            if package in ("quantkit", "torch") or package in sys.stdlib_module_names:
                continue
            if not {name, name.split(".")[0]} & IMPORTERS.get(package, set()):
                wrong.append(f"{name} imports {package}")
            elif package in LATE and not inside and name != PLUGIN:
                wrong.append(f"{name} imports {package} outside a function")
    assert wrong == []


#: What is done one after another in a new process, and what must not be imported then.
STARTS: list[tuple[str, set[str]]] = [
    ("import quantkit", {"torch", "click", "transformers", "numpy"}),
    (
        "from quantkit.cli.commands import quantkit; quantkit(['convert', '--list'], standalone_mode=False)",
        {*LATE, "safetensors", "torch._dynamo"},
    ),
    ("from quantkit.cli import doctor; doctor.diagnose()", {"transformers", "datasets", "jinja2"}),
]


def test_the_start_and_the_doctor_import_nothing_heavy() -> None:
    code = "import sys\n" + "\n".join(f"{start}; print('imported', *sys.modules)" for start, _ in STARTS)
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    loaded = [set(line.split()) for line in done.stdout.splitlines() if line.startswith("imported ")]
    for (start, unwanted), modules in zip(STARTS, loaded, strict=True):
        assert unwanted & modules == set(), start


def test_the_public_names_are_completed_and_others_refused() -> None:
    import quantkit

    assert set(quantkit.__all__) <= set(dir(quantkit))  # notebooks complete these
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = quantkit.no_such_name


def test_scripts_that_reproduce_faults_find_what_they_import(shared: Path) -> None:
    trees = [ast.parse(path.read_text()) for path in sorted((shared / "reports").glob("*.py"))]
    froms = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named = {(node.module, alias.name) for node in froms for alias in node.names if node.module}
    asked = sorted((module, name) for module, name in named if module.startswith("quantkit"))
    missing = [f"{module}.{name}" for module, name in asked if not hasattr(importlib.import_module(module), name)]
    assert asked and not missing, "a module keeps its former place while scripts import from there"
