"""Pictures in the engine: tiles by number, and what a tower has seen in them.

A picture's tiles are kept from the message that brings it until nobody needs it any more. What the tower makes of them
is computed when a step first has a row of the picture, and kept while there is room: a prompt that is computed in
chunks sees its picture once. Behind that it is the keys in the pool that are found again.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from ...lang.errors import RequestError
from ..core.batch import PictureRows
from ..core.clock import Clock, SystemClock
from ..core.counters import Stopwatch
from ..core.messages import EnginePicture
from ..core.model import Given, VisionModel
from .references import HeldPictures

FEATURE_BYTES = 128 << 20  # 28 pictures of 576 rows of 4,096 bfloat16 numbers


class VisionStore:
    """A `batch.PictureStore` that answers rows of pictures.

    Args:
        vision: what sees.
        feature_bytes: embeddings that are kept; those of the last picture are kept in any case.
        clock: of the seconds that the tower takes. On a device that computes beside the CPU these are the seconds in
            which it is told what to compute.
    """

    def __init__(self, vision: VisionModel, *, feature_bytes: int = FEATURE_BYTES, clock: Clock | None = None) -> None:
        self.both_ways = vision.both_ways
        self._vision = vision
        self._room = feature_bytes
        self._pictures: HeldPictures[EnginePicture] = HeldPictures()
        self._features: OrderedDict[int, torch.Tensor] = OrderedDict()  # by number, the last used one last
        self._kept_bytes = 0
        self._watch = Stopwatch(clock or SystemClock())
        self._computed = self._found = 0

    @property
    def feature_bytes(self) -> int:
        """Of embeddings that are kept, at most."""
        return self._room

    def see_largest(self) -> None:
        """The tower's work for the largest picture that there can be, for who measures it."""
        with torch.inference_mode():
            self._vision.encode(self._vision.largest())

    def put(self, picture: EnginePicture) -> None:
        """Keeps a picture's tiles.

        Raises:
            RequestError: they are not what the message or the model says.
        """
        tokens = self._vision.tokens(picture)
        if tokens != picture.tokens:
            raise RequestError(
                f"picture {picture.number} of {picture.width} × {picture.height} pixels has {tokens} tokens in this "
                f"model, not {picture.tokens}; write tokens={tokens}"
            )
        self._pictures.put(picture.number, picture)

    def forget(self, number: int) -> None:
        self._pictures.forget(number)
        self._drop(number)

    def tokens(self, number: int) -> int | None:
        picture = self._pictures.known(number)
        return None if picture is None else picture.tokens

    def hold(self, number: int) -> object:
        return self._pictures.hold(number)

    def given(self, parts: Sequence[PictureRows]) -> Given:
        """What the rows of a step's pictures are given."""
        values = torch.cat([self._of(part.number)[part.offset : part.offset + part.rows] for part in parts])
        # Made where they are needed: a device would be waited for to copy them.
        device = values.device
        rows = torch.cat([torch.arange(part.first, part.first + part.rows, device=device) for part in parts])
        return Given(rows, values)

    def facts(self) -> dict[str, int | float]:
        """Cumulative. `picture_features_found`: parts of a picture that came into a step when the tower had seen it."""
        return {
            "pictures_computed": self._computed,
            "picture_features_found": self._found,
            "tower_seconds": self._watch.seconds,
        }

    def _of(self, number: int) -> torch.Tensor:
        """The embeddings of a picture: [tokens, hidden]"""
        kept = self._features.get(number)
        if kept is not None:
            self._features.move_to_end(number)
            self._found += 1
            return kept
        picture = self._pictures.find(number)
        assert picture is not None, "requests hold their pictures"
        with self._watch, torch.inference_mode():
            made = self._vision.encode(picture)
        assert len(made) == picture.tokens, "the model has said how many rows there are"
        self._computed += 1
        self._features[number] = made
        self._kept_bytes += made.nbytes
        while self._kept_bytes > self._room and len(self._features) > 1:
            self._drop(next(iter(self._features)))
        return made

    def _drop(self, number: int) -> None:
        features = self._features.pop(number, None)
        if features is not None:
            self._kept_bytes -= features.nbytes
