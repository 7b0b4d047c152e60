"""The interface of vision towers and decoders: the tower turns a picture into rows that the decoder embeds."""

from dataclasses import dataclass
from typing import Protocol

import torch

from .messages import EnginePicture


@dataclass(frozen=True, slots=True)
class Given:
    """G rows whose embeddings come from a vision tower. The decoder takes them as they are and does not scale them."""

    rows: torch.Tensor  # int64 [G] ascending
    values: torch.Tensor  # [G, hidden] in the model's dtype


class VisionModel(Protocol):
    """Encodes pictures. Implemented by `models.vision.sight.Sight` for all of its families."""

    both_ways: bool  # rows of a picture see all of it; else only what is before them

    def tokens(self, picture: EnginePicture) -> int:
        """Returns the number of rows of `encode`. Raises RequestError for a picture cut for another model."""

    def largest(self) -> EnginePicture:
        """Returns a picture of as many tiles as there can be."""

    def encode(self, picture: EnginePicture) -> torch.Tensor:
        """Returns [tokens, hidden] in the model's dtype, to be put in place of embeddings without scaling."""
