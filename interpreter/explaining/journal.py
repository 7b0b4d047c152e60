"""The journal of one run: its gens and selects in their order, and the calls that were made for them.

Written on the loop of the streams, in passing: a few small objects for each call. Everything else is worked out when
somebody asks (`report.py`).
"""

from collections.abc import Mapping
from datetime import date, time
from typing import Any

from ...lang.prompt import Prompt
from ...lang.protocol import GenRequest, ScoreRequest, Usage
from ...lang.source import Source
from .history import Asked, History, Intent

# Arguments of these types can be recognised in a prompt. Others are not kept beyond the body.
_RECOGNISED = (str, int, float, list, tuple, dict, date, time)


class Journal:
    """Of one run.

    Args:
        history: that its calls stand in, with those of other runs.
    """

    __slots__ = ("arguments", "calls", "history", "intents")

    def __init__(self, history: History) -> None:
        self.history = history
        self.intents: dict[str, Intent] = {}  # by the id of the request
        self.calls: list[Asked] = []
        self.arguments: Mapping[str, Any] = {}  # the user's values

    def note_arguments(self, arguments: Mapping[str, Any]) -> None:
        """What the run was given."""
        self.arguments = {name: value for name, value in arguments.items() if isinstance(value, _RECOGNISED)}

    def intend(self, request_id: str, kind: str, name: str | None, prompt: Prompt, source: Source | None) -> Intent:
        """The next calls with this id, or with one made of it, are for this `gen` or `select`. To be settled when it
        has its answer."""
        intent = self.intents[request_id] = Intent(kind, name or "", prompt, source)
        return intent

    def begin(self, request: GenRequest | ScoreRequest) -> Asked | None:
        """A call begins; None for one that no `gen` or `select` has announced."""
        name = request.id
        intent = self.intents.get(name)
        while intent is None and name:  # tries and continuations of one gen have ids made of the gen's
            name = name.rpartition("-")[0]
            intent = self.intents.get(name)
        if intent is None:
            return None
        own = intent.asking is not None and request.prompt is intent.asking.parts
        sequences = len(request.choices) if isinstance(request, ScoreRequest) and not request.probability else 1
        asked = self.history.begin(intent, request.prompt, request.origin.salt, own=own, sequences=sequences)
        self.calls.append(asked)
        return asked

    def end(self, asked: Asked | None, usage: Usage, answer: str) -> None:
        """A call has ended well."""
        if asked is not None:
            self.history.end(asked, usage, answer)
