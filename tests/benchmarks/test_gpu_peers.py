"""Kernels of others next to ours: adapters on small fakes of their packages, which compute with torch."""

from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from umbel.srt.attention.backend import AttentionGeometry

from benchmarks.gpu.stopwatch import HostStopwatch
from benchmarks.gpu.subjects.peers import (
    Case,
    FlashAttn,
    FlashInfer,
    Peer,
    Sdpa,
    SGLang,
    cases,
    installed_peers,
    peer_figures,
)
from benchmarks.gpu.subjects.sizes import TINY, Decode, Extend, Fork

CPU = torch.device("cpu")
GEOMETRY = AttentionGeometry(heads=4, kv_heads=2, head_dim=16)


def attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Of one sequence, [rows, heads, d] and [keys, kv_heads, d]; causal: the last rows are the last keys."""
    group = queries.shape[1] // keys.shape[1]
    wide = [part.float().repeat_interleave(group, dim=1) for part in (keys, values)]
    scores = torch.einsum("rhd,khd->hrk", queries.float(), wide[0]) * queries.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hrk,khd->rhd", scores.softmax(-1), wide[1]).to(queries.dtype)


class PagedWrapper:
    """A fake of FlashInfer's wrappers: levels of pages of one token."""

    causal = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        assert "NHD" in arguments

    def plan_levels(self, rows: Sequence[Any], ends: Sequence[Any], indices: Sequence[Any], *shape: int) -> None:
        assert shape == (4, 2, 16, 1)
        assert all(part.dtype == torch.int32 for parts in (rows, ends, indices) for part in parts)
        self.levels = list(zip(rows, ends, indices, strict=True))

    def run(self, queries: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        seen: list[list[int]] = [[] for _ in queries]
        for rows, ends, indices in self.levels:
            for one in range(len(rows) - 1):
                for row in range(int(rows[one]), int(rows[one + 1])):
                    seen[row] += indices[int(ends[one]) : int(ends[one + 1])].tolist()
        keys, values = (part.squeeze(1) for part in cache)
        out = []
        for row, slots in enumerate(seen):
            visible = slots[: len(slots) - len(queries) + row + 1] if self.causal else slots
            out.append(attended(queries[row : row + 1], keys[visible], values[visible], causal=False))
        return torch.cat(out)


class Decoding(PagedWrapper):
    def plan(self, ends: Any, indices: Any, last: Any, *shape: int, **kinds: Any) -> None:
        self.plan_levels([torch.arange(len(ends), dtype=torch.int32)], [ends], [indices], *shape)


class Prefilling(PagedWrapper):
    def plan(self, rows: Any, ends: Any, indices: Any, last: Any, *shape: int, causal: bool, **kinds: Any) -> None:
        self.causal = causal
        self.plan_levels([rows], [ends], [indices], *shape)


class Cascade(PagedWrapper):
    def plan(self, rows: Any, ends: Any, indices: Any, last: Any, *shape: int, **kinds: Any) -> None:
        assert [len(one) for one in last] == [1, len(rows[1]) - 1]
        self.plan_levels(rows, ends, indices, *shape)


FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Decoding,
    BatchPrefillWithPagedKVCacheWrapper=Prefilling,
    MultiLevelCascadeAttentionWrapper=Cascade,
)


def decode_attention_fwd(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    attn_logits: torch.Tensor,
    attn_lse: torch.Tensor,
    num_kv_splits: torch.Tensor,
    max_kv_splits: int,
    sm_scale: float,
    logit_cap: float = 0.0,
) -> None:
    assert attn_logits.shape[2] == max_kv_splits
    for row in range(len(q)):
        slots = kv_indices[kv_indptr[row] : kv_indptr[row + 1]]
        o[row] = attended(q[row : row + 1], k_buffer[slots], v_buffer[slots], causal=False)[0]


def extend_attention_fwd(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    max_len_extend: int,
    sm_scale: float | None = None,
) -> None:
    assert max_len_extend == len(q_extend)
    slots = kv_indices[kv_indptr[0] : kv_indptr[1]]
    keys, values = torch.cat([k_buffer[slots], k_extend]), torch.cat([v_buffer[slots], v_extend])
    o_extend.copy_(attended(q_extend, keys, values, causal=is_causal))


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, causal: bool
) -> torch.Tensor:
    return torch.stack([attended(*parts, causal=causal) for parts in zip(q, k, v, strict=True)])


FAKES: list[Peer] = [
    FlashInfer(FLASHINFER),
    SGLang(decode_attention_fwd, extend_attention_fwd),
    FlashAttn(SimpleNamespace(flash_attn_func=flash_attn_func)),
    Sdpa(SDPBackend.MATH),
]


@pytest.fixture(scope="module")
def small() -> list[Case]:
    from dataclasses import replace

    sizes = replace(
        TINY,
        streams=(Decode(GEOMETRY, 2, 20, torch.float32),),
        extends=(Extend(GEOMETRY, 9), Extend(GEOMETRY, 5, prefix=8)),
        forks=(Fork(GEOMETRY, 3, 24, 4),),
    )
    return list(cases(sizes, CPU))


@pytest.mark.parametrize("peer", FAKES, ids=lambda peer: peer.name)
@pytest.mark.sampled(4)
def test_a_peer_is_asked_for_what_our_kernel_computes(peer: Peer, small: list[Case]) -> None:
    refused: list[str] = []
    figures = [one.take() for one in peer_figures(iter(small), [peer], HostStopwatch(), refused.append)]
    taken = [one for one in figures if one.measured == one.measured]
    assert all("relative error" in one.note and one.measured > 0 for one in taken), [one.note for one in figures]
    whole = peer.name in ("FlashInfer", "SGLang's Triton kernels")
    assert len(taken) == (4 if whole else 3)
    assert [line.partition(": ")[0] for line in refused] == ([] if whole else [small[2].name])


class Wrong:
    name = "wrong"

    def attend(self, case: Case) -> Any:
        return lambda: torch.zeros_like(case.queries)


class Breaks:
    name = "breaks"

    def attend(self, case: Case) -> Any:
        raise RuntimeError("no kernel image\nmore")


def test_a_peer_that_gives_other_values_or_refuses_has_no_time(small: list[Case]) -> None:
    refused: list[str] = []
    found: Iterator[Case] = iter(small[:1])
    wrong, broken = (one.take() for one in peer_figures(found, [Wrong(), Breaks()], HostStopwatch(), refused.append))
    assert wrong.measured != wrong.measured
    assert wrong.note == "gives other values: relative error 1.0e+00"
    assert (broken.note, wrong.is_wrong, broken.is_wrong) == ("not taken", False, False)
    assert refused == [f"{small[0].name}: breaks: RuntimeError: no kernel image"]


def test_a_version_whose_function_needs_more_is_refused_by_its_arguments(small: list[Case]) -> None:
    def decode(q: torch.Tensor, page_table: torch.Tensor) -> None:
        raise AssertionError("it is not called")

    refused: list[str] = []
    peer = SGLang(decode, extend_attention_fwd)
    next(iter(peer_figures(iter(small), [peer], HostStopwatch(), refused.append))).take()
    assert refused[0].endswith("NotTaken: decode of this version needs page_table")


def test_peers_that_are_not_installed_are_named() -> None:
    def find(name: str) -> ModuleType:
        raise ImportError(f"No module named {name!r}")

    peers, absent = installed_peers(find)
    assert [peer.name for peer in peers] == ["torch, flash", "torch, efficient", "torch, cudnn"]
    assert absent == [
        "FlashInfer: not here (ImportError: No module named 'flashinfer')",
        "SGLang's Triton kernels: not here (ImportError: No module named "
        "'sglang.srt.layers.attention.triton_ops.decode_attention')",
        "flash-attn: not here (ImportError: No module named 'flash_attn')",
    ]
