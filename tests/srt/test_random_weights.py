"""Weights of random numbers: a model whose files have names and shapes alone."""

import json
from pathlib import Path

import pytest
import torch
from umbel.srt.testing.random_weights import random_tensors


def sparse_file(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A file of zeros that take no room, with a header."""
    header: dict[str, object] = {}
    at = 0
    for name, shape in shapes.items():
        size = 2 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def test_tensors_have_the_names_and_shapes_of_the_files_and_the_same_numbers_each_time(tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,), "lm_head.weight": (40, 16)}
    sparse_file(tmp_path / "a.safetensors", shapes)
    tensors = random_tensors([tmp_path / "a.safetensors"], torch.float32, torch.device("cpu"))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert torch.equal(tensors["lm_head.weight"], tensors["lm_head.weight"])
    assert float(tensors["lm_head.weight"].std()) == pytest.approx(0.25, rel=0.1)
    assert float(tensors["model.embed_tokens.weight"].std()) == pytest.approx(1.0, rel=0.1)
    assert torch.equal(tensors["model.norm.weight"], torch.ones(16))
    assert "model.norm.weight" in tensors
    assert "model.norm.bias" not in tensors
