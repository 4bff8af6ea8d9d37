"""Checks of installed packages, the lines of a diagnosis."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis. `ok` is None if the thing is missing and nothing here needs it."""

    name: str
    found: str | None
    needs: str
    ok: bool | None
    fix: str | None = None


def required() -> dict[str, str]:
    """Read the packages that quantkit needs, each with its lowest version; none if quantkit is not installed."""
    stated = metadata.requires("quantkit") or [] if installed_version("quantkit") else []
    rule = re.compile(r"([\w.-]+)[^;]*>=([\d.]+)[^;]*")  # other releases may be left out; behind a `;` stands an extra
    return dict((found[1], found[2]) for each in stated if (found := rule.fullmatch(each)))


def package(name: str, lowest: str, why: str = "") -> Check:
    """Check a package that quantkit needs, or only the uses that `why` names."""
    found = installed_version(name)
    ok = at_least(found, lowest) if found is not None else None if why else False
    return Check(
        name, found, f">={lowest} {why}".rstrip(), ok, None if ok else f"pip install --upgrade '{name}>={lowest}'"
    )


def at_least(version: str, lowest: str) -> bool:
    """Compare the leading numbers of two versions (`2.13.0+cpu` is 2.13.0): is the first one as high or higher?"""
    return _numbers(version) >= _numbers(lowest)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def installed_version(package: str) -> str | None:
    """Find the version of an installed package, None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
