"""Reads a safetensors folder: lists and checks its tensors when it is opened, maps a file when one is read.

The `safetensors` library checks each header against its file. An index of shards is checked here: it may name files in
its own folder only, and every tensor that it lists must be in the shard that it names.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...lang.errors import MissingExtraError, ModelError
from .catalog.mistaken_files import beginning_of, mistaken_for

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
PACKED = (*FLOATS, "F8_E4M3", "I8", "U8", "I32", "I64")  # of packed formats, whose readers check each tensor's type


class TensorFolder(Mapping[str, "Tensor"]):
    """Maps parameter names to tensors on the CPU, backed by the mapped file: reading one copies nothing.

    A tensor stays valid as long as it is referenced. torch is imported when the first one is read.
    """

    def __init__(self, places: Mapping[str, Path]) -> None:
        self.places = places  # name → file

    def __getitem__(self, name: str) -> "Tensor":
        tensor: Tensor = self._files[self.places[name]].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def _files(self) -> dict[Path, Any]:  # Any: safetensors.safe_open
        from safetensors import safe_open

        return {path: safe_open(path, framework="pt") for path in sorted(set(self.places.values()))}

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(set(self.places.values())))


def open_tensors(folder: Path, kinds: Sequence[str] = FLOATS) -> TensorFolder:
    """Lists the tensors of a folder with one safetensors file or several and an index.

    Args:
        kinds: the types that tensors may have.

    Raises:
        ModelError: a file is missing, truncated or damaged, or a tensor has a type that cannot be run.
    """
    if (folder / INDEX).is_file():
        return TensorFolder(_sharded(folder, kinds))
    path = folder / SINGLE
    if not path.is_file():
        others = sorted(file.name for file in folder.glob("*.safetensors"))
        executable = sorted(file.name for file in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
        if len(others) == 1:
            path = folder / others[0]
        elif others:
            raise ModelError(f"{folder} has {others} but no {INDEX}; download the whole model")
        elif executable:
            raise ModelError(
                f"{folder} holds {executable[0]}, which can run code when loaded; umbel reads safetensors and GGUF "
                "only: download the model's safetensors files"
            )
        else:
            raise ModelError(f"{folder} holds no {SINGLE}; give the folder of a downloaded model")
    return TensorFolder(dict.fromkeys(_names(path, kinds), path))


def _sharded(folder: Path, kinds: Sequence[str]) -> dict[str, Path]:
    index = folder / INDEX
    try:
        mapping = json.loads(index.read_bytes())["weight_map"]
        places = {str(name): str(file) for name, file in mapping.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is not an index of shards ({error}); download it again") from error
    held: dict[str, set[str]] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{index} names {file!r}, which is not a safetensors file of its folder; download it again"
            )
        if not (folder / file).is_file():
            raise ModelError(f"{folder} lacks {file}, which its index names; download the whole model")
        held[file] = set(_names(folder / file, kinds))
    absent = next((name for name, file in places.items() if name not in held[file]), None)
    if absent is not None:
        raise ModelError(
            f"{folder / places[absent]} lacks tensor {absent!r}, which the index promises; download it again"
        )
    return {name: folder / file for name, file in places.items()}


def _names(path: Path, kinds: Sequence[str]) -> list[str]:
    return list(tensor_headers(path, kinds))


def tensor_headers(path: Path, kinds: Sequence[str] = FLOATS) -> dict[str, tuple[int, ...]]:
    """Lists the tensors of one file with their shapes. The library checks the header against the file.

    Args:
        kinds: the types that tensors may have.

    Raises:
        ModelError: the file is missing, truncated or damaged, or a tensor has a type that cannot be run.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingExtraError("safetensors", "runtime") from error
    try:
        with safe_open(path, framework="numpy") as file:
            names: list[str] = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            types = {name: part.get_dtype() for name, part in slices.items()}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        what = (
            mistaken_for(beginning_of(path), wanted="safetensors")
            or f"truncated or damaged ({error}); download it again"
        )
        raise ModelError(f"{path} is {what}") from error
    wrong = next(((name, kind) for name, kind in types.items() if kind not in kinds), None)
    if wrong is not None:
        raise ModelError(
            f"{path}: tensor {wrong[0]!r} has type {wrong[1]}; umbel runs {', '.join(kinds)}: use the model's "
            "unquantised files, or a GGUF"
        )
    return shapes
