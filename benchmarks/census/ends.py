"""Does vLLM open models whose embeddings or head are packed too? Adds `ends` to the rows that vLLM opens.

python -m benchmarks.census.ends SCRIPT census.json [FAMILY...]   # SCRIPT as for `python -m benchmarks.census --vllm`
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.census import engine, families

#: what is packed besides the linears -> whose module it is, and whether the embeddings are the head
ENDS = {"embeddings": ("input", False), "head": ("output", False), "tied": ("input", True)}
#: layout -> the scheme of either; the second one is for heads where transformers would fill the first's linears
SCHEMES = {"compressed-tensors": "int8:g64", "gptq": "int4:g32"}
#: how tied ones are asked for again, with quantkit's plug-in
TIED, PLUGIN = "tied, with quantkit", ("--option", "quantization=quantkit")
OPTIONS: dict[str, Any] = {"method": "rtn", "group_size": families.GROUP, "min_share": 0, "clip": "none"}


def make(family: str, folder: Path) -> dict[str, str | None]:
    """Write the outputs of a family below `folder`; say for each why it was not made, None if it was."""
    made: dict[str, str | None] = {}
    for end, (which, tied) in ENDS.items():
        source = families.write(family, folder / f"{end}-dense", tied=tied)
        model: Any = families.build(family, tied=tied)
        module = getattr(model, f"get_{which}_embeddings")()
        name = next(path for path, each in model.named_modules() if each is module).rpartition(".")[2]
        for layout, scheme in SCHEMES.items():
            if made.get(end, "") is not None:
                made[end] = pack(source, folder / end, {name: scheme}, layout)
    return made


def pack(source: Path, out: Path, override: dict[str, str], layout: str) -> str | None:
    """Quantize a folder with an override; return why not, None if it was done."""
    import quantkit

    try:
        report = quantkit.quantize(source, out, layout=layout, override=override, **OPTIONS)
    except Exception as error:
        return f"not made: {' '.join(str(error).split())[:200]}"
    packed = {layer["name"].rpartition(".")[2] for layer in report.layers}
    return None if override.keys() <= packed else "not made: it stays dense"


def main() -> None:
    script, path, *chosen = sys.argv[1:]
    census = json.loads(Path(path).read_text(encoding="utf-8"))
    rows = {row["family"]: row for row in census["families"] if row.get("vllm") == engine.OK}
    rows = {family: rows[family] for family in chosen or rows}
    with tempfile.TemporaryDirectory() as place, ProcessPoolExecutor(1) as pool:
        at = {family: Path(place) / family for family in rows}
        made = dict(zip(rows, pool.map(make, rows, at.values()), strict=True))
        folders = [at[family] / end for family, ends in made.items() for end, why in ends.items() if why is None]
        opened = engine.opened(Path(script), folders)
        tied = [folder for folder in folders if folder.name == "tied"]
        by_plugin = engine.opened(Path(script), tied, options=PLUGIN)
        for family, row in rows.items():
            row["ends"] = {end: why or opened[at[family] / end] for end, why in made[family].items()}
            row["ends"][TIED] = made[family]["tied"] or by_plugin[at[family] / "tied"]
    census["ends"] = {"date": f"{date.today()}", **engine.versions()}
    Path(path).write_text(json.dumps(census, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
