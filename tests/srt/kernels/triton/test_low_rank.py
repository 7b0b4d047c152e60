"""Changes of adapters, by the kernels and by their reference, against one adapter after another."""

from collections.abc import Iterator

import pytest
import torch
from umbel.srt.core.messages import NO_ADAPTER
from umbel.srt.kernels.triton import low_rank, reference
from umbel.srt.layers.checkpoint import LinearTensors
from umbel.srt.layers.low_rank import Adapter, AdapterRows, LowRank, LowRankChanges, LowRankStack

from .closeness import TOLERANCES, random, relative_error

MAPS = LinearTensors(("q", "k"), (80, 24), 40)
COUNT = 3


@pytest.fixture(autouse=True)
def _on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


def adapters() -> list[Adapter]:
    """The first changes both maps, the second one of them, with another rank, and the third none."""

    def change(seed: int, rank: int, width: int) -> LowRank:
        return LowRank(random(rank, 40, seed=seed), random(width, rank, seed=seed + 1), 0.3 * seed)

    changes = [{"q": change(1, 4, 80), "k": change(3, 4, 24)}, {"k": change(5, 20, 24)}, {}]
    return [Adapter(f"adapter {index}", own) for index, own in enumerate(changes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 45])
def test_rows_of_several_adapters_are_changed_as_by_one_after_another(rows: int, dtype: torch.dtype) -> None:
    """Rows of one adapter lie apart, and those of the first are more than a block has."""
    device = torch.get_default_device()
    used = torch.tensor([(0, 0, 1, 3, 0, 2)[row % 6] for row in range(rows)], dtype=torch.int32)  # 3: none
    wide = random(rows, 100, dtype=dtype)
    x, before = wide[:, 30:70], random(rows, 2 * 104, dtype=dtype, seed=9)[:, :104]
    stack = LowRankStack.of(adapters(), MAPS, dtype=dtype, device=device)
    assert stack is not None
    results = []
    for kernels in (low_rank, reference):
        out = before.clone()
        kernels.add_low_rank(x, out, kernels.adapter_blocks(used, COUNT), stack)
        results.append(out)
    expected = before.clone()
    by_row = AdapterRows.of(torch.where(used == COUNT, NO_ADAPTER, used).cpu().numpy())
    assert by_row is not None
    LowRankChanges(adapters(), MAPS, dtype=dtype, device=device).add(x, expected, by_row)
    assert relative_error(results[0], expected) < 2 * TOLERANCES[dtype]
    assert relative_error(results[1], expected) < 2 * TOLERANCES[dtype]
    assert torch.equal(results[0][used == COUNT], before[used == COUNT])


def test_no_rows_are_no_work_and_products_without_changes_have_no_stack() -> None:
    device = torch.get_default_device()
    stack = LowRankStack.of(adapters(), MAPS, dtype=torch.float32, device=device)
    assert stack is not None
    blocks = low_rank.adapter_blocks(torch.zeros(1, dtype=torch.int32), COUNT)
    assert int(blocks.filled) == 1
    low_rank.add_low_rank(torch.empty(0, 40), torch.empty(0, 104), blocks, stack)
    assert LowRankStack.of(adapters(), LinearTensors(("v",), (16,), 40), dtype=torch.float32, device=device) is None
