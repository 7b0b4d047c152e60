"""Claude models through Anthropic's Messages API, or any server that speaks it.

claude = umbel.Anthropic("claude-haiku-4-5")        # ANTHROPIC_API_KEY, or api_key=
state = program.run(backend=claude)
state.usage.cached_tokens, state.usage.cache_write_tokens
"""

import asyncio
import importlib
import importlib.util
import os
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping

import msgspec

from .....lang import checks
from .....lang.chat_template import ChatTemplate
from .....lang.errors import CapabilityError, MissingExtraError, ParameterError, unknown_option
from .....lang.prompt import Part
from .....lang.protocol import (
    Capabilities,
    Chunk,
    ConstraintSpec,
    Done,
    Final,
    GenRequest,
    Hint,
    Scored,
    ScoreRequest,
    Usage,
)
from .....lang.runtime_options import MAX_MODEL_LENGTH
from ..clients import MOST_AT_ONCE
from ..conversation import template
from ..credentials import checked_address, checked_headers, checked_key, secrets_of
from ..failures import Provider
from ..line import Line
from ..retries import Retries
from ..strict_schema import WRAPPING_TOKENS
from ..surroundings import Patience, Surroundings
from ..token_bounds import at_most, count_bytes
from .answer import Answer
from .blocks import Places
from .cache import with_breakpoints
from .client import Desk, close_desk, events_of, next_of, open_desk
from .constraints import lower
from .profiles import AnthropicProfile, Sampling, Thinking, profile_of
from .request import Composed, Composer, payload

ADDRESS = "https://api.anthropic.com"
_THINKING_TOKENS = 4096  # what a model that always thinks may need before a short answer
MOST_IMAGE_TOKENS = 5000  # what the provider counts for its largest images, rounded up
SURROUNDING_TOKENS = 64  # what it counts for the frame of a request


class Anthropic:
    """A backend for one Claude model.

    **Roles.** System and developer turns go to the provider's `system`; other turns are messages, neighbours of one
    role joined. An assistant turn that is already begun is continued by prefill where the model has it, else the model
    is asked to go on. Text outside of roles is given to the model with the request to continue it.

    **Prompt cache** (`cache=True`). At most four `cache_control` breakpoints are placed by the program's structure:
    where branches part, the end of the last turn, the end of the system turns, the end of the turn before the last
    answer. Storing a prefix costs a quarter more than its tokens, reading it a tenth; prompts below the model's minimum
    (1,024 tokens for most) get no breakpoint. Requests that share a prefix which nobody has stored yet let the first of
    them begin before they follow, so that one writes and the others read. For one call after which nothing of its
    prompt comes again, `cache=False` is cheaper. A run with a `salt` shares no prefixes, so it gets no breakpoints.

    **Constraints.** JSON Schemas and fixed choices are enforced by structured outputs where the model has them; all
    else is looked at when the text is there, and the model is asked again.

    **Stops** of white space alone ("\\n"), which the provider refuses, are found here: the connection is closed when
    one has come, and the number of output tokens is a bound then.

    Args:
        model: name of the model.
        api_key: the key; None: the environment's ANTHROPIC_API_KEY.
        base_url: another server of this API; None: the environment's ANTHROPIC_BASE_URL, or Anthropic's own.
        timeout: seconds for a call, its retries included.
        first_byte_timeout: seconds until an answer begins; None: as long as the call may take.
        connect_timeout: seconds until a connection stands.
        idle_timeout: seconds of silence in the middle of an answer.
        max_retries: tries after the first one; none once an answer has begun.
        max_concurrency: calls at once; further ones wait.
        cache: place breakpoints.
        default_headers: sent with every request.
        profile: what the model can do, such as `dataclasses.replace(Anthropic(model).profile, prefill=True)`; None:
            looked up by its name.
        may_ignore: parameters that are left out where the model does not take them, instead of being refused:
            temperature, top_p, top_k, min_p, seed, logit_bias, and the penalties.
        surroundings: clock, sleep, chance and wire, for tests.
        environment: where key and address are looked for; None: this process's, as it is now.

    Raises:
        MissingExtraError: the `anthropic` package is not installed.
        ParameterError: no key, or a wrong value or option.
    """

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout: float = 600.0,
        first_byte_timeout: float | None = None,
        connect_timeout: float = 10.0,
        idle_timeout: float = 120.0,
        max_retries: int = 3,
        max_concurrency: int = 64,
        cache: bool = True,
        default_headers: Mapping[str, str] | None = None,
        profile: AnthropicProfile | None = None,
        may_ignore: Collection[str] = (),
        surroundings: Surroundings | None = None,
        environment: Mapping[str, str] | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            options = (name for name in Anthropic.__init__.__annotations__ if name not in ("unknown", "return"))
            raise unknown_option("Anthropic()", next(iter(unknown)), options)
        if importlib.util.find_spec("anthropic") is None:
            raise MissingExtraError("anthropic", "anthropic")
        model = checks.text("Anthropic(): model", model, MAX_MODEL_LENGTH, "a name, such as 'claude-haiku-4-5'")
        checks.switch("cache", cache)
        checks.instance("profile", profile, AnthropicProfile | None)
        checks.instance("surroundings", surroundings, Surroundings | None)
        checks.instance("environment", environment, Mapping | None)
        environment = os.environ if environment is None else environment
        api_key = checked_key("api_key", api_key)
        key = environment.get("ANTHROPIC_API_KEY", "") if api_key is None else api_key
        if not key:
            raise ParameterError(f"Anthropic({model!r}) has no key; write api_key=..., or set ANTHROPIC_API_KEY")
        given_url = (environment.get("ANTHROPIC_BASE_URL") or ADDRESS) if base_url is None else base_url
        address, host = checked_address("base_url", given_url, ADDRESS)
        name = f"anthropic {model}"
        self.model = model
        self.profile = profile or profile_of(model)
        self._composer = Composer(name, model, self.profile, may_ignore)
        self._template = template(name)
        self._cache = cache
        self._places = Places()
        self._usage = Usage()
        self._counts: Counter[str] = Counter(breakpoints=0, waited=0)
        self._key = key
        self._address = address
        self._headers = checked_headers(default_headers)
        max_concurrency = checks.integer("max_concurrency", max_concurrency, 1, MOST_AT_ONCE)
        self._patience = Patience(timeout, first_byte_timeout, connect_timeout, idle_timeout)
        self._concurrency = max_concurrency
        self._surroundings = surroundings or Surroundings()
        self._line = Line(
            Provider(name, host, "api_key= or ANTHROPIC_API_KEY", secrets_of(key, self._headers)),
            self._open,
            close_desk,
            concurrency=max_concurrency,
            retries=Retries(max_retries),
            patience=self._patience,
            surroundings=self._surroundings,
        )
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

    # -------------------------------------------------------------------------------- the Backend protocol

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def chat_template(self) -> ChatTemplate:
        return self._template

    async def start(self) -> None:
        """Imports the SDK, so that the first request does not stop the loop for it."""
        await asyncio.to_thread(importlib.import_module, "anthropic")

    async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        composed = self._composer.compose(request)
        answer = Answer(
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
        """Whether the model is held to this constraint: structured outputs take only a part of JSON Schema."""
        return lower(constraint, self.profile) is not None

    async def score(self, request: ScoreRequest) -> Scored:
        raise CapabilityError(
            f"{self._capabilities.name} gives no log-probabilities, which scoring {len(request.choices)} choices "
            "needs; use choices= or select() with its default method, or run the program on a Runtime"
        )

    def hint(self, hint: Hint) -> None:
        """Remembers the place: requests that go on from it get a breakpoint there. Nothing is sent."""
        if not hint.origin.salt:
            self._places.remember(self._composer.place(hint.prompt))

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return at_most(prompt, count_bytes, MOST_IMAGE_TOKENS) + SURROUNDING_TOKENS

    async def control(self, verb: str) -> Done:
        """Raises CapabilityError for a verb that is not "info"."""
        match verb:
            case "info":
                retries = {f"retries: {reason}": count for reason, count in self._line.counts.items()}
                return Done(
                    "anthropic", {"model": self.model, **msgspec.structs.asdict(self._usage), **self._counts, **retries}
                )
            case "flush_cache":
                raise CapabilityError(
                    f"{self._capabilities.name} cannot empty the provider's cache; give the run a salt=, and it shares "
                    "nothing"
                )
            case _:
                raise CapabilityError(f"{self._capabilities.name} has no control verb {verb!r}; write 'info'")

    async def close(self) -> None:
        await self._line.close()

    # -------------------------------------------------------------------------------- how

    async def _texts(self, request: GenRequest, composed: Composed, answer: Answer) -> AsyncGenerator[str]:
        """The text of one call as it comes."""
        blocks = composed.blocks
        if self._cache and not request.origin.salt:
            blocks = with_breakpoints(blocks, self._places, self.profile.cache_minimum)
            self._places.remember(composed.blocks)
            self._counts["breakpoints"] += sum(block.cached for block in blocks)
        arguments = {**composed.arguments, **payload(blocks, self._capabilities.name)}
        deadline = self._line.deadline(request.origin.timeout)
        async with self._line.place(deadline) as desk:
            turn = await self._line.once(desk.leaders.turn(blocks), deadline)
            try:
                events = await self._line.tried(lambda: events_of(desk.client, arguments), deadline)
                try:
                    while (event := await self._line.once(next_of(events), deadline)) is not None:
                        text = answer.take(event)
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

    def _open(self) -> Desk:
        return open_desk(
            self._key, self._address, self._headers, self._patience, self._concurrency, self._surroundings, self._counts
        )
