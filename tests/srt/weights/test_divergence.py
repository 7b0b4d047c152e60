"""A model as its GGUF stores it says what its dequantised weights say: the mean KL divergence of every next token."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from umbel.srt.evaluation import EvaluationSettings, evaluate
from umbel.srt.weights import ModelSource, open_model
from umbel.srt.weights.default_model import default_pieces
from umbel.srt.weights.gguf_file import GgufFile, open_pieces
from umbel.srt.weights.gguf_tensors import dequantised

from .tiny import BY_NAME, write_gguf

TEXT = Path(__file__).parents[3].joinpath("README.md").read_text(encoding="utf-8")


def divergence(source: ModelSource, tokens: int) -> float:
    (result,) = evaluate(source, ["auto"], TEXT, EvaluationSettings(context=128, tokens=tokens))
    return result.kl


@pytest.mark.parametrize(("kind", "most"), [("Q8_0", 0.002), ("Q5_0", 0.002), ("Q4_1", 0.002)])
def test_a_tiny_model_in_blocks_says_what_its_dequantised_weights_say(kind: str, most: float, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", BY_NAME["qwen3"], kind=kind)
    source = open_model(tmp_path / "tiny.gguf", cache=tmp_path / "cache")
    assert 0 < divergence(source, 100) < most


def requantised(source: GgufFile, target: Path, kind: str) -> Path:
    """Writes a GGUF with all matrices of another type, whose metadata are the source's, byte by byte."""
    tensors = list(source.tensors.values())
    content = tensors[0].file.content
    first = tensors[0].name.encode()
    metadata = content[24 : bytes(content[: source.header_bytes]).rindex(struct.pack("<Q", len(first)) + first)]
    infos, offset = [], 0
    chosen = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[chosen]
    for tensor in tensors:
        own = gguf.GGMLQuantizationType[tensor.type_name] if len(tensor.shape) == 1 else chosen
        size = tensor.num_bytes if len(tensor.shape) == 1 else tensor.rows * (tensor.shape[-1] // block * block_bytes)
        name = tensor.name.encode()
        dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        infos.append(struct.pack("<Q", len(name)) + name + dimensions + struct.pack("<IQ", own, offset))
        offset += -(-size // 32) * 32
    with target.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(source.metadata)))
        file.write(metadata)
        file.write(b"".join(infos))
        for tensor in tensors:
            file.write(bytes(-file.tell() % 32))
            for begin in range(0, tensor.rows, 4096):
                raw = tensor.read(begin, min(begin + 4096, tensor.rows))
                if len(tensor.shape) > 1:
                    raw = gguf.quantize(dequantised(tensor.type_name, raw).numpy(), chosen)
                file.write(np.ascontiguousarray(raw).tobytes())
    return target


@pytest.mark.nightly
@pytest.mark.model
def test_the_default_model_in_blocks_says_what_its_dequantised_weights_say() -> None:
    assert divergence(open_model(), 640) < 0.01  # measured 0.0017


@pytest.mark.nightly
@pytest.mark.model
def test_the_default_model_in_8_bits_says_what_its_dequantised_weights_say(tmp_path: Path) -> None:
    default = open_pieces(default_pieces(), tmp_path / "default.gguf")
    path = requantised(default, tmp_path / "q8.gguf", "Q8_0")
    source = open_model(path, cache=tmp_path / "cache")
    assert divergence(source, 640) < 0.002  # measured 0.0018: products of q, k, v and the head round inputs to 16 bits
