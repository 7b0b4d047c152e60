"""Converts a GGUF file to a model folder: one safetensors file in bfloat16, config, tokenizer, and a manifest.

The manifest is written last. It holds length and digest of every file, so later damage is detected when the folder is
opened (for weights soon after), and the folder is made again.
"""

import hashlib
import json
import logging
import shutil
import struct
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import msgspec

from ...lang.errors import ModelError
from ..core.cache_folder import write_atomically
from .gguf_config import Config, architecture_of, config_of
from .gguf_file import GgufFile
from .gguf_tensors import Parameter, parameters_of, pieces
from .gguf_tokenizer import Json, eos_ids, tokenizer_config, tokenizer_json

log = logging.getLogger("umbel.engine")

MANIFEST = "umbel.json"
WEIGHTS = "model.safetensors"
FORMAT = 1  # of the folder; an older one is converted again

Progress = Callable[[str, float], None]  # current part, share of the whole that is done


def convert(gguf: GgufFile, folder: Path, *, source: str, progress: Progress) -> None:
    """Writes the model into an empty folder.

    Args:
        source: identifies the GGUF file's content, kept in the manifest.

    Raises:
        ModelError: the file cannot be converted, or the disk is too small. Checked before anything is written.
    """
    architecture = architecture_of(gguf)
    config = config_of(gguf)
    parameters = parameters_of(gguf, architecture, config)
    _check_disk(gguf, folder, parameters)
    tokens, rows = len(gguf.metadata.texts("tokenizer.ggml.tokens")), gguf.tensors["token_embd.weight"].shape[0]
    if tokens > rows:  # fewer is usual: matrices are padded
        raise ModelError(f"{gguf.path} is damaged: {tokens} tokens for an embedding of {rows} rows; download it again")
    ends = eos_ids(gguf)
    if ends:
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    progress("tokenizer", 0.0)
    _write_json(folder / "tokenizer.json", tokenizer_json(gguf))  # hundreds of megabytes of objects, gone after this
    _write_json(folder / "tokenizer_config.json", tokenizer_config(gguf))
    _write_json(folder / "generation_config.json", _generation_config(config))
    digest = _write_weights(gguf, folder / WEIGHTS, parameters, progress)
    _write_json(folder / "config.json", config)
    names = sorted(path.name for path in folder.iterdir())
    digests = {name: digest if name == WEIGHTS else file_digest(folder / name) for name in names}
    manifest = Manifest(FORMAT, source, digest, {name: (folder / name).stat().st_size for name in names}, digests)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    progress("done", 1.0)


class Manifest(msgspec.Struct, frozen=True):
    """Lists the files of a converted folder and identifies their source.

    Attributes:
        source: identifies the file that was converted.
        files: name → bytes.
        sha256: name → SHA-256 of the file.
        damaged: why the folder must not be used any more.
    """

    format: int
    source: str
    weights_sha256: str
    files: dict[str, int]
    sha256: dict[str, str] = {}
    damaged: str = ""


def read_manifest(folder: Path) -> Manifest | None:
    """Reads the manifest of a folder; None unless the folder is whole and of this format.

    All files but the weights are compared with their digests. Gigabytes of weights take too long for every start: see
    `check_weights`.
    """
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        if manifest.format != FORMAT or manifest.damaged or "config.json" not in manifest.files:
            return None
        for name, size in manifest.files.items():
            if Path(name).name != name or (folder / name).stat().st_size != size:
                return None
            if name != WEIGHTS and name in manifest.sha256 and file_digest(folder / name) != manifest.sha256[name]:
                return None
    except (OSError, ValueError, RecursionError):
        return None
    return manifest


def check_weights(folder: Path) -> str:
    """Compares the weights with their digest and returns the damage, or "". Takes a second for each gigabyte.

    A folder with wrong weights is marked, so that it is converted again or refused when it is opened the next time. If
    it cannot be marked, the log says so, and the folder is used.
    """
    manifest = read_manifest(folder)
    if manifest is None or file_digest(folder / WEIGHTS) == manifest.weights_sha256:
        return ""
    why = f"{folder / WEIGHTS} is damaged: its content is not what was written when the model was converted"
    marked = msgspec.json.encode(msgspec.structs.replace(manifest, damaged=why))
    try:
        write_atomically(folder / MANIFEST, marked)
    except OSError as error:  # the next engine would meet the same weights, and end as well
        log.error("%s. The folder cannot be marked (%s): delete it, and open the model again", why, error.strerror)
        return ""
    return why


def file_digest(path: Path) -> str:
    """Computes a file's SHA-256, hexadecimal. Other threads run meanwhile."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _generation_config(config: Config) -> Json:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def _check_disk(gguf: GgufFile, folder: Path, parameters: list[Parameter]) -> None:
    needed = sum(parameter.num_bytes for parameter in parameters) + (64 << 20)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(
            f"{gguf.path} needs {needed / 2**30:.1f} GiB in {folder.parent} to be converted, {free / 2**30:.1f} GiB "
            "are free; make room, or set UMBEL_CACHE to a folder on a larger disk"
        )


def _write_weights(gguf: GgufFile, path: Path, parameters: list[Parameter], progress: Progress) -> str:
    """Writes the header, then every parameter's bytes in order. Returns the SHA-256 of the file.

    The library's writer is not used, because it needs all tensors in memory at once.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for parameter in parameters:
        start, end = end, end + parameter.num_bytes
        header[parameter.name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = sha256()
    written = 0
    with path.open("wb") as file:
        for piece in (struct.pack("<Q", len(text)), text):
            file.write(piece)
            digest.update(piece)
        for parameter in parameters:
            progress(parameter.name, written / end)
            for piece in pieces(gguf, parameter):
                file.write(piece)
                digest.update(piece)
                written += len(piece)
    assert written == end, "the header promises another length"
    return digest.hexdigest()


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    compact = path.name == "tokenizer.json"  # megabytes
    text = json.dumps(content, ensure_ascii=False, indent=None if compact else 2)
    path.write_text(text + "\n", encoding="utf-8")
