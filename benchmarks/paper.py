"""Draw a figure of the MARLIN, FP6-LLM, ZeroQuant(4+2) or QUICK paper with quantkit's figures and published kernels'.

    python benchmarks/paper.py --figure marlin-1             # from the CSVs that are here
    python benchmarks/paper.py --figure marlin-1 --measure   # on a GPU first
    python benchmarks/paper.py --table                       # the tables of docs/results.md
    python benchmarks/paper.py --figure quick-8 --fits 80    # the largest batch that 80 GB hold, without a GPU

`paper_figures.py` has shapes, tokens and models. Measured rows go to benchmarks/gpu/paper_NAME.csv as they come, and
are drawn in place of those of earlier runs on the same card. Kernels on another card than that of the published ones
are lines of their own. Whole models that have rows there are not timed again. The points that are drawn go to
benchmarks/papers/NAME.csv, the drawing to docs/papers/NAME.svg. All speed-ups are over the cuBLAS of the same run.
docs/papers.md says what each figure shows.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks import bench_kernels, timing
from benchmarks.paper_chart import Panel, draw
from benchmarks.paper_figures import FIGURES, MODELS, Bias, Counters, Kernels, Kind, Models, Roofline, Sustained

HERE = Path(__file__).parent
RESULTS, POINTS, DRAWINGS = HERE / "gpu", HERE / "papers", HERE.parent / "docs" / "papers"
PEERS = (HERE / "peers" / "kernels_h200.csv", HERE / "peers" / "humming_h200.csv")
#: Scheme -> the published kernels of it.
PUBLISHED = {
    "int4:g128": ("marlin_int4_g128", "humming_int4_g128"),
    "int4:channel": ("marlin_int4_per_channel",),
    "int4:g128:24": ("sparse_marlin_int4_2:4_g128",),
    "int4:channel:24": ("sparse_marlin_int4_2:4_per_channel",),
    "int4:g128:asym": ("quick_int4_g128",),
    "fp6:channel": ("fp6_llm_e3m2_per_channel", "humming_fp6_e3m2_per_channel"),
    "fp5:channel": ("humming_fp5_e3m1_per_channel",),
}
CUBLAS, PEERS_CARD = "cuBLAS", "H200"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", nargs="*", choices=FIGURES, default=[], help="[all that have rows]")
    parser.add_argument("--measure", action="store_true", help="on a GPU, before drawing")
    parser.add_argument("--batches", type=int, nargs="+", help="of whole models that are measured [the figure's]")
    parser.add_argument("--table", action="store_true", help="print speed-ups, and cells that are behind")
    parser.add_argument("--fits", type=float, metavar="GB", help="print the largest batches of whole models, estimated")
    args = parser.parse_args()
    if args.fits:
        for name in args.figure or FIGURES:
            figure = FIGURES[name]
            if isinstance(figure, Models):
                print("\n".join(largest_batches(figure, args.fits * 1e9)))
        return
    if args.table:
        print("\n".join(table(ours(""))))
        return
    for name in args.figure or FIGURES:
        figure = FIGURES[name]
        if args.batches and isinstance(figure, Models):
            figure = replace(figure, batches=tuple(args.batches))
        if args.measure:
            measure(name, figure)
        panels = PANELS[type(figure)](name, figure)
        if not panels:
            print(f"{name}: not measured, run it with --measure on a GPU")
            continue
        write(POINTS / f"{name}.csv", points(panels))
        (DRAWINGS / f"{name}.svg").write_text(draw(panels))
        print(f"{name}: {len(panels)} panels, {sum(len(line) for p in panels for line in p.lines.values())} points")


def read(path: Path) -> list[Row]:
    """Read the rows of a CSV; none if it is missing."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as a CSV, floats to six digits; rows may lack columns of others."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows)


def points(panels: Sequence[Panel]) -> list[Row]:
    """List what is drawn: one row a point."""
    return [
        {"panel": panel.title, "line": label, panel.x: x, panel.y: y}
        for panel in panels
        for label, line in panel.lines.items()
        for x, y in line
    ]


def measured(name: str) -> Path:
    """Name the CSV of what `--measure` found."""
    return RESULTS / f"paper_{name}.csv"


def ours(name: str) -> list[Row]:
    """Read all rows of quantkit's kernels by card, scheme, shape and tokens; those of the figure replace others."""
    found = {}
    for path in (*sorted(RESULTS.glob("kernels_*.csv")), measured(name)):
        for row in read(path):
            found[row["gpu"], row["scheme"], row["N"], row["K"], row["M"]] = row
    return list(found.values())


def kernel_panels(name: str, figure: Kernels) -> list[Panel]:
    """Draw schemes, published kernels and the floor of the first scheme, over tokens or over layer shapes."""
    schemes, rows = [label for _, label in figure.ours], ours(name)
    theirs = [row for path in PEERS for row in read(path) if row["M"]]
    if not any(row["scheme"] in schemes and f"{row['N']}x{row['K']}" in figure.shapes for row in rows):
        return []
    kept: dict[str, dict[str, list[tuple[Any, float]]]] = {}
    for label, key, some in (*((s, "scheme", rows) for s in schemes), *((p, "kernel", theirs) for p in figure.peers)):
        for row in some:
            shape, m = f"{row['N']}x{row['K']}", int(row["M"])
            if row[key] == label and shape in figure.shapes and m in figure.tokens:
                title, x = (f"{m} tokens", shape) if figure.by_layer else (shape, m)
                card = "" if key == "kernel" or PEERS_CARD in row["gpu"] else f", {row['gpu'].split()[1]}"
                line = f"{_called(label)}{card}"
                kept.setdefault(title, {}).setdefault(line, []).append((x, float(row[figure.value])))
                if label == schemes[0] and not figure.by_layer:
                    rate = 2e-6 * m * int(row["N"]) * int(row["K"]) / float(row["cublas_us"])
                    bound = "floor_speedup" if figure.value == "speedup_vs_cublas" else None
                    line, value = (f"{line}: floor", float(row[bound])) if bound else (f"{CUBLAS}{card}", rate)
                    kept[title].setdefault(line, []).append((x, value))
    y = "speed-up over cuBLAS" if figure.value == "speedup_vs_cublas" else "TFLOP/s"
    x = "shape" if figure.by_layer else "tokens"
    order = [f"{m} tokens" for m in figure.tokens] if figure.by_layer else figure.shapes
    if figure.by_layer:
        for lines in kept.values():
            for line in lines.values():
                line.sort(key=lambda point: figure.shapes.index(point[0]))
    dashed = frozenset(line for lines in kept.values() for line in lines if line.endswith(": floor"))
    return [Panel(f"{figure.title}: {at}", x, y, kept[at], dashed) for at in order if at in kept]


def roofline_panels(name: str, figure: Roofline) -> list[Panel]:
    """Draw TFLOP/s over operations for each byte, ours and cuBLAS, under the roof of the same run."""
    panels = []
    for label in (label for _, label in figure.ours):
        rows = [row for row in read(measured(name)) or ours(name) if row["scheme"] == label]
        rows = [row for row in rows if f"{row['N']}x{row['K']}" in figure.shapes]
        mine: dict[str, list[tuple[Any, float]]] = {}
        dense: dict[str, list[tuple[Any, float]]] = {}
        for row in rows:
            m, n, k, us = int(row["M"]), int(row["N"]), int(row["K"]), float(row["time_us"])
            work, moved = 2 * m * n * k, 2 * m * (n + k)
            packed = float(row["weight_GBps"]) * us * 1e3
            mine.setdefault(f"{n}x{k}", []).append((work / (packed + moved), work / us / 1e6))
            cublas = work / float(row["cublas_us"]) / 1e6
            dense.setdefault(f"{n}x{k}", []).append((work / (2 * n * k + moved), cublas))
        for title, lines in ((label, mine), (CUBLAS, dense)):
            if lines:
                copy, rate = float(rows[0]["copy_GBps"]) * 1e9, float(rows[0]["matrix_tflops"])
                across = [x for line in lines.values() for x, _ in line]
                turn = rate * 1e12 / copy
                ends = sorted({min(across), min(max(turn, min(across)), max(across)), max(across)})
                roof = {"roof": [(x, min(rate, copy * x / 1e12)) for x in ends]}
                dashed, y = frozenset(roof), "TFLOP/s"
                panels.append(
                    Panel(f"{figure.title}: {title}", "operations for each byte", y, lines | roof, dashed, True)
                )
    return panels


def sustained_panels(name: str, figure: Sustained) -> list[Panel]:
    """Draw speed-up in busy loops beside that with rests, and the clocks."""
    rows, rested, panels = read(measured(name)), ours(""), []
    for shape in figure.shapes:
        speed: dict[str, list[tuple[Any, float]]] = {}
        clocks: dict[str, list[tuple[Any, float]]] = {}
        for row in (row for row in rows if f"{row['N']}x{row['K']}" == shape):
            m = int(row["M"])
            clocks.setdefault(_called(row["scheme"] or CUBLAS), []).append((m, float(row["sm_MHz"])))
            if row["scheme"]:
                speed.setdefault(f"{row['scheme']}, busy", []).append((m, float(row["speedup_vs_cublas"])))
        for row in rested:
            line = f"{row['scheme']}, rested"
            busy = line.replace("rested", "busy") in speed
            if busy and f"{row['N']}x{row['K']}" == shape and int(row["M"]) in figure.tokens:
                speed.setdefault(line, []).append((int(row["M"]), float(row["speedup_vs_cublas"])))
        if speed:
            panels.append(Panel(f"{figure.title}: {shape}", "tokens", "speed-up over cuBLAS", speed))
            panels.append(Panel(f"{shape}: clock in the loop", "tokens", "MHz", clocks))
    return panels


def counter_panels(name: str, figure: Counters) -> list[Panel]:
    """Draw counters of each shape over tokens, or over kernels if there is one number of tokens."""
    rows = read(measured(name)) or [row for one in figure.layouts for row in read(RESULTS / f"counters_{one}.csv")]
    longest: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        kernel, *_, shape, m = row["product"].split()
        key = kernel, shape, int(m[1:])
        if shape in figure.shapes and key[2] in figure.tokens:
            longest[key] = max(row, longest.get(key, row), key=lambda one: float(one["us"]))
    panels = []
    for shape in figure.shapes:
        lines: dict[str, list[tuple[Any, float]]] = {}
        for (kernel, at, m), row in longest.items():
            for column in figure.columns if at == shape else ():
                line, x = (column, kernel) if len(figure.tokens) == 1 else (f"{kernel}: {column}", m)
                lines.setdefault(line, []).append((x, max(1e-2, float(row[column] or 0))))
        if lines:
            one = len(figure.tokens) == 1
            x, y = ("kernel", "count") if one else ("tokens", "% of the peak")
            panels.append(Panel(f"{figure.title}: {shape}", x, y, lines, log_y=one))
    return panels


def bias_panels(name: str, figure: Bias) -> list[Panel]:
    """Draw the time with converted exponents over the time with one shift."""
    found = {
        (row["N"], row["K"], row["M"]): row
        for path in (RESULTS / "bias_shift.csv", measured(name))
        for row in read(path)
    }
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in found.values():
        shape = f"{row['N']}x{row['K']}"
        if shape in figure.shapes and int(row["M"]) in figure.tokens:
            lines.setdefault(shape, []).append((int(row["M"]), float(row["ratio"])))
            if row.get("integer_ratio"):
                lines.setdefault(f"{shape}: by integers", []).append((int(row["M"]), float(row["integer_ratio"])))
    dashed = frozenset(label for label in lines if label.endswith(": by integers"))
    return [Panel(figure.title, "tokens", "time, converted over shifted", lines, dashed)] if lines else []


def model_panels(name: str, figure: Models) -> list[Panel]:
    """Draw tokens per GPU second, and the milliseconds of a step beside one read of the weights, over the batch."""
    rows = [row for path in (*(RESULTS / f"{file}.csv" for file in figure.files), measured(name)) for row in read(path)]
    panels = []
    for model in figure.models:
        rates: dict[str, list[tuple[Any, float]]] = {}
        steps: dict[str, list[tuple[Any, float]]] = {}
        wanted = ("dense", *figure.layouts)
        for row in (r for r in rows if r["model"] == model and r["layout"] in wanted and r.get("step_ms")):
            batch, new = int(row["batch"]), int(row["new_tokens"])
            prompt, step = float(row["prompt_ms"]) / 1e3, float(row["step_ms"]) / 1e3
            scheme = f"{row['layout']} {row['scheme']}".strip()
            line = f"{scheme}, {row['prompt_tokens']} + {new}"
            rates.setdefault(line, []).append((batch, batch * new / (prompt + new * step)))
            steps.setdefault(line, []).append((batch, 1e3 * step))
            if f"{line}: weights" not in steps or batch not in dict(steps[f"{line}: weights"]):
                reading = 1e-6 * float(row["read_bytes"]) / float(row["copy_GBps"])
                steps.setdefault(f"{line}: weights", []).append((batch, reading))
        if rates:
            bounds = frozenset(label for label in steps if label.endswith(": weights"))
            panels.append(Panel(f"{figure.title}: {model}", "prompts at a time", "tokens per GPU second", rates))
            panels.append(Panel(f"{model}: a step, and reading the weights", "prompts at a time", "ms", steps, bounds))
    return panels


PANELS: dict[type, Callable[[str, Any], list[Panel]]] = {
    Kernels: kernel_panels,
    Roofline: roofline_panels,
    Sustained: sustained_panels,
    Counters: counter_panels,
    Bias: bias_panels,
    Models: model_panels,
}


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the tables of docs/results.md by model, and for each published kernel the cells of ours that are behind."""
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    for model in bench_kernels.MODELS:
        yield f"| {model}, M | " + " | ".join(schemes) + " |"
        yield "|---|" + "---|" * len(schemes)
        for m in sorted({int(row["M"]) for row in rows}):
            cells = []
            for scheme in schemes:
                part = [r for r in rows if (r["layer"].split(" ")[0], r["M"], r["scheme"]) == (model, str(m), scheme)]
                means = [
                    geometric_mean([float(r[key]) for r in part])
                    for key in ("speedup_vs_cublas", "pct_of_floor")
                    if part
                ]
                cells.append(f"{means[0]:.2f} ({means[1]:.0f} %)" if means else "")
            yield f"| {m} | " + " | ".join(cells) + " |"
        yield ""
    for scheme, names in PUBLISHED.items():
        for peer in names:
            theirs = {(r["N"], r["K"], r["M"]): r for path in PEERS for r in read(path) if r["kernel"] == peer}
            ratios = {
                f"{r['N']}x{r['K']} M={r['M']}": float(r["speedup_vs_cublas"])
                / float(theirs[r["N"], r["K"], r["M"]]["speedup_vs_cublas"])
                for r in rows
                if r["scheme"] == scheme and (r["N"], r["K"], r["M"]) in theirs
            }
            late = sorted((ratio, shape) for shape, ratio in ratios.items() if ratio < 1)
            behind = ", ".join(f"{shape} {ratio:.3f}" for ratio, shape in late)
            yield f"{scheme} beside {peer}: {len(ratios) - len(late)} of {len(ratios)} not slower; {behind}"


def _called(label: str) -> str:
    """Name a scheme of ours, or a published kernel."""
    return f"quantkit {label}" if label in PUBLISHED else label


def measure(name: str, figure: Kind) -> None:
    """Measure a figure on the current GPU, and write its rows."""
    out, here = measured(name), [sys.executable, str(HERE)]
    if isinstance(figure, Counters):
        script = [here[0], f"{here[1]}/counters.py", "--cublas", "--layout", *figure.layouts, "--csv", str(out)]
        subprocess.run([*script, "--shape", *figure.shapes, "--m", *map(str, figure.tokens)], check=True)
    elif isinstance(figure, Bias):
        script = [here[0], f"{here[1]}/bias_shift.py", "--csv", str(out), "--shape", *figure.shapes]
        subprocess.run([*script, "--m", *map(str, figure.tokens)], check=True)
    elif isinstance(figure, Models):
        keep(out, whole_models(figure, read(out)), read(out))
    elif isinstance(figure, Sustained):
        keep(out, busy_loops(figure))
    elif isinstance(figure, Roofline):
        keep(out, squares(figure))
    else:
        keep(out, products(figure))


def keep(path: Path, rows: Iterable[Row], before: Sequence[Row] = ()) -> None:
    """Write rows as they come, so that a run that is cut off has left those that it had."""
    found = list(before)
    for row in rows:
        found.append(row)
        write(path, found)


def squares(figure: Roofline) -> Iterator[Row]:
    """Time products of few to very many tokens, and the speeds that make the roof."""
    import torch

    from benchmarks import batches
    from quantkit.core.quantized_tensor import Scheme

    where = torch.device("cuda", torch.cuda.current_device())
    device = timing.measured_on(where, torch.float16)
    roof = {"copy_GBps": device.copy / 1e9, "matrix_tflops": device.rate / 1e12}
    for layout, label in figure.ours:
        for layer in bench_kernels.layers((), figure.shapes):
            with torch.inference_mode():
                for row in batches.timed(layout, Scheme.parse(label), layer.name, layer.n, layer.k, figure.tokens):
                    yield row | roof


def products(figure: Kernels) -> Iterator[Row]:
    """Time products by bench_kernels.py."""
    import torch

    from benchmarks.bench_kernels import kernels
    from quantkit.core.quantized_tensor import Scheme
    from quantkit.progress import Progress

    for layout, label in figure.ours:
        for layer in bench_kernels.layers((), figure.shapes):
            asked = [layer], figure.tokens, [layout], [Scheme.parse(label)], torch.float16
            yield from kernels(*asked, Progress())["rows"]


def busy_loops(figure: Sustained) -> Iterator[Row]:
    """Repeat each product without rests, and ask for clock and power in the second half of the time."""
    import torch

    from benchmarks.bench_kernels import random_record
    from quantkit.core.quantized_tensor import Scheme
    from quantkit.kernels import MATMULS
    from quantkit.layouts import LAYOUTS

    where = torch.device("cuda", torch.cuda.current_device())
    l2 = torch.cuda.get_device_properties(where).L2_cache_size
    for layer in bench_kernels.layers((), figure.shapes):
        n, k = layer.n, layer.k
        for m in figure.tokens:
            x = torch.randn(m, k, device=where).half()
            out = torch.empty(m, n, dtype=torch.float16, device=where)
            plain = torch.randn(n, k, device=where).mul_(0.02).half()
            w = [plain.clone() for _ in range(timing.copies(plain.nbytes, l2))]
            calls: dict[str, Callable[[int], object]] = {
                "": lambda i, x=x, w=w, out=out: torch.mm(x, w[i % len(w)].t(), out=out)
            }
            for layout, label in figure.ours:
                scheme = Scheme.parse(label)
                one = LAYOUTS[layout].pack(random_record(scheme, n, k, where))
                size = sum(part.nbytes for part in one.values())
                some = [one, *({key: t.clone() for key, t in one.items()} for _ in range(timing.copies(size, l2) - 1))]

                def multiply(i: int, some: Any = some, layout: str = layout, scheme: Any = scheme) -> object:
                    return MATMULS[layout](x, some[i % len(some)], scheme, n, k, out=out)  # noqa: B023

                calls[label] = multiply
            cublas_us = 0.0
            for label, call in calls.items():
                us, clock, watts = _busy(call, figure.seconds, timing)
                cublas_us = cublas_us or us
                yield {"scheme": label, "N": n, "K": k, "M": m, "time_us": us, "speedup_vs_cublas": cublas_us / us} | {
                    "sm_MHz": clock,
                    "watts": watts,
                    "gpu": torch.cuda.get_device_name(where),
                }


def _busy(call: Callable[[int], object], seconds: float, timing: Any) -> tuple[float, float, float]:
    """Replay calls for some seconds; returns microseconds of a call, clock and power of the second half."""
    import torch

    for i in range(64):
        call(i)
    repeated = max(1, round(20_000 / (timing.seconds(lambda: call(0)) * 1e6)))
    graph = timing.captured(call, repeated)
    times: list[float] = []
    asked: list[tuple[float, float]] = []
    begin = time.perf_counter()
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    query.append(f"--id={torch.cuda.current_device()}")
    while (now := time.perf_counter() - begin) < seconds:
        for _ in range(3):
            graph.replay()  # the GPU has work while nvidia-smi is asked
        if now > seconds / 2:
            clock, watts = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
            asked.append((float(clock), float(watts)))
        took = timing.seconds(graph.replay)
        if now > seconds / 2:
            times.append(1e6 * took / repeated)
    return median(times), median(clock for clock, _ in asked), median(watts for _, watts in asked)


def whole_models(figure: Models, before: Sequence[Row]) -> Iterator[Row]:
    """Time models in growing batches; a batch that does not fit has a row without times.

    Forms of a model that have rows `before` are not timed again.
    """
    import torch

    from benchmarks import bench_generate, random_model
    from quantkit.models.meta_model import skeleton
    from quantkit.models.weights import free_gpu_memory
    from quantkit.progress import Progress

    where = torch.device("cuda", torch.cuda.current_device())
    for name in figure.models:
        outline = random_model.Outline(name, Path(name), MODELS[name])
        built = skeleton(outline, torch.float16)
        for variant in random_model.variants(outline, figure.layouts, (), ()):
            if any((row["model"], row["layout"]) == (name, variant.layout) for row in before):
                continue
            fits = fitting(figure, name, built, variant, free_gpu_memory(where))
            about = {"model": name, "layout": variant.layout, "scheme": variant.scheme, "fits": False}
            yield from (about | {"batch": batch} for batch in figure.batches if batch not in fits)
            if not fits:
                continue
            load = random_model.Workload(tuple(fits), figure.prompt, figure.new, torch.float16, timed=64)
            for row in bench_generate.measure(outline, [variant], load, Progress())["rows"]:
                yield row | {"fits": True}


def fitting(figure: Models, name: str, built: Any, variant: Any, free: float) -> list[int]:
    """List the batches of a model that fit into `free` bytes, by the estimate of bench_generate.py."""
    import torch

    from benchmarks import random_model
    from quantkit.errors import KernelError

    fits = []
    for batch in figure.batches:
        load = random_model.Workload((batch,), figure.prompt, figure.new, torch.float16)
        with suppress(KernelError):  # a packed model does not fit; of a dense one nothing is left
            if random_model.fit_batches(name, built, [variant], load, int(free))[0]:
                fits.append(batch)
    return fits


def largest_batches(figure: Models, free: float) -> Iterator[str]:
    """Yield the largest batch of each model in each form that fits into `free` bytes, as a table."""
    import torch

    from benchmarks import random_model
    from quantkit.models.meta_model import skeleton

    yield f"| {figure.title}, {figure.prompt} + {figure.new} tokens | dense | " + " | ".join(figure.layouts) + " |"
    yield "|---|---|" + "---|" * len(figure.layouts)
    for name in figure.models:
        outline = random_model.Outline(name, Path(name), MODELS[name])
        built = skeleton(outline, torch.float16)
        forms = random_model.variants(outline, figure.layouts, (), ())
        found = [fitting(figure, name, built, form, free)[-1:] for form in forms]
        yield f"| {name} | " + " | ".join(str(fits[0]) if fits else "none" for fits in found) + " |"


if __name__ == "__main__":
    main()
