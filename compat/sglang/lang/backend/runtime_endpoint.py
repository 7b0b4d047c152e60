"""`sglang.lang.backend.runtime_endpoint`: models on this machine, and at an address.

Options of SGLang's server are mapped to those of `umbel.Runtime`; those without a counterpart are refused, with what
to write.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast, get_args

from .....interpreter.backends import runtime as core
from .....interpreter.backends.hosted.sglang import endpoint
from .....interpreter.loop import streams
from .....interpreter.run import flush_cache, get_server_info
from .....interpreter.variables import meta_of_completion
from .....lang import checks
from .....lang.chat_template import ChatTemplate
from .....lang.errors import BackendError, CapabilityError, ParameterError, shown, unknown_option
from .....lang.generation import demand_of
from .....lang.prompt import Text
from .....lang.protocol import Backend, Chunk, Completion, Final, GenRequest
from .....lang.runtime_options import GONE, OPTION_NAMES, LogLevel, Policy
from .....lang.sampling import merge, overrides

if TYPE_CHECKING:
    from .....srt.tokenizer.tokenizer import Tokenizer


def check_refused(owner: str, given: Mapping[str, Any], refusals: Mapping[str, tuple[object, str]]) -> None:
    """Looks for parameters that are not mapped to anything.

    Args:
        given: what the program passes; None stands for "not given".
        refusals: parameter → the value that asks for nothing, and what to write instead of any other.

    Raises:
        ParameterError: the first one that is given.
    """
    for name, value in given.items():
        if name in refusals and value is not None and value != refusals[name][0]:
            raise ParameterError(f"{owner} takes no {name}={shown(value)}; {refusals[name][1]}")


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

    Options are mapped by `runtime_options`; ours are taken as well. No HTTP server is started: a runtime is reached as
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
        """Raises CapabilityError: embeddings are a call of the language."""
        raise CapabilityError(
            "embeddings are umbel.embed(texts, backend=umbel.Runtime(model)); for token ids write "
            "runtime.get_tokenizer().encode(text)"
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
    "lora_path": (None, "write a program of umbel, with gen(adapter=name)"),
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


class RuntimeEndpoint(endpoint.RuntimeEndpoint):
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

Options = dict[str, Any]  # Any: options are of all types

# SGLang's name → ours, where the value is the same.
_SAME = {
    "model_path": "model_path",
    "tp_size": "tensor_parallel",
    "tensor_parallel_size": "tensor_parallel",
    "random_seed": "seed",
    "context_length": "context_length",
    "max_running_requests": "max_running",
    "max_total_tokens": "pool_tokens",
    "launch_timeout": "startup_timeout",
    "device": "device",
}
_DTYPES = {
    "auto": "auto",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_KV_DTYPES = {"auto": "auto", "fp8_e5m2": "fp8", "fp8_e4m3": "fp8"}
_ENGINES = {"xgrammar": "auto", "outlines": "outlines-core", "llguidance": "llguidance"}
_LEVELS = {"critical": "error", "fatal": "error", **{level: level for level in get_args(LogLevel)}}

# SGLang's name → the value that asks for nothing, and what to write instead of any other.
_REFUSED: dict[str, tuple[object, str]] = {
    "port": (None, "nothing listens: programs reach the runtime as backend=runtime; leave it out"),
    "host": (None, "nothing listens: programs reach the runtime as backend=runtime; leave it out"),
    "additional_ports": (None, "nothing listens; leave it out"),
    "nccl_port": (None, "ranks find each other without one; leave it out"),
    "api_key": (None, "nothing listens, so no client has to be kept out; leave it out"),
    "mem_fraction_static": (
        None,
        "it leaves out the memory of steps; leave it out, or write memory_share= with that, or pool_memory= in bytes",
    ),
    "tokenizer_mode": ("auto", "the model's own tokenizer is read; leave it out"),
    "skip_tokenizer_init": (False, "prompts are texts; leave it out"),
    "load_format": ("auto", "safetensors folders and GGUF files are told apart; leave it out"),
    "trust_remote_code": (False, "code of models is never run; leave it out"),
    "quantization": (None, "a packed checkpoint says it; leave it out, or write weights='int8'"),
    "revision": (None, "write it into the name, model_path='org/repo@revision'"),
    "served_model_name": (None, "leave it out: a runtime has one model"),
    "is_embedding": (False, "every model makes embeddings: write umbel.embed(texts, backend=umbel.Runtime(model))"),
    "dp_size": (1, "write replicas=, or leave it out"),
    "pp_size": (1, "write tp_size=, or leave it out"),
    "ep_size": (1, "write tp_size=, or leave it out"),
    "attention_backend": (None, "write kernels= ('auto', 'native', 'torch', ...)"),
    "sampling_backend": (None, "leave it out"),
    "schedule_conservativeness": (1.0, "leave it out: requests that do not fit wait"),
    "enable_torch_compile": (False, "leave it out"),
    "enable_mixed_chunk": (False, "prompts and single tokens always share steps; leave it out"),
    "enable_metrics": (False, "runtime.get_server_info() has the counters"),
    "log_requests": (False, "program.run(..., verbose=True) prints the text of a run"),
    "lora_paths": (None, "write adapters={name: path}, and programs of umbel, with gen(adapter=name)"),
    "speculative_algorithm": (None, "write draft_model=NAME of a smaller model, or leave it out"),
    "json_model_override_args": (None, "change the model's config.json"),
    "file_storage_path": (None, "leave it out"),
}
_OWN = OPTION_NAMES | {
    "model",
    "template_options",
    "startup_timeout",
    "progress",
    "chat_template",
}


def runtime_options(given: Mapping[str, Any]) -> Options:
    """
    Args:
        given: SGLang's options, or ours.

    Raises:
        ParameterError: an option without counterpart, with what to write; a wrong value; one option under two names.
    """
    check_refused("Runtime()", given, _REFUSED)
    options: Options = {}
    for name, value in given.items():
        if name in _REFUSED or value is None:
            continue
        ours, mapped = _mapped(name, value, given)
        if ours in options:
            raise ParameterError(f"Runtime({name}=...) is a second value of {ours}; give one of them")
        if ours:
            options[ours] = mapped
    return options


def _mapped(name: str, value: Any, given: Mapping[str, Any]) -> tuple[str, Any]:
    """Our name and value; "" for what says the same as another option."""
    if name in _SAME:
        return _SAME[name], value
    if name in _SWITCHES:
        ours, turned = _SWITCHES[name]
        return ours, turned(name, value)
    match name:
        case "log_level":
            return "log_level", _LEVELS.get(value, value) if isinstance(value, str) else value
        case "chunked_prefill_size":
            return "chunk_size", None if checks.as_integer(value) == -1 else value
        case "tokenizer_path":
            if checks.path("tokenizer_path", value) != checks.path("model_path", given.get("model_path")):
                raise ParameterError(
                    "Runtime() takes no tokenizer_path: the tokenizer is that of model_path; leave it out"
                )
            return "", None
    if name not in _OWN and name not in GONE:  # those are refused with what to write
        raise unknown_option("Runtime()", name, {*_OWN, *_SAME, *_SWITCHES, "tokenizer_path", "chunked_prefill_size"})
    return name, value


def _one_of(known: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    def mapped(name: str, value: Any) -> Any:
        if not isinstance(value, str) or value not in known:
            raise ParameterError(f"Runtime({name}={value!r}): write one of {', '.join(map(repr, known))}")
        return known[value]

    return mapped


def _turned_off(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(f"Runtime({name}={value!r}): write True or False")
    return not value


def _overlap(name: str, value: Any) -> Any:
    """SGLang's default lets steps overlap where the device can."""
    return "auto" if _turned_off(name, value) else False


_POLICIES = {policy: policy for policy in get_args(Policy)}
_SWITCHES: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "dtype": ("dtype", _one_of(_DTYPES)),
    "kv_cache_dtype": ("kv_dtype", _one_of(_KV_DTYPES)),
    "grammar_backend": ("constraint_engine", _one_of(_ENGINES)),
    "schedule_policy": ("policy", _one_of(_POLICIES)),
    "schedule_heuristic": ("policy", _one_of(_POLICIES)),
    "disable_radix_cache": ("radix_cache", _turned_off),
    "disable_cuda_graph": ("cuda_graphs", _turned_off),
    "disable_overlap_schedule": ("overlap", _overlap),
    "disable_jump_forward": ("jump_forward", _turned_off),
}
