"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: answers to messages of blocks, and the size of a prompt.

The events of a stream and a whole answer come of the same pieces by the same blocks (answers.py). The first event of a
stream has the figures of the prompt, which the engine sends with its first text.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from ...interpreter.tool_reader import ArgumentsPiece, CallBegins, CallEnds, ContentPiece
from ...lang.caching import Begun
from ...lang.conversations.messages import Option
from ...lang.errors import ContextLengthError
from ...lang.protocol import FinishReason, Locate, Locating, Usage
from ...lang.sampling import SamplingParams
from ..bodies import wrong
from ..conversation import Dialogue, Piece, Question, ReasoningPiece, Said, open_dialogue, warn_of_effort
from ..diagnosis.comparison import Comparison, compare
from ..errors import HttpError
from ..http import JSON_OR_EVENTS, Answer, Asked, Endpoint, EventStream, Reply, sse
from .answers import (
    PING,
    AnswerBlocks,
    AppliedEdits,
    Event,
    MessageAnswer,
    MessageUsage,
    StopReason,
    diagnostics_of,
    message_usage,
)
from .fields import (
    NOT_OFFERED,
    CountBody,
    MessageFields,
    MessagesBody,
    ThinkAdaptive,
    ThinkDisabled,
    ThinkEnabled,
)
from .turns import read_turns


class TokenCount(msgspec.Struct, frozen=True):
    """Tokens of a prompt, with its system text, its tools, and what the chat template writes around them."""

    input_tokens: int


async def _open(asked: Asked[Any], sampling: SamplingParams) -> Dialogue:
    """Writes the prompt of a body. Raises HttpError and errors of umbel for what cannot be honoured."""
    body: MessageFields = asked.body
    front = asked.front
    model = front.model(body.model)
    for number, edit in enumerate([] if body.context_management is None else body.context_management.edits):
        if not str(edit.get("type")).startswith("clear_"):
            raise wrong(f"context_management.edits[{number}]", "only edits that clear blocks are known; leave it out")
    turns = read_turns(body)
    question = Question(
        turns.messages,
        turns.tools,
        turns.choice,
        body.schema,
        options=_options(body),
        continues=turns.continues,
    )
    _warn(asked)
    origin = front.origin(asked.caller, body.umbel, body.cache_salt, body.model)
    dialogue = await open_dialogue(front, question, sampling, origin, asked.id, model=model, given=body.given())
    caching = turns.marks.caching(dialogue.conversation, front.limits.cache_minimum, whole=body.cache_control)
    dialogue.mark(caching, asked.warnings)
    return dialogue


def _warn(asked: Asked[Any]) -> None:
    """Warns of fields that change nothing."""
    body: MessageFields = asked.body
    warnings = asked.warnings
    if isinstance(body.thinking, ThinkEnabled):
        if asked.front.template.reasoning_tags is None:
            warnings.append("thinking: this model's chat template knows no reasoning; the answer has none")
        else:
            warnings.append("thinking.budget_tokens: it limits nothing; max_tokens limits thinking and answer together")
    if body.output_config is not None and body.output_config.effort is not None:
        effort: dict[str, Option] = {"reasoning_effort": body.output_config.effort}
        warn_of_effort(asked.front, "output_config.effort", effort, warnings)
    if body.context_management is not None and body.context_management.edits:
        warnings.append("context_management: nothing is cleared; leave out what the model shall not see")
    if getattr(body, "service_tier", None) == "standard_only":
        warnings.append("service_tier: there is one tier; it changes nothing")


def _options(body: MessageFields) -> dict[str, Option]:
    """Returns variables of the chat template: its switch for reasoning, and an effort."""
    options: dict[str, Option] = {}
    if isinstance(body.thinking, ThinkEnabled | ThinkDisabled):
        options["enable_thinking"] = isinstance(body.thinking, ThinkEnabled)
    elif body.thinking is None and body.schema is not None:  # JSON begins at once
        options["enable_thinking"] = False
    if body.output_config is not None and body.output_config.effort is not None:
        options["reasoning_effort"] = body.output_config.effort
    return options


async def _count(asked: Asked[Any], dialogue: Dialogue) -> int:
    """Returns the tokens of the prompt, pictures included; 0 for a program, which makes its prompts as it runs."""
    backend, request = asked.front.backend, dialogue.request
    if not request.prompt:
        return 0
    assert isinstance(backend, Locating), "a runtime knows its tokens"
    located = await backend.locate(Locate(f"{asked.id}-count", request.prompt, (), origin=request.origin))
    return located.tokens


class _Message:
    """One request, and its answer in both forms."""

    def __init__(self, asked: Asked[MessagesBody], dialogue: Dialogue, comparison: Comparison | None) -> None:
        self._asked = asked
        self._comparison = comparison
        self._body = asked.body
        self._dialogue = dialogue
        thinking = self._body.thinking
        shown = not isinstance(thinking, ThinkEnabled | ThinkAdaptive) or thinking.display != "omitted"
        self._blocks = AnswerBlocks(self._sign, f"toolu_{asked.id}", shows_thinking=shown)

    async def whole(self) -> MessageAnswer:
        with self._asked.front.open():
            try:
                (said,) = await self._dialogue.whole()
            except ContextLengthError as error:
                raise await self._explained(error) from None
        for piece in said.pieces:
            self._add(piece)
        self._blocks.end()
        reason, stop = self._stop(said)
        answer = self._begun(self._usage(said))
        return msgspec.structs.replace(answer, content=self._blocks.content, stop_reason=reason, stop_sequence=stop)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields the events. The first one comes with the first token: an error before it is a whole answer."""
        started = False
        with self._asked.front.open():
            try:
                async with aclosing(self._dialogue.steps(begun=True)) as steps:
                    async for step in steps:
                        if not started:
                            started = True
                            yield self._start()
                            yield PING
                        for piece in step.pieces:
                            for event in self._add(piece):
                                yield _encoded(event)
            except ContextLengthError as error:
                raise await self._explained(error) from None
        for event in self._blocks.end():
            yield _encoded(event)
        said = self._dialogue.ending(0)
        reason, stop = self._stop(said)
        delta = {"stop_reason": reason, "stop_sequence": stop, "stop_details": None, "container": None}
        yield _encoded({"type": "message_delta", "delta": delta, "usage": self._usage(said)})
        yield _encoded({"type": "message_stop"})

    def _start(self) -> bytes:
        """Returns the first event. A program counts its prompts at its end: until then they are 0."""
        begun = self._dialogue.begun or Begun(0, 0)
        prompt = Usage(begun.prompt_tokens, begun.cached_tokens).marked(begun.caching)
        usage = message_usage(prompt, 0, self._comparison)
        return _encoded({"type": "message_start", "message": self._begun(usage)})

    def _add(self, piece: Piece) -> list[Event]:
        blocks = self._blocks
        match piece:
            case ReasoningPiece(text):
                return blocks.think(text)
            case ContentPiece(text):
                return blocks.say(text)
            case CallBegins(_, name):
                return blocks.begin_call(name)
            case ArgumentsPiece(_, text):
                return blocks.add_arguments(text)
            case CallEnds():
                return blocks.end()

    def _begun(self, usage: MessageUsage) -> MessageAnswer:
        """Returns the answer before it has content."""
        edits = None if self._body.context_management is None else AppliedEdits()
        diagnostics = diagnostics_of(self._comparison)
        name = _name(self._asked)
        return MessageAnswer(name, self._body.model, [], usage, diagnostics=diagnostics, context_management=edits)

    def _usage(self, said: Said) -> MessageUsage:
        final = self._dialogue.final
        return message_usage(final.usage, said.reasoning_tokens, self._comparison, final.placed)

    def _stop(self, said: Said) -> tuple[StopReason, str | None]:
        """Returns why the answer ended, and the stop sequence that ended it."""
        final = self._dialogue.final
        (completion,) = final.completions
        if isinstance(said.matched_stop, str) and said.matched_stop in (self._body.stop_sequences or ()):
            return "stop_sequence", said.matched_stop
        if said.reason == "length":
            is_full = completion.finish_reason is FinishReason.LENGTH
            left = self._body.max_tokens - len(completion.token_ids)
            return "model_context_window_exceeded" if is_full and left > 0 else "max_tokens", None
        return "tool_use" if said.reason == "tool_calls" else "end_turn", None

    async def _explained(self, error: ContextLengthError) -> HttpError:
        """Returns an error in the words by which clients know that a prompt is too long."""
        try:
            tokens = await _count(self._asked, self._dialogue)
            said = f"{tokens} tokens > {self._asked.front.backend.capabilities.max_context} maximum"
        except ContextLengthError:  # it was refused without a look at its tokens
            said = str(error)
        return HttpError(400, f"prompt is too long: {said}", "context_length_exceeded")

    def _sign(self, text: str) -> str:
        return self._asked.front.access.signature(self._dialogue.request.origin.salt, text)


def _name(asked: Asked[MessagesBody]) -> str:
    return f"msg_{asked.id}"


def _encoded(event: Event) -> bytes:
    return sse(event, event["type"])


async def create_message(asked: Asked[MessagesBody]) -> Answer:
    """Answers messages."""
    body = asked.body
    if isinstance(body.thinking, ThinkEnabled) and body.thinking.budget_tokens >= body.max_tokens:
        raise wrong("thinking.budget_tokens", f"it must be below max_tokens, which is {body.max_tokens}")
    given = {"temperature": body.temperature, "top_p": body.top_p, "seed": body.seed}
    sampling = SamplingParams(
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or (),
        top_k=body.top_k or -1,  # 0 keeps all
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    dialogue = await _open(asked, sampling)
    if not body.max_tokens:  # only the prompt is computed, and no text follows a constraint
        dialogue.request = msgspec.structs.replace(dialogue.request, constraint=None)
    comparison = None
    if body.diagnostics is not None:
        comparison = await compare(asked, dialogue, _name(asked), body.diagnostics.previous_message_id)
    message = _Message(asked, dialogue, comparison)
    return EventStream(message.stream(), PING) if body.stream else Reply(await message.whole())


async def count_tokens(asked: Asked[CountBody]) -> Reply:
    """Counts the tokens of a prompt."""
    model = asked.front.model(asked.body.model)
    if model.program:
        raise wrong(
            "model", f"{model.name!r} is a program, which makes its prompts as it runs; its answer has the usage"
        )
    dialogue = await _open(asked, SamplingParams())
    with asked.front.open():
        return Reply(TokenCount(await _count(asked, dialogue)))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/messages",
        create_message,
        "Answer messages",
        body=MessagesBody,
        answer=MessageAnswer,
        media=JSON_OR_EVENTS,
        errors=(404, 504),
        dialect="anthropic",
        not_offered=NOT_OFFERED,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "Count the tokens of messages",
        body=CountBody,
        answer=TokenCount,
        errors=(404,),
        dialect="anthropic",
        not_offered=NOT_OFFERED,
    ),
)
