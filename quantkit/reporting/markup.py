"""Elements of an HTML page, built as a tree: tags always balance, and no text is taken for markup."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

Element = ElementTree.Element
Child = Element | str | None


def tag(name: str, /, *children: Child, **attributes: Any) -> Element:
    """Make an element. Texts are data; children and attributes that are None or "" are left out.

    An attribute `data_tip` is written as `data-tip`, and `class_` as `class`.
    """
    element = Element(name)
    for key, value in attributes.items():
        if value is not None and value != "":
            element.set(key.rstrip("_").replace("_", "-"), printable(str(value)))
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            element.append(child)
            last = child
        elif child and last is None:
            element.text = (element.text or "") + printable(child)
        elif child and last is not None:
            last.tail = (last.tail or "") + printable(child)
    return element


def raw(name: str, content: str) -> Element:
    """Make an element with its content as it is, line breaks too. HTML does not escape it in `script` and `style`."""
    element = Element(name)
    element.text = content
    return element


def document(root: Element) -> str:
    """Write a whole page."""
    return f"<!doctype html>\n{ElementTree.tostring(root, encoding='unicode', method='html')}\n"


def printable(text: str) -> str:
    """Join untrusted text into one line without control characters, which would hide or reorder what follows."""
    spaced = "".join(" " if letter.isspace() else letter for letter in text)
    return "".join(letter for letter in spaced if letter.isprintable())
