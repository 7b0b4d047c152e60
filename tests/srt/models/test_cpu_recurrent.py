"""Scans of the CPU kernels: a sequence has the same bits alone and in a batch, whole and cut, with any threads."""

import ctypes
from collections.abc import Sequence

import pytest
import torch
from umbel.srt.cache.state_pool import StatePool
from umbel.srt.core.batch import StateRun
from umbel.srt.kernels.cpu.library import load_library
from umbel.srt.kernels.cpu.recurrent import RunTable, StateTable
from umbel.srt.layers.checkpoint import Checkpoint
from umbel.srt.models.cpu_decoder import ACTIVATION_CODES
from umbel.srt.models.cpu_recurrent import CpuRecurrent
from umbel.srt.models.decoder_config import DecoderConfig
from umbel.srt.models.families import read_config

from ..kernels.native import isa_cases
from .reference import reference_model, tensors_of
from .test_cpu_decoder import CASES

KINDS = {"short convolutions": 0, "delta nets, gated attention": 0, "mamba, layers and MLPs alone, without gates": 2}
LENGTH, STATES = 23, 6
CUTS = ((0, 1, 0), (1, 3, 2), (3, 20, 2), (20, LENGTH, 2))  # first row, end, slot of the state before


class Scan:
    """The recurrent part of one layer, on states of its own."""

    def __init__(self, case: str, library: ctypes.CDLL) -> None:
        index = KINDS[case]
        model = reference_model(CASES[case][0], **CASES[case][1])
        config: DecoderConfig = read_config(model.config.to_dict())
        weights = Checkpoint(tensors_of(model), dtype=torch.float32, device=torch.device("cpu"))
        self.layer = CpuRecurrent(index, config, weights, ACTIVATION_CODES)
        geometry = config.state_geometry(torch.float32)
        assert geometry is not None
        self._number = sum(layer.recurrent is not None for layer in config.layers[:index])
        self.pool = StatePool(geometry, STATES, torch.device("cpu"), library)
        self._states = StateTable(self.pool)
        self._library = library

    def run(self, rows: torch.Tensor, runs: Sequence[StateRun]) -> torch.Tensor:
        """[R, first width] → [R, width]"""
        out = torch.full((len(rows), self.layer.arguments.width), torch.nan)
        table, first = RunTable(runs), rows.clone()
        done = self._library.umbel_recurrent_scan(
            ctypes.byref(self.layer.arguments),
            ctypes.byref(table.arguments),
            ctypes.byref(self._states.layers[self._number]),
            ctypes.c_void_p(first.data_ptr()),
            ctypes.c_long(len(rows)),
            ctypes.c_float(1e-6),
            ctypes.c_void_p(out.data_ptr()),
        )
        assert done
        return out

    def state(self, slot: int) -> torch.Tensor:
        return torch.cat([part[slot].flatten() for part in self.pool.parts[self._number]])

    def rows(self, count: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, self.layer.arguments.first_width, generator=generator)


@pytest.mark.parametrize("isa", isa_cases())
@pytest.mark.parametrize("case", KINDS)
def test_a_sequence_has_the_same_bits_however_it_is_computed(case: str, isa: str) -> None:
    library = load_library(isa)
    library.umbel_set_threads(1)
    scan = Scan(case, library)
    rows, others = scan.rows(LENGTH, 1), scan.rows(9, 2)
    expected = scan.run(rows, [StateRun(LENGTH, 0, 1)])
    assert expected.isfinite().all()
    state = scan.state(1).clone()
    library.umbel_set_threads(2)
    parts = [scan.run(rows[begin:end], [StateRun(end - begin, source, 2)]) for begin, end, source in CUTS]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(scan.state(2), state)
    batch = torch.cat([others[:4], rows, others[4:]])
    runs = [StateRun(4, 0, 3), StateRun(7, 0, 4), StateRun(LENGTH - 7, 4, 5), StateRun(5, 3, 3)]
    assert torch.equal(scan.run(batch, runs)[4 : 4 + LENGTH], expected)
    assert torch.equal(scan.state(5), state)
    fork = scan.run(torch.cat([rows[7:], rows[7:8]]), [StateRun(LENGTH - 7, 4, 1), StateRun(1, 4, 4)])
    assert torch.equal(fork, torch.cat([expected[7:], expected[7:8]]))
