"""Collects the steps queued after a `gen`, and decides whether requesting more text for them pays off.

    gen("name") │ "\\nJob: "  gen("job")  "\\nAge: "  gen("age") │ end of the turn
                  before      op          before      op

It decides from the hit rates of earlier calls.

A hit saves the prompt of the next gen; a miss has paid for unused output. Prices are of input and output tokens, or 1
to 4 where no price is known, as with most providers.

    gain   sum over the gens that follow:  chance of reaching it · tokens of the prompt it would send · price of input
    waste  (tokens asked for - tokens expected to be taken) · price of output
"""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ...lang import ops
from ...lang.errors import DeadlineError
from ...lang.sampling import SamplingParams
from ..loop import wait_until_async
from ..steps import BranchOff, Gather, Mark, Step
from .replies import Field

if TYPE_CHECKING:
    from ..executor import StepQueue
    from ..run import Run


PATIENCE = 0.05  # seconds that a program has to say what follows, when it neither waits nor ends; a call takes more


@dataclass(frozen=True, slots=True)
class Coming:
    """A following gen, and the constant text between it and the previous one."""

    before: str
    name: str
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Outlook:
    """The steps that follow a gen.

    Attributes:
        literal: the constant text next in the queue.
        coming: the gens that follow with only constant text between them.
        closed: no later step can join them: a turn begins or ends, or unknown text comes.
    """

    literal: str
    coming: tuple[Coming, ...]
    closed: bool

    @property
    def says(self) -> bool:
        """True if anything follows."""
        return bool(self.literal or self.coming)

    def can_follow(self, field: Field) -> bool:
        """Returns whether a reply's text after `field` can match the program's next text. A stop string is no part of
        the field's text, so the next text has to begin with it."""
        if not self.coming:
            return not self.closed
        literal = self.coming[0].before
        if not literal or field.sampling.stop_regex or field.constraint is not None:
            return True
        return any(stop.startswith(literal) or literal.startswith(stop) for stop in field.sampling.stop)


# The parameters of a step that could be answered from the same reply, else None.
Takes = Callable[[Step], SamplingParams | None]

# Steps that append no text and ask nothing.
_SILENT = (ops.VarScopeBegin, ops.VarScopeEnd, ops.CachePoint, BranchOff, Mark, Gather)


def read(steps: Iterable[Step], takes: Takes) -> Outlook:
    """Reads a stream's queued steps."""
    coming: list[Coming] = []
    literal = before = ""
    for step in steps:
        match step.op:
            case ops.ConstantText(text):
                before += text
                if not coming:
                    literal = before
            case ops.Gen(name) | ops.Select(name):
                sampling = takes(step)
                if sampling is None:
                    return Outlook(literal, tuple(coming), closed=True)
                coming.append(Coming(before, name or "", sampling))
                before = ""
            case op if isinstance(op, _SILENT):
                continue
            case _:
                return Outlook(literal, tuple(coming), closed=True)
    return Outlook(literal, tuple(coming), closed=False)


async def look(queue: "StepQueue", run: "Run", takes: Takes, enough: Callable[[Outlook], bool]) -> Outlook:
    """Waits until `enough` of the following steps are queued, or the program adds none, and returns them."""
    assert run.speculation is not None, "only streams of runs that speculate look ahead"
    waits = run.speculation.waits

    def ready() -> bool:
        return run.ended or waits.waiting or enough(read(queue.upcoming(), takes))

    with suppress(DeadlineError):
        signals = (queue.pushed, run.changed, waits.changed)
        await wait_until_async(ready, signals, time.monotonic() + PATIENCE, "what follows")
    seen = read(queue.upcoming(), takes)
    return Outlook(seen.literal, seen.coming, seen.closed or run.ended)


MOST_SITES = 1024  # and names, of one program; those that are made up on the way do not fill the memory
# A beginning of two hits and a miss: programs that ask for speculation were mostly written for it.
PRIOR_HITS, PRIOR_MISSES = 2.0, 1.0
UNKNOWN_TOKENS = 48  # of a field that has not been seen yet: those that end at a stop are short
MARGIN = 1.25  # times the longest text seen
BYTES_PER_TOKEN = 4  # of text that is given: an estimate for prices, never for what must hold
MOST_REFUSALS = 3  # after which a backend is asked for nothing more; one may have another reason

Key = TypeVar("Key")
Extra = Literal["more tokens", "logprobs"]  # what speculation adds to a call


@dataclass(slots=True)
class _Site:
    hits: float = PRIOR_HITS
    misses: float = PRIOR_MISSES


class Planner:
    """Statistics of one program, for all of its runs on all threads.

    Hits are counted by site: the names of the previous gen and of the gen, (before, name). Text lengths are kept by
    name.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: OrderedDict[tuple[str, str], _Site] = OrderedDict()
        self._longest: OrderedDict[str, int] = OrderedDict()  # tokens
        self._refusals: dict[tuple[str, Extra], int] = {}

    # -------------------------------------------------------------------------------- learning

    def note(self, site: tuple[str, str], hit: bool) -> None:
        """Counts a hit or a miss of surplus text at a site."""
        with self._lock:
            found = self._sites.setdefault(site, _Site())
            if hit:
                found.hits += 1
            else:
                found.misses += 1
            _bound(self._sites, site)

    def note_length(self, name: str, tokens: int) -> None:
        """Records the length of a text of this gen, in tokens."""
        with self._lock:
            self._longest[name] = max(self._longest.get(name, 0), tokens)
            _bound(self._longest, name)

    def note_refusal(self, backend: str, what: Extra) -> None:
        """Counts a refusal: the backend refused a call with this extra and took the same one without."""
        with self._lock:
            self._refusals[backend, what] = self._refusals.get((backend, what), 0) + 1

    def refuses(self, backend: str, what: Extra) -> bool:
        """Returns whether the backend has refused this extra at least MOST_REFUSALS times."""
        with self._lock:
            return self._refusals.get((backend, what), 0) >= MOST_REFUSALS

    def chance(self, site: tuple[str, str]) -> float:
        """Returns the probability that surplus text fits at a site: the mean of a Beta distribution."""
        with self._lock:
            found = self._sites.get(site)
        return _share(found.hits, found.misses) if found is not None else _share(PRIOR_HITS, PRIOR_MISSES)

    def tokens(self, name: str, sampling: SamplingParams) -> int:
        """Returns the number of tokens to request for the complete text of this gen."""
        with self._lock:
            longest = self._longest.get(name, 0)
        expected = math.ceil(longest * MARGIN) + 1 if longest else UNKNOWN_TOKENS
        return min(sampling.max_tokens, expected)

    # -------------------------------------------------------------------------------- planning

    def worthwhile(self, name: str, coming: Sequence[Coming], prompt_tokens: int, price: tuple[float, float]) -> int:
        """Returns the number of tokens to request beyond those of gen `name`; 0 when it does not pay.

        Args:
            coming: the gens that follow.
            prompt_tokens: of the call that is made anyway.
            price: of an input and an output token.
        """
        best = 0.0
        worth = 0
        asked = taken = saved = 0.0
        reached, before = 1.0, name
        for field in coming:
            site = (before, field.name)
            literal, tokens = tokens_of(field.before), self.tokens(field.name, field.sampling)
            reached *= self.chance(site)
            saved += reached * (prompt_tokens + asked + literal)
            asked += literal + tokens
            taken += reached * tokens
            gain = saved * price[0] - (asked - taken) * price[1]
            if gain > best:
                best, worth = gain, math.ceil(asked)
            before = field.name
        return worth


def tokens_of(text: str) -> int:
    """Estimates the number of tokens of a text."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def _bound(table: OrderedDict[Key, Any], key: Key) -> None:  # Any: whatever the table holds
    """Marks `key` as used, and evicts the least recently used entries beyond the limit."""
    table.move_to_end(key)
    if len(table) > MOST_SITES:
        table.popitem(last=False)


def _share(hits: float, misses: float) -> float:
    return hits / (hits + misses)
