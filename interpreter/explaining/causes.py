"""Why the cached part of a prompt ends where it does: a decision over what is known of the prompt and of earlier ones.

    text       This is the same for all | and this is not
               ─────────────────────────┼────────────────
    cached     ══════════════════════▷ token           the cache ended, at the token [start, end)
    parted     ─────────────────────────▷              the nearest earlier prompt ended to be the same

The token of the end holds the place where they part, or touches it: what is said there is the cause. Where the texts go
on alike behind the token, it should have been there.
"""

from dataclasses import dataclass

from ...lang.cache_report import CacheCause
from ...lang.protocol import Usage
from ...lang.source import Source, SourceKind
from .history import Asked
from .neighbours import Neighbour, Neighbours

STEP = 128  # tokens in which providers count what is cached


@dataclass(frozen=True, slots=True)
class Ending:
    """Where the cached part of a prompt ends.

    Attributes:
        start, end: characters of the first token that was not found.
        shared: tokens that the prompt begins with as each of the nearest prompts of its salt does.
    """

    start: int
    end: int
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """`parted`: the earlier prompt that says something else at `character`; None where none does, or none is known."""

    cause: CacheCause
    character: int
    parted: Neighbour | None = None


def decide(asked: Asked, cached: int, ending: Ending, neighbours: Neighbours) -> Decision:
    """For a backend that knows its tokens. Not for a full hit."""
    nearest = neighbours.same_salt[0] if neighbours.same_salt else None
    common = nearest.common if nearest is not None else 0
    elsewhere = neighbours.other_salts[0].common if neighbours.other_salts else 0
    if elsewhere > max(common, ending.end):
        return Decision(CacheCause.SALT, ending.start)
    if nearest is None:
        return Decision(CacheCause.FIRST, ending.start)
    if common < ending.start:  # somebody else has asked for more of it than this process remembers
        return Decision(CacheCause.NEW, ending.start)
    if common > ending.end or max(ending.shared, default=0) > cached:
        return Decision(_lost(asked, cached, ending, neighbours), ending.start)
    return parting(nearest)


def estimate(asked: Asked, usage: Usage, text: str, neighbours: Neighbours, *, minimum: int) -> Decision:
    """For a provider, of which only the counts are known.

    Args:
        minimum: tokens of the shortest prompt that it stores.
    """
    nearest = neighbours.same_salt[0] if neighbours.same_salt else None
    common = nearest.common if nearest is not None else 0
    elsewhere = neighbours.other_salts[0].common if neighbours.other_salts else 0
    characters = len(text) / max(1, usage.prompt_tokens)  # of a token, on average
    reached = min(len(text), round(characters * usage.cached_tokens))
    step = characters * STEP
    if usage.prompt_tokens < minimum and not usage.cached_tokens:
        return Decision(CacheCause.SHORT, common, nearest if nearest is not None and nearest.goes_on else None)
    if elsewhere > max(common, reached) + step:
        return Decision(CacheCause.SALT, reached)
    if nearest is None:
        return Decision(CacheCause.FIRST, reached)
    whole = common == len(text)
    if whole and (reached + step >= len(text) or usage.cached_tokens >= minimum > 0):
        return Decision(CacheCause.HIT, common)  # all that the provider stores of it
    # One that is told what to store stores nothing of a part in which something changes, however late.
    if common > reached + step and (whole or not usage.cache_write_tokens):
        ended = any(found.had_ended(asked) for found in neighbours.same_salt if found.common > reached + step)
        return Decision(CacheCause.EVICTED if ended else CacheCause.CONCURRENT, reached)
    return parting(nearest)


def parting(nearest: Neighbour) -> Decision:
    """What an earlier prompt says in the same place; `of_sources` tells more of it."""
    return Decision(CacheCause.NEW, nearest.common, nearest if nearest.goes_on else None)


def of_sources(here: Source | None, earlier: Source | None) -> CacheCause:
    """Two prompts say different things in one place. What an argument explains is told apart afterwards."""
    if here is None or earlier is None or not _same_line(here, earlier):
        return CacheCause.OTHER_LINE
    if here.kind in (SourceKind.GENERATED, SourceKind.CHOSEN):
        return CacheCause.GENERATED
    return CacheCause.VOLATILE


def _lost(asked: Asked, cached: int, ending: Ending, neighbours: Neighbours) -> CacheCause:
    """Earlier prompts say the same behind the end of what was found."""
    with_tokens = [found for found, shared in zip(neighbours.same_salt, ending.shared, strict=True) if shared > cached]
    if not with_tokens:
        return CacheCause.SEAM
    return CacheCause.EVICTED if any(found.had_ended(asked) for found in with_tokens) else CacheCause.CONCURRENT


def _same_line(one: Source, other: Source) -> bool:
    """Of the same kind, from the same line of the program."""
    if one.kind != other.kind or one.name != other.name:
        return False
    if one.place is None or other.place is None:
        return one.place is other.place
    return (one.place.file, one.place.number) == (other.place.file, other.place.number)
