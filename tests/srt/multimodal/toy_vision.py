"""A vision model that sees the number of a picture, and no more."""

import torch
from umbel.srt.core.batch import PictureGrid
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import EnginePicture

HIDDEN = 48


class ToyVision:
    """A `models.vision.model.VisionModel`: as many tokens as a picture has bytes, random embeddings from its number."""

    def __init__(
        self,
        clock: VirtualClock | None = None,
        *,
        both_ways: bool = False,
        on_axes: bool = False,
        added_layers: int = 0,
    ) -> None:
        self.both_ways = both_ways
        self.on_axes = on_axes
        self.added_layers = added_layers
        self.encoded: list[int] = []
        self._clock = clock

    def tokens(self, picture: EnginePicture) -> int:
        return len(picture.pixels)

    def grid(self, picture: EnginePicture) -> PictureGrid | None:
        return PictureGrid(1, len(picture.pixels)) if self.on_axes else None

    def largest(self) -> EnginePicture:
        return picture(number=0, tokens=50)

    def encode(self, picture: EnginePicture) -> torch.Tensor:
        self.encoded.append(picture.number)
        if self._clock is not None:
            self._clock.advance(0.25)
        generator = torch.Generator().manual_seed(picture.number)
        return torch.randn((len(picture.pixels), HIDDEN * (1 + self.added_layers)), generator=generator)


def picture(number: int, tokens: int) -> EnginePicture:
    return EnginePicture(number, tokens, 4, 3, 0, 0, 1, 1, bytes(tokens))
