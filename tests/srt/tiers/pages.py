"""Small pages for tests of tiers: names that say where they belong, payloads that say their place."""

import numpy as np
from umbel.srt.tiers.tier import Payload

PAGE = 1_000  # bytes


def chain(letter: str, count: int) -> list[bytes]:
    """Returns the names of the first pages of a sequence."""
    return [f"{letter}{place}".encode().ljust(32, b".") for place in range(count)]


def pages(count: int, value: int = 0) -> list[Payload]:
    return [np.full(PAGE, value + place, dtype=np.uint8) for place in range(count)]
