"""What a `gen` asks of a backend, and what may be said of the answer."""

from dataclasses import dataclass

from ..lang.ops import Gen
from ..lang.protocol import Capabilities, Final, GenRequest
from . import guarantees, meta
from .calls import Calls, OnChunk
from .variables import Meta


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a request, and facts about each of its continuations."""

    final: Final
    facts: list[Meta]


async def ask(calls: Calls, capabilities: Capabilities, op: Gen, request: GenRequest, on_chunk: OnChunk) -> Reply:
    """Have `request` answered so that what `op` demands holds.

    Raises:
        BackendError: the backend's answer is not what was asked for.
    """
    final = await calls.generate(request, on_chunk)
    facts = [meta.of_completion(final, c, with_text=op.text_in_logprobs) for c in final.completions]
    if op.constraint is not None:
        for completion, known in zip(final.completions, facts, strict=True):
            known |= await guarantees.of_completion(op.constraint, completion, capabilities.name)
    return Reply(final, facts)
