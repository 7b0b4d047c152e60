"""Reads JSON as it comes: text in pieces → the value so far. Each character is read once, whatever the pieces are.

    {"title": "Du   →  Partial(title="Du", year=None)        strings grow
    {"title": "Dune", "year": 19  →  year=None               a number is there when the text goes on after it

Open containers are on a stack; what is complete was converted when it ended and is shared by all later values. So a
value costs the containers that are open, one pointer for each of their members, and the text of the open string.
"""

import json
import re
from typing import Any, Literal

from ..forms import Form
from ..result import Result
from ..typed import Typed
from . import parts
from .parts import Forms

NOTHING = object()  # the value has not begun

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # of a string
_ATOM = re.compile(r"[-+.0-9A-Za-z]+")  # of a number, true, false, null
_HEXADECIMAL = re.compile(r"\\u([0-9A-Fa-f]{4})")
_BLANKS = re.compile(r"[ \t\r\n]+")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}

State = Literal[
    "value", "first value", "key", "first key", "colon", "after", "key text", "text", "atom", "end", "broken"
]


class _Container:
    """An object or array that is open: its members that are complete."""

    __slots__ = ("forms", "items", "key", "values")

    def __init__(self, forms: Forms, *, is_object: bool) -> None:
        self.forms = forms
        self.values: dict[str, Any] | None = {} if is_object else None
        self.items: list[Any] = []
        self.key = ""  # of the member that is read

    def member_forms(self) -> Forms:
        if self.values is None:
            return parts.items(self.forms, len(self.items))
        return parts.members(self.forms, self.key)

    def add(self, value: Any) -> None:
        if self.values is None:
            self.items.append(value)
        else:
            self.values[self.key] = value

    def part(self, member: Any = NOTHING) -> Any:
        """Returns the container as it is, with the open member if that is there."""
        if self.values is None:
            return [*self.items] if member is NOTHING else [*self.items, member]
        return parts.part_of_object(self.forms, self.values if member is NOTHING else {**self.values, self.key: member})


class JsonReader:
    """Reads one JSON value.

    Text that is no JSON ends the reading where it begins: the value stays as it was before.

    Args:
        form: of the value's type.

    Attributes:
        characters: that have been read.
    """

    def __init__(self, form: Form) -> None:
        self.characters = 0
        self._changed = False
        self._state: State = "value"
        self._open: list[_Container] = []
        self._forms = parts.alternatives((form,))  # of the value that is read or comes next
        self._text: list[str] = []  # of the open string or atom
        self._grows = False  # the open string is shown before it is complete
        self._escape = ""  # that has begun
        self._high = ""  # first half of a surrogate pair
        self._value: Any = NOTHING  # the whole one

    def read(self, text: str) -> bool:
        """Reads a piece. Returns whether the value has changed."""
        self._changed = False
        place = 0
        while place < len(text) and self._state not in ("end", "broken"):
            place = self._step(text, place)
        self.characters += len(text)
        return self._changed

    def value(self) -> Any:
        """Returns the value so far; NOTHING before it has begun."""
        if self._value is not NOTHING:
            return self._value
        member = NOTHING
        if self._state == "text" and self._grows:
            self._text = ["".join(self._text)]
            member = self._text[0]
        for container in reversed(self._open):
            member = container.part(member)
        return member

    def _step(self, text: str, place: int) -> int:
        """Reads some characters from `place` on → the place after them."""
        match self._state:
            case "text" | "key text":
                return self._string(text, place)
            case "atom":
                return self._atom(text, place)
        if blanks := _BLANKS.match(text, place):
            return blanks.end()
        match self._state, text[place]:
            case (("value" | "first value"), "{" | "[" as bracket):
                self._begin(is_object=bracket == "{")
            case (("value" | "first value"), '"'):
                self._state = "text"
                self._grows = parts.grows(self._forms)
                self._changed |= self._grows
            case "first value", "]":
                self._end_container()
            case (("value" | "first value"), character) if _ATOM.match(character):
                self._state = "atom"
                return place
            case (("key" | "first key"), '"'):
                self._state = "key text"
            case "first key", "}":
                self._end_container()
            case "colon", ":":
                self._expect_value("value")
            case "after", ",":
                self._next_member()
            case "after", "}" | "]" as bracket if (bracket == "}") == (self._open[-1].values is not None):
                self._end_container()
            case _:
                self._state = "broken"
        return place + 1

    # -------------------------------------------------------------------------------- strings and atoms

    def _string(self, text: str, place: int) -> int:
        if self._escape:
            return self._escaped(text, place)
        if plain := _PLAIN.match(text, place):
            self._say(plain[0])
            return plain.end()
        match text[place]:
            case "\\":
                self._escape = "\\"
            case '"':
                self._say("")
                self._end_string()
            case _:
                self._state = "broken"
        return place + 1

    def _escaped(self, text: str, place: int) -> int:
        """Reads one character of an escape, which may be spread over pieces."""
        self._escape += text[place]
        if self._escape[1] != "u":
            if self._escape[1] in _ESCAPES:
                self._say(_ESCAPES[self._escape[1]])
            else:
                self._state = "broken"
            self._escape = ""
        elif len(self._escape) == 6:
            if unit := _HEXADECIMAL.fullmatch(self._escape):
                self._unit(int(unit[1], 16))
            else:
                self._state = "broken"
            self._escape = ""
        return place + 1

    def _unit(self, code: int) -> None:
        """Takes a unit of UTF-16; the first half of a pair waits for what comes after it."""
        if self._high and 0xDC00 <= code < 0xE000:
            pair = 0x10000 + (ord(self._high) - 0xD800) * 0x400 + (code - 0xDC00)
            self._high = ""
            self._say(chr(pair))
        elif 0xD800 <= code < 0xDC00:
            self._say("")
            self._high = chr(code)
        else:
            self._say(chr(code))

    def _say(self, text: str) -> None:
        """Appends to the open string, after a half of a pair that stayed alone."""
        said = self._high + text
        self._high = ""
        if said:
            self._text.append(said)
            self._changed |= self._state == "text" and self._grows

    def _end_string(self) -> None:
        text = "".join(self._text)
        self._text = []
        if self._state == "text":
            self._end_value(text)
        else:
            container = self._open[-1]
            container.key = text
            container.forms = parts.with_key(container.forms, text)
            self._state = "colon"

    def _atom(self, text: str, place: int) -> int:
        if atom := _ATOM.match(text, place):
            self._text.append(atom[0])
            return atom.end()
        written = "".join(self._text)
        self._text = []
        try:
            self._end_value(json.loads(written))
        except ValueError:
            self._state = "broken"
        return place

    # -------------------------------------------------------------------------------- containers

    def _begin(self, *, is_object: bool) -> None:
        forms = parts.of_objects(self._forms) if is_object else parts.of_arrays(self._forms)
        self._open.append(_Container(forms, is_object=is_object))
        self._changed = True
        if is_object:
            self._state = "first key"
        else:
            self._expect_value("first value")

    def _expect_value(self, state: State) -> None:
        self._forms = self._open[-1].member_forms()
        self._state = state

    def _next_member(self) -> None:
        if self._open[-1].values is None:
            self._expect_value("value")
        else:
            self._state = "key"

    def _end_container(self) -> None:
        self._give(self._open.pop().part())

    def _end_value(self, value: Any) -> None:
        """Ends a string, number, bool or null."""
        if self._open and self._open[-1].values is not None:
            container = self._open[-1]
            container.forms = parts.with_value(container.forms, container.key, value)
        self._give(parts.complete(self._forms, value))

    def _give(self, value: Any) -> None:
        """Gives a complete value to the container around it; without one it is the whole value."""
        self._changed = True
        if self._open:
            self._open[-1].add(value)
            self._state = "after"
        else:
            self._value = value
            self._state = "end"


class TextReader:
    """Reads a text that is no JSON: its value so far is the text so far."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def read(self, text: str) -> bool:
        self._text.append(text)
        return bool(text)

    def value(self) -> str:
        self._text = ["".join(self._text)]
        return self._text[0]


class WholeReader:
    """Reads a value that has no parts: a number, a member, one of some choices."""

    def read(self, text: str) -> bool:
        return False

    def value(self) -> Any:
        return NOTHING


def reader_of(result: Result | None) -> JsonReader | TextReader | WholeReader:
    """Returns the reader of a variable's text. `result`: what its gen asked for; None: text."""
    if result is None or result.parse is str:
        return TextReader()
    if result.parse is json.loads:
        return JsonReader(parts.ANYTHING[0])
    match getattr(result.parse, "__self__", None):
        case Typed() as known:
            return JsonReader(known.form)
        case _:
            return WholeReader()
