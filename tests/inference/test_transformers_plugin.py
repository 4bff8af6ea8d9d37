"""`import quantkit` leaves other libraries alone; `quantkit.register` adds a quantizer and changes no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.core.quantized_tensor import Scheme
from quantkit.layouts.schemes import Schemes
from tests.inference.samples import Folders
from tests.layouts.samples import write_folder

#: One process checks both, because the imports take most of its time.
OPENED = """
import json, sys, warnings
import torch, transformers
from transformers.quantizers import auto

def state():
    tables = auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    return [list(x) for x in (sys.meta_path, sys.path_hooks, warnings.filters)] + [dict(table) for table in tables]

before, modules = state(), set(sys.modules)
import quantkit
assert state() == before and type(quantkit) is type(sys)
assert {name for name in set(sys.modules) - modules if not name.startswith("quantkit")} == set()
import quantkit.inference.load, quantkit.inference.transformers_plugin
assert state() == before

from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
tables = auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING
before = [dict(table) for table in tables]
quantkit.register()
after = [dict(table) for table in tables]
quantkit.register()
assert [dict(table) for table in tables] == after
assert all(now[name] is owner for was, now in zip(before, after) for name, owner in was.items())
found = {}
for path in sys.argv[1:]:
    try:
        model = AutoModelForCausalLM.from_pretrained(path)
        found[path] = type(model.hf_quantizer).__name__ + " " + type(model.model.layers[0].mlp.up_proj).__name__
    except Exception as error:
        found[path] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def test_import_changes_no_table_and_from_pretrained_opens_a_layout_or_leaves_it_to_its_owner(
    folder: Folders, small_llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the compressed-tensors library, which is not installed")
    labels = {"humming": "fp5:channel", "tcfpx": "fp6:channel", "awq": "int4:g64:asym", "quick": "int4:g32"}
    named = ("marlin", "gptq", "compressed-tensors", *labels)  # one of each method in public configs
    cases = {layout: folder(layout, labels.get(layout, "int4:g128")) for layout in named}
    cases["marlin by its own name"] = tmp_path / "marlin"
    schemes = Schemes(Scheme.parse("int4:g128"), ignore=("lm_head",))
    write_folder(small_llama, tmp_path / "marlin", "marlin", schemes, key=False)
    config = json.loads((tmp_path / "marlin" / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "marlin"
    (tmp_path / "marlin" / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", OPENED, *map(str, cases.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    outcomes = {name: found[str(path)] for name, path in cases.items()}
    ours = {name for name, outcome in outcomes.items() if outcome == "QuantkitQuantizer PackedLinear"}
    owned = {name for name, outcome in outcomes.items() if outcome.startswith("CompressedTensorsHfQuantizer")}
    assert ours == {"tcfpx", "humming", "marlin by its own name"} and owned == {"compressed-tensors"}, outcomes
    # The owner refuses a kernel layout, or wants a package for its own layout: no model comes of either.
    assert all("Error: " in outcomes[name] for name in outcomes.keys() - ours - owned), outcomes
