"""Claude models through Anthropic's Messages API, or any server that speaks it.

claude = umbel.Anthropic("claude-haiku-4-5")        # ANTHROPIC_API_KEY, or api_key=
state = program.run(backend=claude)
state.usage.cached_tokens, state.usage.cache_write_tokens
"""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack

import msgspec

from .....lang import checks
from .....lang.agents.dialogue import with_calls
from .....lang.errors import BackendError, ConnectionLostError, ParameterError, RequestError
from .....lang.prompt import Part, namespace
from .....lang.protocol import (
    Capabilities,
    Chunk,
    Completion,
    ConstraintSpec,
    Facts,
    Final,
    FinishReason,
    GenRequest,
    Hint,
    Usage,
)
from .....lang.runtime_options import MAX_MODEL_LENGTH
from .....lang.tool_calls import ToolCall
from ..backend import ConnectionOptions, HostedBackend
from ..constraint_params import WRAPPING_TOKENS, beginning, unwrap
from ..conversation import conversation_tokens_at_most, count_bytes
from ..errors import Provider
from ..places import Places
from ..stops import Lead, StopCutter
from ..transport import checked_address, checked_headers, checked_key, open_client, secrets_of
from .cache import Leaders, lifetime_of, with_breakpoints
from .request import AnthropicProfile, Composed, Composer, Sampling, Thinking, lower, payload, profile_of

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic


ADDRESS = "https://api.anthropic.com"
_THINKING_TOKENS = 4096  # what a model that always thinks may need before a short answer
MOST_IMAGE_TOKENS = 5000  # what the provider counts for its largest images, rounded up
FRAME_TOKENS = 64  # what it counts for the frame of a request


@dataclass(frozen=True, slots=True)
class CachingClient:
    """A client of one event loop, and the order in which its requests store prefixes."""

    client: "AsyncAnthropic"
    leaders: Leaders

    async def close(self) -> None:
        await self.client.close()


class Anthropic(HostedBackend[CachingClient]):
    """Runs programs on one Claude model, at Anthropic or another server of the Messages API.

    **Roles.** System and developer turns go to the provider's `system`; other turns are messages, neighbours of one
    role joined. An assistant turn that is already begun is continued by prefill where the model has it, else the model
    is asked to go on. Text outside of roles is given to the model with the request to continue it.

    **Prompt cache** (`cache=True`). At most four `cache_control` breakpoints are placed by the program's structure:
    the last four cache points, where branches part, the end of the last turn, the end of the system turns, the end of
    the turn before the last answer. A prefix is kept for 5 minutes after its last use; before a cache point with a
    longer time, for an hour, the provider's longest time: a point that asks for more warns. Storing a prefix costs a
    quarter more than its tokens, for an hour twice as much, reading it a tenth; prompts below the model's minimum
    (1,024 tokens for most) get no breakpoint. Requests that share a prefix that is not stored yet wait until the first
    of them has begun, so that one writes and the others read. For one call after which nothing of its prompt comes
    again, `cache=False` is cheaper. A run with a `salt`, and a call with a private part, shares no prefixes, so it gets
    no breakpoints.

    **Constraints.** JSON Schemas and fixed choices are enforced by structured outputs where the model has them; all
    else is validated when the text is complete, and the model is asked again.

    **Stops** of white space alone ("\\n"), which the provider refuses, are found here: the connection is closed when
    one has come, and the number of output tokens is a bound then.

    Args:
        model: its name, such as "claude-haiku-4-5".
        api_key: the key; None: the environment's ANTHROPIC_API_KEY.
        base_url: another server of this API; None: the environment's ANTHROPIC_BASE_URL, or Anthropic's own.
        cache: places breakpoints, so that the provider keeps prefixes that programs share.
        profile: what the model can do, such as `dataclasses.replace(Anthropic(model).profile, prefill=True)`; None:
            looked up by its name.
        may_ignore: parameters that are left out where the model does not take them, instead of being refused:
            temperature, top_p, top_k, min_p, seed, logit_bias, and the penalties.
        options: timeouts, retries and further settings of calls, as of `ConnectionOptions`.

    Attributes:
        model: its name.
        profile: what the model can do: the given one, or that of its name.

    Raises:
        MissingExtraError: the `anthropic` package is not installed.
        ParameterError: no key, or a wrong value or option.

    Examples:
        A fake plays the provider here. With a key, leave `base_url` out.

        >>> from umbel.testing import FakeAnthropic
        >>> @ul.function
        ... def capital(s, country):
        ...     s += ul.user(f"What is the capital of {country}?")
        ...     s += ul.assistant(ul.gen("city", max_tokens=8))
        >>> with FakeAnthropic({"France": "Paris"}) as server:
        ...     model = ul.Anthropic("claude-haiku-4-5", base_url=server.base_url, api_key=server.api_key)
        ...     capital.run("France", backend=model)["city"]
        'Paris'
    """

    KIND = PACKAGE = EXTRA = "anthropic"
    FORGETTING = "give the run a salt=, and it shares nothing"

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        cache: bool = True,
        profile: AnthropicProfile | None = None,
        may_ignore: Collection[str] = (),
        **options: Unpack[ConnectionOptions],
    ) -> None:
        environment = self.check_options(options)
        self.require_package()
        model = checks.text("Anthropic(): model", model, MAX_MODEL_LENGTH, "a name, such as 'claude-haiku-4-5'")
        checks.switch("cache", cache)
        checks.instance("profile", profile, AnthropicProfile | None)
        api_key = checked_key("api_key", api_key)
        key = environment.variable("ANTHROPIC_API_KEY") if api_key is None else api_key
        if not key:
            raise ParameterError(f"Anthropic({model!r}) has no key; write api_key=..., or set ANTHROPIC_API_KEY")
        given_url = (environment.variable("ANTHROPIC_BASE_URL") or ADDRESS) if base_url is None else base_url
        address, host = checked_address("base_url", given_url, ADDRESS)
        headers = checked_headers(options.get("default_headers"))
        name = f"anthropic {model}"
        provider = Provider(name, host, "api_key= or ANTHROPIC_API_KEY", secrets_of(key, headers), address)
        super().__init__(provider, options)
        self.model = model
        self.profile = profile or profile_of(model)
        self._composer = Composer(name, model, self.profile, may_ignore)
        self._cache = cache
        self._places = Places()
        self._usage = Usage()
        self._counts: Counter[str] = Counter(breakpoints=0, waited=0)
        self._key, self._address, self._headers = key, address, headers
        self._capabilities = Capabilities(
            name,
            hint=cache,
            prefix_cache=cache,
            cache_minimum=self.profile.cache_minimum,
            images=self.profile.images,
            max_context=self.profile.max_context,
            constraints=("json_schema", "choices") if self.profile.structured else (),
            asks_again=True,
            speculation=True,
            converses=True,
            temperature=self.profile.sampling is not Sampling.NONE,
            thinking_tokens=_THINKING_TOKENS if self.profile.thinking is Thinking.ALWAYS else 0,
            continues=self.profile.prefill,
            model=model,
            wrapping_tokens=WRAPPING_TOKENS if self.profile.structured else 0,
            most_n=1,
            tools=self.profile.tools,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, base_url={self._address!r})"

    def open_client(self) -> CachingClient:
        import anthropic  # late: a program may never call

        client = anthropic.AsyncAnthropic(
            api_key=self._key,
            base_url=self._address,
            max_retries=0,  # ours know when an answer has begun
            default_headers=self._headers,
            http_client=open_client(anthropic, self._timeouts, self._concurrency, self._environment.wire),
        )
        return CachingClient(client, Leaders(self._counts))

    # -------------------------------------------------------------------------------- the Backend protocol

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        composed = self._composer.compose(request)
        answer = AnthropicAnswer(
            self._capabilities.name,
            composed.lead,
            composed.stops,
            wrapped=composed.wrapped,
            constrained=request.constraint is not None,
            max_tokens=request.sampling.max_tokens,
            offers_tools=composed.offers_tools,
            one_call=composed.one_call,
        )
        texts = self._texts(request, composed, answer)
        try:
            async for text in texts:
                if text and request.stream:
                    yield Chunk(request.id, 0, text)
        finally:
            await texts.aclose()
        usage = answer.usage()
        self._usage = self._usage + usage
        yield Final(request.id, (answer.completion(),), usage)

    def enforces(self, constraint: ConstraintSpec) -> bool:
        """Returns whether the model enforces this constraint: structured outputs take only a part of JSON Schema."""
        return lower(constraint, self.profile) is not None

    def hint(self, hint: Hint) -> None:
        """Records the prompt of a hint: later requests that start with it get a breakpoint there. Sends nothing."""
        if hint.pin is not None:
            self._composer.check_lifetime(hint.pin)
        if not namespace(hint.origin.salt, hint.prompt):
            self._places.remember(self._composer.place(hint.prompt), "" if hint.pin is None else lifetime_of(hint.pin))

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return conversation_tokens_at_most(prompt, count_bytes, MOST_IMAGE_TOKENS) + FRAME_TOKENS

    def facts(self) -> Facts:
        return {"model": self.model, **msgspec.structs.asdict(self._usage), **self._counts}

    # -------------------------------------------------------------------------------- how

    async def _texts(self, request: GenRequest, composed: Composed, answer: "AnthropicAnswer") -> AsyncGenerator[str]:
        """Yields the text of one call as it comes."""
        blocks = composed.blocks
        if self._cache and not namespace(request.origin.salt, request.prompt):
            blocks = with_breakpoints(blocks, self._places, self.profile.cache_minimum)
            self._places.remember(composed.blocks)
            self._counts["breakpoints"] += sum(bool(block.cached) for block in blocks)
        arguments = {**composed.arguments, **payload(blocks, self._capabilities.name)}
        deadline = self._session.deadline(request.origin.timeout)
        async with self._session.slot(deadline) as caching:
            turn = await self._session.once(caching.leaders.turn(blocks), deadline)
            try:
                events = await self._session.retried(lambda: events_of(caching.client, arguments), deadline)
                try:
                    while (event := await self._session.once(next_of(events), deadline)) is not None:
                        text = answer.append(event)
                        if answer.begun:
                            turn.began()
                        yield text
                        if answer.over:
                            break
                    yield answer.end()
                finally:
                    await events.aclose()
            finally:
                turn.over()


# Any below: the SDK's events, and its stream of them.
async def events_of(client: "AsyncAnthropic", arguments: Mapping[str, Any]) -> AsyncGenerator[Any]:
    """Returns the SDK's events once the answer has begun; its whole Message if no text is requested (the provider does
    not stream that)."""
    if not arguments["max_tokens"]:
        return _whole(await client.messages.create(stream=False, **arguments))
    return _streamed(await client.messages.create(stream=True, **arguments))


async def _whole(message: Any) -> AsyncGenerator[Any]:
    yield message


async def _streamed(stream: Any) -> AsyncGenerator[Any]:
    try:
        async for event in stream:
            yield event
    finally:
        await stream.close()


async def next_of(events: AsyncGenerator[Any]) -> Any:  # an event, or None
    return await anext(events, None)


LONGEST_TOKEN = 256  # characters; a server that says more for each token it may say does not stop at all
MOST_EVENTS = 10_000  # of an answer, apart from those that bring text


class AnthropicAnswer:
    """Reads one answer as it streams.

    Args:
        name: of the backend, for messages.
        lead: white space that the request left out.
        stops: strings that end the text here.
        wrapped: the answer is a member of a JSON object; the backend passes it on when it is complete.
        constrained: the provider enforces a constraint.
        max_tokens: that were asked for.
        offers_tools: it may have calls of tools.
        one_call: one at most: further ones are left out.
    """

    def __init__(
        self,
        name: str,
        lead: str,
        stops: tuple[str, ...],
        *,
        wrapped: Literal["", "text", "json"],
        constrained: bool,
        max_tokens: int,
        offers_tools: bool = False,
        one_call: bool = False,
    ) -> None:
        self._name = name
        self._one_call = one_call
        self._offers_tools = offers_tools
        self._calls: dict[int, tuple[str, list[str]]] = {}  # number of the block → name, pieces of the arguments
        self._lead = Lead(lead)
        self._cutter = StopCutter(stops)
        self._wrapping = wrapped
        self._max_tokens = max_tokens
        self._events = 0
        self._constrained = constrained
        self._wrapped = ""
        self._told: list[str] = []
        self._heard = 0  # bytes of text
        self._input: dict[str, int] = {}
        self._long_writes = 0
        self._output: int | None = None
        self._thought = False
        self._reason: str | None = None
        self._sequence: str | None = None
        self.begun = False

    def append(self, event: Any) -> str:  # Any: the SDK's events, told apart by their `type`
        """Reads one event. Returns its text. An answer without a text may come as a whole message.

        Raises:
            BackendError: it is no event, or there are more than an answer of this length can have.
        """
        self._events += 1
        if self._events > MOST_EVENTS + LONGEST_TOKEN * self._max_tokens:
            raise BackendError(f"{self._name}: the server sent an answer that does not end")
        try:
            text = self._taken(event)
        except (AttributeError, TypeError, KeyError) as error:
            raise BackendError(f"{self._name}: the server sent what is no answer of this API: {error}") from None
        if self._heard > 4 * LONGEST_TOKEN * (self._max_tokens + 1):
            raise BackendError(f"{self._name}: the server sent more text than max_tokens={self._max_tokens} allows")
        return text

    def _taken(self, event: Any) -> str:
        match event.type:
            case "message":
                self.begun = True
                self._count(event.usage)
                self._output, self._reason = event.usage.output_tokens, event.stop_reason
            case "message_start":
                self.begun = True
                self._count(event.message.usage)
            case "content_block_start" if event.content_block.type == "text":
                return self._hear(event.content_block.text)
            case "content_block_start" if event.content_block.type == "tool_use":
                self._calls[event.index] = (event.content_block.name, [])
            case "content_block_delta" if event.delta.type == "input_json_delta":
                self._calls[event.index][1].append(event.delta.partial_json)
                self._heard += len(event.delta.partial_json.encode("utf-8", "surrogatepass"))
            case "content_block_start" | "content_block_delta" if _is_thought(event):
                self._thought = True
            case "content_block_delta" if event.delta.type == "text_delta":
                return self._hear(event.delta.text)
            case "message_delta":
                self._count(event.usage)
                self._output = event.usage.output_tokens
                self._reason, self._sequence = event.delta.stop_reason, event.delta.stop_sequence
        return ""

    @property
    def over(self) -> bool:
        """True once a stop found here has come: the rest of the answer is not read."""
        return self._cutter.matched is not None

    def end(self) -> str:
        """Ends the answer after its last event. Returns the text that was held back.

        Raises:
            BackendError: that was no answer, or one of a kind that was not asked for.
            ConnectionLostError: it has no end.
            RequestError: the model declined, or used up its tokens before it wrote a word.
        """
        if not self.begun:
            raise BackendError(f"{self._name}: the server sent what is no answer of this API")
        if self.over:
            return ""
        rest = self._unwrapped() if self._wrapping else self._cutter.end()
        match self._reason:
            case None:
                raise ConnectionLostError(f"{self._name}: an answer ended too early: the server closed it")
            case "refusal":
                raise RequestError(f"{self._name}: the model declined to answer; word the prompt differently")
            case "tool_use" if self._offers_tools:
                pass
            case "tool_use" | "pause_turn":
                raise BackendError(f"{self._name}: the answer ended with {self._reason!r}, and no tools were offered")
            case "max_tokens" if self._thought and not self._heard:
                raise RequestError(
                    f"{self._name}: all {self._output} tokens went into the model's thoughts; raise max_tokens, or "
                    "take a model that answers without thinking"
                )
        self._told.append(rest)
        return rest

    def completion(self) -> Completion:
        """Returns the completion. Token ids are not known here, so all of the text is its tail."""
        calls = tuple(ToolCall(name, "".join(pieces) or "{}") for _, (name, pieces) in sorted(self._calls.items()))
        calls = calls[:1] if self._one_call else calls
        text = with_calls("".join(self._told), calls)
        cut_short = self._reason in ("max_tokens", "model_context_window_exceeded") and not self.over
        reason = FinishReason.LENGTH if cut_short else FinishReason.STOP
        matched = self._cutter.matched or self._sequence
        whole = self._constrained and not cut_short and matched is None
        return Completion(text, (), 0, text, reason, matched, guarantee="enforced" if whole else "", calls=calls)

    def usage(self) -> Usage:
        """Returns the provider's counts. They lack the output tokens of an answer closed at a stop of ours: its bytes
        are the bound then."""
        read, written = self._input.get("cache_read_input_tokens", 0), self._input.get("cache_creation_input_tokens", 0)
        output = min(self._max_tokens, self._heard) if self._output is None else self._output
        prompt = self._input.get("input_tokens", 0) + read + written
        return Usage(prompt, read, output, 1, written, self._long_writes, read)

    # -------------------------------------------------------------------------------- how

    def _hear(self, text: str) -> str:
        self._heard += len(text.encode("utf-8", "surrogatepass"))
        if self._wrapping:
            self._wrapped += text
            return ""
        if self.over:
            return ""
        told = self._cutter.feed(self._lead.take_from(text))
        self._told.append(told)
        return told

    def _unwrapped(self) -> str:
        """Returns the text inside the object; of a truncated object, its beginning. An answer that is no object is
        returned as it is."""
        assert self._wrapping, "asked for wrapped answers only"
        answer = unwrap(self._wrapped, self._wrapping)
        if answer is None:
            self._constrained = False
            answer = beginning(self._wrapped, self._wrapping) if self._reason == "max_tokens" else self._wrapped
        told = self._cutter.feed(answer)
        return told if self.over else told + self._cutter.end()

    def _count(self, usage: Any) -> None:  # Any: the SDK's Usage or MessageDeltaUsage
        """Updates the usage. Numbers are cumulative, and missing where nothing has changed."""
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            value = getattr(usage, name, None)
            if value is not None:
                self._input[name] = value
        by_time = getattr(usage, "cache_creation", None)
        self._long_writes = getattr(by_time, "ephemeral_1h_input_tokens", None) or self._long_writes


def _is_thought(event: Any) -> bool:  # Any: the SDK's events
    kind = event.content_block.type if event.type == "content_block_start" else event.delta.type
    return str(kind).startswith(("thinking", "redacted_thinking", "signature"))
