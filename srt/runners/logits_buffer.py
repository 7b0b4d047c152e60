"""Keeps one growing buffer for logits: allocating it for every step would cost milliseconds of page faults."""

import torch

KEPT_BYTES = 256 << 20  # a larger buffer is freed after its step


class LogitsBuffer:
    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._buffer = torch.empty((0, vocab_size), device=device)

    def take(self, rows: int) -> torch.Tensor:
        """Returns float32 [rows, vocab] of undefined content, in the memory that earlier calls returned."""
        vocab_size = self._buffer.shape[1]
        if rows > len(self._buffer) or self._buffer.nbytes > KEPT_BYTES:
            kept = min(max(2 * len(self._buffer), 8), KEPT_BYTES // (vocab_size * 4))
            self._buffer = torch.empty((max(rows, kept), vocab_size), device=self._buffer.device)
        return self._buffer[:rows]
