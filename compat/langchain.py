"""LangChain's programs on umbel's backends: `umbel.langchain.ChatUmbel` is a chat model.

from umbel.langchain import ChatUmbel

model = ChatUmbel(backend=ul.Runtime(), temperature=0)
model.invoke("What is an umbel?").content
"""

import itertools
import json
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from ..interpreter import loop
from ..interpreter.run import chosen_backend
from ..interpreter.tool_reader import ArgumentsPiece, CallBegins, CallEnds, CallEvent, ContentPiece
from ..lang.conversations.messages import Message
from ..lang.errors import CapabilityError, MissingExtraError, ParameterError, shown, unknown_option
from ..lang.ops import image
from ..lang.prompt import Media, Text, media_of
from ..lang.protocol import Backend, Tokenize
from ..lang.tool_calls import Tool, ToolCall, ToolChoice
from . import conversing
from .answering import ANY_OBJECT, Answer, Turn, ask, ask_async, picture, stream, stream_async

try:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
    from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
    from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
    from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
    from langchain_core.utils.pydantic import is_basemodel_subclass
    from pydantic import ConfigDict
except ModuleNotFoundError as error:
    raise MissingExtraError("langchain-core", "langchain") from error

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}
_CHUNKS = {
    "HumanMessageChunk": "human",
    "AIMessageChunk": "ai",
    "SystemMessageChunk": "system",
    "ToolMessageChunk": "tool",
}
_numbers = itertools.count()  # of questions for tokens
_CALL_BLOCKS = ("tool_use", "tool_call", "function_call")  # the message's `tool_calls` say the same
_SIGNATURES = "umbel_signatures"  # of calls, in their order: the provider wants them back
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_SAMPLING = frozenset({"temperature", "max_tokens", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty"})
_OF_BACKENDS = frozenset({"api_key", "timeout", "max_retries"})  # LangChain gives them to models of every provider


class ChatUmbel(BaseChatModel):  # type: ignore[misc]  # LangChain is not looked into
    """A chat model of LangChain that asks a backend of umbel.

    Attributes:
        backend: a Runtime, a hosted model or Echo; None: the default one. It stays the caller's.
        temperature, max_tokens, top_p, top_k, seed, frequency_penalty, presence_penalty, stop: of all calls; None
            leaves them to umbel.
        streaming: as LangChain reads it: True asks for pieces also where a whole answer is returned.

    Raises:
        ParameterError: not a backend, or a setting that is none.
    """

    backend: Any = None
    temperature: float | None = None
    max_tokens: int = 1_024
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: list[str] | str | None = None
    streaming: bool = False

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def __init__(self, **settings: Any) -> None:
        known = type(self).model_fields
        for setting in settings:
            if setting in _OF_BACKENDS:
                warnings.warn(
                    f"ChatUmbel() does nothing with {setting}=; give it to the backend, such as ul.OpenAI(...)",
                    stacklevel=2,
                )
            elif setting not in known:
                raise unknown_option("ChatUmbel()", setting, known)
        if settings.get("backend") is not None:
            chosen_backend(settings["backend"])
        super().__init__(**settings)

    @property
    def _llm_type(self) -> str:
        return "umbel"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        """Returns what LangChain's tracers are told of a call."""
        known = super()._get_ls_params(stop=stop, **kwargs)
        name = "umbel" if self.backend is None else self.backend.capabilities.name
        return {**known, "ls_provider": "umbel", "ls_model_name": kwargs.get("model", name)}

    def _asked(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | str | None, given: Mapping[str, Any]
    ) -> "_Asked":
        """Returns a call. Raises ParameterError for what is not offered."""
        rest = dict(given)
        schema = rest.pop("json_schema", None)
        rest.pop("ls_structured_output_format", None)  # for LangChain's tracers
        tools = [_tool(each) for each in rest.pop("tools", None) or ()]
        choice = choice_of(rest.pop("tool_choice", None), rest.pop("parallel_tool_calls", None))
        foreign = next((name for name in rest if name not in _SAMPLING), None)
        if foreign is not None:
            raise ParameterError(f"ChatUmbel takes no {shown(foreign)}; write one of {', '.join(sorted(_SAMPLING))}")
        own = {name: getattr(self, name) for name in _SAMPLING}
        sampling = own | rest | {"stop": stop or self.stop}
        return _Asked(
            chosen_backend(self.backend),
            messages_of(messages),
            tools,
            choice,
            schema,
            {name: value for name, value in sampling.items() if value is not None},
        )

    def get_num_tokens(self, text: str) -> int:
        """Counts the tokens of a text, BOS included, by the model's own tokenizer. A backend without token ids, such as
        a hosted model, gives a number that is never less than they are."""
        backend = chosen_backend(self.backend)
        tokenize = getattr(backend, "tokenize", None)
        parts = (Text(text),) if text else ()
        if tokenize is None:
            return backend.tokens_at_most(parts)
        return len(loop.streams.run(tokenize(Tokenize(f"langchain-{next(_numbers)}", parts))).token_ids)

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        asked = self._asked(messages, stop, kwargs)
        return _result(asked.answer(), asked.name)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        asked = self._asked(messages, stop, kwargs)
        return _result(await asked.answer_async(), asked.name)

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        asked = self._asked(messages, stop, kwargs)
        for piece in asked.stream():
            for chunk in _chunks(piece, asked.name):
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        asked = self._asked(messages, stop, kwargs)
        async for piece in asked.stream_async():
            for chunk in _chunks(piece, asked.name):
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable:
        """Returns a runnable whose answers may call tools.

        Args:
            tools: functions, LangChain's tools, Pydantic classes or schemas of functions.
            tool_choice: "auto" or None: as the model likes; "any", "required" or True: at least one call; "none" or
                False: no call; the name of a tool, or {"type": "function", "function": {"name": ...}}: one call of it.
            parallel_tool_calls: False: at most one call in an answer.
            kwargs: of all calls. `strict` changes nothing: arguments follow their schema.

        Raises:
            ParameterError: a choice that is none of these; when it is asked: a name of no tool, or of two.
        """
        kwargs.pop("strict", None)
        shaped = [convert_to_openai_tool(tool) for tool in tools]
        choice_of(tool_choice, parallel_tool_calls)
        return self.bind(tools=shaped, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, **kwargs)

    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, method: str = "json_schema", strict: bool | None = None
    ) -> Runnable:
        """Returns a runnable whose answers are of a schema.

        Args:
            schema: a Pydantic class, whose objects come then, or a JSON Schema or TypedDict, for dicts.
            include_raw: gives {"raw": message, "parsed": object, "parsing_error": None or error}.
            method: "json_schema": the backend enforces the schema. "function_calling": the answer is a call of a tool
                with its arguments. "json_mode": the answer is any JSON object, and the schema is in the prompt.
            strict: changes nothing: what is enforced is enforced as a whole.
        """
        typed = isinstance(schema, type) and is_basemodel_subclass(schema)
        facts = {"kwargs": {"method": method}, "schema": convert_to_json_schema(schema)}
        parser: Any = PydanticOutputParser(pydantic_object=schema) if typed else JsonOutputParser()
        match method:
            case "json_schema":
                model = self.bind(json_schema=facts["schema"], ls_structured_output_format=facts)
            case "json_mode":
                model = self.bind(json_schema=ANY_OBJECT, ls_structured_output_format=facts)
            case "function_calling":
                name = convert_to_openai_tool(schema)["function"]["name"]
                model = self.bind_tools([schema], tool_choice=name, ls_structured_output_format=facts)
                parser = (
                    PydanticToolsParser(tools=[schema], first_tool_only=True)
                    if typed
                    else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
                )
            case _:
                raise ParameterError(
                    f"with_structured_output(): method {shown(method)} is not known; leave it out, or write "
                    "json_schema, function_calling or json_mode"
                )
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call: a program with one `gen`, and where tools are in it, a turn of a conversation."""

    backend: Backend
    messages: Sequence[Message]
    tools: Sequence[Tool]
    choice: ToolChoice
    schema: Any  # JSON Schema
    sampling: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The backend's, which is known once it has answered."""
        return self.backend.capabilities.name

    @property
    def _dialogue(self) -> conversing.Dialogue | None:
        if not self.tools and not any(message.calls or message.role == "tool" for message in self.messages):
            return None
        return conversing.Dialogue(self.messages, self.tools, self.choice, self.schema)

    @property
    def _turns(self) -> list[Turn]:
        return [
            (message.role, [image(block.data) if isinstance(block, Media) else str(block) for block in message.content])
            for message in self.messages
        ]

    def answer(self) -> Answer:
        if (dialogue := self._dialogue) is not None:
            return conversing.answer(self.backend, dialogue, self.sampling)
        return ask(self.backend, self._turns, self.schema, self.sampling)

    async def answer_async(self) -> Answer:
        if (dialogue := self._dialogue) is not None:
            return await conversing.answer_async(self.backend, dialogue, self.sampling)
        return await ask_async(self.backend, self._turns, self.schema, self.sampling)

    def stream(self) -> Iterator[str | CallEvent | Answer]:
        if (dialogue := self._dialogue) is not None:
            return conversing.events(self.backend, dialogue, self.sampling)
        return stream(self.backend, self._turns, self.schema, self.sampling)

    def stream_async(self) -> AsyncIterator[str | CallEvent | Answer]:
        if (dialogue := self._dialogue) is not None:
            return conversing.events_async(self.backend, dialogue, self.sampling)
        return stream_async(self.backend, self._turns, self.schema, self.sampling)


def choice_of(given: Any, parallel: bool | None) -> ToolChoice:
    """Returns LangChain's choice among tools in the words of the language. Raises ParameterError for another value."""
    several = parallel is not False
    match given:
        case None | "auto":
            return ToolChoice(parallel=several)
        case True | "any" | "required":
            return ToolChoice("required", parallel=several)
        case False | "none":
            return ToolChoice("none")
        case str(name) | {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice.only(name)
    raise ParameterError(f'tool_choice: {shown(given)} is not known; write "auto", "any", "none" or a name')


def _tool(shaped: Mapping[str, Any]) -> Tool:
    function = convert_to_openai_tool(shaped)["function"]
    return Tool(function["name"], function.get("description", ""), function.get("parameters", _NO_PARAMETERS))


def messages_of(messages: Sequence[BaseMessage]) -> list[Message]:
    """Returns messages in the words of the language. Raises CapabilityError for other blocks than text and pictures."""
    return [_message(message) for message in messages]


def _message(message: BaseMessage) -> Message:
    role = _ROLES.get(_CHUNKS.get(message.type, message.type))
    if role is None:
        raise CapabilityError(f"ChatUmbel takes no message of the type {message.type!r}; write it as a human's")
    calls = [
        ToolCall(call["name"], json.dumps(call["args"], ensure_ascii=False), call["id"] or "")
        for call in getattr(message, "tool_calls", None) or ()
    ]
    signatures = message.additional_kwargs.get(_SIGNATURES, ())
    if len(signatures) == len(calls):
        calls = [replace(call, signature=each) for call, each in zip(calls, signatures, strict=True)]
    return Message(
        role,
        tuple(_blocks(message.content)),
        tuple(calls),
        getattr(message, "tool_call_id", ""),
        message.name or "" if role == "tool" else "",
    )


def _blocks(content: str | Sequence[Any]) -> list[str | Media]:
    if isinstance(content, str):
        return [content] if content else []
    return [
        block if isinstance(block, str) else _block(block)
        for block in content
        if isinstance(block, str) or block.get("type") not in _CALL_BLOCKS
    ]


def _block(block: Mapping[str, Any]) -> str | Media:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image_url", "image_url": str(url)}:
            return media_of("image", picture(url).source)
        case {"type": "image", "base64": str(data)}:
            return media_of("image", picture(f"data:{block.get('mime_type', 'image/png')};base64,{data}").source)
    raise CapabilityError(f"ChatUmbel takes text and pictures, and a message has {shown(block)}; write it as text")


def _facts(answer: Answer, model: str) -> dict[str, Any]:
    """Returns the fields that tell of a whole answer."""
    usage = answer.usage
    signatures = [call.signature for call in answer.calls]
    return {
        "additional_kwargs": {_SIGNATURES: signatures} if any(signatures) else {},
        "usage_metadata": {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "input_token_details": {"cache_read": usage.cached_tokens},
        },
        "response_metadata": {"finish_reason": answer.reason, "model_name": model, "model_provider": "umbel"},
    }


def _result(answer: Answer, model: str) -> ChatResult:
    calls, wrong = [], []
    for call in answer.calls:
        named = {"name": call.name, "id": _new_id()}
        try:
            calls.append({**named, "args": json.loads(call.arguments or "{}"), "type": "tool_call"})
        except ValueError as error:  # it was cut, or the backend enforces nothing
            wrong.append({**named, "args": call.arguments, "error": str(error), "type": "invalid_tool_call"})
    message = AIMessage(answer.text, tool_calls=calls, invalid_tool_calls=wrong, **_facts(answer, model))
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunks(piece: str | CallEvent | Answer, model: str) -> list[ChatGenerationChunk]:
    """Returns the chunks of a piece: the end of a call has none."""
    match piece:
        case str() as text:
            chunk = AIMessageChunk(text)
        case ContentPiece(text):
            chunk = AIMessageChunk(text)
        case CallBegins(index, name):
            chunk = AIMessageChunk("", tool_call_chunks=[_call_chunk(index, name, "", _new_id())])
        case ArgumentsPiece(index, text):
            chunk = AIMessageChunk("", tool_call_chunks=[_call_chunk(index, None, text, None)])
        case Answer() as answer:
            chunk = AIMessageChunk("", chunk_position="last", **_facts(answer, model))
        case CallEnds():
            return []
    return [ChatGenerationChunk(message=chunk)]


def _call_chunk(index: int, name: str | None, arguments: str, call_id: str | None) -> Any:
    return {"index": index, "name": name, "args": arguments, "id": call_id, "type": "tool_call_chunk"}


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
