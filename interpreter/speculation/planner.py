"""Whether asking for more text is worth its price, learned from what came of it.

A program that hits pays for the prompt once and not for every gen; one that misses has paid for text that is not read.
Prices are of input and output tokens, or 1 to 4 where no price is known, as most providers have it.

    gain   sum over the gens that follow:  chance of reaching it · tokens of the prompt it would send · price of input
    waste  (tokens asked for - tokens expected to be taken) · price of output
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ...lang.sampling import SamplingParams
from .lookahead import Coming

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
    """Of one program, for all of its runs on all threads.

    Whether a text fits is learned by site: the name of a gen and that of the gen before it, (before, name). How long
    texts are is learned by name.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: OrderedDict[tuple[str, str], _Site] = OrderedDict()
        self._longest: OrderedDict[str, int] = OrderedDict()  # tokens
        self._refusals: dict[tuple[str, Extra], int] = {}

    # -------------------------------------------------------------------------------- learning

    def note(self, site: tuple[str, str], hit: bool) -> None:
        """Whether text at hand was what the gen at this site wanted."""
        with self._lock:
            found = self._sites.setdefault(site, _Site())
            if hit:
                found.hits += 1
            else:
                found.misses += 1
            _bound(self._sites, site)

    def note_length(self, name: str, tokens: int) -> None:
        """Notes how long a text was that the gen of this name got."""
        with self._lock:
            self._longest[name] = max(self._longest.get(name, 0), tokens)
            _bound(self._longest, name)

    def note_refusal(self, backend: str, what: Extra) -> None:
        """This backend refuses calls with something more, and takes the same without."""
        with self._lock:
            self._refusals[backend, what] = self._refusals.get((backend, what), 0) + 1

    def refuses(self, backend: str, what: Extra) -> bool:
        """So often that it is no accident."""
        with self._lock:
            return self._refusals.get((backend, what), 0) >= MOST_REFUSALS

    def chance(self, site: tuple[str, str]) -> float:
        """That text at hand fits: the mean of a Beta distribution."""
        with self._lock:
            found = self._sites.get(site)
        return _share(found.hits, found.misses) if found is not None else _share(PRIOR_HITS, PRIOR_MISSES)

    def tokens(self, name: str, sampling: SamplingParams) -> int:
        """Says how many tokens to ask for so that the text of this gen is whole."""
        with self._lock:
            longest = self._longest.get(name, 0)
        expected = math.ceil(longest * MARGIN) + 1 if longest else UNKNOWN_TOKENS
        return min(sampling.max_tokens, expected)

    # -------------------------------------------------------------------------------- planning

    def worthwhile(self, name: str, coming: Sequence[Coming], prompt_tokens: int, price: tuple[float, float]) -> int:
        """Says how many tokens to ask for beyond those of gen `name`; 0 when it does not pay.

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
    """About how many tokens a text has."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def _bound(table: OrderedDict[Key, Any], key: Key) -> None:  # Any: whatever the table holds
    """`key` was used last; what was not used for the longest time goes when there is too much."""
    table.move_to_end(key)
    if len(table) > MOST_SITES:
        table.popitem(last=False)


def _share(hits: float, misses: float) -> float:
    return hits / (hits + misses)
