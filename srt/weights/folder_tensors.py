"""Gives the matrices of a safetensors folder as the kernels read them: in the bytes of the file, mapped.

A tensor by name is the library's, whose pages stay with the process as long as the tensor. A block is a view of a
mapping of our own, whose pages are given back when the kernels have laid them out.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..layers.checkpoint import BlockTensor, BlockTensors
from .mapped_file import MappedFile
from .safetensors_folder import TensorFolder

_LENGTH_BYTES = 8
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class FolderTensors(BlockTensors):
    """The tensors of a folder; matrices of floats also as blocks of one weight."""

    def __init__(self, folder: TensorFolder) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._folder[name]

    def __contains__(self, name: object) -> bool:  # Mapping's own would open the tensor
        return name in self._folder.places

    def __iter__(self) -> Iterator[str]:
        return iter(self._folder)

    def __len__(self) -> int:
        return len(self._folder)

    def block(self, name: str) -> BlockTensor | None:
        file, header, start = self._files[self._folder.places[name]]
        entry = header[name]
        item_bytes = _ITEM_BYTES.get(entry["dtype"])
        first, last = entry["data_offsets"]
        if item_bytes is None or len(entry["shape"]) != 2 or first == last or (start + first) % item_bytes:
            return None
        outputs, inputs = entry["shape"]
        data = file.view(start + first, last - first).reshape(outputs, inputs * item_bytes)
        return BlockTensor(entry["dtype"], (outputs, inputs), data)

    @cached_property
    def _files(self) -> Mapping[Path, tuple[MappedFile, dict[str, Any], int]]:  # Any: JSON
        """File → its mapping, its header and the place of the first tensor. The library has checked the header."""
        files = {}
        for path in self._folder.files:
            file = MappedFile([path])
            start = _LENGTH_BYTES + int.from_bytes(file.content[:_LENGTH_BYTES], "little")
            files[path] = file, msgspec.json.decode(file.content[_LENGTH_BYTES:start]), start
        return files
