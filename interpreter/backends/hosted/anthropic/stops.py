"""Stop strings that the provider can take, and white space that it cannot.

It refuses stop sequences of white space alone, which are the most common ones ("\\n" ends a line), and white space at
the end of an answer that it is asked to continue.
"""

from collections.abc import Sequence


def sendable(stops: Sequence[str], lead: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Stops for the provider, and stops to be looked for here.

    The provider cuts its stop away and all behind it. So a stop of words stays here as well when a stop of ours may end
    inside it: when it contains that one, or begins with its end. `lead`: white space that the answer may begin with and
    that is not part of the text, which no stop may reach into.
    """
    here = {stop for stop in stops if not stop.strip()}
    while met := {stop for stop in stops if stop not in here and any(_meet(stop, each) for each in (*here, lead))}:
        here |= met
    return tuple(stop for stop in stops if stop not in here), tuple(stop for stop in stops if stop in here)


def _meet(stop: str, ours: str) -> bool:
    """Whether `ours` can end inside an occurrence of `stop`."""
    return bool(ours) and (ours in stop or any(stop.startswith(ours[place:]) for place in range(len(ours))))


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
