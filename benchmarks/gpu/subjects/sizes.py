"""What is measured: shapes of models that people run on such a device, and tiny ones for a dry run."""

import zlib
from dataclasses import dataclass

import torch
from umbel.srt.attention.backend import AttentionGeometry

LLAMA_2_7B = AttentionGeometry(heads=32, kv_heads=32, head_dim=128)
LLAMA_3_8B = AttentionGeometry(heads=32, kv_heads=8, head_dim=128)
NARROW = AttentionGeometry(heads=32, kv_heads=8, head_dim=64)
WIDE = AttentionGeometry(heads=16, kv_heads=8, head_dim=256)  # Gemma 3 12B
SMALL = AttentionGeometry(heads=4, kv_heads=2, head_dim=16)


@dataclass(frozen=True, slots=True)
class Decode:
    """Each of `sequences` decodes one token behind `keys` of its own."""

    geometry: AttentionGeometry
    sequences: int
    keys: int
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Extend:
    """A prompt of `rows` behind `prefix` keys that are in the pool."""

    geometry: AttentionGeometry
    rows: int
    prefix: int = 0
    must: float | None = None  # TFLOPS
    stretch: float | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Branches that decode behind a prefix that they share, and perhaps behind nodes that some of them do.

    between: nodes between the prefix and the branches, and the keys of each.
    must: how often faster than without sharing.
    """

    geometry: AttentionGeometry
    branches: int
    shared: int
    own: int
    between: tuple[int, int] = (0, 0)
    must: float = 3.0

    @property
    def levels(self) -> list[tuple[int, int]]:
        """Nodes of each level of the tree, and the keys of each."""
        return [(1, self.shared), *([self.between] if self.between[0] else []), (self.branches, self.own)]


@dataclass(frozen=True, slots=True)
class ExpertShape:
    name: str
    experts: int
    top_k: int
    hidden: int
    width: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the kernels are run on.

    Attributes:
        streams: decode steps that read so many keys that memory is all that counts.
        singles: decode steps of one sequence, where starting kernels counts.
        layers: of `singles`, one after another, so that none finds its keys in the cache.
        long_prompts: prompts for torch's kernel on gathered keys, and for ours; the last one is a chunk of a prompt.
        rows, hidden, width: of norms, activations, and heads that are turned.
        draws, vocab: rows of logits of which tokens are chosen.
        experts, packed: mixtures whose experts are floats, and packed ones.
        prompt: tokens that go through experts at once.
        copied, multiplied: numbers in the large copy, width of the large product.
    """

    streams: tuple[Decode, ...]
    singles: tuple[Decode, ...]
    layers: int
    extends: tuple[Extend, ...]
    long_prompts: tuple[Extend, ...]
    forks: tuple[Fork, ...]
    rows: int
    hidden: int
    width: int
    turned: AttentionGeometry
    draws: int
    vocab: int
    experts: tuple[ExpertShape, ...]
    packed: tuple[ExpertShape, ...]
    prompt: int
    copied: int
    multiplied: int

    @property
    def key(self) -> str:
        """Equal for equal sizes, in all processes."""
        return f"{zlib.crc32(repr(self).encode()):08x}"


FULL = Sizes(
    streams=(
        Decode(LLAMA_2_7B, 32, 1024),
        Decode(LLAMA_2_7B, 4, 4096),
        Decode(LLAMA_3_8B, 32, 4096),
        Decode(LLAMA_3_8B, 256, 1024),
        Decode(NARROW, 64, 4096),
        Decode(WIDE, 32, 2048),
    ),
    singles=tuple(Decode(geometry, 1, keys) for geometry in (LLAMA_2_7B, LLAMA_3_8B) for keys in (1024, 4096, 8192)),
    layers=16,
    extends=(
        Extend(LLAMA_2_7B, 8192, must=300, stretch=450),
        Extend(LLAMA_3_8B, 8192, must=300, stretch=450),
        Extend(LLAMA_3_8B, 2048, prefix=8192, must=255, stretch=414),
        Extend(WIDE, 8192, must=200, stretch=330),
        Extend(NARROW, 8192),
    ),
    long_prompts=(
        *(Extend(LLAMA_3_8B, rows) for rows in (2048, 8192, 32_768)),
        Extend(LLAMA_3_8B, 8192, prefix=24_576),
    ),
    forks=(
        Fork(LLAMA_2_7B, 32, 1024, 128, must=3.5),
        Fork(LLAMA_2_7B, 32, 2048, 228, must=4.5),
        Fork(LLAMA_3_8B, 32, 4096, 228, must=5.0),
        Fork(LLAMA_2_7B, 128, 2048, 128, must=10.0),
        Fork(LLAMA_2_7B, 32, 1024, 100, between=(4, 512)),
    ),
    rows=8192,
    hidden=4096,
    width=14336,
    turned=LLAMA_3_8B,
    draws=64,
    vocab=128_256,
    experts=(ExpertShape("Mixtral 8x7B", 8, 2, 4096, 14336), ExpertShape("Qwen 3 30B A3B", 128, 8, 2048, 768)),
    packed=(ExpertShape("gpt-oss 20B", 32, 4, 2880, 2880), ExpertShape("Qwen 3 30B A3B", 128, 8, 2048, 768)),
    prompt=8192,
    copied=1 << 30,
    multiplied=8192,
)
TINY = Sizes(
    streams=(Decode(SMALL, 2, 40, torch.float32),),
    singles=(Decode(SMALL, 1, 24, torch.float32),),
    layers=2,
    extends=(Extend(SMALL, 24, must=300, stretch=450), Extend(SMALL, 8, prefix=16, must=255, stretch=414)),
    long_prompts=(Extend(SMALL, 24), Extend(SMALL, 8, prefix=16)),
    forks=(Fork(SMALL, 3, 300, 4), Fork(SMALL, 8, 300, 4, between=(2, 260))),
    rows=4,
    hidden=64,
    width=80,
    turned=SMALL,
    draws=2,
    vocab=300,
    experts=(ExpertShape("small", 4, 2, 32, 48),),
    packed=(ExpertShape("small", 4, 2, 64, 32),),
    prompt=8,
    copied=1 << 12,
    multiplied=32,
)
