"""Records the calls of a run in a log, and the last prompts of each backend.

There is one history for each backend of this process, bounded in prompts and in their size; the oldest are evicted
first. A call is in it from its beginning, so that concurrent calls are known as well.

Written on the streams' loop: a few small objects for each call. Everything else is computed when a report is requested
(`report.py`): there a prompt is laid out as text with the sources of its pieces, and the earlier prompts nearest to it
are found.

    "Q: "  "What is"  "\\nA:"          pieces, with their sources
    0      3          10              where they begin
"""

import itertools
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date, time
from time import monotonic
from typing import Any

import msgspec

from ...lang.prompt import (
    Borders,
    Generated,
    Media,
    Part,
    Private,
    Prompt,
    Source,
    SourceKind,
    Text,
    adapted_salt,
    openings,
    parting,
    told_apart,
)
from ...lang.protocol import Backend, GenRequest, Placed, RequestTimes, ScoreRequest, Usage

PROMPTS = 256
CHARACTERS = 32 * 2**20  # and bytes of pictures; what prompts share is counted for each of them


class Intent(msgspec.Struct, eq=False, gc=False):  # no cycle goes through it
    """A `gen` or `select` of a program, from its execution on.

    Attributes:
        kind: "gen" or "select".
        asking: the prompt before it, until it has its answer.
        place: of the call in its run: the stream's path through the forks, and the number of the call in it.
    """

    kind: str
    name: str
    asking: Prompt | None
    source: Source | None
    place: str = ""
    _asked: tuple[Prompt | None, Part | None, int, Source | None] | None = None

    @property
    def settled(self) -> bool:
        """True once it has its answer."""
        return self.asking is None

    @property
    def prompt(self) -> Prompt:
        """The prompt before it."""
        if self.asking is not None:
            return self.asking
        assert self._asked is not None, "a settled intent remembers its prompt"
        return Prompt(*self._asked)

    def settle(self) -> None:
        """Marks it as answered, and releases the joined text of its prompt. Journals live as long as their state, and
        histories longer: they keep the prompt's nodes, which branches share."""
        prompt = self.asking
        if prompt is not None:
            self._asked = (prompt.parent, prompt.part, prompt.length, prompt.source)
            self.asking = None


class Asked(msgspec.Struct, eq=False, gc=False):
    """One call.

    Attributes:
        intent: the gen or select it serves.
        parts: its prompt where that differs from the intent's; else None.
        salt: of the cache, with the adapter (`adapted_salt`).
        began, ended: logical times, counted in starts and ends of calls; `ended` None while it runs, or if it failed.
        usage: by the backend.
        answer: the generated text.
        placed: the engine that computed it, of several.
        sent, first, came: seconds by the run's clock: when it was sent, when its first piece and its end came. `first`
            None where it came in one piece, `came` None where it failed.
        times: by the engine, where it tells them.
        characters: of its prompt, and bytes of its pictures.
        sequences: that are computed: one for every choice of a scored select.
    """

    intent: Intent
    parts: tuple[Part, ...] | None
    salt: str
    began: int
    characters: int
    sequences: int = 1
    ended: int | None = None
    usage: Usage | None = None
    answer: str = ""
    placed: Placed | None = None
    sent: float = 0.0
    first: float | None = None
    came: float | None = None
    times: RequestTimes | None = None


class History:
    """Calls to one backend, the oldest first.

    Args:
        prompts, characters: most of them that are kept; the latest call always is.
    """

    def __init__(self, prompts: int = PROMPTS, characters: int = CHARACTERS) -> None:
        self._most_prompts = prompts
        self._most_characters = characters
        self._lock = threading.Lock()  # several loops may ask one backend
        self._calls: deque[Asked] = deque()
        self._characters = 0
        self._time = itertools.count(1)

    def record(self, intent: Intent, parts: tuple[Part, ...], salt: str, *, own: bool, sequences: int = 1) -> Asked:
        """Records the start of a call. `own`: its prompt is the intent's."""
        characters = 0
        for part in parts:
            characters += len(part.data if isinstance(part, Media) else part.text)
        asked = Asked(intent, None if own else parts, salt, next(self._time), characters, sequences)
        with self._lock:
            self._calls.append(asked)
            self._characters += characters
            while len(self._calls) > self._most_prompts or (
                self._characters > self._most_characters and len(self._calls) > 1
            ):
                self._characters -= self._calls.popleft().characters
        return asked

    def end(self, asked: Asked, usage: Usage, answer: str, placed: Placed | None = None) -> None:
        """Records the end of a successful call."""
        asked.ended = next(self._time)
        asked.usage, asked.answer, asked.placed = usage, answer, placed

    @property
    def calls(self) -> list[Asked]:
        """Returns the recorded calls, the oldest first."""
        with self._lock:
            return list(self._calls)


_histories: "weakref.WeakKeyDictionary[Backend, History]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def history_of(backend: Backend) -> History:
    """Returns the history of all runs on this backend. A backend without weak references has one for each run."""
    try:
        history = _histories.get(backend)
        if history is None:
            with _lock:
                history = _histories.setdefault(backend, History())
    except TypeError:
        return History()
    return history


# Arguments of these types can be recognised in a prompt. Others are not kept beyond the body.
_RECOGNISED = (str, int, float, list, tuple, dict, date, time)


class CallLog:
    """The calls of one run.

    Args:
        history: holds its calls, with those of other runs.
        clock: of the run, in seconds.
    """

    __slots__ = ("arguments", "calls", "clock", "history", "intents")

    def __init__(self, history: History, clock: Callable[[], float] = monotonic) -> None:
        self.history = history
        self.clock = clock
        self.intents: dict[str, Intent] = {}  # by the id of the request
        self.calls: list[Asked] = []
        self.arguments: Mapping[str, Any] = {}  # the user's values

    def note_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Keeps the run's arguments that can be recognised in a prompt."""
        self.arguments = {name: value for name, value in arguments.items() if isinstance(value, _RECOGNISED)}

    def intend(
        self, request_id: str, kind: str, name: str | None, prompt: Prompt, source: Source | None, place: str = ""
    ) -> Intent:
        """Announces a `gen` or `select`: the next calls with this id, or one derived from it, serve it. The caller
        settles it when it has its answer."""
        intent = self.intents[request_id] = Intent(kind, name or "", prompt, source, place)
        return intent

    def intent_of(self, request_id: str) -> tuple[Intent, str] | None:
        """Returns the `gen` or `select` that a request serves, and the id it was announced with; None without one."""
        name = request_id
        intent = self.intents.get(name)
        while intent is None and name:  # tries and continuations of one gen have ids made of the gen's
            name = name.rpartition("-")[0]
            intent = self.intents.get(name)
        return None if intent is None else (intent, name)

    def record(self, request: GenRequest | ScoreRequest) -> Asked | None:
        """Records the start of a call; None for one that no `gen` or `select` has announced."""
        found = self.intent_of(request.id)
        if found is None:
            return None
        intent, _ = found
        own = intent.asking is not None and request.prompt is intent.asking.parts
        sequences = len(request.choices) if isinstance(request, ScoreRequest) and not request.probability else 1
        salt = adapted_salt(request.origin.salt, request.origin.adapter)
        asked = self.history.record(intent, request.prompt, salt, own=own, sequences=sequences)
        asked.sent = self.clock()
        self.calls.append(asked)
        return asked

    def note_piece(self, asked: Asked | None) -> None:
        """Records when the first piece of an answer came."""
        if asked is not None and asked.first is None:
            asked.first = self.clock()

    def end(
        self,
        asked: Asked | None,
        usage: Usage,
        answer: str,
        placed: Placed | None = None,
        times: RequestTimes | None = None,
    ) -> None:
        """Records the end of a successful call."""
        if asked is not None:
            asked.came = self.clock()
            asked.times = times
            self.history.end(asked, usage, answer, placed)


# -------------------------------------------------------------------------------- earlier prompts


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A piece of a prompt. `text` begins at character `start`. `source` None: umbel wrote it."""

    start: int
    text: str
    source: Source | None


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt: its text and its non-empty pieces. `private`: characters at which private parts begin."""

    text: str
    pieces: tuple[PromptPiece, ...]
    private: Borders = ()

    def at(self, character: int) -> PromptPiece | None:
        """Returns the piece that holds this character; None after the end."""
        if not 0 <= character < len(self.text):
            return None
        return self.pieces[bisect_right(self.pieces, character, key=lambda piece: piece.start) - 1]


def of_call(asked: Asked) -> Layout:
    """Lays out the prompt that was sent."""
    layout = _laid(_written(asked.intent.prompt))
    parts = asked.intent.prompt.parts if asked.parts is None else asked.parts
    if asked.parts is not None:
        layout = _aligned(layout, "".join(map(text_of, parts)))
    private = ((len("".join(map(text_of, parts[:place]))), name) for place, name in openings("", parts))
    return replace(layout, private=tuple(private))


def with_answer(asked: Asked) -> Layout:
    """Lays out the prompt and its answer: both are in the cache afterwards."""
    layout = of_call(asked)
    if not asked.answer:
        return layout
    origin = asked.intent.source
    source = None if origin is None else origin.of(SourceKind.GENERATED, asked.intent.name)
    piece = PromptPiece(len(layout.text), asked.answer, source)
    return Layout(layout.text + asked.answer, (*layout.pieces, piece), layout.private)


def common_length(left: str, right: str) -> int:
    """Returns the length of the common prefix of two texts. Bisects by comparing slices."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # alike up to low, not up to high
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def text_of(part: Part) -> str:
    match part:
        case Text(text=text) | Generated(text=text) | Private(text=text):
            return text
        case Media():
            return told_apart(part)


def _written(prompt: Prompt) -> list[tuple[str, Source | None]]:
    """Returns the program's pieces of a prompt, with their sources."""
    found: list[tuple[str, Source | None]] = []
    step: Prompt | None = prompt
    while step is not None and step.part is not None:
        found.append((text_of(step.part), step.source))
        step = step.parent
    found.reverse()
    return found


def _laid(written: list[tuple[str, Source | None]]) -> Layout:
    pieces: list[PromptPiece] = []
    place = 0
    for text, source in written:
        if text:
            pieces.append(PromptPiece(place, text, source))
            place += len(text)
    return Layout("".join(piece.text for piece in pieces), tuple(pieces))


def _aligned(own: Layout, sent: str) -> Layout:
    """Lays out a sent prompt that differs from the program's: instructions about a constraint stand somewhere in the
    middle."""
    head = common_length(own.text, sent)
    tail = common_length(own.text[head:][::-1], sent[head:][::-1])
    inserted = sent[head : len(sent) - tail]
    before = [(piece.text[: head - piece.start], piece.source) for piece in own.pieces if piece.start < head]
    start = len(own.text) - tail
    after = [
        (piece.text[max(0, start - piece.start) :], piece.source)
        for piece in own.pieces
        if piece.start + len(piece.text) > start
    ]
    return _laid([*before, (inserted, None), *after])


COMPARED = 8  # earlier prompts whose tokens are compared


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An earlier call. `common`: characters of its prompt and answer in common with the explained prompt.

    `apart`: the explained prompt or the earlier one goes on there in a private part that the other is not in.
    """

    asked: Asked
    layout: Layout
    common: int
    apart: bool = False

    @property
    def goes_on(self) -> bool:
        """True if its text continues after the common prefix."""
        return self.common < len(self.layout.text)

    def had_ended(self, asked: Asked) -> bool:
        """Returns whether it had ended before `asked` began."""
        return self.asked.ended is not None and self.asked.ended < asked.began


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The nearest calls first; of equally near ones those that go on, and of these the latest."""

    same_salt: tuple[Neighbour, ...]
    other_salts: tuple[Neighbour, ...]


class EarlierCalls:
    """Earlier prompts as the calls of one report see them: each is laid out once.

    Args:
        calls: in any order, some of them perhaps twice.
    """

    def __init__(self, calls: Iterable[Asked]) -> None:
        self._calls = sorted(dict.fromkeys(calls), key=lambda call: call.began, reverse=True)
        self._layouts: dict[Asked, Layout] = {}

    def of(self, asked: Asked, laid: Layout) -> Neighbours:
        """Finds the nearest calls that began before this one and share a prefix with its text."""
        same, others = _Nearest(laid), _Nearest(laid)
        for call in self._calls[bisect_right(self._calls, -asked.began, key=lambda call: -call.began) :]:
            layout = self._layouts.get(call)
            if layout is None:
                layout = self._layouts[call] = with_answer(call)
            (same if call.salt == asked.salt else others).look_at(call, layout)
        return Neighbours(same.found(), others.found())


class _Nearest:
    """Keeps the nearest of many prompts. Most are rejected by comparing as many characters as the last one shares."""

    def __init__(self, laid: Layout) -> None:
        self._text = laid.text
        self._private = laid.private
        self._found: list[Neighbour] = []
        self._least = laid.text[:1]  # what a prompt has to begin with to be among them

    def look_at(self, asked: Asked, layout: Layout) -> None:
        if not self._least or not layout.text.startswith(self._least):
            return
        text = common_length(self._text, layout.text)
        common = parting(self._private, layout.private, text)
        apart = parting(self._private, layout.private, text + 1) == common
        self._found.append(Neighbour(asked, layout, common, apart))
        if len(self._found) >= 2 * COMPARED:
            del self._sorted()[COMPARED:]
            self._least = self._text[: self._found[-1].common]

    def found(self) -> tuple[Neighbour, ...]:
        return tuple(self._sorted()[:COMPARED])

    def _sorted(self) -> list[Neighbour]:
        self._found.sort(key=lambda neighbour: (neighbour.common, neighbour.goes_on), reverse=True)  # the latest first
        return self._found
