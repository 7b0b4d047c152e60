"""Stop strings as one automaton over bytes (Aho and Corasick, 1975).

Tokens end where they like, stop strings too: a stop may begin inside one token and end inside a
later one. Feeding bytes finds the first stop however the tokens fall, and says how many of the
bytes seen so far could still become the beginning of a stop and must not be shown yet.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`start` and `end` are byte offsets in everything fed so far; `stop` is the string that matched."""

    start: int
    end: int
    stop: str


class StopAutomaton:
    """Compiled stop strings; immutable, shared by every request with the same stops.

    state = longest suffix of the input that is a prefix of some stop
    goto[state][byte] → state        fail links resolved on the way, cached in goto
    """

    __slots__ = ("_depth", "_fail", "_goto", "_output", "stops")

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(stops)
        self._goto: list[dict[int, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._output: list[str | None] = [None]
        for stop in self.stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for byte in stop.encode("utf-8"):
            following = self._goto[state].get(byte)
            if following is None:
                following = len(self._goto)
                self._goto.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._output.append(None)
                self._goto[state][byte] = following
            state = following
        self._output[state] = stop

    def _link(self) -> None:
        """Fail links breadth first; a state inherits the longest stop that is its suffix."""
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for byte, following in self._goto[state].items():
                fail = self._fail[state]
                while fail and byte not in self._goto[fail]:
                    fail = self._fail[fail]
                target = self._goto[fail].get(byte, 0)
                self._fail[following] = target if target != following else 0
                if self._output[following] is None:
                    self._output[following] = self._output[self._fail[following]]
                queue.append(following)

    def matcher(self) -> "StopMatcher":
        return StopMatcher(self)


class StopMatcher:
    """The cursor of one stream. Feed bytes until a match; after it, feeding is an error."""

    __slots__ = ("_automaton", "_seen", "_state", "match")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._seen = 0
        self.match: StopMatch | None = None

    @property
    def pending(self) -> int:
        """How many of the last bytes could be the beginning of a stop."""
        return 0 if self.match else self._automaton._depth[self._state]

    def feed(self, data: bytes) -> StopMatch | None:
        """The first stop that ends in `data`, or None. Of stops that end together the longest wins."""
        assert self.match is None, "the stream has ended"
        automaton = self._automaton
        for offset, byte in enumerate(data):
            state = self._state
            while state and byte not in automaton._goto[state]:
                state = automaton._fail[state]
            self._state = automaton._goto[state].get(byte, 0)
            stop = automaton._output[self._state]
            if stop is not None:
                end = self._seen + offset + 1
                self.match = StopMatch(end - len(stop.encode("utf-8")), end, stop)
                self._seen = end
                return self.match
        self._seen += len(data)
        return None
