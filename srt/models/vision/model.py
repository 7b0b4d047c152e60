"""The protocol of a model that sees: a picture in, rows of the decoder out."""

from typing import Protocol

import torch

from ...engine_protocol import EnginePicture


class VisionModel(Protocol):
    """`sight.Sight` for the families of `registry`."""

    both_ways: bool  # rows of a picture see all of it; else only what is before them

    def tokens(self, picture: EnginePicture) -> int:
        """How many rows `encode` makes of it. Raises RequestError for a picture that was cut for another model."""

    def largest(self) -> EnginePicture:
        """A picture of as many tiles as there can be."""

    def encode(self, picture: EnginePicture) -> torch.Tensor:
        """[tokens, hidden] in the model's dtype: what stands in place of embeddings, not scaled."""
