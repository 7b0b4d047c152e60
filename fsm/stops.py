"""Whatever ends a text by what it says: stop strings, expressions, or both."""

from collections.abc import Iterable
from typing import Protocol

from .stop import StopAutomaton, StopMatch, StopMatcher
from .stop_regex import PatternMatcher, StopPatterns


class Matcher(Protocol):
    """The cursor of one stream. Feed bytes until a match; whoever goes on behind one sets `match` to None before."""

    match: StopMatch | None

    @property
    def pending(self) -> int:
        """How many of the last bytes could be the beginning of a stop."""

    def feed(self, data: bytes) -> StopMatch | None:
        """The first stop that ends in `data`, or None; what follows it is not looked at. The longest of those that
        end together."""


class Stops(Protocol):
    """Compiled, and shared by every request with the same stops."""

    def matcher(self) -> Matcher: ...


def stops_of(strings: Iterable[str], patterns: Iterable[str]) -> Stops | None:
    """None when there is nothing to look for.

    Raises:
        ConstraintRefused: an expression that cannot be used; the message names it.
    """
    stops, expressions = tuple(strings), tuple(patterns)
    if stops and expressions:
        return _Both(StopAutomaton(stops), StopPatterns(expressions))
    if expressions:
        return StopPatterns(expressions)
    return StopAutomaton(stops) if stops else None


class _Both:
    def __init__(self, strings: StopAutomaton, patterns: StopPatterns) -> None:
        self._strings = strings
        self._patterns = patterns

    def matcher(self) -> Matcher:
        return _BothMatcher(self._strings.matcher(), self._patterns.matcher())


class _BothMatcher:
    """Byte by byte, so that neither has seen more than the other when one of them matches."""

    def __init__(self, strings: StopMatcher, patterns: PatternMatcher) -> None:
        self._matchers: tuple[Matcher, ...] = (strings, patterns)
        self.match: StopMatch | None = None

    @property
    def pending(self) -> int:
        return 0 if self.match else max(matcher.pending for matcher in self._matchers)

    def feed(self, data: bytes) -> StopMatch | None:
        assert self.match is None, "the stream has ended"
        for index in range(len(data)):
            found = [match for each in self._matchers if (match := each.feed(data[index : index + 1])) is not None]
            if found:
                for matcher in self._matchers:
                    matcher.match = None
                self.match = min(found, key=lambda match: match.start)
                return self.match
        return None
