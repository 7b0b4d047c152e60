"""Attention kernels of others next to ours, on the same keys and queries: decode, prompts, branches with a prefix.

    torch          scaled dot product attention by flash, efficient and cuDNN kernels, always there; keys in one piece
    FlashInfer     paged decode and prefill, and cascades of two levels; pages of one token, as ours
    SGLang         its Triton kernels of decode and extend; pages of one token
    flash-attn     decode and prompts, keys in one piece

What is not installed is named, and so is what a kernel refuses. A peer counts if it gives what ours gives. Each is
asked for what its documentation shows for the case; plans are made before the time runs, as ours are.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.cache.kv_pool import KVPool
from umbel.srt.kernels.triton.attention_backend import TritonBackend

from ..figures import Figure, PendingFigure, Unit
from ..stopwatch import Stopwatch
from .batches import Rows, Step, forked_step, normal, pool_for, step_of
from .sizes import Decode, Extend, Fork, Sizes

GROUP = "peers"
MOST = 2e-2  # of our values, by their norm: both round
WORKSPACE = 128 << 20  # bytes, as FlashInfer's documentation has it
_SPLITS = 8  # of the keys of a sequence, in SGLang's kernel; its server takes so many at most unless told otherwise

Attend = Callable[[], torch.Tensor]  # → [rows, heads, head_dim]


class NotTaken(Exception):
    """A peer has no kernel for the case."""


@dataclass(frozen=True)
class Case:
    """Rows and keys that all attend with.

    Attributes:
        kind: "decode", "prompt" or "branches".
        prefix: keys that all sequences share; 0 unless they are branches.
    """

    name: str
    kind: str
    geometry: AttentionGeometry
    dtype: torch.dtype
    device: torch.device
    step: Step
    prefix: int = 0

    @cached_property
    def pool(self) -> KVPool:
        return pool_for(self.step.slots, self.geometry, self.dtype, self.device)

    @cached_property
    def queries(self) -> torch.Tensor:
        geometry = self.geometry
        shape = self.step.batch.rows, geometry.heads, geometry.head_dim
        return normal(*shape, device=self.device, dtype=self.dtype)

    @property
    def keys(self) -> torch.Tensor:
        return self.pool.keys[0]

    @property
    def values(self) -> torch.Tensor:
        return self.pool.values[0]

    @property
    def scale(self) -> float:
        return float(self.geometry.head_dim**-0.5)

    @property
    def sequences(self) -> int:
        return len(self.step.batch.slots)

    def ours(self) -> Attend:
        """Our kernel, planned."""
        backend = TritonBackend(self.geometry, self.device, dtype=self.dtype)
        plan, pool, queries = backend.plan(self.step.batch, None), self.pool, self.queries
        return lambda: backend.attend(0, queries, pool, plan, scale=self.scale)

    def in_one_piece(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values as [sequences, heads, rows or keys, head_dim]. All sequences are equally long."""
        slots = torch.stack([torch.from_numpy(one).long() for one in self.step.batch.slots]).to(self.device)
        rows = self.queries.unflatten(0, (self.sequences, -1))
        parts = rows, self.keys[slots], self.values[slots]
        queries, keys, values = (part.transpose(1, 2).contiguous() for part in parts)
        return queries, keys, values

    def ends(self, lengths: Sequence[int]) -> torch.Tensor:
        """Where parts of these lengths begin, and the end of the last."""
        return torch.tensor([0, *lengths], dtype=torch.int32, device=self.device).cumsum(0, dtype=torch.int32)


class Peer(Protocol):
    name: str

    def attend(self, case: Case) -> Attend:
        """Plans the case. Raises NotTaken where there is no kernel for it."""


class Sdpa:
    """One backend of torch's scaled dot product attention."""

    def __init__(self, backend: SDPBackend) -> None:
        self._backend = backend
        self.name = f"torch, {backend.name.removesuffix('_ATTENTION').lower()}"

    def attend(self, case: Case) -> Attend:
        if case.kind == "prompt" and case.step.batch.prefix_lengths.any():
            raise NotTaken("rows that see a prefix and each other need a mask")
        queries, keys, values = case.in_one_piece()
        causal, grouped = case.kind == "prompt", case.geometry.group > 1

        def work() -> torch.Tensor:
            with sdpa_kernel(self._backend):
                out = functional.scaled_dot_product_attention(
                    queries, keys, values, is_causal=causal, enable_gqa=grouped, scale=case.scale
                )
            return out.transpose(1, 2).flatten(0, 1)

        return work


class FlashInfer:
    """The package `flashinfer`."""

    name = "FlashInfer"

    # Any: the package, or a fake of it
    def __init__(self, module: Any) -> None:
        self._module = module

    def attend(self, case: Case) -> Attend:
        batch, geometry = case.step.batch, case.geometry
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=case.device)
        shape = geometry.heads, geometry.kv_heads, geometry.head_dim, 1
        kinds = {"q_data_type": case.dtype, "kv_data_type": case.dtype}
        lengths = [len(one) for one in batch.slots]
        indices = _indices(batch.slots, case)
        ones = torch.ones(case.sequences, dtype=torch.int32, device=case.device)
        match case.kind:
            case "decode":
                wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
                    workspace, "NHD", use_tensor_cores=geometry.group > 1
                )
                wrapper.plan(case.ends(lengths), indices, ones, *shape, **kinds)
            case "prompt":
                wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
                rows = case.ends(batch.query_lengths.tolist())
                wrapper.plan(rows, case.ends(lengths), indices, ones, *shape, causal=True, **kinds)
            case _:
                own = [one[case.prefix :] for one in batch.slots]
                wrapper = self._module.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
                wrapper.plan(
                    [case.ends([case.sequences]), case.ends([1] * case.sequences)],
                    [case.ends([case.prefix]), case.ends([len(one) for one in own])],
                    [_indices([batch.slots[0][: case.prefix]], case), _indices(own, case)],
                    [ones[:1], ones],
                    *shape,
                    **kinds,
                )
        queries, cache = case.queries, (case.keys.unsqueeze(1), case.values.unsqueeze(1))

        def work() -> torch.Tensor:
            out: torch.Tensor = wrapper.run(queries, cache)
            return out

        return work


class SGLang:
    """The Triton kernels of the package `sglang`. Arguments go by name: their order differs between versions."""

    name = "SGLang's Triton kernels"

    # Any: functions of the package, or fakes of them
    def __init__(self, decode: Callable[..., Any], extend: Callable[..., Any]) -> None:
        self._decode = decode
        self._extend = extend

    def attend(self, case: Case) -> Attend:
        return self._extended(case) if case.kind == "prompt" else self._decoded(case)

    def _decoded(self, case: Case) -> Attend:
        batch, queries = case.step.batch, case.queries
        out = torch.empty_like(queries)
        parts = (case.sequences, case.geometry.heads, _SPLITS)
        logits = torch.empty(*parts, case.geometry.head_dim, dtype=torch.float32, device=case.device)
        known = {
            "q": queries,
            "k_buffer": case.keys,
            "v_buffer": case.values,
            "o": out,
            "kv_indptr": case.ends([len(one) for one in batch.slots]),
            "kv_indices": _indices(batch.slots, case).long(),
            "attn_logits": logits,
            "attn_lse": torch.empty(*parts, dtype=torch.float32, device=case.device),
            "num_kv_splits": torch.full((case.sequences,), _SPLITS, dtype=torch.int32, device=case.device),
            "max_kv_splits": _SPLITS,
            "sm_scale": case.scale,
            "k_scale": 1.0,
            "v_scale": 1.0,
        }
        return _called(self._decode, known, out)

    def _extended(self, case: Case) -> Attend:
        batch, queries = case.step.batch, case.queries
        out = torch.empty_like(queries)
        prefixes = batch.prefix_lengths.tolist()
        pairs = list(zip(batch.slots, prefixes, strict=True))
        own = _indices([slots[prefix:] for slots, prefix in pairs], case).long()
        known = {
            "q_extend": queries,
            "k_extend": case.keys[own],
            "v_extend": case.values[own],
            "o_extend": out,
            "k_buffer": case.keys,
            "v_buffer": case.values,
            "qo_indptr": case.ends(batch.query_lengths.tolist()),
            "kv_indptr": case.ends(prefixes),
            "kv_indices": _indices([slots[:prefix] for slots, prefix in pairs], case).long(),
            "custom_mask": None,
            "is_causal": True,
            "mask_indptr": None,
            "max_len_extend": int(batch.query_lengths.max()),
            "k_scale": 1.0,
            "v_scale": 1.0,
            "sm_scale": case.scale,
        }
        return _called(self._extend, known, out)


class FlashAttn:
    """The package `flash_attn`."""

    name = "flash-attn"

    # Any: the package, or a fake of it
    def __init__(self, module: Any) -> None:
        self._module = module

    def attend(self, case: Case) -> Attend:
        if case.kind == "prompt" and case.step.batch.prefix_lengths.any():
            raise NotTaken("keys in one piece are compared where there is no prefix")
        queries, keys, values = (part.transpose(1, 2).contiguous() for part in case.in_one_piece())

        def work() -> torch.Tensor:
            causal, scale = case.kind == "prompt", case.scale
            out: torch.Tensor = self._module.flash_attn_func(queries, keys, values, softmax_scale=scale, causal=causal)
            return out.flatten(0, 1)

        return work


def _called(function: Callable[..., Any], known: dict[str, Any], out: torch.Tensor) -> Attend:
    """Gives a function those of the known arguments that it takes. Raises NotTaken if it needs others."""
    taken = inspect.signature(function).parameters
    needed = [name for name, one in taken.items() if one.default is inspect.Parameter.empty and name not in known]
    if needed:
        raise NotTaken(f"{function.__name__} of this version needs {', '.join(needed)}")
    given = {name: value for name, value in known.items() if name in taken}

    def work() -> torch.Tensor:
        function(**given)
        return out

    return work


def _indices(slots: Sequence[NDArray[np.int32]], case: Case) -> torch.Tensor:
    """The slots of several sequences, one after the other: int32 on the device."""
    return torch.from_numpy(np.concatenate(slots)).to(case.device)


# ------------------------------------------------------------------------------------------ figures


def installed_peers(find: Callable[[str], ModuleType] = importlib.import_module) -> tuple[list[Peer], list[str]]:
    """Returns the peers that can be asked here, and lines that name the others. find: imports a module."""
    peers: list[Peer] = [
        Sdpa(backend)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    ]
    kernels = "sglang.srt.layers.attention.triton_ops"

    def sglang() -> Peer:
        decode, extend = find(f"{kernels}.decode_attention"), find(f"{kernels}.extend_attention")
        return SGLang(decode.decode_attention_fwd, extend.extend_attention_fwd)

    makers: dict[str, Callable[[], Peer]] = {
        FlashInfer.name: lambda: FlashInfer(find("flashinfer")),
        SGLang.name: sglang,
        FlashAttn.name: lambda: FlashAttn(find("flash_attn")),
    }
    absent = []
    for name, make in makers.items():
        try:
            peers.append(make())
        except Exception as error:  # packages of others raise anything while they are imported
            absent.append(f"{name}: not here ({type(error).__name__}: {str(error).partition(chr(10))[0]})")
    return peers, absent


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """One at a time: their pools would not fit together."""
    for decode in sizes.streams:
        yield _decode(decode, device)
    for extend in sizes.extends:
        yield _prompt(extend, device)
    for fork in sizes.forks:
        if fork.between == (0, 0):  # peers share one prefix
            yield _branches(fork, device)


def peer_figures(
    found: Iterator[Case], peers: Sequence[Peer], stopwatch: Stopwatch, refused: Callable[[str], None]
) -> Iterator[PendingFigure]:
    """Yields how many times faster ours is, peer by peer. refused: told of each case that a peer does not take."""
    for case in found:
        for peer in peers:
            yield PendingFigure(_name(case, peer), partial(_compared, case, peer, stopwatch, refused))


def _compared(case: Case, peer: Peer, stopwatch: Stopwatch, refused: Callable[[str], None]) -> Figure:
    """Compares the values of a peer with ours, and times both if they are equal.

    The figure is no number where the peer gives other values (the note has its error) or does not take the case.
    """
    name = _name(case, peer)
    ours = case.ours()
    try:
        theirs = peer.attend(case)
        expected, actual = ours().double(), theirs().double()
        error = float((actual - expected).norm() / expected.norm())
        seconds = stopwatch.seconds(theirs)
    except Exception as caught:  # a kernel of others may raise anything
        refused(f"{name}: {type(caught).__name__}: {str(caught).partition(chr(10))[0]}")
        return Figure(GROUP, name, Unit.TIMES, float("nan"), note="not taken")
    if not error <= MOST:
        return Figure(GROUP, name, Unit.TIMES, float("nan"), note=f"gives other values: relative error {error:.1e}")
    own = stopwatch.seconds(ours)
    note = f"ours {own * 1e6:.1f} µs, theirs {seconds * 1e6:.1f} µs, relative error {error:.1e}"
    return Figure(GROUP, name, Unit.TIMES, seconds / own, note=note)


def _name(case: Case, peer: Peer) -> str:
    return f"{case.name}: {peer.name}"


def _decode(decode: Decode, device: torch.device) -> Case:
    step = step_of([Rows(decode.keys - 1)] * decode.sequences)
    name = f"decode, {_words(decode.geometry)}, {decode.sequences} sequences of {decode.keys} keys"
    return Case(name, "decode", decode.geometry, decode.dtype, device, step)


def _prompt(extend: Extend, device: torch.device) -> Case:
    step = step_of([Rows(extend.prefix, extend.rows)])
    after = f" after {extend.prefix} keys" if extend.prefix else ""
    name = f"prompt of {extend.rows}{after}, {_words(extend.geometry)}"
    return Case(name, "prompt", extend.geometry, torch.bfloat16, device, step)


def _branches(fork: Fork, device: torch.device) -> Case:
    step = forked_step(fork.branches, fork.shared, fork.own)
    name = f"{fork.branches} branches of {fork.own} keys after {fork.shared}, {_words(fork.geometry)}"
    return Case(name, "branches", fork.geometry, torch.bfloat16, device, step, prefix=fork.shared)


def _words(geometry: AttentionGeometry) -> str:
    return f"{geometry.heads}/{geometry.kv_heads} heads of {geometry.head_dim}"
