"""Says which calls of a program wait for which, and which texts of a prompt are answers.

    stream 0      a ──┬── c ─── d         c waits for a, x and y; d for c
    stream 0.0_0      ├─ x                x and y wait for a
    stream 0.0_1      └─ y

A call waits for the one before it in its stream. The first call of a branch waits for the one before the fork: the last
one whose prompt and answer its own prompt begins with. A call also waits for what streams that began in its own had
called by then, since a file does not say which variables a text has read. The first call of a run that a body has
started waits for the last call of the body, and for the run before it, where that had ended.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...lang.traces.calls import TracedCall, Written


@dataclass(slots=True, eq=False)
class EndedCall:
    """A call that has ended, as a file describes it.

    Attributes:
        stream, above: its stream, and those that this one began in, the nearest first.
        number: of the gen or select in the stream. Calls of one number are tries; with `together` continuations.
        text: of the prompt; `pieces` are the same text.
        tokens, kept, tail, choices, sampled, branch: as of a `TracedCall`.
        answer: the whole text.
        apart: its stream is that of a run which a body has started: its prompts do not go on from those above.
        run_before: how the streams are called of the run that the body has started before this one: they begin so.
        sent: calls of the program that had ended when it began; None where a file has the order of ends alone.
    """

    stream: str
    above: tuple[str, ...]
    number: int
    text: str
    pieces: tuple[Written, ...]
    answer: str = ""
    tokens: int = 0
    kept: int | None = None
    tail: str = ""
    choices: tuple[str, ...] = ()
    sampled: bool = False
    branch: str = ""
    together: bool = False
    apart: bool = False
    run_before: str = ""
    sent: int | None = None
    index: int = field(init=False, default=0)  # in its program
    before: "EndedCall | None" = field(init=False, default=None)  # that its prompt goes on from
    prompt: tuple[Written | int, ...] = field(init=False, default=())


def traced(calls: Sequence[EndedCall]) -> tuple[TracedCall, ...]:
    """Returns the calls of a program with what each waits for. calls: in the order of their ends."""
    streams: dict[str, list[EndedCall]] = {}
    whole = Counter(call.stream for call in calls)
    found: list[TracedCall] = []
    for index, call in enumerate(calls):
        call.index = index
        own = streams.setdefault(call.stream, [])
        call.before = _before(call, own, streams)
        call.prompt = _with_answers(call)
        waits = {each.index for each in _earlier_in_stream(call, own)}
        if call.before is not None:
            waits.add(call.before.index)
        ended = index if call.sent is None else call.sent
        waits |= {each[-1].index for each in _joined(call, streams, whole) if each[-1].index < ended}
        found.append(
            TracedCall(
                call.prompt,
                tuple(sorted(waits)),
                call.answer,
                call.tokens,
                call.kept,
                call.tail,
                call.choices,
                call.sampled,
                call.branch,
            )
        )
        own.append(call)
    return tuple(found)


def _earlier_in_stream(call: EndedCall, own: Sequence[EndedCall]) -> list[EndedCall]:
    """Returns the calls of its stream that it waits for: the tries before it, else all of the number before it."""
    if not call.together and any(each.number == call.number for each in own):
        return [each for each in own if each.number == call.number]
    earlier = [each for each in own if each.number < call.number]
    newest = max((each.number for each in earlier), default=0)
    return [each for each in earlier if each.number == newest]


def _before(call: EndedCall, own: Sequence[EndedCall], streams: dict[str, list[EndedCall]]) -> EndedCall | None:
    """Returns the call that the prompt goes on from: of its stream, else of the streams above."""
    for each in reversed(own):
        if each.number < call.number:
            return each
    for stream in call.above:
        for each in reversed(streams.get(stream, ())):
            if call.apart or _continues(call.text, each):
                return each
    return None


def _continues(text: str, call: EndedCall) -> bool:
    """Returns whether a text begins with the prompt and the answer of a call."""
    if not text.startswith(call.text):
        return False
    rest = text[len(call.text) :].lstrip()
    return any(rest.startswith(said.strip()) for said in call.choices or (call.answer,))


def _joined(call: EndedCall, streams: Mapping[str, list[EndedCall]], whole: Mapping[str, int]) -> list[list[EndedCall]]:
    """Returns the streams that began in that of the call, and those of the run before its own, where that had ended.

    whole: calls that each stream makes.
    """
    found = [each for each in streams.values() if each and call.stream in each[-1].above]
    if call.run_before and not streams[call.stream]:
        names = [stream for stream in whole if stream.startswith(call.run_before)]
        if all(len(streams.get(stream, ())) == whole[stream] for stream in names):
            found += [streams[stream] for stream in names]
    return found


def _with_answers(call: EndedCall) -> tuple[Written | int, ...]:
    """Returns the prompt, in which answers of earlier calls are the numbers of these."""
    earlier = call.before
    while earlier is not None and not call.text.startswith(earlier.text):
        earlier = earlier.before
    if earlier is None:
        return call.pieces
    reached = len(earlier.text)
    prompt = earlier.prompt
    if not earlier.choices and earlier.answer and call.text.startswith(earlier.answer, reached):
        prompt = (*prompt, earlier.index)
        reached += len(earlier.answer)
    return (*prompt, *_from(call.pieces, reached))


def _from(pieces: Sequence[Written], start: int) -> list[Written]:
    """Returns pieces without their first `start` characters."""
    left: list[Written] = []
    for piece in pieces:
        if start < len(piece.text):
            left.append(Written(piece.text[start:], piece.control))
        start = max(0, start - len(piece.text))
    return left
