"""Fill the Jinja2 templates beside this module. Values are data: none is taken for markup."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent


def render(name: str, /, **values: Any) -> str:
    """Fill a template."""
    return _environment().get_template(name).render(values)


def raw(file: str) -> str:
    """Read a file of this package that goes into a page as it is."""
    from markupsafe import Markup

    return Markup((HERE / file).read_text(encoding="utf-8"))


def printable(text: str) -> str:
    """Join untrusted text into one line without control characters, which would hide or reorder
    what follows.
    """
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    return Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
