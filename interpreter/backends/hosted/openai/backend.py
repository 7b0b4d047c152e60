"""Models behind the OpenAI dialect: OpenAI itself, Azure, and any server that speaks it (vLLM, SGLang, llama.cpp).

model = umbel.OpenAI("gpt-4.1-mini")                                     # OPENAI_API_KEY, or api_key=
local = umbel.OpenAI("Qwen/Qwen3-8B", base_url="http://127.0.0.1:8000/v1")
"""

import asyncio
import contextlib
import importlib
import importlib.util
import os
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, cast, get_args
from weakref import WeakKeyDictionary

from .....lang import checks
from .....lang.chat_template import ChatTemplate, TemplateWarning, read_chat_template
from .....lang.errors import CapabilityError, MissingExtraError, ParameterError, unknown_option
from .....lang.prompt import Part
from .....lang.protocol import (
    Capabilities,
    Chunk,
    Completion,
    ConstraintSpec,
    Done,
    Final,
    FinishReason,
    GenRequest,
    Hint,
    Scored,
    ScoreRequest,
    Usage,
)
from .....lang.runtime_options import MAX_MODEL_LENGTH
from .. import continuation, token_bounds
from ..clients import MOST_AT_ONCE
from ..conversation import template
from ..failures import Provider
from ..line import Line
from ..retries import Retries
from ..surroundings import Patience, Surroundings
from . import calls, profiles
from . import scores as openai_scores
from .answers import Answer
from .constraints import lower
from .endpoint import endpoint
from .mode import AskedMode, capabilities_of, mode_of
from .models import listed
from .profiles import Profile
from .requests import Planner, checked_extra

if TYPE_CHECKING:
    from openai import AsyncOpenAI


_MOST_SECONDS_FOR_MODELS = 30.0  # that a start waits for the list of models
_MOST_SECONDS_FOR_TOKENIZER = 10.0  # and for a tokenizer, whose package may have to fetch a file


class OpenAI:
    """A backend for one model.

    **Roles** become the messages of a chat request, in the program's order. An assistant turn that has begun is
    continued where the server can; else the model is asked to go on. Text outside of roles is for completion models;
    a chat model is asked to continue it, with a warning.

    **Constraints** are enforced by what the server has (strict structured outputs and others, see `Profile`); all else
    is looked at when the text is there, and the model is asked again. Sampling parameters that a server does not take
    are refused, never left out.

    **Stops** beyond what a server takes are found here: the answer is streamed, and its connection closed at the stop.
    What such a call cost is not told by the server; `usage` holds bounds then.

    Args:
        model: its name; of an Azure deployment without `azure_deployment`, the deployment's.
        api_key: the key; None: the environment's OPENAI_API_KEY (AZURE_OPENAI_API_KEY for Azure).
        base_url: another server; None: the environment's OPENAI_BASE_URL, or OpenAI's own.
        mode: "chat", "completion", or "auto": chat where the model has it.
        chat_template: how roles are written in completion mode: Jinja source, the name of a format such as "chatml",
            the path of a file with Jinja source, or a ChatTemplate.
        profile: what the server can do: "auto" asks it who it is; "openai", "vllm", "sglang", "llama.cpp",
            "llama-cpp-python" or "compatible" say so; a Profile says it in detail.
        azure_endpoint, azure_deployment, api_version: an Azure resource.
        organization, project: at OpenAI, for accounting.
        timeout: seconds for a call, its tries included.
        first_byte_timeout: seconds until an answer begins; None: as long as the call may take.
        connect_timeout: seconds until a connection stands.
        idle_timeout: seconds of silence in the middle of an answer.
        max_retries: tries after the first one; none once an answer has begun.
        max_concurrency: calls at once; further ones wait.
        extra_body: fields added to every request, as the server understands them.
        default_headers: sent with every request.
        surroundings: clock, sleep, chance and wire, for tests.
        environment: where keys and addresses are looked for; None: this process's, as it is now.

    Raises:
        MissingExtraError: the `openai` package is not installed.
        ParameterError: no key, or a wrong value or option.
        TemplateError: the chat template does not compile.
    """

    # Of classes that reach a provider by another client (`translated`): its package ("" for none), the extra that
    # brings it, and what names of backends begin with.
    PACKAGE = "openai"
    EXTRA = "openai"
    KIND = "openai"

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        mode: AskedMode = "auto",
        chat_template: str | PathLike[str] | ChatTemplate | None = None,
        profile: str | Profile = "auto",
        azure_endpoint: str | None = None,
        azure_deployment: str | None = None,
        api_version: str | None = None,
        organization: str | None = None,
        project: str | None = None,
        timeout: float = 600.0,
        first_byte_timeout: float | None = None,
        connect_timeout: float = 10.0,
        idle_timeout: float = 120.0,
        max_retries: int = 3,
        max_concurrency: int = 64,
        extra_body: Mapping[str, Any] | None = None,  # Any: JSON
        default_headers: Mapping[str, str] | None = None,
        surroundings: Surroundings | None = None,
        environment: Mapping[str, str] | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            options = (name for name in OpenAI.__init__.__annotations__ if name not in ("unknown", "return"))
            raise unknown_option(f"{type(self).__name__}()", next(iter(unknown)), options)
        if not _is_installed(self.PACKAGE):
            raise MissingExtraError(self.PACKAGE, self.EXTRA)
        named = f"{type(self).__name__}(): model"
        model = checks.text(named, model, MAX_MODEL_LENGTH, "the name of a model, such as 'gpt-4.1-mini'")
        mode = cast(AskedMode, checks.one_of("mode", mode, get_args(AskedMode)))
        checks.instance("surroundings", surroundings, Surroundings | None)
        checks.instance("environment", environment, Mapping | None)
        if mode == "chat" and chat_template is not None:
            raise ParameterError("chat_template= is for mode='completion'; a chat API has the model's own")
        self.model = model
        self._endpoint = endpoint(
            api_key=api_key,
            base_url=base_url,
            azure_endpoint=azure_endpoint,
            azure_deployment=azure_deployment,
            api_version=api_version,
            organization=organization,
            project=project,
            default_headers=default_headers,
            environment=os.environ if environment is None else environment,
        )
        self._asked_mode: AskedMode = "completion" if mode == "auto" and chat_template is not None else mode
        self._extra = checked_extra(extra_body)
        self._name = f"{self.KIND} {model}"
        endpoint_ = self._endpoint
        self._provider = Provider(self._name, endpoint_.host, endpoint_.key_from, endpoint_.secrets)
        max_concurrency = checks.integer("max_concurrency", max_concurrency, 1, MOST_AT_ONCE)
        self._patience = Patience(timeout, first_byte_timeout, connect_timeout, idle_timeout)
        self._surroundings = surroundings or Surroundings()
        self._line: Line[AsyncOpenAI] = Line(
            self._provider,
            lambda: self._client(max_concurrency),
            _close,
            concurrency=max_concurrency,
            retries=Retries(max_retries),
            patience=self._patience,
            surroundings=self._surroundings,
        )
        detects = isinstance(profile, str) and checks.plain(profile) == "auto"
        self._detects = detects and not endpoint_.is_openai and endpoint_.azure is None
        self._given_template = _template_of(chat_template, self._name)
        self._chat = template(self._name)
        self._count: Callable[[str], int] = token_bounds.count_bytes
        self._started = False
        self._starting: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._warned = False
        self._calls = self._estimated = 0
        self._take(self._first_profile(profile), None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, host={self._endpoint.host!r}, mode={self._planner.mode!r})"

    # -------------------------------------------------------------------------------- the Backend protocol

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def chat_template(self) -> ChatTemplate:
        return self._chat if self._planner.mode == "chat" else self._given_template

    async def start(self) -> None:
        """Ask the server once which models it has, which costs nothing: who it is, whether key and model are right.

        A server that has no such list is taken at its word.

        Raises:
            RequestError: the address, the key or the model is wrong.
            CapabilityError: the model does not have the mode that was asked for.
            ConnectionLostError: no server there.
        """
        async with self._starting.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if self._started:
                return
            if self.PACKAGE:
                await asyncio.to_thread(importlib.import_module, self.PACKAGE)
            if self.KIND == "openai" and self._endpoint.azure is None:
                await self._ask_models()
            if self._endpoint.is_openai:
                with contextlib.suppress(TimeoutError):  # bytes are a bound as well
                    async with asyncio.timeout(_MOST_SECONDS_FOR_TOKENIZER):
                        self._count = await asyncio.to_thread(token_bounds.counter, self.model)
            self._started = True

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        if request.sampling.max_tokens == 0 and request.sampling.prompt_logprobs_from is not None:
            yield await self._prompt_logprobs(request)
            return
        if request.sampling.max_tokens == 0:
            yield Final(request.id, (_NOTHING,) * request.sampling.n, Usage())  # nothing is asked of the server
            return
        plan = self._planner.plan(request)
        if plan.continues_text and not self._warned:
            self._warned = True
            warnings.warn(continuation.warning(self._name), TemplateWarning, stacklevel=2)
        answer = Answer(
            plan, self._provider, self.tokens_at_most(request.prompt), constrained=request.constraint is not None
        )
        self._calls += 1
        async with contextlib.aclosing(calls.chunks(self._line, plan, answer, request)) as chunks:
            async for chunk in chunks:
                yield chunk
        answer.check_whole()
        self._estimated += not answer.counted
        yield Final(request.id, answer.completions(), answer.usage())

    async def score(self, request: ScoreRequest) -> Scored:
        """
        Raises:
            CapabilityError: the server tells no log-probabilities of given text.
        """
        if not self._capabilities.score or request.unconditional or request.probability:
            what = request.probability or ("scores without the prompt" if request.unconditional else "scores")
            raise CapabilityError(
                f"{self._name} ({self._planner.profile.name}, {self._planner.mode} mode) cannot give {what}; "
                'write select() with its default method, or method="token_length_normalized" on a server that scores'
            )
        self._calls += len(request.choices)
        deadline = self._line.deadline(request.origin.timeout)
        return await openai_scores.score(self._line, self._planner, request, deadline, self.tokens_at_most)

    def hint(self, hint: Hint) -> None:
        """Nothing can be computed ahead at this API; `capabilities.hint` says so."""

    def enforces(self, constraint: ConstraintSpec) -> bool:
        """Whether the server enforces exactly this constraint, and not only simpler ones of its kind."""
        return lower(constraint, self._planner.profile, self._planner.mode) is not None

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        if self._planner.mode == "completion":
            return token_bounds.of_text(prompt, self._count)
        return token_bounds.at_most(prompt, self._count, self._planner.profile.image_tokens)

    async def control(self, verb: str) -> Done:
        """Raises CapabilityError for a verb that is not "info"."""
        match verb:
            case "info":
                facts = {"model": self.model, "host": self._endpoint.host, "mode": self._planner.mode}
                retries = {f"retries_{reason}": count for reason, count in sorted(self._line.counts.items())}
                counts = {"calls": self._calls, "calls_with_estimated_usage": self._estimated, **retries}
                return Done(self.KIND, {**facts, "profile": self._planner.profile.name, **counts})
            case "flush_cache":
                raise CapabilityError(f"{self._name} cannot empty the provider's cache; it forgets by itself")
            case _:
                raise CapabilityError(f"{self._name} has no control verb {verb!r}; write 'info'")

    async def close(self) -> None:
        await self._line.close()

    # -------------------------------------------------------------------------------- how

    async def _prompt_logprobs(self, request: GenRequest) -> Final:
        """Raises CapabilityError where the server tells none."""
        if not self._capabilities.score:
            self._planner.plan(request)  # it says what is not taken
        self._calls += 1
        deadline = self._line.deadline(request.origin.timeout)
        told, usage = await openai_scores.of_prompt(self._line, self._planner, request, deadline, self.tokens_at_most)
        return Final(request.id, (_NOTHING,) * request.sampling.n, usage, told)

    def _client(self, concurrency: int) -> "AsyncOpenAI":
        import openai  # late: a program may never call

        from ..transport import open_client

        return self._endpoint.open(open_client(openai, self._patience, concurrency, self._surroundings.wire))

    def _first_profile(self, given: str | Profile) -> Profile:
        if isinstance(given, Profile):
            return given
        if not isinstance(given, str) or checks.plain(given) != "auto":
            return profiles.named(checks.plain_value(given), self.model)
        return profiles.COMPATIBLE if self._detects else profiles.of_model(self.model)

    async def _ask_models(self) -> None:
        deadline = self._line.deadline(_MOST_SECONDS_FOR_MODELS)
        async with self._line.place(deadline) as client:
            models = await self._line.tried(lambda: listed(client, self._provider), deadline)
        if models is None:
            return
        models.check(self.model, self._provider)
        profile = self._planner.profile
        if self._detects:
            profile = profiles.of_owner(models.owner_of(self.model), self.model, models.server)
            if self._asked_mode == "completion":
                profile = replace(profile, completion=True)  # the user knows; the list does not say
        self._take(profile, models.context_of(self.model))

    def _take(self, profile: Profile, max_context: int | None) -> None:
        """Serve by this profile from now on.

        Raises:
            CapabilityError: the model does not have the mode that was asked for.
        """
        mode = mode_of(self._asked_mode, profile, self._name)
        self._planner = Planner(self._name, self.model, profile, mode, self._extra)
        self._capabilities = capabilities_of(self._name, self.model, profile, mode, max_context)


# What max_tokens=0 gives.
_NOTHING = Completion("", (), 0, "", FinishReason.LENGTH)


def _is_installed(package: str) -> bool:
    try:
        return not package or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


async def _close(client: "AsyncOpenAI") -> None:
    await client.close()


def _template_of(given: str | PathLike[str] | ChatTemplate | None, name: str) -> ChatTemplate:
    return ChatTemplate(None, name=name) if given is None else read_chat_template(given, name=name)
