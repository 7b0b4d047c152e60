"""A vision model that sees the number of a picture, and no more."""

import torch
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import EnginePicture

HIDDEN = 48


class ToyVision:
    """A `models.vision.model.VisionModel`: as many tokens as a picture has bytes, random embeddings from its number."""

    def __init__(self, clock: VirtualClock | None = None, *, both_ways: bool = False) -> None:
        self.both_ways = both_ways
        self.encoded: list[int] = []
        self._clock = clock

    def tokens(self, picture: EnginePicture) -> int:
        return len(picture.pixels)

    def largest(self) -> EnginePicture:
        return picture(number=0, tokens=50)

    def encode(self, picture: EnginePicture) -> torch.Tensor:
        self.encoded.append(picture.number)
        if self._clock is not None:
            self._clock.advance(0.25)
        generator = torch.Generator().manual_seed(picture.number)
        return torch.randn((len(picture.pixels), HIDDEN), generator=generator)


def picture(number: int, tokens: int) -> EnginePicture:
    return EnginePicture(number, tokens, 4, 3, 0, 0, 1, 1, bytes(tokens))
