"""Records the calls and steps of an engine for the simulator, without a token of any text.

A sequence is written as the earlier sequence that it shares the longest prefix with, how many tokens they share, and
how many are its own. That is all a radix tree depends on. A step says which texts ran more rows than the one of their
newest token: those of tokens that a constraint has forced, and of guesses, with how many were right. docs/simulator.md
has the format.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...lang.errors import ParameterError
from ..core.batch import PICTURE_BASE, StepShape
from ..core.messages import (
    NO_ADAPTER,
    Ended,
    EngineAbort,
    EngineChoose,
    EngineEmbed,
    EngineFailed,
    EngineGenerate,
    EnginePrefill,
    EngineScore,
    FromEngine,
    Schedule,
    ScoreEnded,
    ToEngine,
    Tokens,
)
from .request import Generation, Request
from .step import PlannedRows, StepPlan

FORMAT = 2
WARM_UP = 0  # the id of the engine's own request, which is not recorded
_BYTES = 4  # of a token


class _Ahead(NamedTuple):
    """Rows of a text after that of its newest token. `known`: tokens of the text whose rows had run, and that one."""

    rows: PlannedRows
    known: int
    forced: int


class EngineRecorder:
    """Writes a recording, one JSON object a line. Used by the thread of the scheduler.

    Args:
        facts: of the engine; they become the first line.

    Raises:
        ParameterError: the file cannot be written.
    """

    def __init__(self, path: Path, facts: Mapping[str, object]) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ParameterError(f"debug.recording: {error}") from error
        self._began: float | None = None  # on the clock, the first call
        self._sorted: list[tuple[bytes, int]] = []  # (tokens, number of the sequence): neighbours share most
        self._count = 0  # sequences
        self._names: dict[tuple[str, str], int] = {}  # (kind, name) → number
        self._open: dict[int, tuple[int, array[int]]] = {}  # call → its sequence, its prompt and answer so far
        self._held: dict[int, EngineGenerate] = {}  # calls whose constraint is being made: they come when it is there
        self._asked: set[int] = set()  # calls that have not ended
        self._requests: dict[int, Request] = {}  # of calls with rows that ran
        self._ahead: list[_Ahead] = []  # of the step that runs
        self._shape: StepShape | None = None
        self._write({"recording": FORMAT, **facts})

    def close(self) -> None:
        self._file.close()

    def arrived(self, message: ToEngine, now: float) -> None:
        """Notes a message to the engine."""
        match message:
            case EngineGenerate(id=id, token_ids=token_ids) if id != WARM_UP:
                if self._refused(message.schedule, token_ids) or message.marks:
                    self._skip("generate", now)
                    return
                if message.constraint is None:
                    self._generation(message, now)
                else:
                    self._held[id] = message
            case EngineScore(id=id, sequences=sequences):
                if self._refused(message.schedule, *sequences) or message.marks:
                    self._skip("score", now)
                    return
                self._call("score", id, sequences, message.schedule, now, start=message.start)
            case EnginePrefill(id=id, token_ids=token_ids):
                if self._refused(message.schedule, token_ids) or message.pin is not None:
                    self._skip("hint", now)
                    return
                self._call("hint", id, [token_ids], message.schedule, now)
            case EngineChoose() | EngineEmbed() | EngineAbort():
                self._skip(type(message).__name__, now)

    def opened(self, held: Collection[int], now: float) -> None:
        """Notes which calls still wait for their constraint; the others come now."""
        for id in [id for id in self._held if id not in held]:
            self._generation(self._held.pop(id), now)

    def planned(self, plan: StepPlan) -> None:
        """Notes a plan, before its rows count as computed."""
        self._ahead.clear()
        for rows in plan.planned:
            request = rows.request
            if not isinstance(request.job, Generation):
                continue
            began = request.message_id in self._requests  # else a prompt may be cached, and chooses no token
            self._requests[request.message_id] = request
            known = max(0, request.reached - request.prompt_length + 1) if began else 0
            forced = max(0, rows.end - request.prompt_length - known)
            if forced or rows.guessed is not None:
                self._ahead.append(_Ahead(rows, known, forced))

    def launched(self, shape: StepShape) -> None:
        """Notes the shape of a step that is being launched."""
        self._shape = shape

    def stepped(self, started: float, events: Iterable[FromEngine], now: float, *, goes_on: bool) -> None:
        """Notes the end of a step, and what it answered. started: on the clock. goes_on: work is left."""
        shape, self._shape = self._shape, None
        if shape is not None and self._began is not None:
            more: dict[str, object] = {"ahead": [_counts(ahead) for ahead in self._ahead]} if self._ahead else {}
            more |= {"more": 1} if goes_on else {}
            times = {"at": self._at(started), "seconds": round(now - started, 6)}
            self._write({"step": list(shape), **times, **more})
        for event in events:
            match event:
                case Tokens(id=id, token_ids=token_ids) if id in self._open:
                    self._open[id][1].extend(token_ids)
                case Ended(id=id, token_ids=token_ids, completion_tokens=made) if id in self._open:
                    number, tokens = self._open.pop(id)
                    prompt = tokens[: event.prompt_tokens]
                    tokens.extend(token_ids)
                    if event.healed:
                        del tokens[event.prompt_tokens - 1]
                    self._grow(number, prompt, tokens)
                    request = self._requests.pop(id, None)
                    chosen = 0 if request is None else max(0, request.reached - request.prompt_length + 1)
                    replaced = {"replaced": 1} if event.healed else {}
                    tail = {"tail": made - chosen} if made > chosen else {}
                    self._end(event, now, {"tokens": made, **tail, **replaced})
                case ScoreEnded(id=id) if id in self._asked:
                    self._end(event, now, {"tokens": 0})
                case EngineFailed(id=id) if id in self._asked:
                    self._open.pop(id, None)
                    self._requests.pop(id, None)
                    self._asked.discard(id)
                    self._write({"end": id, "at": self._at(now), "tokens": 0})
                case EngineFailed(id=id) if self._held.pop(id, None) is not None:
                    self._skip("generate", now)
        if shape is not None:
            self._file.flush()

    # ------------------------------------------------------------------ how

    def _generation(self, message: EngineGenerate, now: float) -> None:
        sampled = not message.sampling.greedy
        number = self._call("generate", message.id, [message.token_ids], message.schedule, now, sampled=sampled)
        self._open[message.id] = (number, array("i", message.token_ids))

    def _call(
        self, kind: str, id: int, sequences: Sequence[Sequence[int]], schedule: Schedule, now: float, **more: int
    ) -> int:
        """Writes a call → the number of its first sequence."""
        first = self._count
        shares = [self._share(ids) for ids in sequences]
        record: dict[str, object] = {"call": id, "kind": kind, "at": self._at(now), "sequences": shares}
        for key, name in (("salt", schedule.salt), ("program", schedule.program_id), ("group", schedule.fork_group)):
            if name:
                record[key] = self._names.setdefault((key, name), len(self._names) + 1)
        if kind != "hint":
            self._asked.add(id)
        self._write({**record, **more})
        return first

    def _end(self, event: Ended | ScoreEnded, now: float, facts: Mapping[str, int]) -> None:
        self._asked.discard(event.id)
        counts = {"prompt": event.prompt_tokens, "cached": event.cached_tokens}
        self._write({"end": event.id, "at": self._at(now), **facts, **counts})

    def _skip(self, what: str, now: float) -> None:
        self._write({"skipped": what, "at": self._at(now)})

    @staticmethod
    def _refused(schedule: Schedule, *sequences: Sequence[int]) -> bool:
        """Returns whether a call uses what a simulation does not know: private parts, adapters, pictures."""
        special = bool(schedule.private) or schedule.adapter != NO_ADAPTER
        return special or any(max(token_ids) >= PICTURE_BASE for token_ids in sequences)

    def _at(self, now: float) -> float:
        if self._began is None:
            self._began = now
        return round(now - self._began, 6)

    def _share(self, token_ids: Sequence[int]) -> tuple[int, int, int]:
        """Adds a sequence → (the earlier one that shares most with it or -1, shared tokens, tokens of its own)."""
        data = array("i", token_ids).tobytes()
        entry = (data, self._count)
        place = bisect_left(self._sorted, entry)
        source, shared = -1, 0
        for neighbour, number in self._sorted[max(0, place - 1) : place + 1]:
            if (common := _common(data, neighbour)) > shared:
                source, shared = number, common
        self._sorted.insert(place, entry)
        self._count += 1
        return source, shared, len(token_ids) - shared

    def _grow(self, number: int, prompt: array[int], tokens: array[int]) -> None:
        """Adds its answer to a sequence."""
        place = bisect_left(self._sorted, (prompt.tobytes(), number))
        assert self._sorted[place][1] == number, "it was added when its call arrived"
        del self._sorted[place]
        entry = (tokens.tobytes(), number)
        self._sorted.insert(bisect_left(self._sorted, entry), entry)

    def _write(self, record: Mapping[str, object]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


def _counts(ahead: _Ahead) -> list[object]:
    """Returns what a step says of a text: call, known, forced, guessed and right tokens, the source of the guesses."""
    rows, known, forced = ahead
    request = rows.request
    guesses = len(rows.guesses)
    right = max(0, min(rows.right_guesses, request.reached - rows.end))
    source = "" if rows.guessed is None else rows.guessed.source
    return [request.message_id, known, forced, guesses, right, source]


def _common(left: bytes, right: bytes) -> int:
    """Returns how many tokens two sequences begin with together."""
    count = min(len(left), len(right)) // _BYTES
    different = np.frombuffer(left, np.int32, count) != np.frombuffer(right, np.int32, count)
    first = int(different.argmax()) if count else 0
    return first if count and different[first] else count
