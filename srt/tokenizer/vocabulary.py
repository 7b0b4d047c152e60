"""The vocabulary: the bytes of every token, all that an engine needs of a tokenizer.

One blob and one row of offsets, so that a vocabulary of 262,144 tokens loads in milliseconds and is
shared by mapping instead of being a quarter of a million objects. Control tokens stand for no bytes.

    file:  magic · version · number of tokens · length of blob · SHA-256 of the rest · offsets · blob
"""

import struct
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...lang.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGIC = b"umbelvoc"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ32s")


class Vocabulary:
    """Maps token ids to bytes. Immutable.

    token i is blob[offsets[i] : offsets[i + 1]]; offsets has one entry more than there are tokens.
    """

    __slots__ = ("_starts", "blob", "offsets")

    def __init__(self, blob: bytes, offsets: "NDArray[np.uint32]") -> None:
        self.blob = blob
        self.offsets = offsets
        self._starts = np.ascontiguousarray(offsets, np.uint32).data  # gives plain integers, faster than the array

    @classmethod
    def of(cls, tokens: Iterable[bytes]) -> "Vocabulary":
        """Makes a vocabulary from the bytes of every token, in the order of their ids."""
        table = list(tokens)
        lengths = np.fromiter(map(len, table), np.uint32, len(table))
        offsets = np.zeros(len(table) + 1, np.uint32)
        np.cumsum(lengths, out=offsets[1:])
        return cls(b"".join(table), offsets)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[bytes]:
        return map(self.token_bytes, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self.blob == other.blob and np.array_equal(self.offsets, other.offsets)

    __hash__ = None  # type: ignore[assignment]  # compared by content, never a key

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token; b"" for control tokens and for ids that only pad the model's matrix."""
        assert token_id >= 0, "token ids are not negative"
        return self.blob[self._starts[token_id] : self._starts[token_id + 1]]

    # ------------------------------------------------------------------------------------ files

    def to_bytes(self) -> bytes:
        """Returns the file's content."""
        body = self.offsets.astype("<u4").tobytes() + self.blob
        return _HEADER.pack(_MAGIC, _VERSION, len(self), len(self.blob), sha256(body).digest()) + body

    @classmethod
    def of_bytes(cls, content: bytes, path: Path) -> "Vocabulary":
        """Parses the output of `to_bytes`. `path`: its file, for messages.

        Raises:
            ModelError: the content is damaged.
        """
        if len(content) < _HEADER.size:
            raise _damaged(path)
        magic, version, count, blob_length, digest = _HEADER.unpack_from(content)
        body = memoryview(content)[_HEADER.size :]
        if (magic, version) != (_MAGIC, _VERSION) or len(body) != 4 * (count + 1) + blob_length:
            raise _damaged(path)
        if sha256(body).digest() != digest:
            raise _damaged(path)
        offsets = np.frombuffer(body, "<u4", count + 1).astype(np.uint32, copy=False)
        if offsets[0] != 0 or offsets[-1] != blob_length or (count and (offsets[1:] < offsets[:-1]).any()):
            raise _damaged(path)
        return cls(bytes(body[4 * (count + 1) :]), offsets)


def _damaged(path: Path) -> ModelError:
    return ModelError(f"the vocabulary {path} is damaged; delete it and open the model again")
