"""Sets the variables that the captures of a constraint name, once its text is there."""

import asyncio

from ...lang.errors import ResultError
from ...lang.ops import Gen
from ...lang.result import Captures, Named
from ..variables import Binding
from .guarantee import Reply

_WHOLE = ("enforced", "validated")  # guarantees of a text that satisfies its constraint to the end


async def resolve(op: Gen, bindings: tuple[Binding, ...], reply: Reply) -> None:
    """Resolves the variables that the captures of `op` set; for several continuations to lists, an item for each.

    A continuation that does not satisfy the constraint fails them: reading one raises ResultError.

    Raises:
        ConstraintError: a text can be read in too many ways.
    """
    assert op.captures is not None, "its bindings come from its captures"
    read: list[Named] = []
    facts = reply.facts
    for completion, known in zip(reply.final.completions, facts, strict=True):
        found = await _read(op.captures, completion.text) if known["guarantee"] in _WHOLE else None
        if found is None:
            for binding in bindings:
                binding.fail(ResultError(_failure(op, binding.name, known["guarantee"], known["finish_reason"])))
            return
        read.append(found)
    for binding in bindings:
        values = [found[binding.name] for found in read]
        if len(values) == 1:
            binding.resolve(values[0], facts[0])
        else:
            binding.resolve(values, facts)


async def _read(captures: Captures, text: str) -> Named | None:
    """Reads a text, in a thread: it may take long."""
    return await asyncio.to_thread(captures.read, text)


def _failure(op: Gen, name: str, guarantee: str, finish_reason: str) -> str:
    of = f"gen({op.name!r})" if op.name else "a gen()"
    more = "; raise max_tokens" if finish_reason == "length" else ""
    return (
        f"variable {name!r} is captured from the text of {of}, which does not satisfy its constraint to the end "
        f"(guarantee {guarantee!r}, finish_reason {finish_reason!r}){more}"
    )
