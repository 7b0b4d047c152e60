"""`HostedBackend`: the base class of backends for hosted models.

A provider is one file or package with a subclass (docs/add_a_backend.md):

    HostedBackend                   options, session, start, what no provider can do
    ├── OpenAIDialect               requests and answers of `/chat/completions` and `/completions`
    │   ├── OpenAI, OpenRouter      by OpenAI's SDK
    │   └── TranslatedBackend       by another client, for which a `Translator` stands in
    │       ├── LiteLLM, Ollama
    │       └── VertexAI, Gemini
    ├── Anthropic                   the Messages API
    └── RuntimeEndpoint             a server by its address: SGLang's own API, or the OpenAI dialect
"""

import asyncio
import importlib
import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, Generic, TypedDict, TypeVar
from weakref import WeakKeyDictionary

from ....lang import checks
from ....lang.chat_template import ChatTemplate
from ....lang.errors import CapabilityError, MissingExtraError, ParameterError, unknown_option
from ....lang.prompt import Part
from ....lang.protocol import (
    Capabilities,
    Chunk,
    ConstraintSpec,
    Done,
    Facts,
    Final,
    GenRequest,
    Hint,
    Scored,
    ScoreRequest,
)
from ....lang.sampling import SamplingParams
from ..direct import DirectCalls
from .conversation import conversation_tokens_at_most, count_bytes, template
from .errors import Provider
from .session import MOST_AT_ONCE, Client, Environment, Retries, Session, Timeouts

C = TypeVar("C", bound=Client)

_DEFAULTS = SamplingParams()


class CallOptions(TypedDict, total=False):
    """Names the keyword options of every hosted backend.

    Attributes:
        timeout: seconds for a call, its tries included; 600 if it is left out.
        first_byte_timeout: seconds until an answer begins; None or left out: as long as the call may take.
        idle_timeout: seconds of silence in the middle of an answer; 120 if it is left out.
        max_retries: tries after the first one, none once an answer has begun; 3 if it is left out.
        max_concurrency: calls at once on one event loop, further ones wait; 64 if it is left out.
        environment: a mapping in place of the process's environment variables, or, for tests, an Environment with
            clock, sleep, chance, wire and variables. LiteLLM and VertexAI open their own connections and find their own
            keys: of an Environment they take the first three only.
    """

    timeout: float
    first_byte_timeout: float | None
    idle_timeout: float
    max_retries: int
    max_concurrency: int
    environment: Environment | Mapping[str, str] | None


class ConnectionOptions(CallOptions, total=False):
    """Names further ones, of backends whose connections are opened here: all but LiteLLM, Gemini and VertexAI.

    Attributes:
        connect_timeout: seconds until a connection stands; 10 if it is left out.
        default_headers: name → value of headers that are sent with every request.
    """

    connect_timeout: float
    default_headers: Mapping[str, str] | None


class HostedBackend(DirectCalls, ABC, Generic[C]):
    """A backend for one model of a provider. C is the client of the provider's SDK.

    A subclass calls `check_options` and `require_package`, checks its own options, and calls this constructor.
    `generate` makes its calls by `self._session`: a slot, retries, a deadline, and the SDK's exceptions as ours.

    Args:
        provider: its name, host and secrets, for messages.
        options: as of `OPTIONS`.

    Raises:
        ParameterError: a wrong value.
    """

    KIND: ClassVar[str]  # what names of backends begin with
    PACKAGE: ClassVar[str]  # the SDK as Python imports it
    EXTRA: ClassVar[str]  # the extra that installs it
    OPTIONS: ClassVar[type] = ConnectionOptions
    FORGETTING: ClassVar[str] = "it forgets by itself"  # said where the provider's cache is to be emptied

    def __init__(self, provider: Provider, options: CallOptions) -> None:
        given: Mapping[str, Any] = dict(options)  # Any: checked one by one below
        self._provider = provider
        self._environment = _environment_of(given)
        self._timeouts = Timeouts.of(given)
        self._retries = Retries(given.get("max_retries", Retries().most))
        self._concurrency = checks.integer("max_concurrency", given.get("max_concurrency", 64), 1, MOST_AT_ONCE)
        self._session: Session[C] = Session(
            provider,
            self.open_client,
            concurrency=self._concurrency,
            retries=self._retries,
            timeouts=self._timeouts,
            environment=self._environment,
        )
        self._template = template(provider.name)
        self._started = False
        self._starting: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    @classmethod
    def option_names(cls) -> list[str]:
        """Returns the names of the constructor's parameters and of the options declared here."""
        names: dict[str, None] = {}
        for owner in cls.__mro__:
            parameters = inspect.signature(owner).parameters
            if (rest := parameters.get("options")) is not None and rest.kind is inspect.Parameter.VAR_KEYWORD:
                names |= dict.fromkeys(name for name in parameters if name != "options")
        return [*names, *(name for name in cls.OPTIONS.__annotations__ if name not in names)]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> Environment:
        """Checks the names of options. Returns the environment.

        Raises:
            ParameterError: an option that does not exist, or an environment that is none.
        """
        for name in options:
            if name not in cls.OPTIONS.__annotations__:
                raise unknown_option(f"{cls.__name__}()", name, cls.option_names())
        return _environment_of(options)

    @classmethod
    def require_package(cls) -> None:
        """Raises MissingExtraError where the SDK is not installed."""
        if not _is_installed(cls.PACKAGE):
            raise MissingExtraError(cls.PACKAGE, cls.EXTRA)

    # -------------------------------------------------------------------------------- what a provider writes

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The features that this model offers, as far as they are known; programs are checked against them."""

    @abstractmethod
    def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        """Yields the answer to a request of a program: pieces when `request.stream`, then one Final.

        Closing the iterator early ends the request.
        """

    @abstractmethod
    def open_client(self) -> C:
        """Makes a client of the SDK for the running event loop, with the SDK's own retries off. Its `close` is awaited
        on this loop when the backend is closed, or dropped."""

    async def prepare(self) -> None:
        """Runs once, before the first request. Imports the SDK, so that no request stops the loop for it."""
        await asyncio.to_thread(importlib.import_module, self.PACKAGE)

    def facts(self) -> Facts:
        """Returns the facts of `control("info")` apart from the retries."""
        return {}

    # -------------------------------------------------------------------------------- the Backend protocol

    @property
    def chat_template(self) -> ChatTemplate:
        """The template that writes roles where the provider takes no messages; else it marks the turns of a prompt."""
        return self._template

    async def start(self) -> None:
        """Prepares the backend, once.

        Raises:
            UmbelError: as `prepare` says.
        """
        async with self._starting.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if not self._started:
                await self.prepare()
                self._started = True

    async def score(self, request: ScoreRequest) -> Scored:
        """Scores the choices of a request.

        Raises:
            CapabilityError: the provider gives no log-probabilities of given text.
        """
        raise CapabilityError(
            f"{self._provider.name} gives no log-probabilities, which scoring {len(request.choices)} choices "
            "needs; use choices= or select() with its default method, or run the program on a Runtime"
        )

    def hint(self, hint: Hint) -> None:
        """Does nothing with a hint, where nothing can be computed ahead (`capabilities.hint`)."""

    def enforces(self, constraint: ConstraintSpec) -> bool:
        """Returns whether the provider enforces exactly this constraint, and not only simpler ones of its kind."""
        return False

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        """Returns a bound on the tokens of a prompt, for budgets: never less than they are."""
        return conversation_tokens_at_most(prompt, count_bytes, self.capabilities.image_tokens)

    async def control(self, verb: str) -> Done:
        """Does what `get_server_info` asks for.

        Args:
            verb: "info".

        Raises:
            CapabilityError: any other verb; "flush_cache" where the provider's cache cannot be emptied.
        """
        match verb:
            case "info":
                retries = {f"retries_{reason}": count for reason, count in sorted(self._session.counts.items())}
                return Done(self.KIND, {**self.facts(), **retries})
            case "flush_cache":
                raise CapabilityError(f"{self._provider.name} cannot empty the provider's cache; {self.FORGETTING}")
            case _:
                raise CapabilityError(f"{self._provider.name} has no control verb {verb!r}; write 'info'")

    async def close(self) -> None:
        """Closes the connections. A later use opens new ones."""
        await self._session.close()


def not_taken(sampling: SamplingParams, taken: frozenset[str]) -> str | None:
    """Returns the first sampling parameter that is set and the provider does not take: refused, never dropped.

    Args:
        taken: names of those that the provider takes.
    """
    names = (name for name in SamplingParams.__struct_fields__ if name not in taken)
    return next((name for name in names if getattr(sampling, name) != getattr(_DEFAULTS, name)), None)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _environment_of(options: Mapping[str, Any]) -> Environment:
    given = options.get("environment")
    checks.instance("environment", given, Environment | Mapping | None)
    if isinstance(given, Mapping):
        if not all(isinstance(text, str) for variable in given.items() for text in variable):
            raise ParameterError(
                "environment= is no mapping of text; write {'OPENAI_API_KEY': '...'} or an Environment"
            )
        return Environment(variables=given)
    return given or Environment()
