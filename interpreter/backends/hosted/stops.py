"""Finds stop strings in this process, where a provider takes none or too few of them.

Anthropic refuses stop sequences of white space alone, which are the most common ones ("\\n" ends a line), and white
space at the end of an answer that it is asked to continue: `sendable` and `Lead`.
"""

from collections.abc import Sequence


class StopCutter:
    """Cuts a streamed text at its first stop string.

    The stop that ends first counts, and of those that end together the longest. Text is given out as soon as no stop
    can begin in it any more:

        given out | held back: the beginning of a stop, perhaps | what comes
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Takes more text. Returns the text that is certain now; nothing after a match."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            certain, self._held = self._held[:start], ""
            return certain
        keep = stop_begun(self._held, self._stops)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return certain

    def end(self) -> str:
        """Ends the text. Returns the text that was held back."""
        rest, self._held = self._held, ""
        return rest


def stop_begun(text: str, stops: tuple[str, ...]) -> int:
    """Returns the length of the longest suffix of the text that is a prefix of a stop."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0


def sendable(stops: Sequence[str], lead: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits stops into those sent to the provider and those found here.

    The provider cuts its stop away and all after it. So a stop of words stays here as well when a stop of ours may end
    inside it: when it contains that one, or begins with its end. `lead`: white space that the answer may begin with and
    that is not part of the text, which no stop may reach into.
    """
    here = {stop for stop in stops if not stop.strip()}
    while met := {stop for stop in stops if stop not in here and any(_meet(stop, each) for each in (*here, lead))}:
        here |= met
    return tuple(stop for stop in stops if stop not in here), tuple(stop for stop in stops if stop in here)


def _meet(stop: str, ours: str) -> bool:
    """Returns whether `ours` can end inside an occurrence of `stop`."""
    return bool(ours) and (ours in stop or any(stop.startswith(ours[place:]) for place in range(len(ours))))


class Lead:
    """Removes white space from the beginning of the answer that the request left out at its end.

    The answer may repeat all of it, its beginning, or nothing.
    """

    def __init__(self, text: str) -> None:
        self._left = text

    def take_from(self, text: str) -> str:
        """Returns the next piece of an answer without the repeated white space."""
        same = 0
        while same < min(len(self._left), len(text)) and self._left[same] == text[same]:
            same += 1
        self._left = "" if same < len(text) else self._left[same:]
        return text[same:]
