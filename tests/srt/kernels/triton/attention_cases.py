"""What the attention tests share: backends with tiny tiles, pools on the device, and the torch reference's answer."""

from dataclasses import replace

import torch
from umbel.srt.attention.backend import AttentionGeometry, TorchBackend
from umbel.srt.cache.kv_pool import KVPool, LayerKV, rounded
from umbel.srt.core.batch import Batch
from umbel.srt.kernels.triton.attention import AttentionTiles, Tile
from umbel.srt.kernels.triton.attention_backend import TritonBackend, Ways

from ...attention.batches import random_pool

SCALE = 0.2
TINY_KEYS = 16  # of a tile: what the batches of tests read takes several


def normal(*shape: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiny(tile: Tile) -> Tile:
    return replace(tile, keys=TINY_KEYS)


def tiny_backend(
    geometry: AttentionGeometry,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    tree: bool = True,
    multiprocessors: int = 2,
    shortest_run: int = 24,
    ways: Ways | None = None,
) -> TritonBackend:
    """Runs of few keys are cut and shared already."""
    backend = TritonBackend(
        geometry,
        device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tree_attention=tree,
        multiprocessors=multiprocessors,
        ways=ways or Ways(),
    )
    sizes = backend.sizes
    tiles = AttentionTiles(tiny(sizes.tiles.few), tiny(sizes.tiles.some), tiny(sizes.tiles.many))
    cut = replace(sizes.cut, merge_keys=4, shortest_run=shortest_run, run_per_row=0, start_keys=4, part_keys=0)
    backend.sizes = replace(sizes, tiles=tiles, cut=cut)
    return backend


def pool_for(
    num_slots: int,
    geometry: AttentionGeometry,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 3,
    layer: LayerKV | None = None,
) -> KVPool:
    """One layer of random keys and values, by the geometry or as given; the dummy slot holds NaN."""
    source = random_pool(num_slots, geometry, torch.float32, seed, layer)
    pool = KVPool(replace(source.geometry, dtype=dtype), num_slots, device)
    pool.keys[0] = rounded(source.keys[0].to(device), dtype)
    pool.values[0] = rounded(source.values[0].to(device), dtype)
    return pool


def attend_reference(
    batch: Batch,
    pool: KVPool,
    queries: torch.Tensor,
    window: int | None,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The torch backend's answer in float32, without sharing, from the same rounded keys."""
    heads, head_dim = queries.shape[1:]
    geometry = AttentionGeometry(heads, pool.geometry.layers[0].kv_heads, head_dim)
    backend = TorchBackend(geometry, queries.device, tree_attention=False)
    exact = queries.float()
    return backend.attend(0, exact, pool, backend.plan(batch, window), scale=SCALE, softcap=softcap, sinks=sinks)
