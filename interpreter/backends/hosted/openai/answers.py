"""Makes a call and reads its answer into continuations, whole or event by event.

An incomplete answer is an error, never a short answer.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .....lang.agents.dialogue import with_calls
from .....lang.errors import BackendError, ConnectionLostError, RequestError, UmbelError
from .....lang.protocol import Chunk, Completion, FinishReason, GenRequest, TokenLogprob, Usage
from .....lang.tool_calls import ToolCall
from ..constraint_params import beginning, unwrap
from ..errors import Provider
from ..session import Session
from ..stops import StopCutter
from .requests import Plan
from .wire import Choice, Counted, Piece, SaidCall, TranslatedStream, Translator, logprobs_of, parsed

if TYPE_CHECKING:
    from openai import AsyncOpenAI, AsyncStream


_LONGEST_TOKEN = 256  # characters; a server that says more than this for each token it may say does not stop at all

_MOST_PIECES = 1024  # apart from those with text


class _Growing:
    """One continuation as it streams.

    received   all text of the server
    released   the certain text: up to a stop; of a wrapped answer nothing until its end
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._cutter = StopCutter(plan.cuts)
        self._wrapping: list[str] = []
        self._released: list[str] = []
        self.length = 0  # characters received
        self.thoughts: list[str] = []  # pieces of the model's reasoning
        self.reason: FinishReason | None = None
        self.matched: str | int | None = None
        self.logprobs: list[TokenLogprob] = []
        self.enforced = True  # the text has the requested form
        self._calls: dict[int, tuple[list[str], list[str], list[str]]] = {}  # pieces of name, arguments, signature

    @property
    def text(self) -> str:
        return "".join(self._released)

    def receive(self, text: str) -> str:
        """Takes more text. Returns the text that can be given out."""
        self.length += len(text)
        if self._plan.wrapped:
            self._wrapping.append(text)
            return ""
        return self._release(self._cutter.feed(text))

    def think(self, text: str) -> None:
        """Takes more of the model's reasoning."""
        self.length += len(text)
        self.thoughts.append(text)

    def call(self, pieces: Sequence[SaidCall]) -> None:
        """Takes more of the calls of tools."""
        for number, piece in enumerate(pieces):
            index = number if piece.index is None else piece.index
            name, arguments, signature = self._calls.setdefault(index, ([], [], []))
            signature.append(piece.signature)
            if piece.function is not None:
                name.append(piece.function.name or "")
                arguments.append(piece.function.arguments or "")
                self.length += len(name[-1]) + len(arguments[-1])

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        calls = [
            ToolCall("".join(name), "".join(arguments), signature="".join(signature))
            for _, (name, arguments, signature) in sorted(self._calls.items())
        ]
        return tuple(calls[:1] if self._plan.one_call else calls)

    def end(self, reason: FinishReason, matched: str | int | None) -> str:
        """Ends the text. Returns the text that was held back."""
        if self.reason is not None:
            return ""
        rest = ""
        if self._plan.wrapped:
            answer = self._unwrapped(self._plan.wrapped, reason)
            rest = self._release(self._cutter.feed(answer))
        if self._cutter.matched is None:
            rest += self._release(self._cutter.end())
        if self.reason is None:
            self.reason, self.matched = reason, matched
        return rest

    def _unwrapped(self, how: Literal["text", "json"], reason: FinishReason) -> str:
        """Returns the answer inside the object. An answer that is no object is returned as it is."""
        whole = "".join(self._wrapping)
        answer = unwrap(whole, how)
        if answer is not None:
            return answer
        self.enforced = False
        return whole if reason is FinishReason.STOP else beginning(whole, how)

    def _release(self, text: str) -> str:
        if self._cutter.matched is not None and self.reason is None:
            self.reason, self.matched = FinishReason.STOP, self._cutter.matched
        if text:
            self._released.append(text)
        return text

    def completion(self, *, constrained: bool) -> Completion:
        """Builds the completion. `constrained`: the server enforces a constraint on it."""
        assert self.reason is not None, "only a text that has ended is a completion"
        text = self.text
        whole = self.enforced and self.reason is FinishReason.STOP and not isinstance(self.matched, str)
        kept: list[TokenLogprob] = []
        characters = 0
        for token in self.logprobs:
            characters += len(token.text)
            if characters > len(text):
                break
            kept.append(token)
        calls = self.calls
        text = with_calls(text, calls)
        called = bool(calls) and self._plan.enforces_calls and self.reason is FinishReason.STOP
        return Completion(
            text,
            (),
            0,
            text,
            self.reason,
            self.matched,
            tuple(kept),
            guarantee="enforced" if called or (constrained and whole) else "",
            calls=calls,
            reasoning="".join(self.thoughts),
        )


@dataclass(frozen=True, slots=True)
class Given:
    """More of a continuation, the log-probabilities of the tokens that came with it, and more of its reasoning."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...]
    reasoning: str = ""


class Answer:
    """Collects all continuations of one call.

    Args:
        plan: of the request.
        provider: for messages.
        prompt_tokens: a bound on the prompt's, for a call whose usage the server does not report.
        constrained: the server enforces a constraint on the text.
    """

    def __init__(self, plan: Plan, provider: Provider, prompt_tokens: int, *, constrained: bool) -> None:
        self._plan, self._provider = plan, provider
        self._prompt_tokens = prompt_tokens
        self._constrained = constrained
        self._texts = [_Growing(plan) for _ in range(plan.n)]
        self._usage: Counted | None = None
        self._pieces = 0

    @property
    def whole(self) -> bool:
        """True once every continuation has ended."""
        return all(text.reason is not None for text in self._texts)

    @property
    def counted(self) -> bool:
        """True once the server has reported the usage."""
        return self._usage is not None

    @property
    def cut(self) -> bool:
        """True once every continuation has ended, one of them at a stop found here: the stream can be closed."""
        return self.whole and any(text.matched in self._plan.cuts for text in self._texts)

    def append(self, piece: Piece) -> list[Given]:
        """Takes a piece. Returns the text that can be given out.

        Raises:
            BackendError: it is no piece of an answer to this call.
            RequestError: the provider did not let the model answer.
        """
        if piece.usage is not None:
            self._usage = piece.usage
        self._pieces += 1
        if self._pieces > _MOST_PIECES + _LONGEST_TOKEN * self._plan.n * self._plan.most_tokens:
            raise self._broken("an answer that does not end")
        given = []
        for choice in piece.choices or ():
            if choice.index >= len(self._texts):
                raise self._broken(f"continuation {choice.index} of {len(self._texts)}")
            growing = self._texts[choice.index]
            if growing.reason is not None:
                continue  # it was cut here; the server does not know
            text = self._text(choice)
            said = choice.message or choice.delta
            thoughts = said.thoughts if said is not None else ""
            growing.think(thoughts)
            logprobs = logprobs_of(choice.logprobs)
            growing.logprobs.extend(logprobs)
            released = growing.receive(text)
            growing.call(self._called(choice))
            if growing.length > _LONGEST_TOKEN * (self._plan.most_tokens + 1):
                raise self._broken(f"more text than max_tokens={self._plan.most_tokens} allows, and did not stop")
            if choice.finish_reason:  # some servers say "" until the end
                released += growing.end(self._reason(choice.finish_reason), choice.stop_reason)
            if released or thoughts:
                given.append(Given(choice.index, released, logprobs, thoughts))
        return given

    def check_whole(self) -> None:
        """Raises ConnectionLostError for an answer without an end."""
        if not self.whole:
            raise ConnectionLostError(
                f"{self._provider.name}: an answer of {self._provider.host} ended too early: its end never came"
            )

    def completions(self) -> tuple[Completion, ...]:
        return tuple(text.completion(constrained=self._constrained) for text in self._texts)

    def usage(self) -> Usage:
        """Returns the usage. If the server does not report it: bounds, by the bytes of the texts."""
        counted = self._usage
        if counted is None:
            received = sum(min(4 * text.length, self._plan.most_tokens) for text in self._texts)
            return Usage(self._prompt_tokens, 0, received, 1)
        return counted.usage

    # -------------------------------------------------------------------------------- how

    def _text(self, choice: Choice) -> str:
        said = choice.message or choice.delta
        if said is not None and said.refusal:
            raise RequestError(f"{self._provider.name}: the model refused: {self._provider.scrub(said.refusal)}")
        return (said.content if said is not None else choice.text) or ""

    def _called(self, choice: Choice) -> Sequence[SaidCall]:
        """Returns the calls of a choice; none where no tools were offered: some servers find calls in any text."""
        said = choice.message or choice.delta
        return (said.tool_calls or ()) if said is not None and self._plan.offers_tools else ()

    def _reason(self, said: str) -> FinishReason:
        match said:
            case "stop":
                return FinishReason.STOP
            case "tool_calls" if self._plan.offers_tools:
                return FinishReason.STOP
            case "length":
                return FinishReason.LENGTH
            case "content_filter":
                raise RequestError(
                    f"{self._provider.name}: the provider's content filter ended the answer; ask for something else"
                )
            case _:
                raise self._broken(f"an answer that ended by {said!r}")

    def _broken(self, what: str) -> UmbelError:
        return BackendError(f"{self._provider.name}: {self._provider.host} sent {what}")


# What a session has clients of: the SDK's, or a translator to another one.
Client: TypeAlias = "AsyncOpenAI | Translator"

# JSON of a server, whole or of an event → a piece of an answer. Raises BackendError for what is none.
Reading = Callable[[object, Provider], Piece]


async def chunks(
    session: Session[Client],
    plan: Plan,
    answer: Answer,
    request: GenRequest,
    read: Reading = parsed,
) -> AsyncGenerator[Chunk, None]:
    """Makes a call and fills `answer`; yields chunks if the request asks for them."""
    deadline = session.deadline(request.origin.timeout)
    async with session.slot(deadline, request.origin) as client:
        if not plan.streams:
            await session.retried(lambda: _whole(client, plan, answer, session.provider, read), deadline)
            return
        events = await session.retried(lambda: _begin(client, plan, answer, session.provider, read), deadline)
        async with contextlib.aclosing(events):
            while (given := await session.once(events.next(), deadline)) is not None:
                for each in given if request.stream else ():
                    yield Chunk(request.id, each.index, each.text, logprobs=each.logprobs, reasoning=each.reasoning)


async def _whole(client: Client, plan: Plan, answer: Answer, provider: Provider, read: Reading) -> None:
    """Makes a call without streaming. Raises what the SDK raises, and as `_take` says."""
    _take(read(await client.post(plan.path, cast_to=object, body=plan.body), provider), answer, provider)


async def _begin(client: Client, plan: Plan, answer: Answer, provider: Provider, read: Reading) -> "Events":
    """Starts a streamed call, until its answer begins: so far it may be tried again."""
    events = Events(await _streamed(client, plan), answer, provider, read)
    try:
        events.check_kind()
    except BackendError:
        await events.aclose()
        raise
    return events


async def _streamed(client: Client, plan: Plan) -> "AsyncStream[object] | TranslatedStream":
    if isinstance(client, Translator):
        return TranslatedStream(await client.stream(plan.body))
    from openai import AsyncStream

    return await client.post(plan.path, cast_to=object, body=plan.body, stream=True, stream_cls=AsyncStream[object])


class Events:
    """The events of a stream."""

    def __init__(
        self, stream: "AsyncStream[object] | TranslatedStream", answer: Answer, provider: Provider, read: Reading
    ) -> None:
        self._stream, self._answer, self._provider, self._read = stream, answer, provider, read

    def check_kind(self) -> None:
        """Raises BackendError if the response is no stream of events, such as a web page."""
        kind = self._stream.response.headers.get("content-type", "")
        if kind and not kind.startswith("text/event-stream"):
            raise BackendError(
                f"{self._provider.name}: {self._provider.host} sent {kind.split(';')[0]} where a stream of events was "
                "asked for; check base_url"
            )

    async def next(self) -> list[Given] | None:
        """Reads the next event; None at the end.

        Errors after every continuation has ended are ignored.
        """
        if self._answer.cut:
            return None
        try:
            data = await anext(self._stream, None)
        except Exception as error:
            if self._answer.whole:
                return None
            told = getattr(error, "body", None)
            if told is None:
                raise
        else:
            if data is None:
                return None
            return _take(self._read(data, self._provider), self._answer, self._provider)
        raise self._provider.of_event(told)

    async def aclose(self) -> None:
        await self._stream.close()


def _take(piece: Piece, answer: Answer, provider: Provider) -> list[Given]:
    """Adds a piece to the answer. Raises as Answer.append does, and for a server's error inside an answer."""
    if piece.error is not None:
        raise provider.of_event(_object(piece.error))
    return answer.append(piece)


def _object(error: Any) -> object:  # Any: whatever a server puts there
    return error if isinstance(error, dict) else {"message": str(error)}
