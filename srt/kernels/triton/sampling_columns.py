"""Draws on the device: counters, all columns and masks in one transfer.

They begin at multiples of 16 bytes for any number of draws: Triton would compile the kernels again for columns that do
not, and the first request beside another would wait for it.

    | counters, a line of the cache each | rows | inverse_temperatures | … | masks |
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.batch import Draws
from .sampling_tiles import LINE

_COLUMNS = 7
_LINE = LINE.value // 2  # numbers of 8 bytes


@dataclass(frozen=True, slots=True, eq=False)
class DeviceDraws:
    """The columns of `draw.Draws` as kernels read them. n draws."""

    limited: bool  # some draw has top_k, top_p or min_p
    nuclei: bool  # some draw has top_p without top_k
    counters: torch.Tensor  # int32 [n, LINE] 0: kernels count in it, and leave 0 behind
    rows: torch.Tensor  # int64 [n] of the logits
    inverse_temperatures: torch.Tensor  # float64 [n] 0 = the most likely token
    keys: torch.Tensor  # int64 [n] the bits of draw_key
    top_p: torch.Tensor  # float64 [n] 1 = all
    log_min_p: torch.Tensor  # float64 [n] −∞ = all
    top_k: torch.Tensor  # int64 [n] 0 = all
    mask_rows: torch.Tensor  # int64 [n] index into masks, −1 = all tokens may be chosen
    masks: torch.Tensor  # int32 [m, words] packed bits, as in Draws

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, draws: Draws, device: torch.device) -> "DeviceDraws":
        """Nobody waits for the copy: it is in the device's stream, in front of what reads it."""
        count = len(draws)
        room = _room(count)
        masks = [] if draws.masks is None else [mask for mask in draws.masks if mask is not None]
        words = len(masks[0]) if masks else 0
        host = np.zeros(_LINE * count + _COLUMNS * room + len(masks) * words // 2 + 1, dtype=np.int64)
        columns = host[_LINE * count :][: _COLUMNS * room].reshape(_COLUMNS, room)[:, :count]
        columns[0] = draws.rows
        columns[1] = draws.inverse_temperatures.view(np.int64)
        columns[2] = draws.keys.view(np.int64)
        columns[3] = draws.top_p.view(np.int64)
        with np.errstate(divide="ignore"):
            columns[4] = np.log(draws.min_p).view(np.int64)
        columns[5] = draws.top_k
        columns[6] = _mask_rows(draws)
        if masks:
            packed = host[_LINE * count + _COLUMNS * room :].view(np.uint32)[: len(masks) * words]
            np.stack(masks, out=packed.reshape(len(masks), words))
        races = draws.inverse_temperatures > 0
        limited = races & ((draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0))
        nuclei = races & (draws.top_k == 0) & (draws.top_p < 1)
        return cls._over(_sent(host, device), bool(limited.any()), bool(nuclei.any()), count, len(masks), words)

    @classmethod
    def _over(
        cls, memory: torch.Tensor, limited: bool, nuclei: bool, count: int, masks: int, words: int
    ) -> "DeviceDraws":
        room = _room(count)
        columns = memory[_LINE * count :][: _COLUMNS * room].view(_COLUMNS, room)[:, :count]
        return cls(
            limited=limited,
            nuclei=nuclei,
            counters=memory[: _LINE * count].view(torch.int32).view(count, LINE.value),
            rows=columns[0],
            inverse_temperatures=columns[1].view(torch.float64),
            keys=columns[2],
            top_p=columns[3].view(torch.float64),
            log_min_p=columns[4].view(torch.float64),
            top_k=columns[5],
            mask_rows=columns[6],
            masks=memory[_LINE * count + _COLUMNS * room :].view(torch.int32)[: masks * words].view(masks, words),
        )


def _room(count: int) -> int:
    """Numbers of 8 bytes in the place of a column: an even number of them."""
    return count + count % 2


def _mask_rows(draws: Draws) -> NDArray[np.int64]:
    if draws.masks is None:
        return np.full(len(draws), -1, dtype=np.int64)
    masked = np.array([mask is not None for mask in draws.masks], dtype=np.int64)
    return np.where(masked > 0, masked.cumsum() - 1, -1)


def _sent(host: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    memory = torch.from_numpy(host)
    if device.type == "cpu":
        return memory
    return memory.pin_memory().to(device, non_blocking=True)
