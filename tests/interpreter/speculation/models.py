"""Models for these tests: what they say is a function of the text before it, token by token, as a greedy model's is."""

import random
import zlib

from umbel.interpreter.backends.echo import Echo
from umbel.lang.protocol import Capabilities

PAID = Capabilities("paid", speculation=True, asks_again=True, stop_regex=True, logprobs=True)
BLIND = Capabilities("blind", speculation=True, asks_again=True, stop_regex=True)  # tells nothing of its tokens
ASKED = Capabilities("asked", speculation=True, asks_again=True, stop_regex=True, continues=False)
FREE = Capabilities("free", asks_again=True, stop_regex=True, logprobs=True)

MOST = 900  # a text of so many characters, or twice, or three times as many, has an end
_TAILS = (12, 8, 5, 3, 2, 1)
_ODD = ("\n", " ", ";", "x", "", " and", ".", "\n\n", "7")


class Follower:
    """Goes on with `text` wherever what stands before looks like it, and says something else now and then.

    Args:
        text: what it has in mind.
        deviates: characters out of 1000 at which it says something else.
        seed: which ones.
    """

    def __init__(self, text: str, deviates: int = 0, seed: int = 0) -> None:
        self._text = text
        self._deviates = deviates
        self._seed = seed
        self._known: dict[str, str] = {}

    def __call__(self, prompt: str) -> str:
        said: list[str] = []
        tail, length = prompt[-40:], len(prompt)
        while length % MOST and (piece := self._remembered(tail)):
            said.append(piece)
            tail, length = (tail + piece)[-40:], length + len(piece)
        return "".join(said)

    def _remembered(self, tail: str) -> str:
        piece = self._known.get(tail)
        if piece is None:
            piece = self._known[tail] = self._next(tail)
        return piece

    def _next(self, tail: str) -> str:
        roll = zlib.crc32(f"{self._seed}.{tail}".encode())
        if roll % 1000 < self._deviates:
            return random.Random(roll).choice(_ODD)
        for count in _TAILS:
            place = self._text.find(tail[-count:]) if len(tail) >= count else -1
            if place >= 0:
                return self._text[place + count : place + count + 1]
        return "\n"


def follower(text: str, capabilities: Capabilities = PAID) -> Echo:
    """A backend with such a model."""
    return Echo(Follower(text), capabilities=capabilities)
