"""What the benchmark asks of another engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol


class PeerError(RuntimeError):
    """A peer is missing, did not start, or refused a request. The message holds what it said."""


# The same for every peer, and enough for the workload files.
CONTEXT = 8192  # longest sequence, in tokens
CONCURRENCY = 64  # requests that may run at once
CACHE_GIGABYTES = 4  # memory for keys and values, where a peer asks for a size


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Where a peer lies and how it is started. A `dtype` that a peer cannot compute in, its constructor refuses."""

    python: Path  # the interpreter of its virtual environment (llama.cpp: also a llama-server binary)
    model: Path  # a safetensors folder, an OpenVINO folder or a GGUF file
    dtype: str | None = None  # "bfloat16" or "float32"; None: bfloat16 where the processor has instructions for it
    threads: int = 2
    prefix_caching: bool = True  # False: switched off, in peers that have one
    arguments: tuple[str, ...] = ()  # further arguments of the peer's own command
    log: Path | None = None  # what the server prints; a temporary file if left out


class Peer(Protocol):
    """One engine. `start` returns when it answers; the two requests may be in flight in any number."""

    name: ClassVar[str]

    def __init__(self, options: PeerOptions) -> None: ...

    @property
    def version(self) -> str:
        """Of the engine, as its distribution or its binary says."""

    def start(self) -> None:
        """
        Raises:
            PeerError: the server ended, or did not answer in time; with the end of its log.
        """

    def stop(self) -> None:
        """The server and all its children are gone when this returns."""

    def resident_bytes(self) -> int:
        """Memory of the server and its children now; shared pages count once a process."""

    async def generate(
        self,
        prompt: str,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        ignore_eos: bool = False,
        regex: str | None = None,
        json_schema: Mapping[str, Any] | None = None,  # Any: a JSON Schema is whatever JSON it is
    ) -> str:
        """The continuation, its stop string cut away."""

    async def score(self, prompt: str, choices: Sequence[str]) -> int:
        """The number of the choice with the highest mean log-probability of its tokens, unless the peer says else."""
