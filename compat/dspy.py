"""DSPy's programs on umbel's backends: `umbel.dspy.LM` is a `dspy.LM` whose engine asks a backend.

    import dspy
    from umbel.dspy import LM, JSONAdapter

    dspy.configure(lm=LM(ul.Runtime()), adapter=JSONAdapter())

An engine answers one request at a time. DSPy's own layer above it has the cache, the retries, `n` and the history.
"""

import inspect
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self

from ..interpreter.run import chosen_backend
from ..lang.errors import (
    CapabilityError,
    ConnectionLostError,
    ContextLengthError,
    DeadlineError,
    MissingExtraError,
    OverloadedError,
    ParameterError,
    UmbelError,
    unknown_option,
)
from ..lang.ops import Image
from ..lang.protocol import Backend
from .answering import ANY_OBJECT, Answer, Turn, ask, ask_async, picture, ready, stream, stream_async

try:
    import dspy
    import pydantic
    from dspy import lm15
except ModuleNotFoundError as error:
    raise MissingExtraError("dspy", "dspy") from error

MOST_TOKENS = 1_024  # of an answer, where the caller gives no number: a chain of thought has room

# Fields of a request's configuration → parameters of `gen`.
_SAMPLING = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop": "stop",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
_PARAMS = frozenset({*_SAMPLING, "response_format", "logprobs", "top_logprobs"})
# What else `LM` takes: parameters of `dspy.LM` but for the engine, and two that DSPy's layer above an engine reads.
_OF_DSPY = frozenset(inspect.signature(dspy.LM).parameters) - {"engine", "async_engine", "kwargs"} | {"n", "rollout_id"}
# Fields that are not offered → what to do instead.
_NOT_OFFERED = {
    "tool_choice": "there are no tools; leave it out",
    "reasoning": "the model's chat template decides; leave it out",
    "cache": "the runtime caches every prefix by itself; leave it out",
    "service_tier": "there is one tier; leave it out",
    "user_id": "requests have no user; leave it out",
    "store": "answers are not stored; leave it out",
    "probabilities": "ask for log-probabilities: LM(..., logprobs=True)",
}
_ERRORS: tuple[tuple[type[UmbelError], type[Exception]], ...] = (
    (ContextLengthError, lm15.ContextLengthError),
    (DeadlineError, lm15.TimeoutError),
    (OverloadedError, lm15.RateLimitError),
    (ConnectionLostError, lm15.ServerError),
    (CapabilityError, lm15.UnsupportedFeatureError),
    (ParameterError, lm15.InvalidRequestError),
)


class LM(dspy.LM):  # type: ignore[misc]  # DSPy has no types
    """A `dspy.LM` that asks a backend of umbel.

    Args:
        backend: a Runtime, a hosted model or Echo; None: the default one. It is started here, and stays the caller's:
            closing it is not the LM's.
        model: names the model in DSPy's cache and history; None: "umbel/" and the name that the backend tells. DSPy
            keeps answers on disk by it: two models under one name would answer for each other.
        max_tokens: most tokens of an answer.
        cache, callbacks, num_retries: as of `dspy.LM`. Hosted backends retry by themselves.
        settings: sampling for all calls (temperature, top_p, top_k, stop, seed, logprobs, ...).

    Raises:
        ParameterError: not a backend, or a setting that is none.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        model: str | None = None,
        max_tokens: int = MOST_TOKENS,
        cache: bool = True,
        callbacks: Sequence[Any] | None = None,
        num_retries: int = 0,
        **settings: Any,
    ) -> None:
        for setting in settings:
            if setting not in _PARAMS | _OF_DSPY:
                raise unknown_option("umbel.dspy.LM()", setting, _PARAMS | _OF_DSPY)
        chosen = chosen_backend(backend)
        name = model or "umbel/" + ready(chosen).name.replace(" ", "/")
        super().__init__(
            name,
            max_tokens=max_tokens,
            cache=cache,
            callbacks=None if callbacks is None else list(callbacks),
            num_retries=num_retries,
            engine=UmbelEngine(chosen),
            async_engine=AsyncUmbelEngine(chosen),
            **settings,
        )


class JSONAdapter(dspy.JSONAdapter):  # type: ignore[misc]
    """A `dspy.JSONAdapter` that gives the schema of every signature.

    DSPy's own one asks for any JSON object where an output field is an open mapping, such as the arguments of a tool in
    ReAct, since few providers take its schema. Our backends do, so that all fields are there, with their types.
    """

    def _prepare_response_format(self, lm: Any, lm_kwargs: dict[str, Any], signature: Any) -> None:
        if not lm.supports_response_schema:
            super()._prepare_response_format(lm, lm_kwargs, signature)
            return
        fields: dict[str, Any] = {name: (field.annotation, ...) for name, field in signature.output_fields.items()}
        outputs = pydantic.create_model("Outputs", __config__=pydantic.ConfigDict(extra="forbid"), **fields)
        schema = {"name": "Outputs", "schema": outputs.model_json_schema()}
        lm_kwargs["response_format"] = {"type": "json_schema", "json_schema": schema}


class _Engine:
    """Base of both engines: the abilities of a backend, by which DSPy's adapters choose."""

    supports_function_calling = False  # adapters write tools and calls as fields of text
    supports_reasoning = False
    supported_params = _PARAMS

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns the engine itself: DSPy copies its `LM`, and the backend is the caller's."""
        return self

    @property
    def supports_response_schema(self) -> bool:
        """True where schemas are enforced, or validated and asked for again."""
        known = self._backend.capabilities
        return known.asks_again or "json_schema" in known.constraints


class UmbelEngine(_Engine):
    """Answers requests of DSPy."""

    def complete(self, request: Any) -> Any:
        """Answers one request. Raises the errors of `dspy.lm15`."""
        try:
            answer = ask(self._backend, turns_of(request), schema_of(request), sampling_of(request.config))
        except UmbelError as error:
            raise foreign(error) from error
        return response_of(request, answer)

    def stream(self, request: Any) -> Iterator[Any]:
        """Answers one request piece by piece."""
        yield lm15.StreamStartEvent(model=request.model)
        try:
            pieces = stream(self._backend, turns_of(request), schema_of(request), sampling_of(request.config))
            for piece in pieces:
                yield _event(piece)
        except UmbelError as error:
            raise foreign(error) from error

    def close(self) -> None:
        """Leaves the backend open: it is its caller's."""


class AsyncUmbelEngine(_Engine):
    """Answers requests of DSPy on an event loop."""

    async def complete(self, request: Any) -> Any:
        """Answers one request. Raises the errors of `dspy.lm15`."""
        try:
            answer = await ask_async(self._backend, turns_of(request), schema_of(request), sampling_of(request.config))
        except UmbelError as error:
            raise foreign(error) from error
        return response_of(request, answer)

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        """Answers one request piece by piece."""
        yield lm15.StreamStartEvent(model=request.model)
        try:
            pieces = stream_async(self._backend, turns_of(request), schema_of(request), sampling_of(request.config))
            async for piece in pieces:
                yield _event(piece)
        except UmbelError as error:
            raise foreign(error) from error

    async def aclose(self) -> None:
        """Leaves the backend open: it is its caller's."""


def turns_of(request: Any) -> list[Turn]:
    """Returns the turns of a request. Raises CapabilityError for tools, and for parts that are no text or picture."""
    if request.tools:
        raise CapabilityError(
            "umbel.dspy.LM takes no native tools; let the adapter write them: use_native_function_calling=False"
        )
    turns: list[Turn] = []
    if request.system is not None:
        system = request.system
        turns.append(("system", [system] if isinstance(system, str) else [_block(part) for part in system]))
    turns += [(message.role, [_block(part) for part in message.parts]) for message in request.messages]
    return turns


def _block(part: Any) -> str | Image:
    match part.type:
        case "text" | "thinking":
            return str(part.text)
        case "image" if part.data is not None:
            return picture(f"data:{part.media_type};base64,{part.data}")
        case "image":
            return picture(part.url or "")
        case kind:
            raise CapabilityError(
                f"umbel.dspy.LM takes text and pictures, and the prompt has a part {kind!r}; write it as text"
            )


def schema_of(request: Any) -> Mapping[str, Any] | None:
    """Returns the JSON Schema that a request asks for; None for free text."""
    wanted = request.config.response_format
    match None if wanted is None else wanted.get("type"):
        case None | "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            schema: Mapping[str, Any] = wanted["schema"]
            return schema
        case kind:
            raise ParameterError(f"response_format {kind!r} is not known; write json_object or json_schema")


def sampling_of(config: Any) -> dict[str, Any]:
    """Returns parameters of `gen`. Raises CapabilityError for settings that are not offered."""
    for name, instead in _NOT_OFFERED.items():
        if getattr(config, name, None) is not None:
            raise CapabilityError(f"umbel.dspy.LM: {name} is not offered: {instead}")
    if config.extensions:
        name = next(iter(config.extensions))
        raise CapabilityError(f"umbel.dspy.LM: {name} is not offered; it takes {', '.join(sorted(_PARAMS))}")
    given = {ours: getattr(config, theirs) for theirs, ours in _SAMPLING.items()}
    if config.logprobs is not None:  # the number of alternatives
        given |= {"return_logprob": True, "top_logprobs_num": config.logprobs}
    return {name: value for name, value in given.items() if value is not None and value != ()}


def response_of(request: Any, answer: Answer) -> Any:
    """Returns an answer as DSPy's layer takes it."""
    tops = answer.top_logprobs or [()] * len(answer.logprobs)
    logprobs = [
        lm15.TokenLogprob(text, number, token_id=token, top=tuple(lm15.TopLogprob(t, n, token_id=i) for n, i, t in top))
        for (number, token, text), top in zip(answer.logprobs, tops, strict=True)
    ]
    return lm15.Response(
        id=None,
        model=request.model,
        message=lm15.Message.assistant([lm15.TextPart(answer.text)]),
        finish_reason=_reason(answer),
        usage=_usage(answer),
        logprobs=tuple(logprobs) or None,
    )


def _reason(answer: Answer) -> str:
    return "length" if answer.reason.startswith("length") else "stop"


def _usage(answer: Answer) -> Any:
    usage = answer.usage
    return lm15.Usage(
        input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens, cache_read_tokens=usage.cached_tokens
    )


def _event(piece: str | Answer) -> Any:
    if isinstance(piece, Answer):
        return lm15.StreamEndEvent(finish_reason=_reason(piece), usage=_usage(piece))
    return lm15.StreamDeltaEvent(lm15.TextDelta(piece))


def foreign(error: UmbelError) -> Exception:
    """Returns the error of `dspy.lm15` that says the same: DSPy retries by its class."""
    kind = next((theirs for ours, theirs in _ERRORS if isinstance(error, ours)), lm15.ProviderError)
    return kind(str(error))
