"""Runs steps: a batch from the scheduler in, logits out. Owns the model, its KV pool and its attention backend."""

from typing import Any

import torch

from ..lang.errors import ModelError, ParameterError
from .attention.backend import AttentionBackend, AttentionStep
from .attention.torch_backend import TorchBackend
from .batch import Batch, Logits
from .kv_pool import KVPool, slots_for_bytes
from .models.config_values import Config
from .models.model import Model, Rows, Tensors, attention_geometry
from .models.registry import build_model

KEPT_LOGITS_BYTES = 256 << 20  # a larger logits buffer is given back after its step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """A `batch.Runner` around a real model.

    Args:
        model: what to run.
        num_slots: size of the KV pool, the dummy slot included.
        backend: attention kernels; None takes torch.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_slots: int,
        # Any: each backend prepares plans in its own form, and only the backend reads it.
        backend: AttentionBackend[Any] | None = None,
    ) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.num_slots = num_slots
        self.pool = KVPool(model.kv_geometry, num_slots, model.device)
        self.backend: AttentionBackend[Any] = backend or TorchBackend(attention_geometry(model), model.device)
        self._logits = torch.empty((0, self.vocab_size), device=model.device)

    def forward(self, batch: Batch) -> Logits:
        """One step, all logits of every logit row: a view of a buffer that the next step overwrites."""
        device = self.model.device
        out = self._buffer(len(batch.logit_rows))  # outside inference mode: a sampler may write to it
        with torch.inference_mode():
            attention = AttentionStep(
                backend=self.backend,
                pool=self.pool,
                plans={window: self.backend.plan(batch, window) for window in self.model.windows},
                write_slots=torch.from_numpy(batch.write_slots).to(device),
            )
            rows = Rows(
                token_ids=torch.from_numpy(batch.token_ids).to(device),
                positions=torch.from_numpy(batch.positions).to(device),
                logit_rows=torch.from_numpy(batch.logit_rows).to(device),
            )
            return Logits.complete(self.model.forward(rows, attention, out=out))

    def clear(self) -> None:
        self.pool.clear()

    def _buffer(self, rows: int) -> torch.Tensor:
        """One buffer that grows: fresh memory of this size costs milliseconds of page faults at every step."""
        row_bytes = self.vocab_size * 4
        if rows > len(self._logits) or len(self._logits) * row_bytes > KEPT_LOGITS_BYTES:
            kept = min(max(2 * len(self._logits), 8), KEPT_LOGITS_BYTES // row_bytes)
            self._logits = torch.empty((max(rows, kept), self.vocab_size), device=self.model.device)
        return self._logits[:rows]


def build_runner(
    config: Config,
    tensors: Tensors,
    *,
    kv_bytes: int | None = None,
    num_slots: int | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    pack: bool | None = None,
) -> ModelRunner:
    """Model, pool and kernels in one call. Give the pool's size as `kv_bytes` or as `num_slots`.

    Raises:
        ModelError: configuration or tensors that cannot be used.
        ParameterError: a pool too small, an unknown dtype or device.
    """
    if (kv_bytes is None) == (num_slots is None):
        raise ParameterError(f"kv_bytes={kv_bytes}, num_slots={num_slots}: write exactly one of them")
    target = resolve_device(device)
    model = build_model(config, tensors, dtype=resolve_dtype(dtype, target), device=target, pack=pack)
    if num_slots is None:
        assert kv_bytes is not None, "one of the two is given"
        num_slots = slots_for_bytes(model.kv_geometry, kv_bytes)
    return ModelRunner(model, num_slots=num_slots)


def resolve_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ParameterError(f'device={name!r}; write "cpu", "cuda" or "cuda:0"') from None
    if device.type not in ("cpu", "cuda"):
        raise ParameterError(f'device={name!r}; write "cpu", "cuda" or "cuda:0"')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f'device={name!r}: torch sees no CUDA device here; write "cpu"')
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 where the hardware multiplies it, else float32."""
    if name == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_multiplies_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        raise ParameterError(f'dtype={name!r}; write "auto" or one of {", ".join(DTYPES)}')
    return DTYPES[name]


def cpu_multiplies_bfloat16() -> bool:
    """AVX512-BF16 or AMX. Elsewhere torch emulates bfloat16, several times slower than float32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
