"""Plays recordings of a real engine (`debug={"recording": FILE}`) again: the same calls, their lengths and their order.

A call begins when all calls have ended that had ended before it in the recording. So clients that waited for answers
wait for the simulated ones. One replica then runs as many steps as ran in between, since a call that came during a
step was read after it; where nothing was left to run, the call comes as many seconds later as it did. Several replicas
have other steps: there a call comes after the seconds that lay in between. An answer has as many tokens as it had, and
they come in as many steps.
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
from ..scheduler.recording import FORMAT
from .answers import NumberTokenizer
from .calls import MADE_UP, Answered, Host, RowsAhead, SimulatedCall
from .events import Events
from .exact import ExactSimulation, ReplicaShape

COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens", "steps", "forward_rows")
_FIRST_TOKEN = 1  # of the ids that stand for recorded ones


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    """A call of a recording.

    `ended`: how many calls had ended before it. `gap`: seconds since the call or the end before it. `steps`: those that
    ended in between. `pause`: seconds after the last step in which nothing was left to run.
    """

    kind: str
    id: int
    sequences: list[tuple[int, int, int]]
    start: int
    sampled: bool
    origin: Origin
    ended: int
    gap: float
    steps: int
    pause: float


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording.

    Attributes:
        settings: of the engine.
        calls: in the order of their arrival.
        ends: calls, in the order of their ends.
        tokens: call → tokens of its answer.
        tails: call → those at its end that a constraint has forced, and that no step chose.
        ahead: call → tokens in its newest row → rows after it.
        seconds: from the first call to the last end.
        totals: what the runtime counted, by the names of its counters; prompts without those of hints.
        replaced: calls whose constraint replaced the prompt's last token: they ran without it, and their answers begin
            with another.
        skipped: messages that could not be recorded; the figures of the simulation leave them out.
    """

    model: str
    settings: ReplicaShape
    calls: tuple[_RecordedCall, ...]
    ends: tuple[int, ...]
    tokens: dict[int, int]
    tails: dict[int, int]
    ahead: dict[int, dict[int, RowsAhead]]
    seconds: float
    totals: dict[str, int]
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
        if facts["recording"] != FORMAT:
            raise ValueError(f"its format is {facts['recording']}, and {FORMAT} is read: record it again")
        window = facts["window"]
        settings = ReplicaShape(
            pool=facts["pool"],
            max_running=facts["max_running"],
            chunk=facts["chunk"],
            policy=facts["policy"],
            least_ahead=facts["least_ahead"],
            window=None if window is None else WindowPool(*window),
        )
        reader = _RecordingLines()
        for line in lines:
            number += 1
            reader.read(json.loads(line))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(f"{path.name}, line {number}: {error!r}; it is no recording of a runtime") from error
    return Recording(
        str(facts["model"]),
        settings,
        tuple(reader.calls),
        tuple(reader.ends),
        reader.tokens,
        reader.tails,
        reader.ahead,
        reader.last - (reader.first or 0.0),
        reader.totals,
        frozenset(reader.replaced),
        reader.skipped,
    )


class _RecordingLines:
    """Collects the lines of a recording."""

    def __init__(self) -> None:
        self.calls: list[_RecordedCall] = []
        self.ends: list[int] = []
        self.tokens: dict[int, int] = {}
        self.tails: dict[int, int] = {}
        self.ahead: dict[int, dict[int, RowsAhead]] = {}
        self.replaced: set[int] = set()
        self.skipped = 0
        self.totals = dict.fromkeys(COUNTED, 0)
        self.first: float | None = None  # time of the first call that is no hint
        self.last = 0.0  # time of the last end
        self._before = 0.0  # time of the last call or end
        self._rested = 0.0  # since then nothing is left to run, if it is not after the last step
        self._steps = 0  # since that call or end

    def read(self, record: dict[str, Any]) -> None:  # Any: JSON
        if "call" in record:
            gap, pause = (max(0.0, record["at"] - since) for since in (self._before, self._rested))
            self.calls.append(_call(record, len(self.ends), gap, self._steps, pause))
            self._before, self._steps = record["at"], 0
            if self.first is None and record["kind"] != "hint":
                self.first = record["at"]
            self._rested = max(self._rested, self._before)
        elif "end" in record:
            id = record["end"]
            self.ends.append(id)
            self.tokens[id] = record["tokens"]
            self.tails[id] = record.get("tail", 0)
            self.totals["prompt_tokens"] += record.get("prompt", 0)
            self.totals["cached_tokens"] += record.get("cached", 0)
            self.totals["completion_tokens"] += record["tokens"]
            if record.get("replaced"):
                self.replaced.add(id)
            self.last = self._before = record["at"]
            self._rested, self._steps = max(self._rested, self._before), 0
        elif "step" in record:
            self._steps += 1
            self.totals["steps"] += 1
            self.totals["forward_rows"] += record["step"][0]
            self._rested = record["at"] + record["seconds"]
            for call, known, *rows in record.get("ahead", ()):
                self.ahead.setdefault(call, {})[known] = RowsAhead(*rows)
        self.skipped += "skipped" in record


def _call(record: dict[str, Any], ended: int, gap: float, steps: int, pause: float) -> _RecordedCall:  # Any: JSON
    names = {key: f"{key}{record[key]}" if key in record else "" for key in ("salt", "program", "group")}
    origin = Origin(names["program"], names["group"], names["salt"])
    sequences = [tuple(sequence) for sequence in record["sequences"]]
    sampled = bool(record.get("sampled", False))
    start = record.get("start", 0)
    return _RecordedCall(record["kind"], record["call"], sequences, start, sampled, origin, ended, gap, steps, pause)


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
        self._replica = host if isinstance(host, ExactSimulation) and host.single else None
        self._since = 0  # steps when the last call was asked, or the last end came

    def begin(self) -> None:
        if self._replica is not None:
            self._replica.on_step = self._go_on
        self._go_on()

    def _go_on(self) -> None:
        """Asks or plans the next call when those that it waits for have ended."""
        ends = self._recording.ends
        while self._ends_seen < len(ends) and ends[self._ends_seen] in self._ended:
            self._ends_seen += 1
        if self._planned or self._next == len(self._recording.calls):
            return
        call, replica = self._recording.calls[self._next], self._replica
        if self._ends_seen < call.ended:
            return
        if replica is None:
            self._plan(call, call.gap)
        elif not replica.works:
            self._plan(call, call.pause)
        elif replica.steps - self._since >= call.steps:
            self._ask(call)

    def _plan(self, call: _RecordedCall, seconds: float) -> None:
        self._planned = True
        self._events.at(self._events.now + seconds, lambda: self._ask(call))

    def _ask(self, call: _RecordedCall) -> None:
        self._planned = False
        self._next += 1
        self._came()
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
            self._came()
            if self._replica is None:
                self._go_on()  # else when the step is over: the ends after this one are of the same step

        return end

    def _came(self) -> None:
        """Notes that a call or an end has come."""
        if self._replica is not None:
            self._since = self._replica.steps

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
                tail = self._recording.tails.get(call.id, 0)
                chosen = self._recording.tokens.get(call.id, 0) - tail
                ahead = self._recording.ahead.get(call.id, {})
                asked = SimulatedCall(prompt, chosen, call.sampled, origin=call.origin, ahead=ahead, tail=tail)
                self._host.ask(asked, then)
