"""The engine's pictures: tiles by number, and the embeddings that the vision tower computed.

A picture's tiles are kept from the message that brings it until no request needs it. Its embeddings are computed when a
step first has a row of the picture, and kept while there is room, so the chunks of one prefill need one pass of the
tower. Later requests find the keys in the pool.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from ...lang.errors import RequestError
from ..core.batch import Given, PictureGrid, PictureRows, VisionModel
from ..core.instruments import Clock, Stopwatch, SystemClock
from ..core.messages import EnginePicture
from .sequence import HeldPictures

FEATURE_BYTES = 128 << 20  # 28 pictures of 576 rows of 4,096 bfloat16 numbers


class VisionStore:
    """Encodes pictures for a runner, as a `batch.PictureStore`.

    Args:
        vision: the vision tower.
        feature_bytes: size of the kept embeddings; those of the last picture are kept in any case.
        clock: measures the seconds of the tower; on an asynchronous device only those of its launches.
    """

    def __init__(self, vision: VisionModel, *, feature_bytes: int = FEATURE_BYTES, clock: Clock | None = None) -> None:
        self.both_ways = vision.both_ways
        self.on_axes = vision.on_axes
        self.added_layers = vision.added_layers
        self._vision = vision
        self._room = feature_bytes
        self._pictures: HeldPictures[EnginePicture] = HeldPictures()
        self._features: OrderedDict[int, torch.Tensor] = OrderedDict()  # by number, the last used one last
        self._kept_bytes = 0
        self._watch = Stopwatch(clock or SystemClock())
        self._computed = self._found = 0

    @property
    def feature_bytes(self) -> int:
        """Largest size of the kept embeddings."""
        return self._room

    def see_largest(self) -> None:
        """Encodes the largest possible picture, to measure the tower's memory."""
        with torch.inference_mode():
            self._vision.encode(self._vision.largest())

    def put(self, picture: EnginePicture) -> None:
        """Keeps a picture's tiles.

        Raises:
            RequestError: they do not fit the message or the model.
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

    def grid(self, number: int) -> PictureGrid | None:
        picture = self._pictures.known(number)
        return None if picture is None else self._vision.grid(picture)

    def digest(self, number: int) -> bytes | None:
        picture = self._pictures.find(number)
        return picture.digest or None if picture is not None else None

    def hold(self, number: int) -> object:
        return self._pictures.hold(number)

    def given(self, parts: Sequence[PictureRows]) -> Given:
        """Returns the embeddings for the picture rows of a step."""
        values = torch.cat([self._of(part.number)[part.offset : part.offset + part.rows] for part in parts])
        # Made on their device: a copy would wait for the device.
        device = values.device
        rows = torch.cat([torch.arange(part.first, part.first + part.rows, device=device) for part in parts])
        values, *added = values.chunk(1 + self.added_layers, dim=-1)
        return Given(rows, values, tuple(added))

    def facts(self) -> dict[str, int | float]:
        """Returns cumulative counters. `picture_features_found`: picture parts in steps whose embeddings were kept."""
        return {
            "pictures_computed": self._computed,
            "picture_features_found": self._found,
            "tower_seconds": self._watch.seconds,
        }

    def _of(self, number: int) -> torch.Tensor:
        """Returns the embeddings of a picture: [tokens, (1 + added_layers) · hidden]"""
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
