"""Stop strings that are looked for here, where a provider takes none, too few, or must not see them."""


class StopCutter:
    """A text that grows, up to its first stop string.

    The stop that ends first counts, and of those that end together the longest. Text is given out as soon as no stop
    can begin in it any more:

        given out | held back: the beginning of a stop, perhaps | what comes
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """More of the text → what of it is certain now; nothing behind a match."""
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
        """The text has ended: what was held back."""
        rest, self._held = self._held, ""
        return rest


def stop_begun(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of the text that a stop begins with."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0
