"""FakeOllama: a server of Ollama's own API on loopback, for tests of programs.

It ships with umbel, as `umbel.testing.FakeOllama`:

    from umbel.testing import FakeOllama

    with FakeOllama({"capital of France?": "Paris."}) as server:
        backend = ul.Ollama("llama3.2", base_url=server.base_url)
        assert capital.run(country="France", backend=backend)["answer"] == "Paris."

It has `/api/chat`, `/api/show` and `/api/tags`, and needs no key, as Ollama. Scripts are those of FakeOpenAI: calls of
tools are spelled in umbel's fence, and thoughts stand at the beginning of an answer, in <think> and </think>.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Unpack

import msgspec
from msgspec import Meta

from ...lang import checks
from ...lang.prompt import Media, Part, Text
from ...lang.protocol import FinishReason, Usage
from ...lang.sampling import MAX_TOKENS, SamplingParams
from ...lang.tool_calls import ToolCall
from ..backends.echo_answers import Script
from ..backends.echo_tokens import pieces, prompt_tokens
from ..backends.hosted.conversation import Conversation
from .openai import Json, Said, said_of, split_thoughts
from .provider import (
    Answered,
    FakeOptions,
    FakeProvider,
    Form,
    JsonBody,
    Misfit,
    Question,
    Refused,
    Schema,
    SentTurn,
    fitted,
    meant,
    of_any_object,
    of_schema,
    picture,
    refuse,
    shown_turns,
    written,
)
from .server import AnswerEvents, Exchange, HttpRequest, at_once

ABILITIES = ("completion", "vision", "tools", "thinking")


class OllamaSampling(JsonBody):
    """`options` of a request: those that are played, and those that only have to be of their type."""

    num_predict: int = -1
    stop: list[str] = []
    num_ctx: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] = 0.8
    top_p: Annotated[float, Meta(ge=0, le=1)] = 0.9
    top_k: Annotated[int, Meta(ge=0)] = 40
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repeat_penalty: float = 1.1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None


class OllamaFunction(JsonBody):
    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None


class OllamaCall(JsonBody):
    function: OllamaFunction
    id: str = ""


class OllamaMessage(JsonBody):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str = ""
    images: list[str] = []
    tool_calls: list[OllamaCall] = []
    tool_name: str = ""
    tool_call_id: str = ""


class OllamaSchema(JsonBody):
    name: str
    parameters: Schema
    description: str = ""


class OllamaTool(JsonBody):
    type: Literal["function"]
    function: OllamaSchema


class OllamaBody(JsonBody):
    """POST /api/chat."""

    model: str
    messages: list[OllamaMessage]
    tools: list[OllamaTool] = []
    format: Schema | Literal["json", ""] = ""
    options: OllamaSampling = msgspec.field(default_factory=OllamaSampling)
    stream: bool = True
    keep_alive: str | float | None = None
    think: bool | Literal["low", "medium", "high"] | None = None


class FakeOllama(FakeProvider):
    """Plays a server of Ollama's API: /api/chat, /api/show, /api/tags. It asks for no key.

    Args:
        script: as Echo's. With a format, the answer has to satisfy it. Text in `<think>` and `</think>` before an
            answer is its thoughts, which a model without the ability "thinking" writes as text.
        models: names that exist.
        abilities: of all models, as /api/show tells them: some of "completion", "vision", "tools", "thinking".
        options: faults, a gate and others, as of `FakeOptions`.

    Examples:
        >>> from umbel.testing import FakeOllama
        >>> with FakeOllama(["Paris"], models=["llama3.2"]) as server:
        ...     model = ul.Ollama("llama3.2", base_url=server.base_url)
        ...     model("What is the capital of France?", max_tokens=8)
        ...     try:
        ...         ul.Ollama("lama3.2", base_url=server.base_url)("What is the capital of Italy?")
        ...     except ul.RequestError as error:
        ...         print(error)
        'Paris'
        ollama lama3.2: ... has no such model (model 'lama3.2' not found); run `ollama pull lama3.2`
    """

    KEY_HEADER = "authorization"
    STREAM_TYPE: ClassVar[str] = "application/x-ndjson"

    def __init__(
        self,
        script: Script | None = None,
        *,
        models: Sequence[str] = ("llama3.2",),
        abilities: Sequence[str] = ("completion", "tools"),
        **options: Unpack[FakeOptions],
    ) -> None:
        super().__init__(script, models, **options)
        wanted = f"some of {', '.join(ABILITIES)}"
        given = checks.members("abilities", abilities, len(ABILITIES), wanted)
        self.abilities = tuple(checks.one_of("abilities", each, ABILITIES) for each in given)

    @property
    def base_url(self) -> str:
        return self.address

    # -------------------------------------------------------------------------------- the dialect

    def _authorised(self, request: HttpRequest) -> bool:
        return True

    def _listing(self, path: str) -> object | None:
        if path == "/api/tags":
            return {"models": [{"name": model, "model": model, "size": 0} for model in self.models]}
        return {"version": "0.0.0-fake"} if path == "/api/version" else None

    async def _respond(self, request: HttpRequest, exchange: Exchange) -> None:
        if request.path != "/api/show":
            await super()._respond(request, exchange)
            return
        body = msgspec.json.decode(request.body)
        self._check_model(str(body.get("model")))
        data = msgspec.json.encode({"capabilities": self.abilities, "details": {}, "model_info": {}})
        await exchange.respond(200, {"content-type": "application/json"}, data)

    def _check_model(self, model: str) -> None:
        if model not in self.models:
            raise Refused(404, f"model '{model}' not found")

    def _failure(self, refused: Refused) -> object:
        return {"error": refused.message}

    def _piece(self, data: object, name: str) -> bytes:
        return _line(data)

    def _question(self, path: str, body: object) -> Question:
        if path != "/api/chat":
            raise Refused(404, f"404 page not found: {path}")
        request = fitted(body, OllamaBody, _misfit)
        self._check_model(request.model)
        lacks = f'"{request.model}" does not support'
        refuse(request.tools and "tools" not in self.abilities, f"{lacks} tools")
        refuse(request.think not in (None, False) and "thinking" not in self.abilities, f"{lacks} thinking")
        turns = shown_turns(self._turn(each) for each in request.messages)
        thinks = "thinking" in self.abilities and request.think is not False
        return _OllamaQuestion(meant(turns), 1, written(Conversation(turns, ())), request, thinks)

    def _turn(self, said: OllamaMessage) -> SentTurn:
        refuse(said.role == "tool" and not said.tool_name, "a message of a tool has no tool_name")
        if said.role == "tool":
            return SentTurn("tool", results=((said.tool_name, said.content),))
        refuse(said.images and "vision" not in self.abilities, "this model is missing data required for image input")
        broken = Refused(400, "illegal base64 data in images")
        content: list[Text | Media] = [picture(image, broken) for image in said.images]
        content += [Text(said.content)] if said.content else []
        calls = tuple(
            ToolCall(each.function.name, msgspec.json.encode(each.function.arguments).decode())
            for each in said.tool_calls
        )
        return SentTurn(said.role, tuple(content), calls)


def _misfit(found: Misfit) -> Refused:
    return Refused(400, f"json: {found.place or 'request'}: {found.problem}")


@dataclass(frozen=True, slots=True)
class _OllamaQuestion(Question):
    """A request of `/api/chat`.

    Attributes:
        sent: all that it says, for counting.
        body: as it came.
        thinks: thoughts of the script come in their own field.
    """

    sent: tuple[Part, ...]
    body: OllamaBody
    thinks: bool

    def answer(self, said: list[str]) -> Answered:
        asked = self.body
        (text,) = said
        thoughts = ""
        if self.thinks:
            split = split_thoughts(text)
            thoughts, text = split.reasoning, split.answer
        limit = asked.options.num_predict
        sampling = SamplingParams(max_tokens=MAX_TOKENS if limit < 0 else limit, stop=tuple(asked.options.stop))
        prompt = "".join(part.text for part in self.meant if isinstance(part, Text))
        one = said_of(text, prompt, self._form, sampling, [tool.function.name for tool in asked.tools])
        generated = len(one.completion.token_ids) + len(pieces(thoughts))
        usage = Usage(len(prompt_tokens(self.sent)), 0, generated, 1)
        return Answered(
            self._events(one, thoughts, usage) if asked.stream else self._whole(one, thoughts, usage), usage
        )

    @property
    def _form(self) -> Form | None:
        asked = self.body.format
        if isinstance(asked, dict):
            return of_schema(asked)
        return of_any_object() if asked == "json" else None

    def _whole(self, one: Said, thoughts: str, usage: Usage) -> AnswerEvents:
        message: Json = {"role": "assistant", "content": one.content if one.calls else one.completion.text}
        if thoughts:
            message["thinking"] = thoughts
        if one.calls:
            message["tool_calls"] = [_call(number, call) for number, call in enumerate(one.calls)]
        return at_once({**self._head, "message": message, **_ending(one, usage)})

    def _events(self, one: Said, thoughts: str, usage: Usage) -> AnswerEvents:
        told: list[Json] = [{"content": "", "thinking": text} for text in pieces(thoughts)]
        texts = pieces(one.content) if one.calls else [seen for _, seen, _ in one.tokens]
        told += [{"content": text} for text in texts]
        told += [{"content": "", "tool_calls": [_call(number, call)]} for number, call in enumerate(one.calls)]
        lines = [_line({**self._head, "message": {"role": "assistant", **each}, "done": False}) for each in told]
        last = _line({**self._head, "message": {"role": "assistant", "content": ""}, **_ending(one, usage)})
        return AnswerEvents((), tuple(lines), (), (last,))

    @property
    def _head(self) -> Json:
        return {"model": self.body.model, "created_at": "2024-01-01T00:00:00Z"}


def _call(number: int, call: ToolCall) -> Json:
    arguments = msgspec.json.decode(call.arguments)
    return {"id": f"call_fake_{number}", "function": {"index": number, "name": call.name, "arguments": arguments}}


def _ending(one: Said, usage: Usage) -> Json:
    cut = one.completion.finish_reason is FinishReason.LENGTH
    counts = {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.completion_tokens}
    return {"done": True, "done_reason": "length" if cut else "stop", **counts}


def _line(data: object) -> bytes:
    return msgspec.json.encode(data) + b"\n"
