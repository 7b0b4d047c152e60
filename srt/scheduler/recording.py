"""Records the calls and steps of an engine for the simulator, without a token of any text.

A sequence is written as the earlier sequence that it shares the longest prefix with, how many tokens they share, and
how many are its own. That is all a radix tree depends on. docs/simulator.md has the format.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

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

WARM_UP = 0  # the id of the engine's own request, which is not recorded
_BYTES = 4  # of a token


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
        self._shape: StepShape | None = None
        self._write({"recording": 1, **facts})

    def close(self) -> None:
        self._file.close()

    def arrived(self, message: ToEngine, now: float) -> None:
        """Notes a message to the engine."""
        match message:
            case EngineGenerate(id=id, token_ids=token_ids) if id != WARM_UP:
                if self._refused(message.schedule, token_ids) or message.marks:
                    self._skip("generate", now)
                    return
                sampled = not message.sampling.greedy
                number = self._call("generate", id, [token_ids], message.schedule, now, sampled=sampled)
                self._open[id] = (number, array("i", token_ids))
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

    def launched(self, shape: StepShape) -> None:
        """Notes the shape of a step that is being launched."""
        self._shape = shape

    def stepped(self, seconds: float, events: Iterable[FromEngine], now: float) -> None:
        """Notes the end of a step: how long it took in all, and what it answered."""
        shape, self._shape = self._shape, None
        if shape is not None and self._began is not None:
            self._write({"step": list(shape), "seconds": seconds})
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
                    replaced = {"replaced": 1} if event.healed else {}
                    self._write({"end": id, "at": self._at(now), "tokens": made, **replaced})
                case ScoreEnded(id=id) | EngineFailed(id=id) if id != WARM_UP:
                    self._open.pop(id, None)
                    self._write({"end": id, "at": self._at(now), "tokens": 0})
        if shape is not None:
            self._file.flush()

    # ------------------------------------------------------------------ how

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
        self._write({**record, **more})
        return first

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


def _common(left: bytes, right: bytes) -> int:
    """Returns how many tokens two sequences begin with together."""
    count = min(len(left), len(right)) // _BYTES
    different = np.frombuffer(left, np.int32, count) != np.frombuffer(right, np.int32, count)
    first = int(different.argmax()) if count else 0
    return first if count and different[first] else count
