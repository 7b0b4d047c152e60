"""Records the calls of a run in a journal, and the last prompts of each backend.

There is one history for each backend of this process, bounded in prompts and in their size; the oldest are evicted
first. A call is in it from its beginning, so that concurrent calls are known as well.

Written on the streams' loop: a few small objects for each call. Everything else is computed when a report is requested
(`report.py`).
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from datetime import date, time
from typing import Any

import msgspec

from ...lang.prompt import Media, Part, Prompt, Source
from ...lang.protocol import Backend, GenRequest, ScoreRequest, Usage

PROMPTS = 256
CHARACTERS = 32 * 2**20  # and bytes of pictures; what prompts share is counted for each of them


class Intent(msgspec.Struct, eq=False, gc=False):  # no cycle goes through it
    """A `gen` or `select` of a program, from its execution on.

    Attributes:
        kind: "gen" or "select".
        asking: the prompt before it, until it has its answer.
    """

    kind: str
    name: str
    asking: Prompt | None
    source: Source | None
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
        salt: of the cache.
        began, ended: logical times, counted in starts and ends of calls; `ended` None while it runs, or if it failed.
        usage: by the backend.
        answer: the generated text.
        characters: of its prompt, and bytes of its pictures.
        sequences: times its tokens are counted: once for every choice of a scored select.
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

    def end(self, asked: Asked, usage: Usage, answer: str) -> None:
        """Records the end of a successful call."""
        asked.ended = next(self._time)
        asked.usage, asked.answer = usage, answer

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


class Journal:
    """The calls of one run.

    Args:
        history: holds its calls, with those of other runs.
    """

    __slots__ = ("arguments", "calls", "history", "intents")

    def __init__(self, history: History) -> None:
        self.history = history
        self.intents: dict[str, Intent] = {}  # by the id of the request
        self.calls: list[Asked] = []
        self.arguments: Mapping[str, Any] = {}  # the user's values

    def note_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Keeps the run's arguments that can be recognised in a prompt."""
        self.arguments = {name: value for name, value in arguments.items() if isinstance(value, _RECOGNISED)}

    def intend(self, request_id: str, kind: str, name: str | None, prompt: Prompt, source: Source | None) -> Intent:
        """Announces a `gen` or `select`: the next calls with this id, or one derived from it, serve it. The caller
        settles it when it has its answer."""
        intent = self.intents[request_id] = Intent(kind, name or "", prompt, source)
        return intent

    def record(self, request: GenRequest | ScoreRequest) -> Asked | None:
        """Records the start of a call; None for one that no `gen` or `select` has announced."""
        name = request.id
        intent = self.intents.get(name)
        while intent is None and name:  # tries and continuations of one gen have ids made of the gen's
            name = name.rpartition("-")[0]
            intent = self.intents.get(name)
        if intent is None:
            return None
        own = intent.asking is not None and request.prompt is intent.asking.parts
        sequences = len(request.choices) if isinstance(request, ScoreRequest) and not request.probability else 1
        asked = self.history.record(intent, request.prompt, request.origin.salt, own=own, sequences=sequences)
        self.calls.append(asked)
        return asked

    def end(self, asked: Asked | None, usage: Usage, answer: str) -> None:
        """Records the end of a successful call."""
        if asked is not None:
            self.history.end(asked, usage, answer)
