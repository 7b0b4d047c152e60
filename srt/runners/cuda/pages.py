"""Copies pages between the KV pool of a device and the host, in the order of steps.

    save    gather on the device → one copy to pinned memory ─ mark          result() waits for the mark, in any thread
    load    pinned memory → one copy to the device → scatter to the slots    the next step runs after it

Everything is enqueued on the stream of steps: a page is gathered after the step that writes it, and before a later step
may write to its slots for another request. Only `result` waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...cache.kv_pool import KVPool
from ...cache.pool_pages import PoolRows, write_rows
from ...core.batch import PagePart
from .device import Accelerator, Mark, Staging


@dataclass(frozen=True, slots=True, eq=False)
class PagesOnTheirWay:
    """Implements `batch.SavedPages`."""

    host: torch.Tensor  # uint8 [pages, bytes] in pinned memory, full after the mark
    mark: Mark

    def result(self) -> list[NDArray[np.uint8]]:
        """Copies the pages out of pinned memory, of which there is little."""
        self.mark.wait()
        return [page.copy() for page in self.host.numpy()]


class DevicePages:
    """Implements `batch.PagePort`. Called from the thread that launches steps."""

    def __init__(self, pool: KVPool, accelerator: Accelerator) -> None:
        self._rows = PoolRows(pool)
        self._accelerator = accelerator
        self._staging = Staging(accelerator, 1 << 12)
        self.layout = self._rows.layout
        self.bytes_per_token = self._rows.bytes_per_token

    def save(self, slots: NDArray[np.int32], part: PagePart) -> PagesOnTheirWay:
        self._accelerator.use()
        pages, _tokens = slots.shape
        index = self._staging.send([slots.reshape(-1).astype(np.int64)])[0]
        gathered = [rows.index_select(0, index).view(torch.uint8).view(pages, -1) for rows in self._rows.tensors(part)]
        payloads = torch.cat(gathered, dim=1)
        host = self._accelerator.host_buffer(payloads.nbytes).view(pages, -1)
        host.copy_(payloads, non_blocking=True)
        return PagesOnTheirWay(host, self._accelerator.mark())

    def load(self, slots: NDArray[np.int32], payloads: Sequence[NDArray[np.uint8]], part: PagePart) -> None:
        self._accelerator.use()
        index = self._staging.send([slots.astype(np.int64)])[0]
        host = self._accelerator.host_buffer(sum(payload.nbytes for payload in payloads)).view(len(payloads), -1)
        np.stack(payloads, out=host.numpy())
        write_rows(self._rows.tensors(part), index, host.to(index.device, non_blocking=True))
