"""One buffer of logits that grows: fresh memory of this size costs milliseconds of page faults at every step."""

import torch

KEPT_BYTES = 256 << 20  # a larger buffer is given back after its step


class LogitsBuffer:
    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._buffer = torch.empty((0, vocab_size), device=device)

    def take(self, rows: int) -> torch.Tensor:
        """Float32 [rows, vocab], content undefined; what was taken before is overwritten."""
        vocab_size = self._buffer.shape[1]
        if rows > len(self._buffer) or self._buffer.nbytes > KEPT_BYTES:
            kept = min(max(2 * len(self._buffer), 8), KEPT_BYTES // (vocab_size * 4))
            self._buffer = torch.empty((max(rows, kept), vocab_size), device=self._buffer.device)
        return self._buffer[:rows]
