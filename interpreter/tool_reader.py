"""Finds calls of tools in generated text, streamed or whole.

    TEXT ──header of a call──▶ ARGUMENTS ──the object closes──▶ AFTER ──"}" and the end of the call──▶ TEXT
      ▲                            ▲                              │
      │                            └───────header of another──────┤
      └───────────anything else: it is text───────────────────────┘

Each decision depends on the text alone, and is made when no further character could change it. So the events of a text
do not depend on the pieces in which it came: pieces of content and of arguments aside, they are the same.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from ..lang.tool_calls import CallFormat, ToolCall

# Before a call, not part of the content: models separate their text, or their reasoning, from a call by them.
_NEWLINES = re.compile("\n{0,2}")
_MOST_READ = 4_096  # characters at a time: what is held is copied for each call in it


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """More of the text around calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call whose name is known; `index` counts from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of a call's arguments, as JSON text; all pieces of a call together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The end of a call. `cut`: the text ended inside its arguments."""

    index: int
    cut: bool = False


CallEvent = ContentPiece | CallBegins | ArgumentsPiece | CallEnds


class _Place(Enum):
    TEXT = auto()
    ARGUMENTS = auto()
    AFTER = auto()


class ToolCallReader:
    """Reads calls of tools in text that comes in pieces.

    Holds back only what may turn out to be the beginning of a call: at most the header of one.

    Args:
        call_format: the spelling.
        names: of the tools that may be called; a call of another one is text.
    """

    def __init__(self, call_format: CallFormat, names: Iterable[str]) -> None:
        self._format = call_format
        headers = {call_format.header(name) + "{": name for name in names}
        self._openings = {call_format.open + header: name for header, name in headers.items()}
        self._stem = call_format.open + call_format.before_name if headers else ""
        after = call_format.after_arguments
        self._endings: dict[str, str | None] = {after + call_format.close: None}  # the text → the next call's name
        if call_format.parallel:
            self._endings.update({after + call_format.between + header: name for header, name in headers.items()})
        self._place = _Place.TEXT
        self._held = ""
        self._begun = False  # content or a call has been read
        self._after_call = False  # and nothing has come since
        self._calls = 0
        self._arguments = _ObjectScanner()

    def feed(self, text: str) -> list[CallEvent]:
        """Returns what the text makes certain."""
        events: list[CallEvent] = []
        for start in range(0, len(text), _MOST_READ):
            self._held += text[start : start + _MOST_READ]
            while self._held and self._advance(events):
                pass
        return events

    def finish(self) -> list[CallEvent]:
        """Returns the rest, when no more text comes. A header that was cut is left out, as the end of a call is."""
        held, self._held = self._held, ""
        match self._place:
            case _Place.ARGUMENTS:
                return [CallEnds(self._calls - 1, cut=True)]
            case _Place.AFTER:
                ending = self._longest_ending(held)
                held = held[len(ending) :] if ending is not None else ""
                self._after_call = True
            case _Place.TEXT:
                pass
        rest = held.lstrip("\n")
        begins_call = self._format.has_mark and rest.startswith(self._format.mark)
        if begins_call or (self._after_call and not rest):  # a call, or the newline after the last one
            return []
        return [ContentPiece(held)] if held else []

    def _advance(self, events: list[CallEvent]) -> bool:
        """Reads on; False: more text is needed to decide."""
        match self._place:
            case _Place.TEXT:
                return self._read_text(events)
            case _Place.ARGUMENTS:
                return self._read_arguments(events)
            case _Place.AFTER:
                return self._read_ending(events)

    def _read_text(self, events: list[CallEvent]) -> bool:
        start, opening = self._find_opening()
        self._say(events, self._held[:start])
        self._held = self._held[start:]
        if opening is None:
            return False
        self._held = self._held[len(opening) :]
        self._begin(events, self._openings[opening.lstrip("\n")])
        return True

    def _find_opening(self) -> tuple[int, str | None]:
        """Returns where the first call begins, or may begin, and its opening if that is there as a whole."""
        held = self._held
        if not self._stem or (self._begun and not self._format.has_mark):
            return len(held), None
        for found in re.finditer(f"\n|{re.escape(self._stem[0])}", held):
            start = found.start()
            if start and not self._format.has_mark:
                break
            newlines = _NEWLINES.match(held, start)
            assert newlines is not None, "it matches nothing, too"
            if held.startswith(self._stem, newlines.end()):
                opening = next((each for each in self._openings if held.startswith(each, newlines.end())), None)
                if opening is not None:
                    return start, held[start : newlines.end()] + opening
            if _may_become(held[newlines.end() :], self._openings, self._stem):
                return start, None
        return len(held), None

    def _say(self, events: list[CallEvent], text: str) -> None:
        if text:
            self._begun, self._after_call = True, False
            events.append(ContentPiece(text))

    def _begin(self, events: list[CallEvent], name: str) -> None:
        self._begun = True
        self._place = _Place.ARGUMENTS
        self._arguments = _ObjectScanner()
        events.append(CallBegins(self._calls, name))
        self._calls += 1
        self._held = "{" + self._held

    def _read_arguments(self, events: list[CallEvent]) -> bool:
        length = self._arguments.scan(self._held)
        events.append(ArgumentsPiece(self._calls - 1, self._held[:length]))
        self._held = self._held[length:]
        if not self._arguments.closed:
            return False
        events.append(CallEnds(self._calls - 1))
        self._place = _Place.AFTER
        return True

    def _read_ending(self, events: list[CallEvent]) -> bool:
        if _may_become(self._held, self._endings, self._format.after_arguments):
            return False
        ending = self._longest_ending(self._held)
        self._place, self._after_call = _Place.TEXT, True
        if ending is not None:
            self._held = self._held[len(ending) :]
            name = self._endings[ending]
            if name is not None:
                self._begin(events, name)
        return True

    def _longest_ending(self, text: str) -> str | None:
        return max((ending for ending in self._endings if text.startswith(ending)), key=len, default=None)


def _may_become(text: str, wholes: Iterable[str], stem: str) -> bool:
    """Returns whether more text could make one of `wholes` of it, which all begin with `stem`."""
    if len(text) < len(stem):
        return stem.startswith(text)
    return text.startswith(stem) and any(len(text) < len(whole) and whole.startswith(text) for whole in wholes)


class _ObjectScanner:
    """Finds the end of a JSON object in text that comes in pieces."""

    _INSIDE = re.compile(r'["{}\[\]]')
    _IN_STRING = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def closed(self) -> bool:
        return self._depth == 0 and not self._in_string

    def scan(self, text: str) -> int:
        """Reads on; returns the length of the part that belongs to the object."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (self._IN_STRING if self._in_string else self._INSIDE).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = True
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        return at
        return at


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A whole answer: its text without the calls, the calls, and whether the last one was cut."""

    content: str
    calls: tuple[ToolCall, ...]
    cut: bool


def read_answer(call_format: CallFormat, names: Iterable[str], text: str) -> ReadAnswer:
    """Reads a whole answer, as the streaming reader does."""
    reader = ToolCallReader(call_format, names)
    return gathered([*reader.feed(text), *reader.finish()])


def gathered(events: Iterable[CallEvent]) -> ReadAnswer:
    """Puts the events of an answer together."""
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    cut = False
    for event in events:
        match event:
            case ContentPiece(text):
                content.append(text)
            case CallBegins(_, name):
                names.append(name)
                arguments.append([])
            case ArgumentsPiece(index, text):
                arguments[index].append(text)
            case CallEnds():
                cut = event.cut
    calls = tuple(ToolCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True))
    return ReadAnswer("".join(content), calls, cut)
