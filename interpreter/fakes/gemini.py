"""FakeGemini: a server of the Gemini API on loopback, for tests of programs.

It ships with umbel, as `umbel.testing.FakeGemini`:

    from umbel.testing import FakeGemini

    with FakeGemini({"capital of France?": "Paris."}) as server:
        backend = ul.Gemini("gemini-2.5-flash", base_url=server.base_url, api_key=server.api_key)
        assert capital.run(country="France", backend=backend)["answer"] == "Paris."

Google's own client (`umbel[gemini]`) asks it. Scripts are those of FakeOpenAI, with calls of tools in umbel's fence.
"""

import base64
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Unpack

import msgspec
from msgspec import Meta

from ...lang.prompt import Media, Part, Text
from ...lang.protocol import FinishReason, Usage
from ...lang.sampling import MAX_TOKENS, SamplingParams
from ...lang.tool_calls import ToolCall
from ..backends.echo_answers import Script
from ..backends.echo_tokens import pieces, prompt_tokens
from ..backends.hosted.conversation import Conversation, Message
from .openai import Json, Said, said_of, split_thoughts
from .provider import (
    Answered,
    FakeOptions,
    FakeProvider,
    Form,
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
from .server import AnswerEvents, at_once, event

_ROUTE = re.compile(r"/v1(?:beta\d*|alpha)?/models/([^/:]+):(generateContent|streamGenerateContent)")
_SIGNED = re.compile(r"gemini-(?:[3-9]|\d\d)")
_ALPHABET = str.maketrans("-_", "+/")  # of base64: both are taken
_UNSIGNED = base64.b64encode(b"skip_thought_signature_validator").decode()
_STATUSES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE",
}  # fmt: skip


class GeminiJson(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Base of everything that a client sends."""


class GeminiBlob(GeminiJson):
    """A picture. The server takes both spellings of its type, and Google's clients differ."""

    data: str
    mime_type: str = ""
    mime_type_of_others: str = msgspec.field(default="", name="mime_type")


class GeminiCall(GeminiJson):
    name: str
    args: dict[str, Any] = {}
    id: str = ""


class GeminiResult(GeminiJson):
    name: str
    response: dict[str, Any]
    id: str = ""


class GeminiPart(GeminiJson):
    """One of its fields; a call may have a signature."""

    text: str | None = None
    inline_data: GeminiBlob | None = None
    function_call: GeminiCall | None = None
    function_response: GeminiResult | None = None
    thought_signature: str = ""


class GeminiContent(GeminiJson):
    parts: Annotated[list[GeminiPart], Meta(min_length=1)]
    role: Literal["user", "model"] = "user"


class ThinkingConfig(GeminiJson, rename=None):
    """Says how the model thinks. Google's client writes these names, and the server takes both spellings."""

    thinking_budget: int | None = None
    include_thoughts: bool | None = None


class GeminiSampling(GeminiJson):
    max_output_tokens: Annotated[int, Meta(ge=1)] = MAX_TOKENS
    stop_sequences: Annotated[list[str], Meta(max_length=5)] = []
    candidate_count: Annotated[int, Meta(ge=1, le=8)] = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 0.95
    top_k: Annotated[float, Meta(ge=1, multiple_of=1)] = 64  # whole, and Google's client sends a float
    frequency_penalty: Annotated[float, Meta(ge=-2, lt=2)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, lt=2)] = 0.0
    seed: int | None = None
    response_mime_type: Literal["text/plain", "application/json"] = "text/plain"
    response_json_schema: Schema | None = None
    thinking_config: ThinkingConfig | None = None


class Declaration(GeminiJson, rename=None):
    """A function. Google's client writes its schema under this name, and the server takes both spellings."""

    name: str
    description: str = ""
    parameters_json_schema: Schema | None = None


class GeminiTools(GeminiJson):
    function_declarations: list[Declaration]


class CallingConfig(GeminiJson):
    mode: Literal["AUTO", "ANY", "NONE"] = "AUTO"
    allowed_function_names: list[str] | None = None


class ToolConfig(GeminiJson):
    function_calling_config: CallingConfig


class SafetySetting(GeminiJson):
    category: str
    threshold: str


class GenerateContentBody(GeminiJson):
    """POST .../models/{model}:generateContent, and :streamGenerateContent."""

    contents: Annotated[list[GeminiContent], Meta(min_length=1)]
    system_instruction: GeminiContent | None = None
    generation_config: GeminiSampling = msgspec.field(default_factory=GeminiSampling)
    tools: list[GeminiTools] = []
    tool_config: ToolConfig | None = None
    safety_settings: list[SafetySetting] = []

    @property
    def declared(self) -> list[str]:
        """The names of all functions."""
        return [each.name for tools in self.tools for each in tools.function_declarations]

    @property
    def callable(self) -> list[str]:
        """The names of the functions that the model may call."""
        calling = CallingConfig() if self.tool_config is None else self.tool_config.function_calling_config
        if calling.mode == "NONE":
            return []
        allowed = calling.allowed_function_names
        return [name for name in self.declared if allowed is None or name in allowed]


class FakeGemini(FakeProvider):
    """Plays a server of the Gemini API: generateContent and streamGenerateContent.

    Models of the names "gemini-3" and later sign the first call of an answer, and refuse a conversation that brings
    such a call back without a signature, as Google's do.

    Args:
        script: as Echo's. With a schema, the answer has to satisfy it. Text in `<think>` and `</think>` before an
            answer is its thoughts: told where `include_thoughts` asks for them, and paid for in any case.
        models: names that exist.
        options: faults, a gate and others, as of `FakeOptions`.

    Examples:
        >>> from umbel.testing import FakeGemini
        >>> with FakeGemini(["<think>France is a country.</think>Paris"]) as server:
        ...     model = ul.Gemini("gemini-2.5-flash", base_url=server.base_url, api_key=server.api_key)
        ...     model("What is the capital of France?", max_tokens=8)
        ...     server.usage.completion_tokens  # thoughts are paid for
        'Paris'
        6
    """

    KEY_HEADER = "x-goog-api-key"

    def __init__(
        self,
        script: Script | None = None,
        *,
        models: Sequence[str] = ("gemini-2.5-flash", "gemini-3-pro-preview"),
        **options: Unpack[FakeOptions],
    ) -> None:
        super().__init__(script, models, **options)
        self._signatures = {_UNSIGNED}  # that calls may have

    @property
    def base_url(self) -> str:
        return self.address

    # -------------------------------------------------------------------------------- the dialect

    def _listing(self, path: str) -> object | None:
        if path not in ("/v1beta/models", "/v1/models"):
            return None
        return {"models": [{"name": f"models/{model}"} for model in self.models]}

    def _failure(self, refused: Refused) -> object:
        message = refused.message or "API key not valid. Please pass a valid API key."
        return {
            "error": {
                "code": refused.status,
                "message": message,
                "status": _STATUSES.get(refused.status, "INTERNAL"),
            }
        }

    def _question(self, path: str, body: object) -> Question:
        route = _ROUTE.fullmatch(path)
        if route is None:
            raise Refused(404, f"Not found: POST {path}")
        model, method = route[1], route[2]
        if model not in self.models:
            raise Refused(404, f"models/{model} is not found for API version v1beta.")
        request = fitted(body, GenerateContentBody, _misfit)
        signs = _SIGNED.match(model) is not None
        self._check_calls(request, signs)
        turns = _turns(request)
        sent = written(Conversation(turns, ()))
        return _GeminiQuestion(
            meant(turns),
            request.generation_config.candidate_count,
            sent,
            request,
            method == "streamGenerateContent",
            self._signatures if signs else None,
        )

    def _check_calls(self, request: GenerateContentBody, signs: bool) -> None:
        """Refuses results that do not answer the calls before them, and calls that lost their signatures."""
        calling = CallingConfig() if request.tool_config is None else request.tool_config.function_calling_config
        foreign = [name for name in calling.allowed_function_names or () if name not in request.declared]
        refuse(foreign, f"allowed_function_names has no declaration of {foreign}")
        refuse(calling.allowed_function_names and calling.mode != "ANY", "allowed_function_names needs the mode ANY")
        waiting: list[tuple[str, str]] = []
        words = "the number of function response parts is not equal to the number of function call parts"
        for content in request.contents:
            results = [part.function_response for part in content.parts if part.function_response is not None]
            answered = [(each.id, each.name) for each in results]
            refuse(sorted(answered) != sorted(waiting), f"Please ensure that {words} of the function call turn.")
            calls = [part for part in content.parts if part.function_call is not None]
            refuse(calls and content.role != "model", "Function calls are of the role model.")
            missing = signs and calls and calls[0].thought_signature.translate(_ALPHABET) not in self._signatures
            refuse(missing, "Function call is missing a thought_signature in functionCall parts.")
            waiting = [(part.function_call.id, part.function_call.name) for part in calls if part.function_call]
        refuse(waiting, f"Please ensure that {words} of the function call turn.")


def _misfit(found: Misfit) -> Refused:
    return Refused(400, f"Invalid JSON payload received. {found.problem} at '{found.place}'")


def _turns(request: GenerateContentBody) -> tuple[Message, ...]:
    sent: list[SentTurn] = []
    if request.system_instruction is not None:
        sent.append(SentTurn("system", tuple(_content(request.system_instruction))))
    for content in request.contents:
        results = tuple(
            (part.function_response.name, str(part.function_response.response.get("output", "")))
            for part in content.parts
            if part.function_response is not None
        )
        calls = tuple(
            ToolCall(part.function_call.name, json.dumps(part.function_call.args, ensure_ascii=False))
            for part in content.parts
            if part.function_call is not None
        )
        role = "assistant" if content.role == "model" else "user"
        sent.append(SentTurn(role, () if results else tuple(_content(content)), calls, results))
    return shown_turns(sent)


def _content(content: GeminiContent) -> list[Text | Media]:
    parts: list[Text | Media] = []
    for part in content.parts:
        if part.text is not None:
            refuse(part.text == "", "Unable to submit request because it has an empty text parameter.")
            parts.append(Text(part.text))
        elif part.inline_data is not None:
            blob = part.inline_data
            refuse(not (blob.mime_type or blob.mime_type_of_others), "Request contains an invalid argument.")
            data = blob.data.translate(_ALPHABET)
            parts.append(picture(data, Refused(400, "Unable to process input image.")))
    return parts


@dataclass(frozen=True, slots=True)
class _GeminiQuestion(Question):
    """A request of either method.

    Attributes:
        sent: all that it says, for counting.
        body: as it came.
        streams: it is answered in events.
        signatures: gets those of calls in the answer; None: they have none.
    """

    sent: tuple[Part, ...]
    body: GenerateContentBody
    streams: bool
    signatures: set[str] | None

    def answer(self, said: list[str]) -> Answered:
        config = self.body.generation_config
        sampling = SamplingParams(max_tokens=config.max_output_tokens, stop=tuple(config.stop_sequences))
        prompt = "".join(part.text for part in self.meant if isinstance(part, Text))
        names = self.body.callable
        splits = [split_thoughts(text) for text in said]
        thinking = config.thinking_config
        shown = thinking is not None and thinking.include_thoughts
        candidates = [
            replace(
                said_of(split.answer, prompt, self._form, sampling, names), thoughts=split.reasoning if shown else ""
            )
            for split in splits
        ]
        thought = sum(len(pieces(split.reasoning)) for split in splits)
        generated = sum(len(one.completion.token_ids) for one in candidates) + thought
        usage = Usage(len(prompt_tokens(self.sent)), 0, generated, 1)
        return Answered(self._events(candidates, usage) if self.streams else self._whole(candidates, usage), usage)

    @property
    def _form(self) -> Form | None:
        config = self.body.generation_config
        if config.response_mime_type != "application/json":
            return None
        return of_any_object() if config.response_json_schema is None else of_schema(config.response_json_schema)

    def _whole(self, candidates: Sequence[Said], usage: Usage) -> AnswerEvents:
        told = [
            self._candidate(index, [*_thoughts(one), *_texts([_said(one)]), *self._calls(one)], _reason(one))
            for index, one in enumerate(candidates)
        ]
        return at_once({"candidates": told, "usageMetadata": _counted(usage)})

    def _events(self, candidates: Sequence[Said], usage: Usage) -> AnswerEvents:
        told = [[[each] for each in (*_thoughts(one), *_texts(_pieces(one)), *self._calls(one))] for one in candidates]
        between = [
            event({"candidates": [self._candidate(index, parts[place], "")]})
            for place in range(max(map(len, told)))
            for index, parts in enumerate(told)
            if place < len(parts)
        ]
        ends = [self._candidate(index, [{"text": ""}], _reason(one)) for index, one in enumerate(candidates)]
        last = event({"candidates": ends, "usageMetadata": _counted(usage)})
        return AnswerEvents((), tuple(between), (), (last,))

    def _candidate(self, index: int, parts: list[Json], reason: str) -> Json:
        ending = {"finishReason": reason} if reason else {}
        return {"index": index, "content": {"role": "model", "parts": parts}, **ending}

    def _calls(self, one: Said) -> list[Json]:
        parts: list[Json] = []
        for number, call in enumerate(one.calls):
            called = {"id": f"fake{number}", "name": call.name, "args": json.loads(call.arguments)}
            part: Json = {"functionCall": called}
            if self.signatures is not None and not number:
                signature = base64.b64encode(b"fake %d" % zlib.crc32(call.arguments.encode())).decode()
                self.signatures.add(signature)
                part["thoughtSignature"] = signature
            parts.append(part)
        return parts


def _said(one: Said) -> str:
    return one.content if one.calls else one.completion.text


def _pieces(one: Said) -> list[str]:
    return pieces(one.content) if one.calls else [seen for _, seen, _ in one.tokens]


def _thoughts(one: Said) -> list[Json]:
    return [{"text": text, "thought": True} for text in pieces(one.thoughts)]


def _texts(texts: Sequence[str]) -> list[Json]:
    return [{"text": text} for text in texts if text]


def _reason(one: Said) -> str:
    return "MAX_TOKENS" if one.completion.finish_reason is FinishReason.LENGTH else "STOP"


def _counted(usage: Usage) -> Json:
    return {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
