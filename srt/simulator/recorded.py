"""Plays recordings of a real engine (`debug={"recording": FILE}`) again: the same calls, their lengths and their order.

A call begins when all calls have ended that had ended before it in the recording, and as long after that as it did
there. So clients that waited for answers wait for the simulated ones. Its answer has as many tokens as it had.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...lang.errors import ParameterError
from ...lang.prompt import Generated
from ...lang.protocol import Origin
from ..core.batch import WindowPool
from .answers import NumberTokenizer
from .calls import MADE_UP, Answered, Host, SimulatedCall
from .events import Events
from .exact import ReplicaShape

_FIRST_TOKEN = 1  # of the ids that stand for recorded ones


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    """A call of a recording. `ended`: how many calls had ended before it; `gap`: seconds after the line before it."""

    kind: str
    id: int
    sequences: list[tuple[int, int, int]]
    start: int
    sampled: bool
    origin: Origin
    ended: int
    gap: float


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording.

    Attributes:
        settings: of the engine.
        calls: in the order of their arrival.
        ends: calls, in the order of their ends.
        tokens: call → tokens of its answer.
        replaced: calls whose constraint replaced the prompt's last token: they ran without it, and their answers begin
            with another.
        skipped: messages that could not be recorded; the figures of the simulation leave them out.
    """

    model: str
    settings: ReplicaShape
    calls: tuple[_RecordedCall, ...]
    ends: tuple[int, ...]
    tokens: dict[int, int]
    replaced: frozenset[int]
    skipped: int


def is_recording(path: Path) -> bool:
    """Returns whether a file begins as a recording does."""
    try:
        with path.open("rb") as file:
            return file.read(12) == b'{"recording"'
    except OSError:
        return False


def read_recording(path: Path) -> Recording:
    """Reads a recording. Raises ParameterError for a file that is none, with the line."""
    number = 1
    try:
        header, *lines = path.read_text(encoding="utf-8").splitlines()
        facts = json.loads(header)
        if facts["recording"] != 1:
            raise ValueError(f"its format is {facts['recording']}, and 1 is read")
        window = facts["window"]
        settings = ReplicaShape(
            pool=facts["pool"],
            max_running=facts["max_running"],
            chunk=facts["chunk"],
            policy=facts["policy"],
            least_ahead=facts["least_ahead"],
            window=None if window is None else WindowPool(*window),
        )
        calls: list[_RecordedCall] = []
        ends: list[int] = []
        tokens: dict[int, int] = {}
        replaced: set[int] = set()
        skipped, before = 0, 0.0
        for line in lines:
            number += 1
            record = json.loads(line)
            if "call" in record:
                calls.append(_call(record, len(ends), record["at"] - before))
            elif "end" in record:
                ends.append(record["end"])
                tokens[record["end"]] = record["tokens"]
                if record.get("replaced"):
                    replaced.add(record["end"])
            skipped += "skipped" in record
            before = record.get("at", before)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(f"{path.name}, line {number}: {error!r}; it is no recording of a runtime") from error
    return Recording(str(facts["model"]), settings, tuple(calls), tuple(ends), tokens, frozenset(replaced), skipped)


def _call(record: dict[str, Any], ended: int, gap: float) -> _RecordedCall:  # Any: JSON
    names = {key: f"{key}{record[key]}" if key in record else "" for key in ("salt", "program", "group")}
    origin = Origin(names["program"], names["group"], names["salt"])
    sequences = [tuple(sequence) for sequence in record["sequences"]]
    sampled = bool(record.get("sampled", False))
    return _RecordedCall(
        record["kind"], record["call"], sequences, record.get("start", 0), sampled, origin, ended, max(0.0, gap)
    )


class RecordingPlayer:
    """Asks the calls of a recording. `tokenizer`: that of the simulation."""

    def __init__(self, recording: Recording, tokenizer: NumberTokenizer, events: Events, host: Host) -> None:
        self._recording = recording
        self._tokenizer = tokenizer
        self._events = events
        self._host = host
        self._sequences: list[list[int]] = []
        self._fresh = _FIRST_TOKEN
        self._next = 0  # of the calls
        self._ends_seen = 0  # of the recorded ends, those that have come here too, without a gap
        self._ended: set[int] = set()
        self._planned = False

    def begin(self) -> None:
        self._go_on()

    def _go_on(self) -> None:
        """Plans the next call when those that it waits for have ended."""
        ends = self._recording.ends
        while self._ends_seen < len(ends) and ends[self._ends_seen] in self._ended:
            self._ends_seen += 1
        if self._planned or self._next == len(self._recording.calls):
            return
        call = self._recording.calls[self._next]
        if self._ends_seen >= call.ended:
            self._planned = True
            self._events.at(self._events.now + call.gap, lambda: self._ask(call))

    def _ask(self, call: _RecordedCall) -> None:
        self._planned = False
        self._next += 1
        first = len(self._sequences)
        for source, shared, own in call.sequences:
            known = self._sequences[source][:shared] if shared else []
            assert len(known) == shared, "an answer is as long as it was, and has come"
            self._sequences.append([*known, *range(self._fresh, self._fresh + own)])
            self._fresh += own
        if self._fresh > MADE_UP:
            raise ParameterError(f"the recording has more than {MADE_UP:,} different tokens")
        self._send(call, self._sequences[first:], self._ending(call, first))
        self._go_on()

    def _ending(self, call: _RecordedCall, sequence: int) -> Callable[[Answered], None]:
        def end(answer: Answered) -> None:
            if call.id in self._recording.replaced:
                self._sequences[sequence].pop()
            self._sequences[sequence] += answer.token_ids
            self._ended.add(call.id)
            self._go_on()

        return end

    def _send(self, call: _RecordedCall, sequences: list[list[int]], then: Callable[[Answered], None]) -> None:
        match call.kind:
            case "hint":
                self._host.hint((Generated("", tuple(sequences[0])),), call.origin)
            case "score":
                prompt = np.array(sequences[0][: call.start], dtype=np.int32)
                choices = tuple(self._tokenizer.text_of(tuple(ids[call.start :])) for ids in sequences)
                self._host.ask(SimulatedCall(prompt, choices=choices, origin=call.origin), then)
            case _:
                ran = sequences[0][:-1] if call.id in self._recording.replaced else sequences[0]
                prompt = np.array(ran, dtype=np.int32)
                made = self._recording.tokens.get(call.id, 0)
                self._host.ask(SimulatedCall(prompt, made, call.sampled, origin=call.origin), then)
