"""`sglang.lang.backend.runtime_endpoint`: models on this machine, and at an address."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from .....interpreter.backends import runtime as core
from .....interpreter.backends.hosted.sglang import endpoint
from .....interpreter.backends.hosted.sglang import endpoint as core_endpoint
from .....interpreter.loop import streams
from .....interpreter.run import flush_cache, get_server_info
from .....interpreter.variables import meta_of_completion
from .....lang import checks
from .....lang.chat_template import ChatTemplate
from .....lang.constraint import demand_of
from .....lang.errors import BackendError, CapabilityError, ParameterError
from .....lang.prompt import Text
from .....lang.protocol import Backend, Chunk, Completion, Final, GenRequest
from .....lang.sampling import merge, overrides
from ...refusals import check_refused
from .server_options import runtime_options

if TYPE_CHECKING:
    from .....srt.tokenizer.tokenizer import Tokenizer


_CONSTRAINTS = ("regex", "json_schema", "ebnf")
_ALWAYS_SO = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False}
_numbers = itertools.count(1)

Parameters = Mapping[str, Any] | None  # Any: as of umbel.gen


def request_of(
    prompt: str,
    sampling_params: Parameters = None,
    *,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    stream: bool = False,
) -> GenRequest:
    """
    Raises:
        ParameterError: a prompt that is no text, or a wrong parameter; the message says what to write.
        ConstraintError: a schema that is no JSON.
    """
    if not isinstance(prompt, str):
        raise ParameterError(f"a prompt is a string, got {type(prompt).__name__}; give texts one by one, or in a list")
    wanted = "a dict of sampling parameters, such as {'max_new_tokens': 16}"
    given = {} if sampling_params is None else checks.entries("sampling_params", sampling_params, 256, wanted)
    for name, usual in _ALWAYS_SO.items():
        if given.pop(name, usual) != usual:
            raise ParameterError(f"sampling_params[{name!r}] is always {usual}; leave it out")
    demand = demand_of({kind: given.pop(kind, None) for kind in _CONSTRAINTS})
    fields = overrides(given)
    fields |= overrides(
        {
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len if return_logprob else None,
            "top_logprobs_num": top_logprobs_num or None,
        }
    )
    constraint = demand.spec if demand is not None else None
    return GenRequest(
        f"generate-{next(_numbers)}", (Text(prompt),), merge(fields), stream=stream, constraint=constraint
    )


async def answer(backend: Backend, request: GenRequest) -> dict[str, Any] | list[dict[str, Any]]:
    """The whole answer; a list for n above 1."""
    await backend.start()
    async with aclosing(_events(backend, request)) as events:
        async for event in events:
            if isinstance(event, Final):
                answers = [_written(event, completion) for completion in event.completions]
                return answers if len(answers) > 1 else answers[0]
    raise BackendError("the request ended without an answer")


async def answers(backend: Backend, requests: list[GenRequest]) -> list[Any]:
    """Answers all requests concurrently."""
    return list(await asyncio.gather(*(answer(backend, request) for request in requests)))


async def growing_answers(backend: Backend, request: GenRequest) -> AsyncGenerator[dict[str, Any], None]:
    """The answer as it comes: each piece has all of the text so far, and the last one what it cost."""
    await backend.start()
    text = ""
    async with aclosing(_events(backend, request)) as events:
        async for event in events:
            if isinstance(event, Final):
                yield _written(event, event.completions[0])
            elif event.index == 0:
                text += event.text
                yield {"text": text, "meta_info": {"id": event.id, "finish_reason": None}}


def _events(backend: Backend, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
    events: Any = backend.generate(request)  # Any: backends give generators, where the protocol says iterators
    return events  # type: ignore[no-any-return]


def _written(final: Final, completion: Completion) -> dict[str, Any]:
    meta = meta_of_completion(final, completion, with_text=True)
    reason = meta.pop("finish_reason")
    matched = meta.pop("matched_stop")
    length = meta["completion_tokens"]
    told = {"type": "length", "length": length} if reason.startswith("length") else {"type": reason, "matched": matched}
    return {
        "text": completion.text,
        "output_ids": list(completion.token_ids),
        "meta_info": {**meta, "finish_reason": told},
    }


class RuntimeTokenizer:
    """A model's tokenizer: text → ids and back."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. `add_special_tokens`: it begins with the token that begins texts, where the model has one."""
        ids = self._tokenizer.encode(text, first=True)
        begins = self._tokenizer.bos_id if add_special_tokens else None
        return ids if begins is None else [begins, *ids]

    def decode(self, token_ids: list[int]) -> str:
        """The text of ids, without control tokens."""
        return b"".join(self._tokenizer.token_bytes(token) for token in token_ids).decode("utf-8", "replace")


class Runtime(core.Runtime):
    """`umbel.Runtime` with SGLang's options, and prompts outside of programs.

    Options are mapped by `server_options`; ours are taken as well. No HTTP server is started: a runtime is reached as
    an object.
    """

    def __init__(self, log_level: str = "error", launch_timeout: float = 300.0, **options: Any) -> None:
        given = {"log_level": log_level, **options}
        if "startup_timeout" not in options:
            given["launch_timeout"] = launch_timeout
        super().__init__(**runtime_options(given))

    @property
    def endpoint(self) -> Self:
        """The runtime itself, where SGLang has a client of its server."""
        return self

    @property
    def url(self) -> NoReturn:
        """Refuses with CapabilityError: nothing listens."""
        raise CapabilityError("a Runtime has no address: nothing listens; write backend=runtime")

    generate_url = url

    def get_tokenizer(self) -> RuntimeTokenizer:
        """The model's tokenizer, read without starting the runtime."""
        from .....srt.launch import open_tokenizer  # late: it brings what reads models

        return RuntimeTokenizer(open_tokenizer(self.options).tokenizer)

    def get_model_name(self) -> str:
        return self.options.model

    def get_chat_template(self) -> ChatTemplate:
        """The model's own template; starts the runtime."""
        return self.wait_ready().chat_template

    def cache_prefix(self, prefix: str) -> None:
        """Computes a text that prompts will begin with."""
        streams.run(answer(self._backend, request_of(prefix, {"max_new_tokens": 0})))

    def generate(  # type: ignore[override]  # SGLang's name for prompts is the protocol's for requests: both come here
        self, prompt: Any, sampling_params: Parameters = None, **options: Any
    ) -> Any:
        """The answer to a prompt, as JSON text; a JSON list for a list of prompts. Blocks.

        Args:
            sampling_params: such as max_new_tokens, temperature, stop, regex, json_schema, ebnf.
            options: return_logprob, logprob_start_len, top_logprobs_num; each one for all prompts.
        """
        if isinstance(prompt, GenRequest):
            return super().generate(prompt)
        return json.dumps(self._answered(prompt, sampling_params, options), ensure_ascii=False)

    async def async_generate(self, prompt: str, sampling_params: Parameters = None) -> AsyncGenerator[str, None]:
        """The pieces of the text, as they come."""
        said = 0
        async with aclosing(growing_answers(self._backend, request_of(prompt, sampling_params, stream=True))) as pieces:
            async for piece in pieces:
                if len(piece["text"]) > said:
                    yield piece["text"][said:]
                    said = len(piece["text"])

    add_request = async_generate

    def encode(self, prompt: object) -> NoReturn:
        """Refuses with CapabilityError: embeddings are not computed here."""
        raise CapabilityError(
            "a Runtime computes no embeddings; for token ids write runtime.get_tokenizer().encode(text)"
        )

    def start_profile(self) -> NoReturn:
        """Raises CapabilityError."""
        raise CapabilityError("a Runtime has no profiler; runtime.get_server_info() has its counters")

    stop_profile = start_profile

    @property
    def _backend(self) -> Backend:
        """Itself: `generate` is told by its argument which of the two it is."""
        return cast(Backend, self)

    def _answered(self, prompt: Any, sampling_params: Any, options: dict[str, Any]) -> Any:
        told = _told(options)
        if not isinstance(prompt, list):
            return streams.run(answer(self._backend, request_of(prompt, sampling_params, **told)))
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompt)
        if len(params) != len(prompt):
            raise ParameterError(f"{len(params)} sampling_params for {len(prompt)} prompts; give one, or one for each")
        requests = [request_of(one, how, **told) for one, how in zip(prompt, params, strict=True)]
        return streams.run(answers(self._backend, requests))


class Engine(Runtime):
    """A model without programs: prompts in, dictionaries out."""

    def generate(self, prompt: Any = None, sampling_params: Parameters = None, **options: Any) -> Any:  # type: ignore[override]  # as of Runtime
        """The answer as a dictionary; a list for a list of prompts; an iterator of growing answers with stream=True."""
        if isinstance(prompt, GenRequest):
            return super().generate(prompt)
        stream = checks.switch("stream", options.pop("stream", False))
        _check_engine(options)
        if not stream:
            return self._answered(prompt, sampling_params, options)
        return _blocking(
            growing_answers(self._backend, request_of(prompt, sampling_params, stream=True, **_told(options)))
        )

    async def async_generate(  # type: ignore[override]  # SGLang's engine gives an answer, its runtime pieces
        self, prompt: str, sampling_params: Parameters = None, *, stream: bool = False, **options: Any
    ) -> dict[str, Any] | list[dict[str, Any]] | AsyncIterator[dict[str, Any]]:
        """`await` it: the answer, or with stream=True an asynchronous iterator of growing ones."""
        _check_engine(options)
        checks.switch("stream", stream)
        request = request_of(prompt, sampling_params, stream=stream, **_told(options))
        return growing_answers(self._backend, request) if stream else await answer(self._backend, request)


_TOLD = ("logprob_start_len", "return_logprob", "top_logprobs_num")


def _told(options: Mapping[str, Any]) -> dict[str, Any]:
    """Reads which facts an answer adds to its text. Raises ParameterError for other options of a prompt."""
    wrong = next((name for name, value in options.items() if name not in _TOLD and value is not None), None)
    if wrong is not None:
        raise ParameterError(f"generate() takes no {wrong}; it takes sampling_params and {', '.join(_TOLD)}")
    return {name: value for name, value in options.items() if name in _TOLD}


_ENGINE_REFUSED: dict[str, tuple[object, str]] = {
    "input_ids": (None, "give the text as prompt="),
    "image_data": (None, "write a program with image(...)"),
    "lora_path": (None, "adapters are not served; merge them into the model"),
    "custom_logit_processor": (None, "write a constraint, or logit_bias in sampling_params"),
}


def _check_engine(options: dict[str, Any]) -> None:
    """Takes what is refused out of the options, where it asks for nothing."""
    check_refused("Engine.generate()", options, _ENGINE_REFUSED)
    for name in _ENGINE_REFUSED:
        options.pop(name, None)


def _blocking(pieces: AsyncGenerator[dict[str, Any], None]) -> Iterator[dict[str, Any]]:
    try:
        while (piece := streams.run(_next(pieces))) is not None:
            yield piece
    finally:
        streams.run(_close(pieces))


async def _next(pieces: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    return await anext(pieces, None)


async def _close(pieces: AsyncGenerator[dict[str, Any], None]) -> None:
    await pieces.aclose()


class RuntimeEndpoint(core_endpoint.RuntimeEndpoint):
    """`umbel.RuntimeEndpoint` with SGLang's parameters.

    Args:
        chat_template_name: of a family, such as "llama-3-instruct".
        options: of `umbel.RuntimeEndpoint`.

    Raises:
        ParameterError: `verify`, for which the environment has SSL_CERT_FILE.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: object = None,
        chat_template_name: str | None = None,
        **options: Any,
    ) -> None:
        if verify is not None and verify is not True:
            raise ParameterError(
                "RuntimeEndpoint() takes no verify=; set SSL_CERT_FILE to the file of the server's authority"
            )
        if chat_template_name is not None:
            options["chat_template"] = endpoint.named_template(chat_template_name)
        super().__init__(base_url, api_key=api_key, **options)

    def get_model_name(self) -> str | None:
        """The server's name of its model; asks it at the first time."""
        streams.run(self.start())
        return self.model

    def get_chat_template(self) -> ChatTemplate:
        streams.run(self.start())
        return self.chat_template

    def get_server_info(self) -> dict[str, Any]:
        return get_server_info(self)

    def flush_cache(self) -> None:
        """Forget every cached prefix of the server."""
        flush_cache(self)

    def cache_prefix(self, prefix_str: str) -> None:
        """Has the server compute a text that prompts will begin with."""
        streams.run(answer(self, request_of(prefix_str, {"max_new_tokens": 0})))


__all__ = ["Engine", "Runtime", "RuntimeEndpoint"]
