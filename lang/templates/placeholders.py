"""Placeholders: they stand in a template's text for what callers write.

A template is given a placeholder in place of each such text, so its output, the outline, is scaffolding with
placeholders in it. Scaffolding may become special tokens; what replaces a placeholder never does. A placeholder says
how the template wrote it: `tojson` adds a code for each time it passed through, and the text is spelled likewise.

    \\ue000 0000012 \\ue003 \\ue001        number 12, once through tojson
    \\ue000 0000007 \\ue005 \\ue001        number 7, which is JSON: tojson writes it without quotes

A placeholder is 9 characters long: Mistral's templates refuse ids of calls of any other length.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from ..errors import TemplateError

_JSON, _ASCII, _VERBATIM = "\ue003", "\ue004", "\ue005"
_IN_JSON = re.compile(f'"(\ue000[0-9]{{7}}){_VERBATIM}\ue001"|(\ue000[0-9]{{7}}[{_JSON}{_ASCII}]*)\ue001')
_FIND = re.compile(f"\ue000([0-9]{{7}})([{_JSON}{_ASCII}]*){_VERBATIM}?\ue001")
_STRAY = re.compile("[\ue000-\ue005]")
_NO_ASCII = re.compile("[^\x00-\x7f\ue000-\ue005]")


def placeholder(number: int) -> str:
    """Returns the placeholder of a text."""
    return f"\ue000{number:07}\ue001"


def json_placeholder(number: int) -> str:
    """Returns the placeholder of a text that is JSON already: `tojson` must not make a string of it."""
    return f"\ue000{number:07}{_VERBATIM}\ue001"


@dataclass(frozen=True, slots=True)
class Outline:
    """A template's text, cut at its placeholders.

    Attributes:
        gaps: scaffolding; gaps[i] stands before marks[i], the last one after all of them.
        marks: number of a placeholder, and the codes of how it was written.
    """

    gaps: tuple[str, ...]
    marks: tuple[tuple[int, str], ...]

    @property
    def size(self) -> int:
        """The length in characters, about."""
        return sum(map(len, self.gaps)) + 16 * len(self.marks)


def read_outline(text: str) -> Outline:
    """Cuts a template's text at its placeholders.

    Raises:
        TemplateError: the template cut a placeholder into pieces.
    """
    pieces = _FIND.split(text)  # gap, number, codes, gap, …
    gaps = tuple(pieces[::3])
    if any(map(_STRAY.search, gaps)):
        raise TemplateError("it writes a part of a text that it is given, not all of it")
    return Outline(gaps, tuple(zip(map(int, pieces[1::3]), pieces[2::3], strict=True)))


def write_json(value: Any, *, ensure_ascii: bool = False, **form: Any) -> str:  # Any: template data, json's options
    """Writes JSON and codes the placeholders in it. With `ensure_ascii` other characters are escaped."""
    text = json.dumps(value, ensure_ascii=False, **form)
    if ensure_ascii:
        text = _NO_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text)
    if "\ue000" not in text:
        return text
    code = _ASCII if ensure_ascii else _JSON
    return _IN_JSON.sub(lambda match: f"{match[1]}\ue001" if match[1] else f"{match[2]}{code}\ue001", text)


def spelled(text: str, codes: str) -> str:
    """Returns a text as the template would have written it in place of a placeholder with these codes."""
    for code in codes:
        text = json.dumps(text, ensure_ascii=code == _ASCII)[1:-1]
    return text
