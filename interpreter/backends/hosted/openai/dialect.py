"""Models that are asked in the OpenAI dialect, by OpenAI's SDK or by a translator to another client."""

import contextlib
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from .....lang.chat_template import ChatTemplate, TemplateWarning
from .....lang.errors import CapabilityError, ParameterError
from .....lang.prompt import Part
from .....lang.protocol import (
    Capabilities,
    Chunk,
    Completion,
    ConstraintSpec,
    Facts,
    Final,
    FinishReason,
    GenRequest,
    Scored,
    ScoreRequest,
    Usage,
)
from .. import content
from ..backend import CallOptions, HostedBackend
from ..conversation import continuation_warning
from ..errors import Provider
from ..translated import Translator
from . import answers
from . import scores as openai_scores
from .answers import Answer
from .constraints import AskedMode, capabilities_of, lower, mode_of
from .profiles import Profile
from .requests import OpenAIPlanner, checked_extra

if TYPE_CHECKING:
    from openai import AsyncOpenAI

C = TypeVar("C", bound="AsyncOpenAI | Translator")

# The completion of max_tokens=0.
_NOTHING = Completion("", (), 0, "", FinishReason.LENGTH)


class OpenAIDialect(HostedBackend[C]):
    """A backend for one model that takes bodies of `/chat/completions` or `/completions`.

    Args:
        model: its name.
        provider: for messages.
        options: as of `OPTIONS`.
        profile: what the model can do, as far as is known before the start.
        mode: which of the two APIs is asked for.
        written_with: how roles are written in completion mode; None: as plain lines.
        extra_body: fields added to every request.

    Raises:
        CapabilityError: the model does not have the mode that was asked for.
        ParameterError: a wrong value.
    """

    def __init__(
        self,
        model: str,
        provider: Provider,
        options: CallOptions,
        *,
        profile: Profile,
        mode: AskedMode = "chat",
        written_with: ChatTemplate | None = None,
        extra_body: Mapping[str, Any] | None = None,  # Any: JSON
    ) -> None:
        super().__init__(provider, options)
        self.model = model
        self._extra = checked_extra(extra_body)
        self._asked_mode = mode
        self._written_with = written_with or ChatTemplate(None, name=provider.name)
        self._count: Callable[[str], int] = content.count_bytes
        self._warned = False
        self._calls = self._estimated = 0
        self.use_profile(profile, None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, host={self._provider.host!r}, mode={self._planner.mode!r})"

    def use_profile(self, profile: Profile, max_context: int | None) -> None:
        """Switches to a profile. `max_context`: tokens, reported by the server; None: the profile's.

        Raises:
            CapabilityError: the model does not have the mode that was asked for.
        """
        mode = mode_of(self._asked_mode, profile, self._provider.name)
        self._planner = OpenAIPlanner(self._provider.name, self.model, profile, mode, self._extra)
        self._capabilities = capabilities_of(self._provider.name, self.model, profile, mode, max_context)

    # -------------------------------------------------------------------------------- the Backend protocol

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def chat_template(self) -> ChatTemplate:
        return self._template if self._planner.mode == "chat" else self._written_with

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
            warnings.warn(continuation_warning(self._provider.name), TemplateWarning, stacklevel=2)
        answer = Answer(
            plan, self._provider, self.tokens_at_most(request.prompt), constrained=request.constraint is not None
        )
        self._calls += 1
        async with contextlib.aclosing(answers.chunks(self._session, plan, answer, request)) as chunks:
            async for chunk in chunks:
                yield chunk
        answer.check_whole()
        self._estimated += not answer.counted
        yield Final(request.id, answer.completions(), answer.usage())

    async def score(self, request: ScoreRequest) -> Scored:
        """Scores the choices of a request.

        Raises:
            CapabilityError: the server returns no log-probabilities of given text.
        """
        if not self._capabilities.score or request.unconditional or request.probability:
            what = request.probability or ("scores without the prompt" if request.unconditional else "scores")
            raise CapabilityError(
                f"{self._provider.name} ({self._planner.profile.name}, {self._planner.mode} mode) cannot give {what}; "
                'write select() with its default method, or method="token_length_normalized" on a server that scores'
            )
        self._calls += len(request.choices)
        deadline = self._session.deadline(request.origin.timeout)
        return await openai_scores.score(self._session, self._planner, request, deadline, self.tokens_at_most)

    def enforces(self, constraint: ConstraintSpec) -> bool:
        """Returns whether the server enforces exactly this constraint, and not only simpler ones of its kind."""
        return lower(constraint, self._planner.profile, self._planner.mode) is not None

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        if self._planner.mode == "completion":
            return content.text_tokens_at_most(prompt, self._count)
        return content.conversation_tokens_at_most(prompt, self._count, self._planner.profile.image_tokens)

    def facts(self) -> Facts:
        return {
            "model": self.model,
            "host": self._provider.host,
            "mode": self._planner.mode,
            "profile": self._planner.profile.name,
            "calls": self._calls,
            "calls_with_estimated_usage": self._estimated,
        }

    # -------------------------------------------------------------------------------- how

    async def _prompt_logprobs(self, request: GenRequest) -> Final:
        """Requests log-probabilities of the prompt. Raises CapabilityError where the server returns none."""
        if not self._capabilities.score:
            self._planner.plan(request)  # it says what is not taken
        self._calls += 1
        deadline = self._session.deadline(request.origin.timeout)
        told, usage = await openai_scores.of_prompt(
            self._session, self._planner, request, deadline, self.tokens_at_most
        )
        return Final(request.id, (_NOTHING,) * request.sampling.n, usage, told)


class TranslatedBackend(OpenAIDialect[Translator]):
    """A backend whose provider's own client is asked in the OpenAI dialect. A subclass opens a `Translator`."""

    OPTIONS = CallOptions

    async def close_client(self, client: Translator) -> None:
        await client.close()


def checked_chat_profile(owner: str, profile: object) -> Profile:
    """Checks a profile. Raises ParameterError for anything but a profile of a chat model."""
    if not isinstance(profile, Profile) or not profile.chat:
        raise ParameterError(f"{owner}(profile={profile!r}): write a Profile(...) of a chat model")
    return profile
