"""Decides after every token whether a generation ends.

It looks at token ids and at bytes, so that it finds a stop string wherever the token boundaries lie.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ...lang.protocol import FinishReason
from .request import Generation, Request

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason why a text ends. `text_bytes`: its length without the stop string or stop token."""

    reason: FinishReason
    matched: str | int | None
    text_bytes: int


def accept(request: Request, token: int, token_bytes: TokenBytes, longest: int) -> Stop | None:
    """Appends the sampled token; returns a Stop if the text ends with it. `longest`: tokens a sequence may have."""
    generation = request.job
    assert isinstance(generation, Generation), "only generations sample"
    request.append(token)
    generation.counts[token] = generation.counts.get(token, 0) + 1
    before = generation.text_bytes
    data = token_bytes(token)
    if generation.cursor is not None and request.generated == 1:
        data = data[generation.cursor.healed :]
    generation.text_bytes += len(data)
    may_stop = request.generated >= generation.sampling.min_tokens
    if token in generation.ends and may_stop:
        return Stop(FinishReason.STOP, token, before)
    found = _feed(generation, data, before, may_stop)
    if found is not None:
        return found
    if generation.cursor is not None and generation.cursor.finished:
        return constraint_end(generation, token if generation.cursor.ended else None)
    if request.generated >= generation.sampling.max_tokens or request.length >= longest:
        return Stop(FinishReason.LENGTH, None, generation.text_bytes)
    return None


def constraint_end(generation: Generation, token: int | None = None) -> Stop:
    """Returns the stop of a text that satisfies its constraint, also if it was closed by the shortest way to an end.

    `token`: the token with which the model ended it.
    """
    assert generation.cursor is not None, "a constraint ends the text"
    reason = FinishReason.LENGTH_CLOSED if generation.cursor.closing else FinishReason.STOP
    return Stop(reason, token, generation.text_bytes)


def _feed(generation: Generation, data: bytes, offset: int, may_stop: bool) -> Stop | None:
    """Feeds bytes to the stop matcher. Skips stops that end before min_tokens: the search continues after them."""
    while generation.matcher is not None and generation.stops is not None:
        match = generation.matcher.feed(data)
        if match is None:
            return None
        if may_stop:
            return Stop(FinishReason.STOP, match.stop, generation.matcher_base + match.start)
        end = generation.matcher_base + match.end
        data = data[end - offset :]
        offset = end
        generation.matcher_base = end
        generation.matcher = generation.stops.matcher()
    return None
