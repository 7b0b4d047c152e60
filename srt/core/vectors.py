"""Describes how a model makes a vector of a text: an embedding, or the logits of a classifier.

    hidden states ─ pooling ─► [hidden] ─ dense maps ─► [dimensions] ─ first n of them ─ normalisation ─► vector

`weights/vector_config.py` reads the description from a checkpoint, and `weights/vector_head.py` its tensors. The
gateway checks requests by it, so nothing here needs torch.
"""

from dataclasses import dataclass

from ...lang.protocol import VectorInfo


@dataclass(frozen=True, slots=True)
class DenseMap:
    """A linear map after pooling, in a folder of its own. `activation`: "" or "tanh"."""

    folder: str
    inputs: int
    outputs: int
    biased: bool
    activation: str


@dataclass(frozen=True, slots=True)
class VectorConfig:
    """Describes the vectors of a model.

    Attributes:
        dimensions: of a vector.
        every_row: the hidden states of all tokens are averaged; else the last one is taken.
        normalized: to length 1.
        maps: applied to the pooled state, in order.
        labels: of a classifier, whose logits the vector is then; 0: the vector is an embedding.
        yes_first: of two labels the first means "relevant" in the checkpoint; in vectors it is always the second.
        answers: the tokens of "yes" and "no" where the model ranks by its next token.
        both_ways: tokens see those after them, so a text runs whole, and nothing of it is cached.
        generates: it has an output head, and tokens see those before them only.
        refused: why texts get no vectors, as a clause; "" if they do.
    """

    dimensions: int
    every_row: bool = False
    normalized: bool = True
    maps: tuple[DenseMap, ...] = ()
    labels: int = 0
    yes_first: bool = False
    answers: tuple[int, int] | None = None
    both_ways: bool = False
    generates: bool = True
    refused: str = ""

    @property
    def ranks(self) -> bool:
        """Returns whether it tells how relevant texts are to a query."""
        return not self.refused and (self.labels in (1, 2) or self.answers is not None)

    @property
    def info(self) -> VectorInfo:
        """Returns what clients are told."""
        embeds = not (self.labels or self.refused)
        return VectorInfo(self.dimensions if embeds else 0, self.ranks, self.generates)


NO_VECTORS = VectorConfig(0, refused="its runner gives no hidden states")
