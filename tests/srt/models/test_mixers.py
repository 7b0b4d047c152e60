"""Memories of recurrent layers: chunks give what their tokens give one by one, from any state on."""

import pytest
import torch
from umbel.srt.models.mixers import _corrected, _decayed

HEADS, KEYS, VALUES = 3, 4, 5


def rows(count: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, decays, strengths and a memory of two sequences, float64."""
    torch.manual_seed(seed)
    query, key = (torch.randn(2, HEADS, count, KEYS, dtype=torch.float64) / 2 for _ in range(2))
    value = torch.randn(2, HEADS, count, VALUES, dtype=torch.float64)
    decay = -torch.rand(2, HEADS, count, dtype=torch.float64)
    strength = torch.rand(2, HEADS, count, dtype=torch.float64)
    return query, key, value, decay, strength, torch.randn(2, HEADS, KEYS, VALUES, dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 3, 64, 65, 150])
def test_a_decayed_memory_takes_chunks_as_it_takes_tokens(count: int) -> None:
    query, key, value, decay, _, memory = rows(count, 1)
    out, after = _decayed(query, key, value, decay, memory)
    for token in range(count):
        memory = decay[..., token, None, None].exp() * memory
        memory = memory + key[:, :, token, :, None] * value[:, :, token, None, :]
        torch.testing.assert_close(out[:, :, token], (query[:, :, token, None] @ memory)[..., 0, :])
    torch.testing.assert_close(after, memory)


@pytest.mark.parametrize("count", [1, 3, 64, 65, 150])
def test_a_corrected_memory_takes_chunks_as_it_takes_tokens(count: int) -> None:
    query, key, value, decay, strength, memory = rows(count, 2)
    out, after = _corrected(query, key, value, decay, strength, memory)
    for token in range(count):
        memory = decay[..., token, None, None].exp() * memory
        known = (key[:, :, token, None] @ memory)[..., 0, :]
        new = strength[..., token, None] * (value[:, :, token] - known)
        memory = memory + key[:, :, token, :, None] * new[..., None, :]
        torch.testing.assert_close(out[:, :, token], (query[:, :, token, None] @ memory)[..., 0, :])
    torch.testing.assert_close(after, memory)
