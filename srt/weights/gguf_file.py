"""Reads the header of a GGUF file: metadata and the place of each tensor, with every length checked.

    magic · version · tensor count · key count
    key, value type, value                     × key count
    name, dimensions, type, offset             × tensor count
    padding · tensor data

The `gguf` library's own reader builds an array object per token string (20 s for a vocabulary of 262,144, against well
under a second here) and trusts the file's lengths. Here a count is compared with the bytes that are left before memory
is allocated for it.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import NoReturn

from ...lang.errors import MissingExtraError, ModelError

Value = int | float | bool | str | list["Value"]

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

# Tensor types that can be dequantised.
# fmt: off
_TYPE_NAMES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of one tensor. `shape` is in torch's order: rows first."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    row_bytes: int  # bytes of one row, which is the last dimension
    num_bytes: int

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])


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
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]  # one number per layer, all the same
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

    def texts(self, key: str) -> list[str]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            self._wrong(key, "a list of strings")
        return [str(entry) for entry in value]

    def numbers(self, key: str) -> list[float]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, int | float) for entry in value):
            self._wrong(key, "a list of numbers")
        return [float(entry) for entry in value if isinstance(entry, int | float)]

    def _wrong(self, key: str, wanted: str) -> NoReturn:
        found = repr(self._values[key])[:60] if key in self._values else "missing"
        raise ModelError(
            f"{self.path}: metadata {key!r} should be {wanted}, it is {found}; "
            "convert the model again with a current llama.cpp"
        )


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file. `data` is the whole file, mapped read-only; it is closed with the last reference."""

    path: Path
    metadata: Metadata
    tensors: Mapping[str, GgufTensor]
    header_bytes: int
    data: mmap.mmap

    @property
    def architecture(self) -> str:
        return self.metadata.text("general.architecture")


def open_gguf(path: Path) -> GgufFile:
    """Reads the header and maps the data.

    Raises:
        ModelError: the file is missing, truncated or damaged, or holds a tensor type that cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} is empty; download the GGUF file again") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); give the path of a readable .gguf file") from error
    return _Reader(path, data).read()


class _Reader:
    """Reads the header from its first byte on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def read(self) -> GgufFile:
        tensor_count, key_count = self._preamble()
        metadata = Metadata(self.path, self._keys(key_count))
        alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT)
        if alignment <= 0 or alignment & (alignment - 1):
            self._damaged(f"alignment {alignment} is not a power of two")
        infos = [self._tensor_info() for _ in range(tensor_count)]
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_number, offset in infos:
            if name in tensors:
                self._damaged(f"tensor {name!r} occurs twice")
            tensors[name] = self._place(name, shape, type_number, start + offset)
        return GgufFile(self.path, metadata, tensors, start, self.data)

    def _preamble(self) -> tuple[int, int]:
        if self.size < 24 or self.data[:4] != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file (it does not begin with 'GGUF'); give a .gguf file")
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

    def _array(self, *, depth: int) -> list[Value]:
        kind, count = int(self._scalar("<I")), int(self._scalar("<Q"))
        if kind in _SCALARS:
            form = _SCALARS[kind]
            place = self._take(count * struct.calcsize(form))
            return list(struct.unpack_from(f"<{count}{form[1:]}", self.data, place))
        least = 8 if kind == _STRING else 12  # bytes of the shortest element
        if count * least > self.size - self.position:
            self._damaged(f"an array at byte {self.position} claims {count} elements, more than the file holds")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        return [self._value(kind, depth=depth + 1) for _ in range(count)]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = int(self._scalar("<I"))
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self._damaged(f"tensor {name!r} has {dimensions} dimensions")
        place = self._take(8 * dimensions)
        shape = tuple(reversed(struct.unpack_from(f"<{dimensions}Q", self.data, place)))
        return name, shape, int(self._scalar("<I")), int(self._scalar("<Q"))

    def _place(self, name: str, shape: tuple[int, ...], type_number: int, offset: int) -> GgufTensor:
        known = tensor_types().get(type_number)
        if known is None:
            raise ModelError(
                f"{self.path}: tensor {name!r} has type number {type_number}, which cannot be dequantised here; "
                f"requantise the model to one of {', '.join(_TYPE_NAMES)}"
            )
        type_name, block, block_bytes = known
        if min(shape) < 1 or shape[-1] % block:
            self._damaged(f"tensor {name!r} of shape {shape} does not fit the blocks of {block} of {type_name}")
        row_bytes = shape[-1] // block * block_bytes
        num_bytes = row_bytes * prod(shape[:-1])
        if offset + num_bytes > self.size:
            raise ModelError(
                f"{self.path} is truncated: tensor {name!r} should end at byte {offset + num_bytes:,}, "
                f"the file has {self.size:,}; download it again"
            )
        return GgufTensor(name, type_name, shape, offset, row_bytes, num_bytes)

    def _scalar(self, form: str) -> int | float | bool:
        place = self._take(struct.calcsize(form))
        value: int | float | bool = struct.unpack_from(form, self.data, place)[0]
        return value

    def _string(self) -> str:
        place = self._take(8)
        length = int.from_bytes(self.data[place : place + 8], "little")
        place = self._take(length)
        try:
            return self.data[place : place + length].decode("utf-8")
        except UnicodeDecodeError:
            self._damaged(f"the string at byte {place} is not UTF-8")

    def _take(self, length: int) -> int:
        """Moves past `length` bytes and returns their first position."""
        place = self.position
        if length > self.size - place:
            raise ModelError(
                f"{self.path} is truncated: {length:,} bytes expected at byte {place:,} of {self.size:,}; "
                "download it again"
            )
        self.position = place + length
        return place

    def _damaged(self, what: str) -> NoReturn:
        raise ModelError(f"{self.path} is damaged: {what}; download it again")


@cache
def tensor_types() -> dict[int, tuple[str, int, int]]:
    """Returns type number → (name, elements per block, bytes per block), for types that can be dequantised."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise MissingExtraError("gguf", "runtime") from error
    kinds = ((name, GGMLQuantizationType[name]) for name in _TYPE_NAMES)
    return {int(kind): (name, *GGML_QUANT_SIZES[kind]) for name, kind in kinds}
