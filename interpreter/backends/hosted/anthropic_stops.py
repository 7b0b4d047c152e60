"""Stop strings that the provider can take, and white space that it cannot.

It refuses stop sequences of white space alone, which are the most common ones ("\\n" ends a line), and white space at
the end of an answer that it is asked to continue.
"""

from collections.abc import Sequence


def sendable(stops: Sequence[str], lead: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Stops for the provider, and stops to be looked for here.

    A stop of words stays here as well where the provider would find it before one of ours that ends earlier: one that
    contains a blank stop, or begins with the end of one. `lead`: white space that the answer may begin with and that
    is not part of the text, which no stop may reach into.
    """
    blank = [stop for stop in stops if not stop.strip()]
    sent = tuple(stop for stop in stops if stop.strip() and not any(_meet(stop, other) for other in (*blank, lead)))
    return sent, tuple(stop for stop in stops if stop not in sent)


def _meet(stop: str, blank: str) -> bool:
    """Whether `blank` can end inside an occurrence of `stop`."""
    return bool(blank) and (blank in stop or any(stop.startswith(blank[place:]) for place in range(len(blank))))


class Lead:
    """White space that the request left out at its end, taken from the beginning of the answer, where that repeats it.

    The answer may repeat all of it, its beginning, or nothing.
    """

    def __init__(self, text: str) -> None:
        self._left = text

    def take_from(self, text: str) -> str:
        """The next piece of an answer without what it repeats."""
        same = 0
        while same < min(len(self._left), len(text)) and self._left[same] == text[same]:
            same += 1
        self._left = "" if same < len(text) else self._left[same:]
        return text[same:]
