"""Explains for each call of a run why the cached part of its prompt ends where it does.

call ─► nearest earlier prompts ─► where the cached part ends (the backend is asked) ─► cause ─► line, value, argument

    text       This is the same for all | and this is not
               ─────────────────────────┼────────────────
    cached     ══════════════════════▷ token           the cache ended, at the token [start, end)
    parted     ─────────────────────────▷              the nearest earlier prompt ended to be the same

If the first uncached token holds or touches the place where the texts part, the text there is the cause. If the texts
agree beyond that token, it was evicted or never stored. Token positions are requested only when a report is made.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...lang.cache_report import CacheCause, CacheMiss, CacheReport, CallReport, SourceLine
from ...lang.errors import CapabilityError
from ...lang.prompt import Media, Part, Source, SourceKind
from ...lang.protocol import Backend, Locate, Located, Locating, Origin, Placed, Usage
from . import statements
from .history import Asked, CallLog, EarlierCalls, Intent, Layout, Neighbour, Neighbours, PromptPiece, of_call

if TYPE_CHECKING:
    from ..run import Run


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of the cached part of a prompt.

    Attributes:
        start, end: characters of the first token that was not found.
        shared: tokens that the prompt begins with as each of the nearest prompts of its salt does.
    """

    start: int
    end: int
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a miss. `parted`: the earlier prompt that differs at `character`; None if there is none."""

    cause: CacheCause
    character: int
    parted: Neighbour | None = None


AROUND = 48  # characters that are shown on each side of a place
# Bytes of pictures in earlier prompts; with those of the prompt itself they fit into one frame.
_MOST_PICTURE_BYTES = 8 << 20
_numbers = itertools.count(1)


async def explained(run: "Run") -> CacheReport:
    """Explains the calls of a run. Called on the streams' loop. Reports running calls as such.

    Raises:
        CapabilityError: the program was shipped; the gateway that ran it has made the calls.
        Errors of the backend when token positions are requested.
    """
    backend, log = run.backend, run.log
    if not log.intents and run.ledger.cost.usage.calls:
        raise CapabilityError(
            f"{backend.capabilities.name} ran this program itself, so its calls are not known here; to have them "
            "explained run program.compile(server=False)"
        )
    made: dict[Intent, list[Asked]] = {}
    for asked in tuple(log.calls):
        made.setdefault(asked.intent, []).append(asked)
    earlier = EarlierCalls([*log.history.calls, *log.calls])
    calls: list[CallReport] = []
    for intent in tuple(log.intents.values()):
        if intent not in made:
            calls.append(_uncalled(intent))
        for attempt, asked in enumerate(made.get(intent, ()), 1):
            calls.append(await _call(backend, log, earlier, asked, attempt))
            await asyncio.sleep(0)  # long prompts take milliseconds each; others run in between
    return CacheReport(backend.capabilities.name, tuple(calls))


def _uncalled(intent: Intent) -> CallReport:
    """Reports an intent without a call: the text was speculated, or the budget had no room."""
    cause = CacheCause.NO_CALL if intent.settled else CacheCause.UNKNOWN
    return CallReport(intent.kind, intent.name, line_of(intent.source), 1, 0, 0, 0, 0, cause)


async def _call(backend: Backend, log: CallLog, earlier: EarlierCalls, asked: Asked, attempt: int) -> CallReport:
    intent, usage = asked.intent, asked.usage
    if usage is None:
        line = line_of(intent.source)
        return CallReport(intent.kind, intent.name, line, attempt, 0, 0, 0, 0, CacheCause.UNKNOWN, salt=asked.salt)
    computed = usage.prompt_tokens - usage.cached_tokens
    cause, miss = await _explained(backend, log, earlier, asked, usage)
    return CallReport(
        intent.kind,
        intent.name,
        line_of(intent.source),
        attempt,
        usage.prompt_tokens,
        usage.cached_tokens,
        _created(backend, usage),
        computed,
        cause,
        miss,
        asked.salt,
        usage.loaded_tokens,
        "" if asked.placed is None else described(asked.placed),
    )


def described(placed: Placed) -> str:
    """Returns which engine computed a call, and why that one, in words."""
    moved = f", after {placed.moved} lost engine{'s' * (placed.moved > 1)}" if placed.moved else ""
    return f"replica {placed.replica}{moved}: {placed.reason}"


def _created(backend: Backend, usage: Usage) -> int:
    """Returns the tokens written to the cache: all computed ones for a runtime, the reported ones for a provider."""
    capabilities = backend.capabilities
    if capabilities.token_ids and capabilities.prefix_cache:
        return usage.prompt_tokens - usage.cached_tokens
    return usage.cache_write_tokens


async def _explained(
    backend: Backend, log: CallLog, earlier: EarlierCalls, asked: Asked, usage: Usage
) -> tuple[CacheCause, CacheMiss | None]:
    laid = of_call(asked)
    if not backend.capabilities.prefix_cache:
        return CacheCause.OFF, None
    neighbours = earlier.of(asked, laid)
    if not (backend.capabilities.token_ids and isinstance(backend, Locating)):
        minimum = backend.capabilities.cache_minimum
        decision = estimate(asked, usage, laid.text, neighbours, minimum=minimum)
        if decision.cause is CacheCause.HIT:
            return CacheCause.HIT, None
        return _described(decision, laid, log, token=None)
    cached = usage.cached_tokens
    located = await _located(backend, asked, cached, cached + 1)
    if cached >= min(located.tokens, usage.prompt_tokens) - 1:
        return CacheCause.HIT, None
    start, end = located.characters
    if neighbours.same_salt and neighbours.same_salt[0].common >= end:  # it says the same there: in the same tokens?
        shared = await _shared(backend, asked, neighbours.same_salt, cached, end)
    else:
        shared = ()
    decision = decide(asked, cached, Ending(start, end, shared), neighbours)
    return _described(decision, laid, log, token=cached)


async def cached_until(backend: Backend, asked: Asked) -> int | None:
    """Returns the character of a prompt at which its cached part ends; None where the backend does not tell.

    Raises:
        Errors of the backend.
    """
    capabilities, usage = backend.capabilities, asked.usage
    if usage is None or not (capabilities.prefix_cache and capabilities.token_ids and isinstance(backend, Locating)):
        return None
    return (await _located(backend, asked, usage.cached_tokens)).characters[0]


async def _shared(
    backend: Locating, asked: Asked, neighbours: Sequence[Neighbour], cached: int, end: int
) -> tuple[int, ...]:
    """Returns the prompt's common prefix with each neighbour, in tokens. For neighbours too large to send it is derived
    from their characters: up to the last cached token, or one token more."""
    others: list[tuple[Part, ...]] = []
    room = _MOST_PICTURE_BYTES
    for near in neighbours:
        parts = _parts(near.asked)
        room -= sum(len(part.data) for part in parts if isinstance(part, Media))
        if room < 0:
            break
        others.append(parts)
    located = await _located(backend, asked, others=tuple(others))
    guessed = (cached + 1 if near.common >= end else 0 for near in neighbours[len(others) :])
    return (*located.shared, *guessed)


async def _located(backend: Locating, asked: Asked, *tokens: int, others: tuple[tuple[Part, ...], ...] = ()) -> Located:
    """Requests the characters of these tokens, and the common prefixes with other prompts, in tokens."""
    name = f"locate-{next(_numbers)}"
    salt, _, adapter = asked.salt.partition("@")
    return await backend.locate(Locate(name, _parts(asked), tokens, others, Origin(salt=salt, adapter=adapter)))


def _parts(asked: Asked) -> tuple[Part, ...]:
    return asked.intent.prompt.parts if asked.parts is None else asked.parts


# ------------------------------------------------------------------------------------------ in words


def _described(decision: Diagnosis, laid: Layout, log: CallLog, token: int | None) -> tuple[CacheCause, CacheMiss]:
    """Describes a place in a prompt by its line, value and argument. `token`: None where the place is estimated."""
    place = decision.character
    here, parted = laid.at(place), decision.parted
    earlier = None if parted is None else parted.layout.at(place)
    cause = decision.cause
    argument, expression = _said_with(here, place, log.arguments)
    if cause is CacheCause.NEW and parted is not None and earlier is not None:
        cause = of_sources(None if here is None else here.source, earlier.source)
        if parted.asked in log.calls:
            cause = CacheCause.BRANCH
        elif cause is CacheCause.VOLATILE and argument:
            cause = CacheCause.ARGUMENT
    miss = CacheMiss(
        token=token,
        character=place,
        before=laid.text[max(0, place - AROUND) : place],
        here=laid.text[place : place + AROUND],
        earlier=None if parted is None else parted.layout.text[place : place + AROUND],
        source=None if here is None else line_of(here.source, expression),
        earlier_source=None if earlier is None else line_of(earlier.source),
        argument=argument,
        estimated=token is None,
    )
    return cause, miss


def _said_with(here: PromptPiece | None, place: int, given: Mapping[str, Any]) -> tuple[str, str]:
    """Finds the argument and the expression that produced the text at a place of the prompt; "" for none."""
    if here is None or here.source is None or here.source.kind is not SourceKind.TEXT:
        return "", ""
    source, offset = here.source, place - here.start
    value = statements.value_at(source.place, here.text, offset) if source.place is not None else None
    expression = "" if value is None else value.expression
    if expression in given:
        return expression, expression
    start, end = (0, len(here.text)) if value is None else (value.start, value.end)
    return argument_at(given, here.text, start, end, offset), expression


def line_of(source: Source | None, expression: str = "") -> SourceLine | None:
    """Returns the program line for messages; None where umbel wrote the text itself."""
    if source is None:
        return None
    match source.kind:
        case SourceKind.TEXT:
            what = "text"
        case SourceKind.SCAFFOLD:
            what = f"chat template (role {source.name})"
        case SourceKind.GENERATED:
            what = f"generated by gen({source.name!r})" if source.name else "generated by gen()"
        case SourceKind.CHOSEN:
            what = f"chosen by select({source.name!r})" if source.name else "chosen by select()"
    if source.place is None:
        return SourceLine(expression=expression, what=what)
    place = source.place
    return SourceLine(place.file, place.number, place.function, statements.code_at(place), expression, what)


_MOST_VALUES = 2000  # of lists and dicts that are looked into
_SURE = 3  # characters; a shorter value stands in any text, unless it is all of the text


def argument_at(arguments: Mapping[str, Any], text: str, start: int, end: int, offset: int) -> str:
    """Finds the argument that produced `text[offset]`: "question", or "turns[3]" for a member; "" for none.

    Args:
        arguments: of the run.
        text: one piece of a prompt.
        start, end: of the value in it that holds the offset, as far as that is known.
    """
    best, name = 0, ""
    for found, value in _values(arguments):
        length = _overlap(value, text, start, end, offset)
        if length > best:
            best, name = length, found
    return name


def _overlap(value: str, text: str, start: int, end: int, offset: int) -> int:
    """Returns the number of characters around the offset that are this value's."""
    if not value:
        return 0
    if value == text[start:end]:
        return len(value)
    if len(value) < _SURE:
        return 0
    place = text.find(value, max(0, offset - len(value)))
    if 0 <= place <= offset < place + len(value):
        return len(value)
    piece = text[start:end].strip()
    return len(piece) if len(piece) >= _SURE and piece in value else 0


def _values(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields names and texts of arguments and their members."""
    for name, value in arguments.items():
        if isinstance(value, str):
            yield name, value
            continue
        if isinstance(value, list | tuple):
            for index, member in enumerate(value[:_MOST_VALUES]):
                yield f"{name}[{index}]", str(member)
        elif isinstance(value, dict):
            for number, (key, member) in enumerate(value.items()):
                if number == _MOST_VALUES:
                    break
                yield f"{name}[{key!r}]", str(member)
        yield name, str(value)


STEP = 128  # tokens in which providers count what is cached


def decide(asked: Asked, cached: int, ending: Ending, neighbours: Neighbours) -> Diagnosis:
    """Finds the cause of a partial hit, for a backend that returns token positions."""
    nearest = neighbours.same_salt[0] if neighbours.same_salt else None
    common = nearest.common if nearest is not None else 0
    elsewhere = neighbours.other_salts[0].common if neighbours.other_salts else 0
    if elsewhere > max(common, ending.end):
        return Diagnosis(CacheCause.SALT, ending.start)
    if nearest is None:
        return Diagnosis(CacheCause.FIRST, ending.start)
    if common < ending.start:  # another process has asked for more of it than this process remembers
        return Diagnosis(CacheCause.NEW, ending.start)
    if common > ending.end or max(ending.shared, default=0) > cached:
        return Diagnosis(_lost(asked, cached, ending, neighbours), ending.start)
    return diverged(nearest)


def estimate(asked: Asked, usage: Usage, text: str, neighbours: Neighbours, *, minimum: int) -> Diagnosis:
    """Estimates the cause for a provider that reports only counts.

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
        return Diagnosis(CacheCause.SHORT, common, nearest if nearest is not None and nearest.goes_on else None)
    if elsewhere > max(common, reached) + step:
        return Diagnosis(CacheCause.SALT, reached)
    if nearest is None:
        return Diagnosis(CacheCause.FIRST, reached)
    whole = common == len(text)
    if whole and (reached + step >= len(text) or usage.cached_tokens >= minimum > 0):
        return Diagnosis(CacheCause.HIT, common)  # all that the provider stores of it
    # A provider that stores what a request marks stores nothing of a part in which something changes, however late.
    if common > reached + step and (whole or not usage.cache_write_tokens):
        ended = any(found.had_ended(asked) for found in neighbours.same_salt if found.common > reached + step)
        return Diagnosis(CacheCause.EVICTED if ended else CacheCause.CONCURRENT, reached)
    return diverged(nearest)


def diverged(nearest: Neighbour) -> Diagnosis:
    """Diagnoses new text where the nearest earlier prompt differs; `of_sources` refines the cause."""
    if nearest.apart:
        return Diagnosis(CacheCause.SALT, nearest.common)
    return Diagnosis(CacheCause.NEW, nearest.common, nearest if nearest.goes_on else None)


def of_sources(here: Source | None, earlier: Source | None) -> CacheCause:
    """Finds the cause by the sources of two texts that differ. Causes by argument are decided later."""
    if here is None or earlier is None or not _same_line(here, earlier):
        return CacheCause.OTHER_LINE
    if here.kind in (SourceKind.GENERATED, SourceKind.CHOSEN):
        return CacheCause.GENERATED
    return CacheCause.VOLATILE


def _lost(asked: Asked, cached: int, ending: Ending, neighbours: Neighbours) -> CacheCause:
    """Finds the cause where earlier prompts agree beyond the cached part."""
    with_tokens = [found for found, shared in zip(neighbours.same_salt, ending.shared, strict=True) if shared > cached]
    if not with_tokens:
        return CacheCause.SEAM
    return CacheCause.EVICTED if any(found.had_ended(asked) for found in with_tokens) else CacheCause.CONCURRENT


def _same_line(one: Source, other: Source) -> bool:
    """Returns whether both are of one kind, from the same line of the program."""
    if one.kind != other.kind or one.name != other.name:
        return False
    if one.place is None or other.place is None:
        return one.place is other.place
    return (one.place.file, one.place.number) == (other.place.file, other.place.number)
