"""Reads the calls of a journal as a trace."""

import warnings
from collections.abc import Iterator

from ...lang.errors import JournalError
from ...lang.protocol import Final
from ...lang.traces.calls import CallTrace, Written
from ..journal.file import JournalCall, JournalFile, JournalWarning, read_result
from .notes import counts_of, notes_of
from .waits import EndedCall, traced


def of_journal(path: str) -> CallTrace:
    """Reads a journal. Programs that a body has run belong to that body's program.

    Raises:
        JournalError: the file is damaged, of another format, or has no call.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", JournalWarning)
        file = JournalFile(path, writes=False)
    with file:
        places = [
            (number, item, place)
            for item, calls in file.calls.items()
            for place, lines in calls.items()
            for _, number in lines
        ]
        programs: dict[str, list[EndedCall]] = {}
        constrained = searched = 0
        for number, item, place in sorted(places):
            call = file.call(number)
            constrained += call.constraint is not None
            result = read_result(call.result)
            searched += not isinstance(result, Final) and result.evaluations > 0
            programs.setdefault(item.partition(">")[0], []).extend(_calls(call, place, file.text_of(number)))
        models = list(file.models.values())
    if not programs:
        raise JournalError(
            f"{path} has no call, so there is nothing to simulate; write a journal of a run that made some"
        )
    unfinished = len(programs.keys() - file.finished)
    notes = ["the last line of the journal is torn, and left out"] if caught else []
    if unfinished:
        notes.append(f"{unfinished} of {len(programs)} programs had not ended: theirs are the calls until then")
    branches = any(call.branch for calls in programs.values() for call in calls)
    notes += notes_of(constrained=constrained, searched=searched, branches=branches)
    return CallTrace(
        ", ".join(model.capabilities.name for model in models),
        counts_of([model.capabilities for model in models]),
        tuple(traced(calls) for calls in programs.values()),
        tuple(notes),
    )


def _calls(call: JournalCall, place: str, text: str) -> Iterator[EndedCall]:
    """Yields the call of a line: of several continuations each."""
    path, _, rest = place.partition("/")
    number, _, tries = rest.partition("-")
    stream, above = _stream(call.item, path)
    result = read_result(call.result)
    common = {
        "stream": stream,
        "above": above,
        "number": int(number),
        "text": text,
        "pieces": (Written(text, control=True),),
        "branch": f"{call.item}/{path.rpartition('_')[0]}" if "_" in path else "",
        "apart": ">" in call.item and "." not in path,
        "run_before": _run_before(call.item),
    }
    if not isinstance(result, Final):
        yield EndedCall(**common, choices=call.choices)  # type: ignore[arg-type]  # each is of its field's type
        return
    together = len(result.completions) > 1 or tries.startswith("n")
    for completion in result.completions:
        alone = len(result.completions) == 1
        yield EndedCall(
            **common,  # type: ignore[arg-type]  # each is of its field's type
            answer=completion.text,
            tokens=len(completion.token_ids) or (result.usage.completion_tokens if alone else 0),
            kept=completion.kept if completion.token_ids else None,
            tail=completion.tail,
            sampled=call.sampling is not None and call.sampling.temperature > 0,
            together=together,
        )


def _stream(item: str, path: str) -> tuple[str, tuple[str, ...]]:
    """Returns the name of a stream, and those above it: that it is forked from, and those of the programs around."""
    above: list[str] = []
    own = f"{item}/{path}"
    while "." in path:
        path = path.rpartition(".")[0]
        above.append(f"{item}/{path}")
    while ">" in item:
        item = item.rpartition(">")[0]
        above.append(f"{item}/0")
    return own, tuple(above)


def _run_before(item: str) -> str:
    """Returns how the items begin of the run that a body has started before this one: of "3>1.0", "3>0"; or ""."""
    around, _, own = item.rpartition(">")
    number = int(own.partition(".")[0]) if around else 0
    return f"{around}>{number - 1}" if number else ""
