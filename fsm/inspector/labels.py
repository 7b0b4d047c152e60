"""Edges as people read them: texts in quotes, sets of characters in brackets as a regular expression writes them."""

from __future__ import annotations

from ..language import Ranges
from .compress import Edge

_SHORT = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}


def quoted(text: str) -> str:
    """`"text"`, or `'text'` where that needs fewer escapes; an escape for what is not printable."""
    quote = "'" if '"' in text and "'" not in text else '"'
    return quote + "".join(_character(ord(character), f"{quote}\\") for character in text) + quote


def character_set(ranges: Ranges) -> str:
    """`[0-9a-f]`, or `[^"]` where that is shorter, or `.` for every character."""
    others = _others(ranges)
    if not others:
        return "."
    return f"[^{_listed(others)}]" if len(others) < len(ranges) else f"[{_listed(ranges)}]"


def _others(ranges: Ranges) -> Ranges:
    """The characters that are not among `ranges`; surrogates are none."""
    found: list[tuple[int, int]] = []
    start = 0
    for first, last in (*ranges, (0x110000, 0x110000)):
        if start < first and not 0xD800 <= start <= first - 1 <= 0xDFFF:
            found.append((start, first - 1))
        start = last + 1
    return tuple(found)


def _listed(ranges: Ranges) -> str:
    pieces = []
    for first, last in ranges:
        pieces.append(_character(first, "\\]-^"))
        if last > first + 1:
            pieces.append("-")
        if last > first:
            pieces.append(_character(last, "\\]-^"))
    return "".join(pieces)


def _character(code: int, escaped: str) -> str:
    character = chr(code)
    if code in _SHORT:
        return _SHORT[code]
    if character in escaped:
        return f"\\{character}"
    if character.isprintable():
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def edge_label(edge: Edge, longest: int | None = None) -> str:
    """The label of an edge, cut in the middle when it is longer than `longest` characters."""
    if edge.text is not None:
        label = quoted(edge.text)
    else:
        label = character_set(edge.first) + (f" {quoted(edge.then)}" if edge.then else "")
    if longest is None or len(label) <= longest:
        return label
    end = longest // 3
    return f"{label[: longest - 1 - end]}…{label[-end:]}"
