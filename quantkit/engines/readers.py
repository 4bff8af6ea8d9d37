"""Which programs open a folder, and which kernels they choose: questions to the tables.

`plan`, `inspect`, report and model card ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quantkit.core.scheme import Scheme
from quantkit.engines.rows import UNTRIED, Engine, Folder, Reader
from quantkit.engines.tables import (
    CAUTIONS,
    CHAT_PROMPT,
    ENGINES,
    GPUS,
    PROMPT,
    TEXT_PROMPT,
    TRAITS,
    VLLM,
)
from quantkit.errors import Words
from quantkit.models.families import AUTO_CLASSES, OTHER_INPUTS

CAUSAL = AUTO_CLASSES[False][0]


def readers_of(
    folder: Folder, engines: Iterable[Engine] = ENGINES
) -> Iterator[tuple[Reader, list[str]]]:
    """Yield the table rows that apply to this folder, each with the traits that its program
    refuses.
    """
    for reader in (reader for engine in engines for reader in engine.readers):
        known = not reader.layouts or folder.layout in reader.layouts
        if known and (reader.only is None or TRAITS[reader.only].holds(folder)):
            yield reader, [trait for trait in reader.refuses if TRAITS[trait].holds(folder)]


def opened_by(folder: Folder) -> list[str]:
    """Name the programs that open this folder; untested programs are marked so."""
    return [reader.label for reader, reasons in readers_of(folder) if not reasons]


def use_of(
    reader: str, chats: bool = False, auto_class: str = CAUSAL
) -> tuple[str, str, str] | None:
    """Find how a reader from `opened_by` opens FOLDER: a title, a language and commands.

    The model `chats` if it has a chat template. `auto_class` of transformers builds it.
    """
    engine = engine_of(reader)
    found = None if engine is None else engine.uses[reader.removesuffix(UNTRIED)]
    if found is None:
        return None
    commands = found[2].replace(TEXT_PROMPT, CHAT_PROMPT) if chats else found[2]
    if auto_class in OTHER_INPUTS:
        commands = commands.replace(f"\n{PROMPT}", "").replace(", AutoTokenizer", "")
        commands = commands.replace("from transformers import AutoTokenizer\n", "")
    known = auto_class in {each for kinds in AUTO_CLASSES.values() for each in kinds}
    return *found[:2], commands.replace(CAUSAL, auto_class) if known else commands


def engine_of(reader: str) -> Engine | None:
    """Find the engine of a reader, as `opened_by` names it; None if no commands are
    known for it.
    """
    return next((engine for engine in ENGINES if reader.removesuffix(UNTRIED) in engine.uses), None)


def limit_of_signed_scales(engine: Engine | None, layout: str) -> Words | None:
    """Describe the use in which an engine misreads negative scales of a layout, with a way out;
    None if there is none.
    """
    limit = engine.signed if engine is not None else None
    if limit is None or layout not in limit.layouts:
        return None
    return Words(f"{limit.words}:", limit.way_out, f"({limit.source})")


def refusals(folder: Folder) -> list[str]:
    """Describe each trait in a line: the programs that read the layout but refuse this folder, and
    the way out.
    """
    found: dict[str, list[str]] = {}
    for reader, reasons in readers_of(folder):
        for trait in reasons:
            found.setdefault(trait, []).append(reader.label)
    lines: list[str] = [
        Words(
            f"it is not known whether {_list(names)} can open {TRAITS[trait].words}:"
            if TRAITS[trait].is_unknown
            else f"{_list(names)} will not open this folder because of {TRAITS[trait].words}:",
            TRAITS[trait].way_out,
        )
        for trait, names in found.items()
        if trait not in ("split", "padded")  # the former follows, a plan names the padded weights
    ]
    mixed = folder.mixed_groups
    if mixed:
        where, labels = mixed[0]
        more = f" (and {len(mixed) - 1} more such groups)" if len(mixed) > 1 else ""
        rule = (
            f"{where} mix {_list(sorted(labels))}{more}; engines that join them, such as vLLM, "
            "will not open this"
        )
        lines.append(Words(rule, "folder:", TRAITS["split"].way_out))
    return lines


def cautions(folder: Folder) -> list[str]:
    """Name the limits of readers that open the layout."""
    found = (say(folder) for layouts, say in CAUTIONS if folder.layout in layouts)
    return [line for line in found if line is not None]


def refusal(folder: Folder, engine: Engine) -> str | None:
    """Say why an engine does not open a folder, None if it does."""
    reasons = [reasons for _, reasons in readers_of(folder, [engine])]
    if not reasons:
        return f"it does not read the layout {folder.layout}"
    if not all(reasons):
        return None
    first = TRAITS[reasons[0][0]]
    return (
        f"it was not asked to open {first.words}"
        if first.is_unknown
        else f"it does not open a folder with {first.words}"
    )


def has_own_linears(folder: Folder, engine: Engine) -> bool:
    """Return True if an engine opens a folder with quantkit's own linears."""
    return any(reader.is_own for reader, _ in readers_of(folder, [engine]))


def engine_kernel(
    engine: Engine,
    layout: str,
    scheme: Scheme,
    n: int,
    k: int,
    capability: tuple[int, int],
    experts: bool,
) -> tuple[str | None, str | None, str | None]:
    """Give the kernel that an engine chooses for an `[n, k]` weight, the reason if it has none, and
    the source.
    """
    for row in engine.kernels:
        if row.covers(layout, capability, scheme, n, k, experts):
            return row.kernel, row.why, row.source
    return None, "not known", None


def sums_in_float16(layout: str, scheme: Scheme, n: int, k: int, experts: bool) -> bool:
    """Return True if vLLM multiplies an `[n, k]` weight by a kernel that rounds sums before a row's
    scale is applied.

    These are Humming's with one scale per row (docs/layouts.md 9b). With groups, scales are applied
    before.
    """
    kernels = {
        engine_kernel(VLLM, layout, scheme, n, k, gpu, experts)[0] or "" for gpu in GPUS.values()
    }
    return scheme.group_size is None and any(kernel.startswith("Humming") for kernel in kernels)


def _list(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
