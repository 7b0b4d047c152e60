"""Reads the calls of a saved run as a trace: its operations say the prompts, and its times what waits for what."""

from bisect import bisect_right
from pathlib import Path
from typing import Any

from ...lang.errors import ParameterError, shown
from ...lang.traces.calls import CallTrace, Written
from ..view.data import MOST_SENT
from ..view.page import RunRecord
from .notes import notes_of
from .waits import EndedCall, traced

_ANSWERS = ("generated", "guessed", "forced", "chosen")  # origins of the text of a gen or select

Line = dict[str, Any]  # Any: JSON


def of_saved_run(path: Path) -> CallTrace:
    """Reads a file that `state.save()` wrote.

    Raises:
        ParameterError: it is none, or has no call.
    """
    lines = RunRecord.load(path).lines
    try:
        reader = _SavedRunLines()
        for line in lines:
            reader.read(line)
        backend = str(lines[0]["backend"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ParameterError(f"{shown(str(path))} was edited: {error!r}; save the run again") from None
    calls = sorted(reader.calls, key=lambda each: each[0])
    if not calls:
        raise ParameterError(
            f"{shown(str(path))} has no call, so there is nothing to simulate; save a run that made some"
        )
    came = [at for at, _, _ in calls]
    for _, sent, call in calls:
        call.sent = bisect_right(came, sent)
    ended = [call for _, _, call in calls]
    branches = any(call.branch for call in ended)
    local, _, model = backend.partition(" ")
    counts = model if local in ("local", "runtime") else ""
    notes = [*reader.notes(), *notes_of(constrained=reader.constrained, branches=branches)]
    return CallTrace(backend, counts, (traced(ended),), tuple(notes))


class _SavedRunLines:
    """Collects the calls of the lines: `calls` are when they came and were sent, in seconds, and they themselves."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float, EndedCall]] = []
        self.constrained = 0
        self._dropped = 0  # selects whose choices the file does not have, and prompts that it has in part
        self._left_out = 0
        self._prompts: dict[int, list[Written]] = {}
        self._above: dict[int, tuple[str, ...]] = {}
        self._branches: dict[int, str] = {}

    def notes(self) -> list[str]:
        """Returns what the file does not have."""
        notes = []
        if self._left_out:
            notes.append(f"the saved run has left out {self._left_out} operations, and so does the simulation")
        if self._dropped:
            notes.append(f"{self._dropped} calls are left out: the saved run has not all of their prompts or choices")
        return notes

    def read(self, line: Line) -> None:
        if "op" in line:
            self._operation(line)
        elif "stream" in line:
            stream, parent = line["stream"], line["parent"]
            self._prompts[stream] = [] if parent is None else list(self._prompts[parent])
            self._above[stream] = () if parent is None else (str(parent), *self._above[parent])
            self._branches[stream] = "" if parent is None else f"{parent}.{line['after']}"
        elif "end" in line:
            self._left_out = line.get("left_out", 0)

    def _operation(self, line: Line) -> None:
        prompt = self._prompts[line["stream"]]
        pieces = line.get("text", [])
        answered = [number for number, (origin, *_) in enumerate(pieces) if origin in _ANSWERS]
        first = answered[0] if answered else len(pieces)
        prompt += [_written(piece) for piece in pieces[:first]]
        if line.get("calls"):
            self.constrained += "guarantee" in line.get("facts", ())
            self._add(line, tuple(prompt), "".join(piece[1] for piece in pieces[first:]))
        prompt += [_written(piece) for piece in pieces[first:]]

    def _add(self, line: Line, prompt: tuple[Written, ...], answer: str) -> None:
        """Adds the calls of a gen or select: its tries, of which the last has given the answer."""
        calls = [call for call in line["calls"] if "came" in call]
        facts = line.get("facts", {})
        for call in calls:
            sent, choices = call.get("sent_text"), _choices(call, facts)
            if choices is None or (sent is not None and len(sent) >= MOST_SENT):
                self._dropped += 1
                continue
            pieces = prompt if sent is None else (Written(sent, control=True),)
            several = max(1, int(facts.get("continuations", 1)) // len(calls))
            for _ in range(several):
                ended = EndedCall(
                    str(line["stream"]),
                    self._above[line["stream"]],
                    line["op"],
                    "".join(piece.text for piece in pieces),
                    pieces,
                    "" if choices or call is not calls[-1] else answer,
                    0 if choices else call["completion_tokens"] // several,
                    choices=choices,
                    sampled=True,
                    branch=self._branches[line["stream"]],
                    together=several > 1,
                )
                self.calls.append((call["came"], call["sent"], ended))


def _written(piece: list[Any]) -> Written:  # Any: JSON
    return Written(piece[1], piece[0] == "template")


def _choices(call: Line, facts: Line) -> tuple[str, ...] | None:
    """Returns the choices that a call has scored: none of a generation; None where the file does not have them."""
    if "sequences" not in call:
        return ()
    choices = tuple(facts.get("probabilities", {}))
    return choices if len(choices) == call["sequences"] else None
