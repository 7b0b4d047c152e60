"""Models that are asked in the OpenAI dialect, by OpenAI's SDK or by a translator to another client.

Given choices are scored where the completion API returns log-probabilities of the prompt (`echo`). Each choice is a
call of its own, sent as prompt + choice: not every server takes several prompts at once, and those that have a prefix
cache read the shared prompt once anyway. The tokens of a choice are those after the prompt. A token on the border
belongs to the choice when it holds a character of it:

    prompt  |  choice
    [Ans][wer][: y][es]
              ^ token that begins before the border and ends after it: counted
"""

import asyncio
import contextlib
import warnings
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .....lang.chat_template import ChatTemplate, TemplateWarning
from .....lang.errors import BackendError, CapabilityError, ParameterError
from .....lang.prompt import Part, Text
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
    Scored,
    ScoredChoice,
    ScoreRequest,
    TokenLogprob,
    Usage,
)
from .. import conversation
from ..backend import CallOptions, HostedBackend
from ..constraint_params import Fields
from ..conversation import continuation_warning
from ..errors import Provider
from ..places import Places
from ..session import Session
from . import answers
from .answers import Answer, Client
from .profiles import BREAKPOINT_SECONDS, AskedMode, Profile, capabilities_of, lower, mode_of
from .requests import OpenAIPlanner, checked_extra
from .wire import Logprobs, Piece, Translator, parsed

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
        self._count: Callable[[str], int] = conversation.count_bytes
        self._warned = False
        self._warned_of: set[float] = set()  # times of cache points
        self._calls = self._estimated = 0
        self.use_profile(profile, None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, host={self._provider.host!r}, mode={self._planner.mode!r})"

    def use_profile(self, profile: Profile, max_context: int | None) -> None:
        """Switches to a profile.

        Args:
            profile: what the model can do.
            max_context: tokens of prompt and answer together, as the server reports them; None: the profile's.

        Raises:
            CapabilityError: the model does not have the mode that was asked for.
        """
        mode = mode_of(self._asked_mode, profile, self._provider.name)
        self._planner = OpenAIPlanner(self._provider.name, self.model, profile, mode, self._extra, Places())
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
        return await score_choices(self._session, self._planner, request, deadline, self.tokens_at_most)

    def hint(self, hint: Hint) -> None:
        """Remembers the cache point of a hint, where the server takes breakpoints. Sends nothing."""
        if hint.pin is None:
            return
        self._planner.keep(hint.prompt)
        if hint.pin > BREAKPOINT_SECONDS and hint.pin not in self._warned_of:
            self._warned_of.add(hint.pin)
            warnings.warn(
                f"{self._provider.name} keeps a prefix for at least {BREAKPOINT_SECONDS:g} s after its last use, and "
                f"cache_point(ttl={hint.pin:g}) asks for more; write ttl={BREAKPOINT_SECONDS:g}",
                stacklevel=2,
            )

    def enforces(self, constraint: ConstraintSpec) -> bool:
        """Returns whether the server enforces exactly this constraint, and not only simpler ones of its kind."""
        return lower(constraint, self._planner.profile, self._planner.mode) is not None

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        if self._planner.mode == "completion":
            return conversation.text_tokens_at_most(prompt, self._count)
        return conversation.conversation_tokens_at_most(prompt, self._count, self._planner.profile.image_tokens)

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
        told, usage = await prompt_logprobs(self._session, self._planner, request, deadline, self.tokens_at_most)
        return Final(request.id, (_NOTHING,) * request.sampling.n, usage, told)


class TranslatedBackend(OpenAIDialect[Translator]):
    """A backend whose provider's own client is asked in the OpenAI dialect. A subclass opens a `Translator`."""

    OPTIONS = CallOptions


def checked_chat_profile(owner: str, profile: object) -> Profile:
    """Checks a profile. Raises ParameterError for anything but a profile of a chat model."""
    if not isinstance(profile, Profile) or not profile.chat:
        raise ParameterError(f"{owner}(profile={profile!r}): write a Profile(...) of a chat model")
    return profile


async def score_choices(
    session: Session[Client],
    planner: OpenAIPlanner,
    request: ScoreRequest,
    deadline: float,
    tokens_at_most: Callable[[tuple[Part, ...]], int],
) -> Scored:
    """Scores all choices of a request, each by a call.

    Raises:
        CapabilityError: the prompt holds images.
        BackendError: log-probabilities are missing, or a call failed.
    """
    prompt = planner.text(request.prompt)

    async def one(choice: str) -> tuple[ScoredChoice, Usage]:
        body = _body(prompt, choice, planner)
        async with session.slot(deadline, request.origin) as client:
            data = await session.retried(lambda: client.post("/completions", cast_to=object, body=body), deadline)
        piece = parsed(data, session.provider)
        bound = tokens_at_most((Text(prompt + choice),))
        return _scored(piece, prompt, choice, session.provider), _usage(piece, bound)

    tasks = [asyncio.create_task(one(choice)) for choice in request.choices]
    try:
        scores = await asyncio.gather(*tasks)
    finally:  # when one fails the others are of no use
        for task in tasks:
            task.cancel()
    return Scored(request.id, tuple(choice for choice, _ in scores), sum((cost for _, cost in scores), Usage()))


async def prompt_logprobs(
    session: Session[Client],
    planner: OpenAIPlanner,
    request: GenRequest,
    deadline: float,
    tokens_at_most: Callable[[tuple[Part, ...]], int],
) -> tuple[tuple[TokenLogprob, ...], Usage]:
    """Returns log-probabilities of the prompt's tokens, from the requested one on; 0.0 for the first of all.

    Raises:
        CapabilityError: the prompt holds images.
        BackendError: log-probabilities are missing, or the call failed.
    """
    prompt = planner.text(request.prompt)
    body = _body(prompt, "", planner)
    async with session.slot(deadline, request.origin) as client:
        data = await session.retried(lambda: client.post("/completions", cast_to=object, body=body), deadline)
    piece = parsed(data, session.provider)
    given = _told(piece, session.provider)
    tokens = [
        TokenLogprob(_name_of(token), token, value or 0.0)
        for token, offset, value in _placed(given)
        if offset < len(prompt)
    ]
    start = request.sampling.prompt_logprobs_from or 0
    return tuple(tokens[start:]), _usage(piece, tokens_at_most(request.prompt))


def _body(prompt: str, choice: str, planner: OpenAIPlanner) -> Fields:
    """Writes the body. One token is generated and ignored, as not every server can generate none."""
    asked = {"prompt": prompt + choice, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
    return {"model": planner.model, **asked, **planner.extra}


def _scored(piece: Piece, prompt: str, choice: str, provider: Provider) -> ScoredChoice:
    """Reads the scores of a choice from the answer.

    Raises:
        BackendError: log-probabilities are missing.
    """
    names: list[int] = []
    values: list[float] = []
    for token, offset, value in _placed(_told(piece, provider)):
        if offset + len(token) <= len(prompt) or offset >= len(prompt) + len(choice):
            continue
        if value is None:  # the first of all tokens: it has no predecessor
            raise BackendError(f"{provider.name} can score choices after a prompt only; write some text before them")
        names.append(_name_of(token))
        values.append(value)
    if not values:
        raise BackendError(f"{provider.name}: {provider.host} told no log-probabilities of the choice {choice!r}")
    return ScoredChoice(tuple(names), tuple(values))


def _told(piece: Piece, provider: Provider) -> Logprobs:
    given = piece.choices[0].logprobs if piece.choices else None
    if not isinstance(given, Logprobs) or given.tokens is None or given.token_logprobs is None:
        raise BackendError(
            f"{provider.name}: {provider.host} told no log-probabilities of the prompt, which scores are; "
            "OpenAI(..., profile=Profile(..., scores=False)) has the model choose by text"
        )
    return given


def _placed(given: Logprobs) -> Iterable[tuple[str, int, float | None]]:
    """Yields tokens, the characters at which they begin, and their log-probabilities."""
    tokens = given.tokens or []
    return zip(tokens, given.text_offset or _offsets(tokens), given.token_logprobs or [], strict=False)


def _name_of(token: str) -> int:
    """Returns a substitute below 0 for a token id, which this API does not return: equal for equal texts."""
    return -1 - zlib.crc32(token.encode("utf-8", "surrogatepass"))


def _usage(piece: Piece, bound: int) -> Usage:
    """Returns the usage of a call. `bound`: on the prompt's tokens, for a server that does not report it."""
    counted = piece.usage
    if counted is None:
        return Usage(bound, 0, 1, 1)
    return counted.usage


def _offsets(tokens: Sequence[str]) -> list[int]:
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token)
    return offsets
