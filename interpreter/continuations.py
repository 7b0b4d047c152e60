"""`n` continuations of one prompt from a backend that gives one a request: as many requests, at once."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from ..lang.protocol import Chunk, Final, GenRequest, Usage

OnChunk = Callable[[Chunk], None]


class Generate(Protocol):
    """One request to its end, as `Calls.generate`."""

    def __call__(self, request: GenRequest, on_chunk: OnChunk) -> Coroutine[Any, Any, Final]: ...


async def apart(generate: Generate, request: GenRequest, on_chunk: OnChunk) -> Final:
    """The continuations of `request`, each asked for by itself; what one of them raises ends the others.

    A seed is counted up, as equal ones would give equal texts. The usage is the sum, with `n` calls.
    """
    tasks = [
        asyncio.ensure_future(generate(_one(request, index), _renamed(on_chunk, request.id, index)))
        for index in range(request.sampling.n)
    ]
    try:
        finals = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Final(
        request.id,
        tuple(final.completions[0] for final in finals),
        sum((final.usage for final in finals), Usage()),
        finals[0].prompt_logprobs,
    )


def _one(request: GenRequest, index: int) -> GenRequest:
    seed = request.sampling.seed
    sampling = msgspec.structs.replace(request.sampling, n=1, seed=None if seed is None else (seed + index) % 2**63)
    return msgspec.structs.replace(request, id=f"{request.id}-n{index}", sampling=sampling)


def _renamed(on_chunk: OnChunk, request_id: str, index: int) -> OnChunk:
    return lambda chunk: on_chunk(msgspec.structs.replace(chunk, id=request_id, index=index))
