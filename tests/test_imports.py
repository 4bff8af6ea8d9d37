"""Who may import whom: rows of modules, one front door for each third-party package, and a quick `--help`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "quantkit"

#: A unit imports from rows above its own (docs/architecture.md), and within its row only as NEIGHBOURS says.
ROWS = [
    [
        "quantkit",
        "compiled",
        "direct",
        "errors",
        "formats",
        "hashing",
        "inlet",
        "loops",
        "sparsity",
        "storage",
        "progress",
        "room",
    ],
    ["tensor", "items", "headers", "tensorfile"],
    ["layouts", "restate", "kernels", "hessian", "rtn", "factor", "refine", "gptq", "data"],
    ["checkpoint", "writer", "recipe", "report", "drawing", "conversions", "speeds", "linear", "joint"],
    ["skeleton", "models"],
    [
        *("memory", "misfits", "plan", "inspection", "solve", "calibrate", "output", "repack", "verify", "evaluate"),
        *("packed", "hf", "loading", "provenance"),
    ],
    ["pipeline", "api", "bench", "outline", "turns", "decoding"],
    ["demo", "doctor", "cli", "__main__"],
]
NEIGHBOURS = {
    *(
        ("storage", "errors"),
        ("storage", "room"),
        ("direct", "storage"),
        ("direct", "room"),
        ("direct", "errors"),
        ("direct", "hashing"),
        ("inlet", "direct"),
        ("inlet", "storage"),
        ("inlet", "room"),
        ("inlet", "errors"),
        ("inlet", "hashing"),
        ("hashing", "storage"),
        ("items", "tensor"),
        ("tensorfile", "headers"),
        ("restate", "layouts"),
        ("formats", "errors"),
        ("sparsity", "errors"),
        ("sparsity", "room"),
        ("sparsity", "loops"),
        ("rtn", "hessian"),
        ("gptq", "hessian"),
        ("gptq", "rtn"),
        ("gptq", "factor"),
        ("gptq", "refine"),
        ("factor", "hessian"),
        ("factor", "rtn"),
        ("refine", "hessian"),
        ("refine", "rtn"),
        ("writer", "checkpoint"),
        ("drawing", "report"),
        ("joint", "linear"),
        ("models", "skeleton"),
        ("hf", "packed"),
        ("loading", "packed"),
        ("loading", "hf"),
        ("plan", "memory"),
        ("plan", "misfits"),
        ("output", "provenance"),
        ("repack", "plan"),
        ("repack", "output"),
        ("repack", "solve"),
        ("calibrate", "solve"),
        ("outline", "bench"),
        ("decoding", "bench"),
        ("turns", "outline"),
        ("decoding", "outline"),
        ("decoding", "turns"),
    ),
    *(("calibrate", "solve"), ("api", "pipeline"), ("cli", "demo"), ("cli", "doctor"), ("__main__", "cli")),
}
#: The files of layouts/: each imports only from those left of it.
LAYOUT_FILES = [
    "config",
    "tiles",
    "arrange",
    "protocol",
    "checks",
    "quads",
    "compressed_tensors",
    "humming",
    "tcfpx",
    "gptq",
    "gptq_v2",
    "awq",
    "quick",
    "marlin",
    "marlin24",
    "marlin24_ct",
    "stacked",
]
SISTERS = {
    ("gptq_v2", "gptq"),
    ("awq", "gptq"),
    ("quick", "awq"),
    ("quick", "gptq"),
    ("marlin", "gptq"),
    ("marlin24", "gptq"),
    ("marlin24_ct", "marlin24"),
    ("marlin24_ct", "compressed_tensors"),
}

FRONT_DOORS = {
    "transformers": {"skeleton", "models", "hf", "loading", "turns"},
    "accelerate": {"skeleton"},
    "datasets": {"data"},
    "cupy": {"kernels"},
    "safetensors": {"checkpoint"},
    "huggingface_hub": {"checkpoint"},
    "yaml": {"recipe"},
    "matplotlib": {"drawing"},
    "tqdm": {"progress"},
    "blake3": {"hashing"},
    "xxhash": {"tensor"},
    "numba": {"compiled"},
    "llvmlite": {"compiled"},
    "numpy": {"compiled", "direct", "inlet", "layouts", "loops"},
    "click": {"cli"},
}
#: Imported inside functions; `hf` derives classes from those of transformers, and nobody imports it before that.
LATE = {"transformers", "datasets", "cupy", "matplotlib", "accelerate", "huggingface_hub"}


def modules() -> dict[str, ast.Module]:
    """Return dotted name inside the package ("" for its own `__init__`) -> syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix("__init__").removesuffix(".")] = ast.parse(path.read_text())
    return found


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield (dotted name, is it inside a function) of each import; those for type checkers alone are left out."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the row"
            yield from ((f"{node.module}.{alias.name}", inside) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return walk(tree, False)


def place(unit: str) -> int:
    return next(i for i, row in enumerate(ROWS) if unit in row)


def own(name: str) -> str:
    """Return the module's dotted name inside the package of an import such as `quantkit.layouts.gptq.pack`."""
    parts = name.split(".")[1:]
    while parts and not (PACKAGE.joinpath(*parts).is_dir() or PACKAGE.joinpath(*parts).with_suffix(".py").is_file()):
        parts.pop()
    return ".".join(parts)


def test_every_module_has_a_row() -> None:
    units = {name.split(".")[0] or "quantkit" for name in modules()}
    assert units == {unit for row in ROWS for unit in row}


def test_no_file_imports_from_its_own_row_or_below() -> None:
    wrong = []
    for name, tree in modules().items():
        unit = name.split(".")[0] or "quantkit"
        if unit == "quantkit":
            continue  # its re-exports are loaded on first use
        for imported, _ in imports(tree):
            if imported.split(".")[0] != "quantkit":
                continue
            other = own(imported).split(".")[0] or "quantkit"
            if other != unit and place(other) >= place(unit) and (unit, other) not in NEIGHBOURS:
                wrong.append(f"{name} imports {imported}")
    assert wrong == []


def test_layouts_know_only_what_is_left_of_them() -> None:
    wrong = []
    for name, tree in modules().items():
        if not name.startswith("layouts."):
            continue
        me = name.split(".")[1]
        for imported, _ in imports(tree):
            other = own(imported).removeprefix("layouts.") if imported.startswith("quantkit.layouts.") else ""
            if other not in LAYOUT_FILES:
                continue
            shared = LAYOUT_FILES.index(other) < LAYOUT_FILES.index("compressed_tensors")
            if LAYOUT_FILES.index(other) >= LAYOUT_FILES.index(me) or not (shared or (me, other) in SISTERS):
                wrong.append(f"{name} imports {imported}")
    assert wrong == []


def test_third_parties_have_one_front_door() -> None:
    wrong = []
    for name, tree in modules().items():
        unit = name.split(".")[0]
        for imported, inside in imports(tree):
            package = imported.split(".")[0]
            if package in ("quantkit", "torch") or package in sys.stdlib_module_names:
                continue
            if unit not in FRONT_DOORS.get(package, ()):
                wrong.append(f"{name} imports {package}")
            elif package in LATE and not inside and (unit, package) != ("hf", "transformers"):
                wrong.append(f"{name} imports {package} outside a function")
    assert wrong == []


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import quantkit", {"torch", "click", "transformers", "numpy"}),
        ("import quantkit.cli.commands", {*LATE, "safetensors"}),
    ],
)
def test_a_quick_start_loads_nothing_heavy(code: str, unwanted: set[str]) -> None:
    code += "; import sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert unwanted & set(loaded.stdout.split()) == set()


def test_the_names_of_the_package_are_functions_whatever_was_imported_before() -> None:
    import quantkit
    import quantkit.verify  # the submodule must not take the function's place

    for name in ("quantize", "prune", "pack", "load", "verify", "Scheme", "QuantizedTensor"):
        assert callable(getattr(quantkit, name)), name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = quantkit.no_such_name
