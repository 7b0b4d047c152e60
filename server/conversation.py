"""Conversations, the same for every dialect: from messages to a request, from its events to an answer.

    body ─▶ Question ─▶ Dialogue ─▶ GenRequest ─▶ engine ─▶ AnswerReader ─▶ pieces ─▶ events of a dialect's stream
                                                                            └─▶ Said ─▶ a dialect's whole answer

A whole answer is the pieces of its text put together, so it says what the stream says: reasoning, content, calls of
tools, and the reason of its end are found by one code.
"""

import base64
import binascii
import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import msgspec

from ..interpreter.reasoning import ReasoningTags, Splitter
from ..interpreter.tool_reader import ArgumentsPiece, CallBegins, CallEnds, CallEvent, ContentPiece, ToolCallReader
from ..lang.caching import Begun, Caching, CachingUsage
from ..lang.conversations.messages import Conversation, Message, Option
from ..lang.errors import ParameterError, shown
from ..lang.prompt import Media, media_of
from ..lang.protocol import Chunk, Completion, ConstraintSpec, Final, FinishReason, GenRequest, Origin, TokenLogprob
from ..lang.sampling import MAX_STOPS, MAX_TOKENS, SamplingParams
from ..lang.tool_calls import CallFormat, Tool, ToolCall, ToolChoice, call_format_of
from ..lang.tool_constraint import Thinking, tools_constraint
from .bodies import wrong
from .front import Front, ServedModel
from .limits import MAX_CUT_ARGUMENTS, check_schema
from .marks import warn_of_marks
from .programs import ProgramModel, place_warnings
from .tokens import tokenizing

CONTEXT_LEFT = MAX_TOKENS  # as max_tokens: the runtime ends a text where the context does
Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation to be answered.

    Attributes:
        messages: turns in order; a last one of the assistant is continued when `continues`.
        tools, choice: what may be called.
        schema: JSON Schema of the answer; binds the text, not the calls. True is any JSON object.
        regex: a regular expression that the answer matches.
        options: variables of the chat template, such as `enable_thinking`.
    """

    messages: Sequence[Message]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    schema: Mapping[str, Any] | None = None  # Any: JSON
    regex: str | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    continues: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of the model's reasoning."""

    text: str


Piece = ReasoningPiece | CallEvent


@dataclass(frozen=True, slots=True)
class Step:
    """More of one answer: the pieces that its new text made certain, and its new tokens. The last step has the tokens
    that came without text: those of a stop text that matched, and the end of sequence."""

    index: int
    pieces: Sequence[Piece]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class Said:
    """One whole answer.

    Attributes:
        calls: have no id; a dialect gives them one.
        reason: "tool_calls" when calls were made and the last one is whole.
        reasoning_tokens: tokens up to the end of the reasoning.
        pieces: all of it in its order, for dialects that tell text before a call from text after it.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    reason: Reason = "stop"
    matched_stop: str | int | None = None
    reasoning_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    pieces: list[Piece] = field(default_factory=list)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Puts pieces to what was said before."""
        self.pieces += pieces
        for piece in pieces:
            match piece:
                case ReasoningPiece(text):
                    self.reasoning += text
                case ContentPiece(text):
                    self.content += text
                case CallBegins(_, name):
                    self.calls.append(ToolCall(name, ""))
                case ArgumentsPiece(index, text):
                    call = self.calls[index]
                    self.calls[index] = ToolCall(call.name, call.arguments + text)
                case CallEnds():
                    pass


class AnswerReader:
    """Reads one answer as its text comes: reasoning first, then content and calls.

    Args:
        tags: of the model's reasoning; None where it has none.
        tail: the end of the prompt, which may have opened the reasoning.
        call_format: the spelling of calls. names: of tools that may be called; () reads all as content.
        lead: white space that the template writes before an answer, which is no part of its content.
    """

    def __init__(
        self,
        tags: tuple[str, str] | None,
        tail: str,
        call_format: CallFormat,
        names: Sequence[str] = (),
        lead: str = "",
    ) -> None:
        self._lead = lead  # that has not come yet
        self._splitter = None if tags is None else Splitter(ReasoningTags(*tags), tail, opened=True)
        self._calls = ToolCallReader(call_format, names) if names else None
        self._answered = False  # something after the reasoning has come
        self._called = self._cut = False
        self.reasoning_tokens = 0

    def feed(self, text: str, tokens: int) -> list[Piece]:
        """Returns what new text makes certain.

        Args:
            tokens: how many the text is of.
        """
        if self._splitter is None:
            return self._answer(text)
        split = self._splitter.feed(text)
        pieces: list[Piece] = [ReasoningPiece(split.reasoning)] if split.reasoning else []
        if not self._answered and not split.answer:
            self.reasoning_tokens += tokens
        self._answered = self._answered or bool(split.answer)
        return pieces + self._answer(split.answer)

    def finish(self) -> list[Piece]:
        """Returns the rest, when no more text comes."""
        pieces: list[Piece] = []
        if self._splitter is not None:
            split = self._splitter.finish()
            if split.reasoning:
                pieces.append(ReasoningPiece(split.reasoning))
            elif not self._answered and split.answer:
                self.reasoning_tokens = 0  # it was held back as what may have become reasoning
            pieces += self._answer(split.answer)
        if self._calls is not None:
            pieces += self._note(self._calls.finish())
        return pieces

    def reason(self, completion: Completion) -> Reason:
        """Returns why the answer ended. A call that was led to its end is a cut answer; one that was cut, too, unless a
        stop has cut it."""
        if completion.finish_reason is not FinishReason.STOP:
            return "length"
        if self._cut:
            return "length" if completion.matched_stop is None else "stop"
        return "tool_calls" if self._called else "stop"

    @property
    def plain(self) -> bool:
        """True if all of the text was content."""
        return not self._called and not self.reasoning_tokens

    def _answer(self, text: str) -> list[Piece]:
        if self._lead and text:
            most = min(len(text), len(self._lead))
            led = next((place for place in range(most) if text[place] != self._lead[place]), most)
            text, self._lead = text[led:], self._lead[led:] if led == len(text) else ""
        if not text:
            return []
        return [ContentPiece(text)] if self._calls is None else self._note(self._calls.feed(text))

    def _note(self, events: list[CallEvent]) -> list[Piece]:
        for event in events:
            if isinstance(event, CallEnds):
                self._called, self._cut = True, event.cut
        return list(events)


class Answerer(Protocol):
    """Answers requests: the front by its model, or a program."""

    def events(self, requests: Sequence[GenRequest]) -> AsyncGenerator[tuple[int, Chunk | Final], None]: ...

    async def finals(self, requests: Sequence[GenRequest]) -> list[Final]: ...


class Dialogue:
    """One conversation and its answers.

    Args:
        ends: stop texts of the template, which the caller did not ask for.
        answerer: answers the request; None for the front.
        warnings: for the caller.

    Attributes:
        question: as the prompt has it, without lines that the server drops.
        request: what the engine is asked.
        conversation: the prompt, and where blocks and tools end in it.
        begun: figures of the prompt, with the first step that asks for them; None where a program answers.
    """

    def __init__(
        self,
        front: Front,
        question: Question,
        request: GenRequest,
        conversation: Conversation,
        reader: "ReaderFacts",
        ends: tuple[str, ...] = (),
        answerer: Answerer | None = None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._front = front
        self._answerer: Answerer = front if answerer is None else answerer
        self._ends = ends
        self.question = question
        self._warnings = warnings
        self.request = request
        self.conversation = conversation
        self._reader = reader
        self.begun: Begun | None = None
        self._final: Final | None = None

    def mark(self, caching: Caching | None, warnings: list[str]) -> None:
        """Gives the request marks, which are places in the conversation's prompt.

        Args:
            warnings: for the caller; takes those of the conversation, and one for marks that do not count.
        """
        warn_of_marks(caching, warnings)
        warnings += self._warnings
        if caching is not None:
            self.request = msgspec.structs.replace(self.request, caching=caching)

    @property
    def final(self) -> Final:
        """The end of the request, once all steps have come."""
        assert self._final is not None, "the answers have ended"
        return self._final

    async def steps(self, *, begun: bool = False) -> AsyncGenerator[Step, None]:
        """Yields the pieces of all answers as they come, in one step at least.

        `final` and `ending` are known afterwards.

        Args:
            begun: asks for the figures of the prompt, which are known with the first step.
        """
        stepped = False
        readers = [self._reader.open() for _ in range(self.request.sampling.n)]
        told = [0] * len(readers)  # log-probabilities
        request = msgspec.structs.replace(self.request, stream=True, begun=begun)
        async with aclosing(self._answerer.events([request])) as events:
            async for _, event in events:
                if isinstance(event, Chunk):
                    self.begun, stepped = self.begun or event.begun, True
                    pieces = readers[event.index].feed(event.text, len(event.token_ids))
                    told[event.index] += len(event.logprobs)
                    yield Step(event.index, pieces, event.logprobs)
                else:
                    self._final = event
        for index, reader in enumerate(readers):
            rest = reader.finish()
            untold = self.final.completions[index].logprobs[told[index] :]
            if not stepped:  # no text has come
                usage, caching = self.final.usage, self.final.caching or CachingUsage()
                self.begun = Begun(usage.prompt_tokens, usage.cached_tokens, caching)
            if rest or untold or not stepped:
                stepped = True
                yield Step(index, rest, untold)
        self._readers = readers
        self._keep(readers)

    def ending(self, index: int) -> Said:
        """Returns how an answer ended: reason, stop text and tokens of reasoning. The texts stay empty."""
        completion, reader = self.final.completions[index], self._readers[index]
        return Said(
            reason=reader.reason(completion),
            matched_stop=self._matched_stop(completion),
            reasoning_tokens=reader.reasoning_tokens,
        )

    async def whole(self) -> list[Said]:
        """Returns all answers as a whole; `final` is known afterwards."""
        if self._reader.tags is not None:  # which tokens are reasoning is known of streamed text only
            return await self._folded()
        (self._final,) = await self._answerer.finals([self.request])
        said = []
        readers = [self._reader.open() for _ in self.final.completions]
        for completion, reader in zip(self.final.completions, readers, strict=True):
            answer = Said(logprobs=completion.logprobs)
            answer.add([*reader.feed(completion.text, len(completion.token_ids)), *reader.finish()])
            answer.reason, answer.matched_stop = reader.reason(completion), self._matched_stop(completion)
            said.append(answer)
        self._keep(readers)
        return said

    def _matched_stop(self, completion: Completion) -> str | int | None:
        return None if completion.matched_stop in self._ends else completion.matched_stop

    def _keep(self, readers: Sequence[AnswerReader]) -> None:
        """Keeps the tokens of the answers that are all content: a later turn brings their texts back."""
        for completion, reader in zip(self.final.completions, readers, strict=True):
            if reader.plain:
                text = completion.text.removeprefix(self._reader.lead)
                self._front.history.keep(self.request.origin.salt, text, completion)

    async def _folded(self) -> list[Said]:
        texts = [Said() for _ in range(self.request.sampling.n)]
        async with aclosing(self.steps()) as steps:
            async for step in steps:
                texts[step.index].add(step.pieces)
                texts[step.index].logprobs += step.logprobs
        for index, said in enumerate(texts):
            ending = self.ending(index)
            said.reason, said.matched_stop = ending.reason, ending.matched_stop
            said.reasoning_tokens = ending.reasoning_tokens
        return texts


@dataclass(frozen=True, slots=True)
class ReaderFacts:
    """The tags, the prompt's tail and the calls by which an answer is read."""

    tags: tuple[str, str] | None
    tail: str
    call_format: CallFormat
    names: tuple[str, ...]
    lead: str = ""

    def open(self) -> AnswerReader:
        return AnswerReader(self.tags, self.tail, self.call_format, self.names, self.lead)


async def open_dialogue(
    front: Front,
    question: Question,
    sampling: SamplingParams,
    origin: Origin,
    request_id: str,
    *,
    model: ServedModel | None = None,
    given: Collection[str] = (),
) -> Dialogue:
    """Writes the prompt of a conversation and the request for its answer.

    Args:
        model: of the body; one that is a program answers in place of the model.
        given: the sampling parameters that the body gives: a program has defaults of its own for the others.

    Raises:
        TemplateError, ParameterError, ConstraintError: messages, tools or a schema that cannot be honoured.
        HttpError: wishes that exclude each other.
    """
    template = front.template
    call_format = call_format_of(template.source, tokenizing(front).vocabulary.control)
    if model is not None and model.program:
        answerer = ProgramModel(front, model, _message_of(model, question), given)
        request = GenRequest(request_id, (), sampling, origin=origin)
        unread = ReaderFacts(None, "", call_format, ())
        conversation = Conversation((), {}, (None,) * len(question.tools), "")
        return Dialogue(
            front, question, request, conversation, unread, answerer=answerer, warnings=place_warnings(origin)
        )
    offered = question.tools if question.choice.mode != "none" else ()
    question = replace(question, messages=front.ignored.dropped(question.messages))
    warning = front.changing.watch(origin.salt, question.messages)
    conversation = await template.conversation_away(
        front.history.recall(origin.salt, question.messages),
        question.tools,
        call_format=call_format,
        generation="continue" if question.continues else True,
        options=question.options,
    )
    tags = template.reasoning_tags
    thinking = None if tags is None else Thinking(*tags, begun=conversation.opens(tags))
    constraint = _constraint(question, call_format, thinking)
    names = tuple(tool.name for tool in question.choice.among(question.tools)) if offered else ()
    # A constraint says how the text begins, and so does the beginning of an answer that is continued.
    lead = template.lead_of_answers if constraint is None and not question.continues else ""
    facts = ReaderFacts(tags, conversation.tail, call_format, names, lead)
    ends = tuple(text for text in template.turn_stops if text not in sampling.stop)[: MAX_STOPS - len(sampling.stop)]
    asked = msgspec.structs.replace(sampling, stop=sampling.stop + ends) if ends else sampling
    request = GenRequest(request_id, conversation.parts, asked, origin=origin, constraint=constraint)
    warnings = () if warning is None else (warning,)
    return Dialogue(front, question, request, conversation, facts, ends, warnings=warnings)


def warn_of_effort(front: Front, param: str, options: Mapping[str, Option], warnings: list[str]) -> None:
    """Warns of an effort that changes nothing.

    Args:
        param: the field of the effort.
        options: the variables of the chat template that it sets.
    """
    template = front.template
    never_reasons = options.get("enable_thinking") is False and template.reasoning_tags is None
    if options and not never_reasons and not any(name in (template.source or "") for name in options):
        warnings.append(f"{param}: this model's chat template knows no effort; it changes nothing")


def _message_of(model: ServedModel, question: Question) -> str:
    """Returns the argument of a program: the text of the last message of the user. Raises HttpError for wishes that
    only a model itself can honour."""
    for given, what in (
        (question.tools and question.choice.mode != "none", "calls no tools; leave them out"),
        (question.schema is not None or question.regex is not None, "has its own formats; leave the format out"),
        (
            question.options and question.options.get("enable_thinking") is not False,
            "has no options of a chat template, such as reasoning; leave them out",
        ),
        (question.continues, "continues no message; end with one of the user"),
    ):
        if given:
            raise wrong("model", f"{model.name!r} is a program, and {what}")
    last = next((message for message in reversed(question.messages) if message.role == "user"), None)
    if last is None:
        raise wrong("model", f"{model.name!r} is a program, which takes the last message of the user; there is none")
    texts = [block for block in last.content if isinstance(block, str)]
    if len(texts) < len(last.content):
        raise wrong("model", f"{model.name!r} is a program, which takes text as its message; send no pictures")
    return "".join(texts)


def _constraint(question: Question, call_format: CallFormat, thinking: Thinking | None) -> ConstraintSpec | None:
    """Returns the constraint of the answer; None where it is free."""
    if question.schema is not None and question.regex is not None:
        raise wrong("regex", "an answer follows a schema or a regular expression; give one of them")
    if question.schema is not None:
        check_schema("json_schema", question.schema)
    if question.tools and question.choice.mode != "none":
        if question.regex is not None:
            raise wrong("regex", "an answer that may call tools follows no regular expression; leave one of them out")
        return tools_constraint(question.tools, question.choice, call_format, thinking=thinking, answer=question.schema)
    if question.schema is None and question.regex is None:
        return None
    begun = thinking is not None and thinking.begun
    if question.regex is not None:
        if begun:
            raise ParameterError("regex: the model reasons first, which the expression does not match; turn that off")
        return ConstraintSpec("regex", question.regex)
    if begun:
        return tools_constraint((), ToolChoice("none"), call_format, thinking=thinking, answer=question.schema)
    return ConstraintSpec("json_schema", msgspec.json.encode(question.schema).decode())


_DATA_URL = "data:"


def picture(url: str, param: str) -> Media:
    """Reads a picture that a body carries in a data URL. No other URL is followed: the server fetches nothing.

    Raises:
        HttpError: another URL, or no base64.
    """
    if not url.startswith(_DATA_URL):
        raise wrong(param, "pictures are not fetched; send it as data:image/png;base64,...")
    kind, _, data = url[len(_DATA_URL) :].partition(",")
    if not kind.startswith("image/") or not kind.endswith(";base64"):
        raise wrong(param, "write data:image/png;base64,... or another type of image")
    try:
        return media_of("image", base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        raise wrong(param, "the picture is not base64") from None


# ------------------------------------------------------------------------------------------ calls that were cut

_JSON_TOKEN = re.compile(
    r"""\s*(?:(?P<opens>[{\[])|(?P<closes>[}\]])|(?P<mark>[,:])|(?P<text>"(?:[^"\\]++|\\.)*+")|(?P<plain>[^\s"{}\[\],:]+))""",
    re.DOTALL,
)
_CUT = ": they were cut; the prompt has the members that are whole"


def whole_call(call: ToolCall, param: str, warnings: list[str]) -> ToolCall:
    """Returns a call of an earlier answer; one that max_tokens or a stop has cut with the members that are whole.

    Args:
        param: the field of its arguments.
        warnings: for the caller; take one for the first call that was cut.

    Raises:
        HttpError: the arguments are no object.
    """
    if not call.arguments or _is_json(call.arguments, dict):
        return call
    whole = _whole_members(call.arguments) if len(call.arguments) <= MAX_CUT_ARGUMENTS else ""
    if not _is_json(whole, dict):
        raise wrong(param, f"write a JSON object as text, got {shown(call.arguments)}")
    if not any(warning.endswith(_CUT) for warning in warnings):
        warnings.append(f"{param}{_CUT}")
    return ToolCall(call.name, whole, call.id)


def complete_members(text: str) -> dict[str, Any]:  # Any: JSON values
    """Reads a JSON object that may be cut, as clients of a stream do: members whose value has ended, at every depth.

    `{"a": 1, "b": [2, "th` is {"a": 1, "b": [2]}.
    """
    return msgspec.json.decode(_whole_members(text) or "{}", type=dict[str, Any])


def _whole_members(text: str) -> str:
    """Returns the members of a JSON object that are whole, as JSON; "" for text that does not begin with a bracket."""
    closers: list[str] = []
    whole = 0  # the text up to here, and what closes it, is JSON
    before = ""
    at = 0
    while token := _JSON_TOKEN.match(text, at):
        kind, found = str(token.lastgroup), token[0].strip()
        if kind == "opens":
            closers.append("}" if found == "{" else "]")
        elif not closers:
            break
        elif kind == "closes":
            closers.pop()
        at = token.end()
        is_key = kind == "text" and closers[-1] == "}" and before in ("{", ",")
        if kind != "mark" and not is_key and (kind != "plain" or _is_json(found)):
            whole = at
        before = found
    return text[:whole] + "".join(reversed(closers))


def _is_json(text: str, kind: Any = Any) -> bool:  # Any: a type
    try:
        msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True
