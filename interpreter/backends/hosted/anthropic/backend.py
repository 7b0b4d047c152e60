"""Claude models through Anthropic's Messages API, or any server that speaks it.

claude = umbel.Anthropic("claude-haiku-4-5")        # ANTHROPIC_API_KEY, or api_key=
state = program.run(backend=claude)
state.usage.cached_tokens, state.usage.cache_write_tokens
"""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from .....lang import checks
from .....lang.errors import ParameterError
from .....lang.prompt import Part
from .....lang.protocol import Capabilities, Chunk, ConstraintSpec, Facts, Final, GenRequest, Hint, Usage
from .....lang.runtime_options import MAX_MODEL_LENGTH
from ..backend import ConnectionOptions, HostedBackend
from ..constraint_params import WRAPPING_TOKENS
from ..content import conversation_tokens_at_most, count_bytes
from ..credentials import checked_address, checked_headers, checked_key, secrets_of
from ..errors import Provider
from .answer import AnthropicAnswer
from .cache import Leaders, Places, with_breakpoints
from .profiles import AnthropicProfile, Sampling, Thinking, lower, profile_of
from .request import Composed, Composer, payload

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


class Anthropic(HostedBackend[CachingClient]):
    """A backend for one Claude model.

    **Roles.** System and developer turns go to the provider's `system`; other turns are messages, neighbours of one
    role joined. An assistant turn that is already begun is continued by prefill where the model has it, else the model
    is asked to go on. Text outside of roles is given to the model with the request to continue it.

    **Prompt cache** (`cache=True`). At most four `cache_control` breakpoints are placed by the program's structure:
    where branches part, the end of the last turn, the end of the system turns, the end of the turn before the last
    answer. Storing a prefix costs a quarter more than its tokens, reading it a tenth; prompts below the model's minimum
    (1,024 tokens for most) get no breakpoint. Requests that share a prefix that is not stored yet wait until
    the first of them has begun, so that one writes and the others read. For one call after which nothing of its
    prompt comes again, `cache=False` is cheaper. A run with a `salt` shares no prefixes, so it gets no breakpoints.

    **Constraints.** JSON Schemas and fixed choices are enforced by structured outputs where the model has them; all
    else is validated when the text is complete, and the model is asked again.

    **Stops** of white space alone ("\\n"), which the provider refuses, are found here: the connection is closed when
    one has come, and the number of output tokens is a bound then.

    Args:
        model: name of the model.
        api_key: the key; None: the environment's ANTHROPIC_API_KEY.
        base_url: another server of this API; None: the environment's ANTHROPIC_BASE_URL, or Anthropic's own.
        cache: place breakpoints.
        profile: what the model can do, such as `dataclasses.replace(Anthropic(model).profile, prefill=True)`; None:
            looked up by its name.
        may_ignore: parameters that are left out where the model does not take them, instead of being refused:
            temperature, top_p, top_k, min_p, seed, logit_bias, and the penalties.
        options: as of `ConnectionOptions`.

    Raises:
        MissingExtraError: the `anthropic` package is not installed.
        ParameterError: no key, or a wrong value or option.
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
        super().__init__(Provider(name, host, "api_key= or ANTHROPIC_API_KEY", secrets_of(key, headers)), options)
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
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, base_url={self._address!r})"

    def open_client(self) -> CachingClient:
        import anthropic  # late: a program may never call

        from ..transport import open_client

        client = anthropic.AsyncAnthropic(
            api_key=self._key,
            base_url=self._address,
            max_retries=0,  # ours know when an answer has begun
            default_headers=self._headers,
            http_client=open_client(anthropic, self._timeouts, self._concurrency, self._environment.wire),
        )
        return CachingClient(client, Leaders(self._counts))

    async def close_client(self, client: CachingClient) -> None:
        await client.client.close()

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
        """Records the place: later requests that start with it get a breakpoint there. Sends nothing."""
        if not hint.origin.salt:
            self._places.remember(self._composer.place(hint.prompt))

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return conversation_tokens_at_most(prompt, count_bytes, MOST_IMAGE_TOKENS) + FRAME_TOKENS

    def facts(self) -> Facts:
        return {"model": self.model, **msgspec.structs.asdict(self._usage), **self._counts}

    # -------------------------------------------------------------------------------- how

    async def _texts(self, request: GenRequest, composed: Composed, answer: AnthropicAnswer) -> AsyncGenerator[str]:
        """Yields the text of one call as it comes."""
        blocks = composed.blocks
        if self._cache and not request.origin.salt:
            blocks = with_breakpoints(blocks, self._places, self.profile.cache_minimum)
            self._places.remember(composed.blocks)
            self._counts["breakpoints"] += sum(block.cached for block in blocks)
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
