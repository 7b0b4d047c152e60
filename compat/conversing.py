"""Answers conversations that have tools, on any backend: one turn of the model, which may call some.

    Conversation ─▶ answer(...) ─▶ Answer              text, calls, tokens, reason of its end
                    events(...) ─▶ pieces of text and of calls ─▶ Answer

The chat template writes the conversation with tools, calls and results in their places; one without tools gets them in
our own words. On a runtime a constraint admits no call but of these tools, with arguments of their schema. A provider
with fields for tools gets the conversation in them, and its calls are those that come in fields. Other backends enforce
none: their calls are found in the text. Reasoning is left out.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from msgspec.structs import replace

from ..interpreter import loop
from ..interpreter.guarantees import guarantee
from ..interpreter.reasoning import ReasoningTags, Splitter
from ..interpreter.run import Run
from ..interpreter.tool_reader import (
    ArgumentsPiece,
    CallBegins,
    CallEnds,
    CallEvent,
    ContentPiece,
    ToolCallReader,
    gathered,
)
from ..lang import sampling as parameters
from ..lang.agents import dialogue as in_fields
from ..lang.conversations.messages import Message
from ..lang.errors import CapabilityError, GuaranteeError, shown
from ..lang.generation import demand_of
from ..lang.ops import Gen
from ..lang.prompt import Media
from ..lang.protocol import Backend, Completion, ConstraintSpec, FinishReason, GenRequest
from ..lang.sampling import MAX_STOPS
from ..lang.tool_calls import FENCED, MISTRAL, CallFormat, Tool, ToolChoice, is_object
from ..lang.tool_constraint import Thinking, tools_constraint
from .answering import Answer

Put = Callable[[CallEvent | None], object]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation to be answered.

    Attributes:
        messages: turns in order, with calls and results.
        tools, choice: what may be called.
        schema: JSON Schema of the answer; binds the text, not the calls. None: free text.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    schema: Mapping[str, Any] | None = None


def answer(backend: Backend, dialogue: Dialogue, sampling: Mapping[str, Any]) -> Answer:
    """Answers a conversation, and blocks.

    Args:
        sampling: parameters of `gen` that are not None.

    Raises:
        GuaranteeError: the choice requires a call, the backend does not enforce it, and there is none.
        UmbelError: as programs do.
    """
    return loop.streams.run(_answered(backend, dialogue, sampling))


async def answer_async(backend: Backend, dialogue: Dialogue, sampling: Mapping[str, Any]) -> Answer:
    """Does `answer` for the caller's event loop."""
    return await asyncio.wrap_future(loop.streams.spawn(_answered(backend, dialogue, sampling)))


def events(backend: Backend, dialogue: Dialogue, sampling: Mapping[str, Any]) -> Iterator[CallEvent | Answer]:
    """Yields pieces as they come, and the answer at the end. Closing it ends the call."""
    come: SimpleQueue[CallEvent | None] = SimpleQueue()
    ending = loop.streams.spawn(_answered(backend, dialogue, sampling, come.put))
    try:
        while (event := come.get()) is not None:
            yield event
        yield ending.result()
    finally:
        ending.cancel()


async def events_async(
    backend: Backend, dialogue: Dialogue, sampling: Mapping[str, Any]
) -> AsyncIterator[CallEvent | Answer]:
    """Does `events` for the caller's event loop."""
    come: asyncio.Queue[CallEvent | None] = asyncio.Queue()
    here = asyncio.get_running_loop()

    def put(event: CallEvent | None) -> None:
        here.call_soon_threadsafe(come.put_nowait, event)

    ending = loop.streams.spawn(_answered(backend, dialogue, sampling, put))
    try:
        while (event := await come.get()) is not None:
            yield event
        answered: Answer = await asyncio.wrap_future(ending)
        yield answered
    finally:
        ending.cancel()


async def _answered(
    backend: Backend, dialogue: Dialogue, sampling: Mapping[str, Any], put: Put | None = None
) -> Answer:
    """Answers on the streams' loop.

    Args:
        put: gets each event as it comes, and None at the end; None: nothing is streamed.
    """
    found: list[CallEvent] = []
    most = None if dialogue.choice.parallel else 1

    def note(events: Sequence[CallEvent]) -> None:
        events = [event for event in events if most is None or isinstance(event, ContentPiece) or event.index < most]
        found.extend(events)
        if put is not None:
            for event in events:
                put(event)

    try:
        if not loop.has_started(backend):
            await backend.start()
            loop.note_started(backend)
        run = Run(backend, streaming=put is not None, record=False)
        request, reader = await _asked(run, dialogue, sampling)
        final = await run.calls.generate(request, lambda chunk: note(reader.feed(chunk.text)))
        completion = final.completions[0]
        if put is None:
            note(reader.feed(in_fields.without_calls(completion.text, completion.calls)))
        note([*reader.finish(), *_events_of(completion)])
        whole, stopped = gathered(found), completion.finish_reason is FinishReason.STOP
        if dialogue.choice.mode == "required" and not whole.calls and stopped:
            raise GuaranteeError(
                f"{backend.capabilities.name} was to call a tool, and wrote {shown(whole.content)}; it enforces no "
                "calls, so ask for one in the prompt"
            )
        reason = "length" if not stopped or whole.cut else "tool_calls" if whole.calls else "stop"
        return Answer(whole.content, final.usage, reason, calls=completion.calls[:most] or whole.calls)
    finally:
        if put is not None:
            put(None)


async def _asked(run: Run, dialogue: Dialogue, sampling: Mapping[str, Any]) -> tuple[GenRequest, "_Reader"]:
    """Writes a conversation as a request. Returns it with the reader of its answer."""
    backend = run.backend
    stop = sampling.get("stop", ())
    params = parameters.merge({**sampling, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})
    guarantee.check_gen(backend.capabilities, Gen("answer"), params)
    template = backend.chat_template
    call_format = FENCED if template.call_format is MISTRAL else template.call_format  # its mark is a control token
    tags = template.reasoning_tags
    allowed = dialogue.choice.among(dialogue.tools)
    fields = _fields(backend, dialogue)
    if fields is not None:
        call_format, tags = FENCED, None
    written = await template.conversation_away(dialogue.messages, dialogue.tools, call_format=call_format)
    thinking = None if tags is None else Thinking(*tags, begun=written.opens(tags))
    constraint = _constraint(backend, dialogue, call_format, thinking)
    stops = tuple(stop for stop in template.turn_stops if stop not in params.stop)[: MAX_STOPS - len(params.stop)]
    request = GenRequest(
        run.request_id(),
        written.parts,
        replace(params, stop=(*params.stop, *stops)),
        stream=run.streaming,
        origin=run.origin("", ""),
        constraint=constraint,
    )
    free = fields is None and dialogue.choice.mode != "none"
    names = tuple(tool.name for tool in allowed) if free else ()
    return in_fields.with_dialogue(request, fields), _Reader(tags, written.tail, ToolCallReader(call_format, names))


def _fields(backend: Backend, dialogue: Dialogue) -> in_fields.Dialogue | None:
    """Returns a conversation for a provider's own fields; None where it is written as text: the backend has no fields,
    no tool is offered, or there are pictures or a schema."""
    pictures = any(isinstance(part, Media) for message in dialogue.messages for part in message.content)
    if not backend.capabilities.tools or not dialogue.tools or pictures or dialogue.schema is not None:
        return None
    return in_fields.Dialogue(tuple(dialogue.messages), tuple(dialogue.tools), dialogue.choice)


def _events_of(completion: Completion) -> list[CallEvent]:
    """Returns the calls in a provider's fields as events. One that max_tokens cut ends inside its arguments."""
    events: list[CallEvent] = []
    for index, call in enumerate(completion.calls):
        last = index == len(completion.calls) - 1
        cut = last and completion.finish_reason is FinishReason.LENGTH and not is_object(call.arguments)
        events += [CallBegins(index, call.name), ArgumentsPiece(index, call.arguments), CallEnds(index, cut)]
    return events


def _constraint(
    backend: Backend, dialogue: Dialogue, call_format: CallFormat, thinking: Thinking | None
) -> ConstraintSpec | None:
    """Returns the constraint of the answer; None where it is free, or the backend enforces none."""
    enforced = backend.capabilities.constraints
    calls = dialogue.tools and dialogue.choice.mode != "none"
    if dialogue.schema is not None and ("tools" if calls else "json_schema") not in enforced:
        raise CapabilityError(
            f"{backend.capabilities.name} does not enforce a schema in a conversation with tools; take a runtime, or "
            "ask for the schema in a conversation without them"
        )
    if calls and "tools" in enforced:
        return tools_constraint(dialogue.tools, dialogue.choice, call_format, thinking=thinking, answer=dialogue.schema)
    demand = None if calls else demand_of({"json_schema": dialogue.schema})
    return None if demand is None else demand.spec


class _Reader:
    """Reads an answer as its text comes: leaves reasoning out, and finds calls."""

    def __init__(self, tags: tuple[str, str] | None, tail: str, calls: ToolCallReader) -> None:
        self._splitter = None if tags is None else Splitter(ReasoningTags(*tags), tail, opened=True)
        self._calls = calls

    def feed(self, text: str) -> list[CallEvent]:
        return self._calls.feed(text if self._splitter is None else self._splitter.feed(text).answer)

    def finish(self) -> list[CallEvent]:
        rest = "" if self._splitter is None else self._splitter.finish().answer
        return [*self._calls.feed(rest), *self._calls.finish()]
