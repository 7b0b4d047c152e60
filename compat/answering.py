"""Answers conversations that frameworks give as a whole, on any backend: a program with one `gen`.

    turns ─▶ ask(...) ─▶ Answer            text, tokens, reason of its end
             stream(...) ─▶ pieces ─▶ Answer

So frameworks get what programs have: schemas are enforced, or validated and asked again, prefixes are cached, and calls
of several threads or tasks are batched. What `umbel.dspy` and `umbel.langchain` have in common is here.
"""

import base64
import binascii
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..interpreter import loop
from ..interpreter.program import Program, maker
from ..lang.errors import ParameterError, shown
from ..lang.generation import gen
from ..lang.ops import Image, assistant, image, role
from ..lang.protocol import Backend, Capabilities, Usage
from ..lang.state import AsyncState, State
from ..lang.tool_calls import ToolCall

Turn = tuple[str, Sequence[str | Image]]  # role, and blocks of text and pictures
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}  # the schema of "some JSON object"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a conversation.

    Attributes:
        text: all of it.
        usage: tokens of the calls that it took.
        reason: "stop" or "length", as `get_meta_info` has it, or "tool_calls".
        logprobs: (log-probability, token id, text) of each token; () where they were not asked for.
        top_logprobs: the same of the most likely alternatives of each token.
        calls: of tools, in conversations that have some; the text is without them.
    """

    text: str
    usage: Usage
    reason: str
    logprobs: Sequence[tuple[float, int, str]] = ()
    top_logprobs: Sequence[Sequence[tuple[float, int, str]]] = ()
    calls: Sequence[ToolCall] = ()


@maker(Program)
def answered(s: State, turns: Sequence[Turn], schema: Mapping[str, Any] | None) -> None:
    """Answers a conversation. `schema`: JSON Schema of the answer."""
    for name, blocks in turns:
        s += role(name, list(blocks))
    s += assistant(gen("answer", json_schema=schema))


def ready(backend: Backend) -> Capabilities:
    """Starts a backend, once. Returns its abilities. Blocks."""

    async def start() -> None:
        if not loop.has_started(backend):
            await backend.start()
            loop.note_started(backend)

    loop.streams.run(start())
    return backend.capabilities


def ask(
    backend: Backend, turns: Sequence[Turn], schema: Mapping[str, Any] | None, sampling: Mapping[str, Any]
) -> Answer:
    """Answers a conversation, and blocks.

    Args:
        schema: JSON Schema of the answer; None: free text.
        sampling: parameters of `gen` that are not None.

    Raises:
        UmbelError: as programs do.
    """
    state = answered.run(turns, schema, backend=backend, record=False, **sampling)
    return _answer(state["answer"], state.get_meta_info("answer"), state.cost.usage)


async def ask_async(
    backend: Backend, turns: Sequence[Turn], schema: Mapping[str, Any] | None, sampling: Mapping[str, Any]
) -> Answer:
    """Does `ask` for the caller's event loop."""
    state = await answered.run_async(turns, schema, backend=backend, record=False, **sampling)
    return await _last(state)


def stream(
    backend: Backend, turns: Sequence[Turn], schema: Mapping[str, Any] | None, sampling: Mapping[str, Any]
) -> Iterator[str | Answer]:
    """Yields pieces of the text as they come, and the answer at the end. Closing it ends the call."""
    state = answered.run(turns, schema, backend=backend, record=False, stream=True, **sampling)
    try:
        yield from state.text_iter("answer")
        yield _answer(state["answer"], state.get_meta_info("answer"), state.cost.usage)
    finally:
        state.cancel()


async def stream_async(
    backend: Backend, turns: Sequence[Turn], schema: Mapping[str, Any] | None, sampling: Mapping[str, Any]
) -> AsyncIterator[str | Answer]:
    """Does `stream` for the caller's event loop."""
    state = await answered.run_async(turns, schema, backend=backend, record=False, stream=True, **sampling)
    try:
        async for piece in state.text_async_iter("answer"):
            yield piece
        yield await _last(state)
    finally:
        state.cancel()


async def _last(state: AsyncState) -> Answer:
    text, meta, cost = await state["answer"], await state.get_meta_info("answer"), await state.cost
    return _answer(text, meta, cost.usage)


def _answer(text: Any, meta: Mapping[str, Any], usage: Usage) -> Answer:
    return Answer(
        text,
        usage,
        meta["finish_reason"],
        meta.get("output_token_logprobs", ()),
        meta.get("output_top_logprobs", ()),
    )


def picture(url: str) -> Image:
    """Reads a picture of a data URL. No other URL is followed: frameworks send what their users send.

    Raises:
        ParameterError: another URL, or no base64.
    """
    kind, comma, data = url.partition(",")
    if not comma or not kind.startswith("data:image/") or not kind.endswith(";base64"):
        raise ParameterError(
            f"the picture {shown(url)} is not fetched; send it as data:image/png;base64,... (umbel.fetch_image reads "
            "one from a host you trust)"
        )
    try:
        return image(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        raise ParameterError(f"the picture {shown(url)} is not base64; encode its bytes by base64.b64encode") from None
