"""Converts a GGUF file to a model folder: one safetensors file in bfloat16, config, tokenizer, and a manifest.

Before the first byte is converted, the whole list is checked: every parameter that the config implies is present with
its shape, and no tensor is unknown. A tensor is dequantised a few rows at a time, so memory stays bounded.

The manifest is written last. It holds length and digest of every file, so later damage is detected when the folder is
opened (for weights soon after), and the folder is made again.
"""

import hashlib
import json
import logging
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ...lang.errors import ModelError
from ..core.cache_folder import write_atomically
from .gguf_config import Architecture, Config, architecture_of, config_of
from .gguf_file import GgufFile, GgufTensor
from .gguf_tokenizer import Json, eos_ids, tokenizer_config, tokenizer_json

if TYPE_CHECKING:
    from numpy.typing import NDArray


log = logging.getLogger("umbel.engine")

MANIFEST = "umbel.json"
WEIGHTS = "model.safetensors"
FORMAT = 1  # of the folder; an older one is converted again


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter to write. `heads` is set where rows have to be put back into Hugging Face's order."""

    name: str
    shape: tuple[int, ...]
    source: GgufTensor
    heads: int | None = None
    subtract: float = 0.0

    @property
    def num_bytes(self) -> int:
        return 2 * int(np.prod(self.shape))


CHUNK_ELEMENTS = 1 << 24  # of one dequantised piece: 64 MiB as float32

# Read by llama.cpp, but no parameters in Hugging Face: RoPE tables, whose parameters are in the config.
_NOT_PARAMETERS = frozenset({"rope_freqs.weight"})

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


def parameters_of(gguf: GgufFile, architecture: Architecture, config: Config) -> list[Parameter]:
    """Returns the parameters in the file's order.

    Raises:
        ModelError: a tensor is missing, has another shape than the config says, or has no name here.
    """
    expected = _expected(architecture, config)
    unknown = sorted(set(gguf.tensors) - set(expected) - _NOT_PARAMETERS)
    if unknown:
        raise ModelError(
            f"{gguf.path}: tensor {unknown[0]!r} (and {len(unknown) - 1} more) is not part of a "
            f"{architecture.name} model as umbel knows it; use the model's safetensors folder"
        )
    parameters = []
    for source_name, (name, shape, heads) in expected.items():
        tensor = gguf.tensors.get(source_name)
        if tensor is None:
            raise ModelError(f"{gguf.path} lacks tensor {source_name!r}; download the whole model again")
        if tensor.shape != shape:
            raise ModelError(f"{gguf.path} is damaged: {source_name!r} has shape {tensor.shape}, not {shape}")
        shifted = architecture.adds_one_to_norms and name.endswith("norm.weight")
        parameters.append(Parameter(name, shape, tensor, heads, 1.0 if shifted else 0.0))
    return sorted(parameters, key=lambda parameter: parameter.source.offset)


def _expected(architecture: Architecture, config: Config) -> dict[str, tuple[str, tuple[int, ...], int | None]]:
    """Returns GGUF name → (name, shape, heads whose rows are reordered)."""

    def size(key: str) -> int:
        value = config[key]
        assert isinstance(value, int), "config_of checked it"
        return value

    hidden, inner, head_dim = size("hidden_size"), size("intermediate_size"), size("head_dim")
    heads, kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    query, key = heads * head_dim, kv_heads * head_dim
    table: dict[str, tuple[str, tuple[int, ...], int | None]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (size("vocab_size"), hidden), None),
        "output_norm.weight": ("model.norm.weight", (hidden,), None),
    }
    if not config["tie_word_embeddings"]:
        table["output.weight"] = ("lm_head.weight", (size("vocab_size"), hidden), None)
    turned = architecture.rotates_pairs
    layer: dict[str, tuple[str, tuple[int, ...], int | None]] = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,), None),
        "attn_q.weight": ("self_attn.q_proj.weight", (query, hidden), heads if turned else None),
        "attn_k.weight": ("self_attn.k_proj.weight", (key, hidden), kv_heads if turned else None),
        "attn_v.weight": ("self_attn.v_proj.weight", (key, hidden), None),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, query), None),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (inner, hidden), None),
        "ffn_up.weight": ("mlp.up_proj.weight", (inner, hidden), None),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, inner), None),
    }
    if config["attention_bias"]:
        layer["attn_q.bias"] = ("self_attn.q_proj.bias", (query,), heads if turned else None)
        layer["attn_k.bias"] = ("self_attn.k_proj.bias", (key,), kv_heads if turned else None)
        layer["attn_v.bias"] = ("self_attn.v_proj.bias", (key,), None)
        if not architecture.query_key_bias:  # Llama's attention_bias covers the output projection too
            layer["attn_output.bias"] = ("self_attn.o_proj.bias", (hidden,), None)
    if architecture.query_key_norm:
        layer["attn_q_norm.weight"] = ("self_attn.q_norm.weight", (head_dim,), None)
        layer["attn_k_norm.weight"] = ("self_attn.k_norm.weight", (head_dim,), None)
    if architecture.post_norms:
        layer["post_attention_norm.weight"] = ("post_attention_layernorm.weight", (hidden,), None)
        layer["ffn_norm.weight"] = ("pre_feedforward_layernorm.weight", (hidden,), None)
        layer["post_ffw_norm.weight"] = ("post_feedforward_layernorm.weight", (hidden,), None)
    else:
        layer["ffn_norm.weight"] = ("post_attention_layernorm.weight", (hidden,), None)
    for index in range(size("num_hidden_layers")):
        for source, (name, shape, reordered) in layer.items():
            table[f"blk.{index}.{source}"] = (f"model.layers.{index}.{name}", shape, reordered)
    return table


def pieces(gguf: GgufFile, parameter: Parameter) -> Iterator[bytes]:
    """Yields the parameter's bfloat16 bytes, little-endian, row by row, in pieces of bounded size."""
    tensor = parameter.source
    heads_per_piece = 1
    if parameter.heads is None:
        rows_per_piece = max(1, CHUNK_ELEMENTS // tensor.shape[-1])
    elif len(tensor.shape) == 1:  # a bias: its heads lie in one row
        rows_per_piece, heads_per_piece = 1, parameter.heads
    else:  # one head at a time keeps the reordering inside a piece
        rows_per_piece = tensor.rows // parameter.heads
    for first in range(0, tensor.rows, rows_per_piece):
        values = _dequantise(gguf, tensor, first, min(first + rows_per_piece, tensor.rows))
        if parameter.heads is not None:
            values = _restore_rows(values.reshape(-1) if len(tensor.shape) == 1 else values, heads_per_piece)
        if parameter.subtract:
            values = values - np.float32(parameter.subtract)
        yield to_bfloat16(values).tobytes()


def _dequantise(gguf: GgufFile, tensor: GgufTensor, first: int, last: int) -> "NDArray[np.float32]":
    """Dequantises rows [first, last) to float32 [rows, columns]."""
    from gguf import GGMLQuantizationType, dequantize

    place = tensor.offset + first * tensor.row_bytes
    raw = np.frombuffer(gguf.data, np.uint8, (last - first) * tensor.row_bytes, place)
    match tensor.type_name:
        case "F32":
            values = raw.view("<f4")
        case "F16":
            values = raw.view("<f2")
        case _:
            values = dequantize(raw.reshape(last - first, -1), GGMLQuantizationType[tensor.type_name])
    return np.asarray(values, np.float32).reshape(last - first, tensor.shape[-1])


def _restore_rows(values: "NDArray[np.float32]", heads: int) -> "NDArray[np.float32]":
    """Undoes llama.cpp's row order, in which the two rows that RoPE rotates together are adjacent.

    file   a0 b0 a1 b1 a2 b2 …      Hugging Face   a0 a1 a2 … b0 b1 b2 …      (of each head)
    """
    pairs = values.shape[0] // heads // 2
    rest = values.shape[1:]
    return values.reshape(heads, pairs, 2, *rest).swapaxes(1, 2).reshape(values.shape)


def to_bfloat16(values: "NDArray[np.float32]") -> "NDArray[np.uint16]":
    """Rounds to nearest even and returns the bits as uint16. NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded
