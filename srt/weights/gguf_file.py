"""Reads the header of a GGUF file: metadata and the place of each tensor, with every length checked.

    magic · version · tensor count · key count
    key, value type, value                     × key count
    name, dimensions, type, offset             × tensor count
    padding · tensor data

The `gguf` library's own reader builds an array object per token string (20 s for a vocabulary of 262,144, against well
under a second here) and trusts the file's lengths. Here a count is compared with the bytes that are left before memory
is allocated for it, and strings of an array are decoded when they are read.

A model in several files comes in two forms:

    NAME-00001-of-00003.gguf   llama.cpp's split: each file is a GGUF with tensors of its own (`open_gguf`)
    NAME.gguf.part00, …        one file cut anywhere: the parts continue each other (`open_pieces`)
"""

import re
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import ModelError
from .catalog.mistaken_files import BEGINNING, mistaken_for
from .mapped_file import MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Limits that no real file exceeds; they bound the memory that a broken file can claim.
MAX_TENSORS = 1 << 20
MAX_KEYS = 1 << 16
MAX_DIMENSIONS = 4
MAX_NESTING = 2  # arrays of arrays

# Value types of the format, by number.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9

# Tensor types that can be dequantised, by number: name, elements of a block, bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


class Texts(Sequence[str]):
    """An array of strings in the header, each decoded when it is read.

    Raises ModelError when a string that is read is not UTF-8.
    """

    def __init__(self, path: Path, data: memoryview, places: "array[int]") -> None:
        self._path, self._data = path, data
        self._places = places  # of the first character of each, eight bytes of length before it; and of one more

    def __len__(self) -> int:
        return len(self._places) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start, end = self._places[index], self._places[index + 1] - 8
        try:
            return str(self._data[start:end], "utf-8")
        except UnicodeDecodeError:
            raise _damaged(self._path, f"the string at byte {start} is not UTF-8") from None


Scalar = int | float | bool | str
Value = Scalar | Texts | NDArray[np.generic] | list["Value"]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor and its place. `shape` is in torch's order: rows first."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int  # from the start of the file
    row_bytes: int  # bytes of one row, which is the last dimension
    num_bytes: int

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    def mapped(self) -> NDArray[np.uint8]:
        """Returns all rows [rows, row_bytes], in the mapping."""
        return self.file.view(self.offset, self.num_bytes).reshape(self.rows, self.row_bytes)

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """Reads rows [first, last) into memory: [last − first, row_bytes]."""
        raw = self.file.read(self.offset + first * self.row_bytes, (last - first) * self.row_bytes)
        return raw.reshape(last - first, self.row_bytes)


class Metadata(Mapping[str, Value]):
    """Reads metadata of one file by type. A value of another type is a ModelError that names the key."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()  # one number per layer, all the same
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong(key, "an integer (the same for every layer)")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            self._wrong(key, "a string")
        return value

    def texts(self, key: str) -> Texts:
        value = self._values.get(key)
        if not isinstance(value, Texts):
            self._wrong(key, "a list of strings")
        return value

    def numbers(self, key: str) -> NDArray[np.generic]:
        value = self._values.get(key)
        if not isinstance(value, np.ndarray):
            self._wrong(key, "a list of numbers")
        return value

    def _wrong(self, key: str, wanted: str) -> NoReturn:
        value = self._values.get(key, "missing")
        found = f"a list of {len(value)}" if isinstance(value, Texts | np.ndarray | list) else repr(value)[:60]
        found = found if key in self._values else "missing"
        raise ModelError(
            f"{self.path}: metadata {key!r} should be {wanted}, it is {found}; "
            "convert the model again with a current llama.cpp"
        )


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file, or all files of a split one.

    Attributes:
        path: the file, the first one of several; for messages.
        digest: SHA-256 of the metadata, the tokenizer included; hexadecimal.
        header_bytes: length of the header of the first file.
    """

    path: Path
    files: tuple[Path, ...]
    metadata: Metadata
    tensors: Mapping[str, GgufTensor]
    header_bytes: int
    digest: str

    @property
    def architecture(self) -> str:
        return self.metadata.text("general.architecture")


def open_gguf(path: Path) -> GgufFile:
    """Reads the header and maps the data. The first file of a split model opens all of them.

    Raises:
        ModelError: a file is missing, truncated, damaged or of another model, or holds a tensor type that cannot be
            read.
    """
    first = open_pieces([path], path)
    count = first.metadata.integer("split.count", 1)
    return first if count == 1 else _open_split(first, count)


def open_pieces(pieces: Sequence[Path], path: Path) -> GgufFile:
    """Opens one GGUF file that lies in several pieces, cut anywhere.

    Args:
        path: names the whole in messages.

    Raises:
        ModelError: as `open_gguf`.
    """
    return _Reader(path, MappedFile(pieces)).read()


_SPLIT_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")
MAX_SPLITS = 99_999  # by their names


def _open_split(first: GgufFile, count: int) -> GgufFile:
    """Opens the other files of llama.cpp's split next to the first one, and checks that they belong to each other."""
    path, number = first.path, first.metadata.integer("split.no", 0)
    named = _SPLIT_NAME.fullmatch(path.name)
    if not 1 < count <= MAX_SPLITS or named is None or int(named[3]) != count or int(named[2]) != number + 1:
        raise ModelError(
            f"{path} is part {number + 1} of {count} by its metadata; its name should say so, as llama.cpp writes it: "
            f"NAME-{number + 1:05}-of-{count:05}.gguf"
        )
    paths = [path.with_name(f"{named[1]}-{each + 1:05}-of-{count:05}.gguf") for each in range(count)]
    if number != 0:
        raise ModelError(f"{path} is part {number + 1} of {count} of a model; give the first one, {paths[0]}")
    absent = [each.name for each in paths if not each.is_file()]
    if absent:
        raise ModelError(
            f"{path} is the first of {count} files, and its folder lacks {', '.join(absent[:3])}"
            f"{f' and {len(absent) - 3} more' if len(absent) > 3 else ''}; download the whole model"
        )
    tensors = dict(first.tensors)
    for index, other_path in enumerate(paths[1:], start=1):
        other = open_pieces([other_path], other_path)
        belongs = other.metadata.integer("split.no", -1), other.metadata.integer("split.count", 1)
        twice = next((name for name in other.tensors if name in tensors), None)
        if belongs != (index, count) or twice is not None:
            reason = f"it holds {twice!r} again" if belongs == (index, count) else "its metadata says another part"
            raise ModelError(f"{other_path} is no part {index + 1} of {path.name}: {reason}; download the model again")
        tensors.update(other.tensors)
    promised = first.metadata.integer("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise ModelError(f"{path} and its parts hold {len(tensors)} tensors, not {promised}; download them again")
    return GgufFile(path, tuple(paths), first.metadata, tensors, first.header_bytes, first.digest)


class _Reader:
    """Reads the header from its first byte on."""

    def __init__(self, path: Path, file: MappedFile) -> None:
        self.path = path
        self.file = file
        self.data = file.content
        self.size = len(self.data)
        self.position = 0

    def read(self) -> GgufFile:
        tensor_count, key_count = self._preamble()
        begin = self.position
        metadata = Metadata(self.path, self._keys(key_count))
        digest = sha256(self.data[begin : self.position]).hexdigest()
        alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT)
        if alignment <= 0 or alignment & (alignment - 1):
            self._damaged(f"alignment {alignment} is not a power of two")
        infos = [self._tensor_info() for _ in range(tensor_count)]
        twice = next((name for name, seen in Counter(info[0] for info in infos).items() if seen > 1), None)
        if twice is not None:
            self._damaged(f"tensor {twice!r} occurs twice")
        start = -(-self.position // alignment) * alignment
        tensors = {
            name: self._place(name, shape, kind, start, offset, alignment) for name, shape, kind, offset in infos
        }
        end, before = start, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self._damaged(f"tensors {before!r} and {tensor.name!r} overlap")
            end, before = tensor.offset + tensor.num_bytes, tensor.name
        return GgufFile(self.path, self.file.paths, metadata, tensors, start, digest)

    def _preamble(self) -> tuple[int, int]:
        if bytes(self.data[:4]) != MAGIC:
            what = mistaken_for(bytes(self.data[:BEGINNING]))
            if what is None:
                what = "not a GGUF file (it does not begin with 'GGUF'); give a .gguf file"
            raise ModelError(f"{self.path} is {what}")
        self.position = 4
        version = self._scalar("<I")
        if version not in VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            kind = "big-endian GGUF" if swapped in VERSIONS else f"GGUF version {version}"
            raise ModelError(f"{self.path} is {kind}; umbel reads little-endian versions {VERSIONS}: convert it again")
        tensor_count, key_count = int(self._scalar("<Q")), int(self._scalar("<Q"))
        if tensor_count > MAX_TENSORS or key_count > MAX_KEYS:
            self._damaged(f"it claims {tensor_count} tensors and {key_count} metadata keys")
        return tensor_count, key_count

    def _keys(self, count: int) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for _ in range(count):
            key = self._string()
            if key in values:
                self._damaged(f"metadata key {key!r} occurs twice")
            values[key] = self._value(int(self._scalar("<I")), depth=0)
        return values

    def _value(self, kind: int, *, depth: int) -> Value:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < MAX_NESTING:
            return self._array(depth=depth)
        self._damaged(f"value type {kind} at byte {self.position} does not exist")

    def _array(self, *, depth: int) -> Value:
        kind, count = int(self._scalar("<I")), int(self._scalar("<Q"))
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            place = self._take(count * dtype.itemsize)
            return np.frombuffer(self.data, dtype, count, place)
        least = 8 if kind == _STRING else 12  # bytes of the shortest element
        if count * least > self.size - self.position:
            self._damaged(f"an array at byte {self.position} claims {count} elements, more than the file holds")
        if kind == _STRING:
            return self._texts(count)
        return [self._value(kind, depth=depth + 1) for _ in range(count)]

    def _texts(self, count: int) -> Texts:
        """Walks through an array of strings by their lengths; a vocabulary takes 50 ms."""
        data, position, size, length_at = self.data, self.position, self.size, struct.Struct("<Q").unpack_from
        places = array("Q")  # a list would take five times the memory
        for _ in range(count):
            if position + 8 > size:
                break
            places.append(position + 8)
            position += 8 + length_at(data, position)[0]
        if len(places) < count or position > size:
            raise self._truncated(position, 8)
        self.position = position
        places.append(position + 8)
        return Texts(self.path, data, places)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = int(self._scalar("<I"))
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self._damaged(f"tensor {name!r} has {dimensions} dimensions")
        place = self._take(8 * dimensions)
        shape = tuple(reversed(struct.unpack_from(f"<{dimensions}Q", self.data, place)))
        return name, shape, int(self._scalar("<I")), int(self._scalar("<Q"))

    def _place(
        self, name: str, shape: tuple[int, ...], type_number: int, start: int, offset: int, alignment: int
    ) -> GgufTensor:
        known = TENSOR_TYPES.get(type_number)
        if known is None:
            raise ModelError(
                f"{self.path}: tensor {name!r} is of type {_type_name(type_number)}, which cannot be dequantised here; "
                f"take a file of the model with one of {', '.join(name for name, _, _ in TENSOR_TYPES.values())}"
            )
        type_name, block, block_bytes = known
        if min(shape) < 1 or shape[-1] % block:
            self._damaged(f"tensor {name!r} of shape {shape} does not fit the blocks of {block} of {type_name}")
        if offset % alignment:
            self._damaged(f"tensor {name!r} begins at {offset}, which is no multiple of {alignment}")
        row_bytes = shape[-1] // block * block_bytes
        num_bytes = row_bytes * prod(shape[:-1])
        offset += start
        if offset + num_bytes > self.size:
            raise ModelError(
                f"{self.path} is truncated: tensor {name!r} should end at byte {offset + num_bytes:,}, "
                f"the file has {self.size:,}; download it again"
            )
        return GgufTensor(name, type_name, shape, self.file, offset, row_bytes, num_bytes)

    def _scalar(self, form: str) -> int | float | bool:
        place = self._take(struct.calcsize(form))
        value: int | float | bool = struct.unpack_from(form, self.data, place)[0]
        return value

    def _string(self) -> str:
        length = int(self._scalar("<Q"))
        place = self._take(length)
        try:
            return str(self.data[place : place + length], "utf-8")
        except UnicodeDecodeError:
            self._damaged(f"the string at byte {place} is not UTF-8")

    def _take(self, length: int) -> int:
        """Moves past `length` bytes and returns their first position."""
        place = self.position
        if length > self.size - place:
            raise self._truncated(place, length)
        self.position = place + length
        return place

    def _truncated(self, place: int, length: int) -> ModelError:
        return ModelError(
            f"{self.path} is truncated: {length:,} bytes expected at byte {place:,} of {self.size:,}; download it again"
        )

    def _damaged(self, what: str) -> NoReturn:
        raise _damaged(self.path, what)


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is damaged: {what}; download it again")


def _type_name(number: int) -> str:
    """Returns the name of a tensor type that is not read here, for messages: the gguf library may know it."""
    from gguf import GGMLQuantizationType

    try:
        return f"{GGMLQuantizationType(number).name} ({number})"
    except ValueError:
        return str(number)
