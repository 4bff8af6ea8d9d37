"""Ask vLLM which draft models (MTP) it opens: python -m benchmarks.census.draft_table --vllm SCRIPT -o census.json.

For each family of ASKED, a tiny model with one draft layer is quantized by RTN in each layout. SCRIPT
(benchmarks/census/vllm_folder.py) opens each folder twice on a CPU: as the target, and as the draft of
speculative decoding. The answers become the entry `drafts` of the file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import quantkit
from benchmarks.census import engine, families

#: families of which vLLM 0.26.0 opens the dense draft model on a CPU
ASKED = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite")
ASKED += ("glm_moe_dsa", "ernie4_5_moe", "nemotron_h")
LAYOUTS = ("compressed-tensors", "gptq", "awq")
DENSE = "dense"
KINDS = {"target": (), "draft": ("--draft",)}


def table(
    script: Path,
    folder: Path,
    asked: Sequence[str] = ASKED,
    layouts: Sequence[str] = (DENSE, *LAYOUTS),
    kinds: Sequence[str] = (*KINDS,),
) -> dict[str, dict[str, dict[str, str]]]:
    """Return family -> layout -> kind, "target" or "draft" -> vLLM's verdict; `folder` is empty."""
    made: dict[Path, tuple[str, str]] = {}
    for family in asked:
        source = families.write(family, folder / family / DENSE, draft=True)
        for layout in layouts:
            out = folder / family / layout
            if out != source:
                quantkit.quantize(source, out, method="rtn", group_size=families.GROUP, layout=layout, min_share=0)
            made[out] = family, layout
    found: dict[str, dict[str, dict[str, str]]] = {family: {} for family in asked}
    for kind in kinds:
        for out, verdict in engine.opened(script, list(made), options=KINDS[kind]).items():
            family, layout = made[out]
            found[family].setdefault(layout, {})[kind] = verdict
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.census.draft_table", description="Ask vLLM for drafts.")
    parser.add_argument("--families", help=f"comma-separated model types [{','.join(ASKED)}]")
    parser.add_argument("--vllm", type=Path, required=True, help="benchmarks/census/vllm_folder.py")
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON file of the census, which gets the answers")
    arguments = parser.parse_args()
    census: dict[str, Any] = json.loads(arguments.out.read_text(encoding="utf-8"))
    asked = arguments.families.split(",") if arguments.families else ASKED
    with tempfile.TemporaryDirectory() as folder:
        answers = table(arguments.vllm, Path(folder), asked)
    census["drafts"] = {"date": f"{date.today()}", **engine.versions(), "families": answers}
    arguments.out.write_text(json.dumps(census, indent=1) + "\n")


if __name__ == "__main__":
    main()
