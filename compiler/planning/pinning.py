"""Heads in the cache of a backend: computed ahead, and kept while they are needed.

    with program.cache(backend, ttl=600) as cached:        one head for as long as the block takes
        program.run_batch([...], backend=backend)          (a batch of a compiled program pins its own head by itself)

A pin is a hint with a time to live. It costs no request its place, so nothing here can make a run fail or differ.
"""

import contextlib
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from ...interpreter import loop
from ...lang.errors import BackendError, CapabilityError, ParameterError, UmbelError
from ...lang.prompt import Part
from ...lang.protocol import Backend, Final, GenRequest, Hint, Origin, Pinning
from ...lang.sampling import SamplingParams
from ..graph import Graph
from .heads import common_head

SHORTEST = 16  # tokens; a head that is computed in no time is not worth a message
LONGEST_PIN = 86_400.0  # seconds


class Cached:
    """What `cache` put into a backend. A context manager: leaving the block releases it.

    Attributes:
        parts: of the head, as prompts have them.
        tokens: of the head; 0 when there was nothing worth keeping.
    """

    def __init__(self, backend: Backend, pinned: str, parts: tuple[Part, ...], tokens: int) -> None:
        self.parts = parts
        self.tokens = tokens
        self._backend = backend
        self._pinned = pinned  # "": nothing is

    @property
    def text(self) -> str:
        """The head as a person reads it."""
        return "".join(getattr(part, "text", f"<{getattr(part, 'kind', '')}>") for part in self.parts)

    def release(self) -> None:
        """The head may be evicted from now on. Again is allowed."""
        pinned, self._pinned = self._pinned, ""
        if pinned and isinstance(self._backend, Pinning):
            loop.streams.call(self._backend.release, pinned)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<cached head of {self.tokens} tokens{'' if self._pinned else ', not pinned'}>"


def pin(backend: Backend, parts: Sequence[Part], *, salt: str = "", seconds: float = LONGEST_PIN) -> Cached:
    """Asks the backend to compute a head and to keep it; waits for nothing. For the time of a batch.

    A backend without pins, and a head that is not worth it, give a `Cached` of 0 tokens. `tokens` is the backend's
    bound here, since nobody waits for an answer. The backend has been started.
    """
    head, tokens = tuple(parts), 0
    if head and isinstance(backend, Pinning) and backend.capabilities.pins:
        tokens = backend.tokens_at_most(head)
    if tokens < SHORTEST:
        return Cached(backend, "", (), 0)
    name = _name()
    loop.streams.call(_advise, backend, Hint(name, head, Origin(salt=salt), seconds))
    return Cached(backend, name, head, tokens)


async def cache_head(
    graph: Graph, backend: Backend, *, salt: str = "", ttl: float | None = None, shortest: int = SHORTEST
) -> Cached:
    """Computes the head that all runs of a graph share, and pins it. On the streams' loop.

    Args:
        ttl: seconds after its last use for which it is kept; None: until it is released, or this process ends.
        shortest: heads of fewer tokens are left alone.

    Raises:
        CapabilityError: the backend keeps nothing that it is asked to keep.
        ParameterError: `ttl` is no number of seconds.
    """
    seconds = _checked_ttl(ttl)
    await backend.start()
    capabilities = backend.capabilities
    if not (capabilities.pins and isinstance(backend, Pinning)):
        raise CapabilityError(
            f"{capabilities.name} has no cache that a program could fill; leave cache() out (hosted models cache what "
            "they see by themselves, see state.usage.cached_tokens), or run the program on umbel.Runtime()"
        )
    head = await backend.chat_template.away(common_head, graph, backend.chat_template)
    if not head or backend.tokens_at_most(head) < shortest:
        return Cached(backend, "", (), 0)
    name = _name()
    tokens = await _computed(backend, f"{name}-head", head, salt)
    if tokens < shortest:
        return Cached(backend, "", (), 0)
    _advise(backend, Hint(name, head, Origin(salt=salt), seconds))
    return Cached(backend, name, head, tokens)


def _advise(backend: Backend, hint: Hint) -> None:
    """When it is refused, runs are what they would have been without it."""
    with contextlib.suppress(UmbelError):
        backend.hint(hint)


async def _computed(backend: Backend, request_id: str, head: tuple[Part, ...], salt: str) -> int:
    """The tokens of a prompt, which the backend has when this returns."""
    request = GenRequest(request_id, head, SamplingParams(max_tokens=0, temperature=0.0), origin=Origin(salt=salt))
    async for event in backend.generate(request):
        if isinstance(event, Final):
            return event.usage.prompt_tokens
    raise BackendError(f"{backend.capabilities.name} ended request {request_id} without a result")


def _checked_ttl(ttl: object) -> float:
    if ttl is None:
        return LONGEST_PIN
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl <= LONGEST_PIN:
        raise ParameterError(f"ttl={ttl!r}; write seconds above 0 and up to {LONGEST_PIN:g}, or None")
    return float(ttl)


def _name() -> str:
    return f"pin-{secrets.token_hex(8)}"
