"""Pages leave a pool and come back into other slots, byte by byte."""

import numpy as np
import pytest
import torch
from umbel.srt.cache.kv_pool import FLOAT8, KVGeometry, KVPool, LayerKV, PoolSize
from umbel.srt.cache.pool_pages import PoolPages
from umbel.srt.core.batch import PagePart, PagePort
from umbel.srt.runners.cuda.device import HostAccelerator
from umbel.srt.runners.cuda.pages import DevicePages
from umbel.srt.testing.oracle import OracleError

from ..engine_harness import Engine

FULL = LayerKV(2, 4, 3)
WINDOWED = LayerKV(1, 4, 4, windowed=True)
LATENT = LayerKV(1, 6, 4, latent=True)
BORROWING = LayerKV(2, 4, 3, source=0)


def filled(geometry: KVGeometry, size: PoolSize, seed: int) -> KVPool:
    pool = KVPool(geometry, size, "cpu")
    torch.manual_seed(seed)
    for index, layer in enumerate(geometry.layers):
        if layer.source is None:
            pool.keys[index].copy_(torch.randn(pool.keys[index].shape).to(geometry.dtype))
            if not layer.latent:
                pool.values[index].copy_(torch.randn(pool.values[index].shape).to(geometry.dtype))
    return pool


def raw(tensor: torch.Tensor, slots: np.ndarray) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy()[slots].tobytes()


def ports(pool: KVPool) -> list[PagePort]:
    return [PoolPages(pool), DevicePages(pool, HostAccelerator())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT8], ids=str)
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_every_layer_of_a_page_comes_back(dtype: torch.dtype, device: bool) -> None:
    geometry = KVGeometry((FULL, LATENT, BORROWING, WINDOWED), dtype, reach=4)
    source, target = filled(geometry, PoolSize(32), 1), filled(geometry, PoolSize(32), 2)
    out, back = ports(source)[device], ports(target)[device]
    slots, places = np.array([[3, 9, 4, 20], [1, 2, 31, 7]], dtype=np.int32), np.arange(10, 18, dtype=np.int32)
    payloads = out.save(slots, PagePart.TOKENS).result()
    assert [payload.nbytes for payload in payloads] == [4 * out.bytes_per_token(PagePart.TOKENS)] * 2
    back.load(places, payloads, PagePart.TOKENS)
    for index in range(4):
        assert raw(target.keys[index], places) == raw(source.keys[index], slots.ravel())
        assert raw(target.values[index], places) == raw(source.values[index], slots.ravel())


def test_a_page_that_begins_in_the_pool_is_loaded_from_its_middle() -> None:
    geometry = KVGeometry((FULL,), torch.float32)
    source, target = filled(geometry, PoolSize(16), 1), filled(geometry, PoolSize(16), 2)
    untouched = raw(target.keys[0], np.array([1, 2, 3]))
    payloads = PoolPages(source).save(np.array([[4, 5, 6, 7]], dtype=np.int32), PagePart.TOKENS).result()
    PoolPages(target).load(np.array([8, 9], dtype=np.int32), payloads, PagePart.TOKENS)
    assert raw(target.keys[0], np.array([8, 9])) == raw(source.keys[0], np.array([6, 7]))
    assert raw(target.keys[0], np.array([1, 2, 3])) == untouched


def test_layers_with_slots_of_their_own_have_payloads_of_their_own() -> None:
    geometry = KVGeometry((FULL, WINDOWED), torch.float32, reach=4)
    source, target = filled(geometry, PoolSize(32, 8), 1), filled(geometry, PoolSize(32, 8), 2)
    pages = PoolPages(source)
    assert pages.bytes_per_token(PagePart.TOKENS) == FULL.stored * 4
    assert pages.bytes_per_token(PagePart.WINDOWS) == WINDOWED.stored * 4
    payloads = pages.save(np.array([[5, 6]], dtype=np.int32), PagePart.WINDOWS).result()
    PoolPages(target).load(np.array([1, 2], dtype=np.int32), payloads, PagePart.WINDOWS)
    assert raw(target.keys[1], np.array([1, 2])) == raw(source.keys[1], np.array([5, 6]))


def test_layouts_tell_pools_apart() -> None:
    def layout(*layers: LayerKV, size: PoolSize = PoolSize(32), dtype: torch.dtype = torch.float32) -> str:  # noqa: B008
        return PoolPages(KVPool(KVGeometry(layers, dtype, reach=4), size, "cpu")).layout

    layouts = [
        layout(FULL),
        layout(FULL, FULL),
        layout(WINDOWED),
        layout(LATENT),
        layout(FULL, WINDOWED),
        layout(WINDOWED, FULL),
        layout(FULL, WINDOWED, size=PoolSize(32, 8)),
        layout(FULL, dtype=torch.bfloat16),
    ]
    assert len(set(layouts)) == len(layouts)
    assert layout(FULL) == layout(FULL, size=PoolSize(64))


def test_a_page_in_the_wrong_slots_is_noticed_by_the_oracle() -> None:
    engine = Engine()
    prompt = list(range(1, 9))
    engine.generate(prompt)
    engine.run()
    pages = engine.runner.pages
    assert pages is not None
    match = engine.scheduler.kv.cache.match(np.array(prompt, dtype=np.int32), "")
    payloads = pages.save(match.slots()[None, :], PagePart.TOKENS).result()
    pages.load(match.slots()[::-1].copy(), payloads, PagePart.TOKENS)
    engine.generate(prompt)
    engine.run()
    assert isinstance(engine.scheduler.last_failure, OracleError)
