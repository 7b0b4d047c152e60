"""Answers of the API → continuations, whole or event by event. What is not whole is an error, never a short answer."""

from dataclasses import dataclass
from typing import Literal

from .....lang.errors import BackendError, ConnectionLostError, RequestError, UmbelError
from .....lang.protocol import Completion, FinishReason, TokenLogprob, Usage
from ..failures import Provider
from ..lowered import beginning, unwrap
from ..stops import StopCutter
from .requests import Plan
from .wire import Choice, Counted, Piece, logprobs_of

_LONGEST_TOKEN = 256  # characters; a server that says more than this for each token it may say does not stop at all

_MOST_PIECES = 1024  # beside those with text


class _Growing:
    """One continuation while it comes.

    received   everything that the server said
    released   what is certain: up to a stop; of a wrapped answer nothing until its end
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._cutter = StopCutter(plan.cuts)
        self._wrapping: list[str] = []
        self._released: list[str] = []
        self.length = 0  # characters received
        self.reason: FinishReason | None = None
        self.matched: str | int | None = None
        self.logprobs: list[TokenLogprob] = []
        self.enforced = True  # what came has the form that was asked for

    @property
    def text(self) -> str:
        return "".join(self._released)

    def receive(self, text: str) -> str:
        """More text → what can be given out."""
        self.length += len(text)
        if self._plan.wrapped:
            self._wrapping.append(text)
            return ""
        return self._release(self._cutter.feed(text))

    def end(self, reason: FinishReason, matched: str | int | None) -> str:
        """The server says that this is all → what was held back."""
        if self.reason is not None:
            return ""
        rest = ""
        if self._plan.wrapped:
            answer = self._unwrapped(self._plan.wrapped, reason)
            rest = self._release(self._cutter.feed(answer))
        if self._cutter.matched is None:
            rest += self._release(self._cutter.end())
        if self.reason is None:
            self.reason, self.matched = reason, matched
        return rest

    def _unwrapped(self, how: Literal["text", "json"], reason: FinishReason) -> str:
        """The answer inside the object. A server that ignored what was asked gets its words passed on, as such."""
        whole = "".join(self._wrapping)
        answer = unwrap(whole, how)
        if answer is not None:
            return answer
        self.enforced = False
        return whole if reason is FinishReason.STOP else beginning(whole, how)

    def _release(self, text: str) -> str:
        if self._cutter.matched is not None and self.reason is None:
            self.reason, self.matched = FinishReason.STOP, self._cutter.matched
        if text:
            self._released.append(text)
        return text

    def completion(self, *, constrained: bool) -> Completion:
        """`constrained`: the server enforces a constraint on it."""
        assert self.reason is not None, "only a text that has ended is a completion"
        text = self.text
        whole = self.enforced and self.reason is FinishReason.STOP and not isinstance(self.matched, str)
        kept: list[TokenLogprob] = []
        characters = 0
        for token in self.logprobs:
            characters += len(token.text)
            if characters > len(text):
                break
            kept.append(token)
        return Completion(
            text,
            (),
            0,
            text,
            self.reason,
            self.matched,
            tuple(kept),
            guarantee="enforced" if constrained and whole else "",
        )


@dataclass(frozen=True, slots=True)
class Given:
    """More of a continuation, and the log-probabilities of the tokens that came with it."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...]


class Answer:
    """All continuations of one call.

    Args:
        plan: what was asked.
        provider: for messages.
        prompt_tokens: a bound on the prompt's, for a call whose cost the server does not tell.
        constrained: the server enforces a constraint on the text.
    """

    def __init__(self, plan: Plan, provider: Provider, prompt_tokens: int, *, constrained: bool) -> None:
        self._plan, self._provider = plan, provider
        self._prompt_tokens = prompt_tokens
        self._constrained = constrained
        self._texts = [_Growing(plan) for _ in range(plan.n)]
        self._usage: Counted | None = None
        self._pieces = 0

    @property
    def whole(self) -> bool:
        """Every continuation has ended."""
        return all(text.reason is not None for text in self._texts)

    @property
    def counted(self) -> bool:
        """The server has said what the call cost."""
        return self._usage is not None

    @property
    def cut(self) -> bool:
        """Every continuation has ended, one of them at a stop that was found here: nothing more need be waited for."""
        return self.whole and any(text.matched in self._plan.cuts for text in self._texts)

    def take(self, piece: Piece) -> list[Given]:
        """A piece → what can be given out.

        Raises:
            BackendError: it is no piece of an answer to this call.
            RequestError: the provider did not let the model answer.
        """
        if piece.usage is not None:
            self._usage = piece.usage
        self._pieces += 1
        if self._pieces > _MOST_PIECES + _LONGEST_TOKEN * self._plan.n * self._plan.most_tokens:
            raise self._broken("an answer that does not end")
        given = []
        for choice in piece.choices or ():
            if choice.index >= len(self._texts):
                raise self._broken(f"continuation {choice.index} of {len(self._texts)}")
            growing = self._texts[choice.index]
            if growing.reason is not None:
                continue  # it was cut here; the server does not know
            text = self._text(choice)
            logprobs = logprobs_of(choice.logprobs)
            growing.logprobs.extend(logprobs)
            released = growing.receive(text)
            if growing.length > _LONGEST_TOKEN * (self._plan.most_tokens + 1):
                raise self._broken(f"more text than max_tokens={self._plan.most_tokens} allows, and did not stop")
            if choice.finish_reason:  # some servers say "" until the end
                released += growing.end(self._reason(choice.finish_reason), choice.stop_reason)
            if released:
                given.append(Given(choice.index, released, logprobs))
        return given

    def check_whole(self) -> None:
        """Raises ConnectionLostError for an answer without an end."""
        if not self.whole:
            raise ConnectionLostError(
                f"{self._provider.name}: an answer of {self._provider.host} ended too early: its end never came"
            )

    def completions(self) -> tuple[Completion, ...]:
        return tuple(text.completion(constrained=self._constrained) for text in self._texts)

    def usage(self) -> Usage:
        """What the call cost. Where the server does not say: bounds, by the bytes of the texts."""
        counted = self._usage
        if counted is None:
            received = sum(min(4 * text.length, self._plan.most_tokens) for text in self._texts)
            return Usage(self._prompt_tokens, 0, received, 1)
        return Usage(counted.prompt_tokens, counted.cached_tokens, counted.completion_tokens or 0, 1)

    # -------------------------------------------------------------------------------- how

    def _text(self, choice: Choice) -> str:
        said = choice.message or choice.delta
        if said is not None and said.refusal:
            raise RequestError(f"{self._provider.name}: the model refused: {self._provider.scrub(said.refusal)}")
        return (said.content if said is not None else choice.text) or ""

    def _reason(self, said: str) -> FinishReason:
        match said:
            case "stop":
                return FinishReason.STOP
            case "length":
                return FinishReason.LENGTH
            case "content_filter":
                raise RequestError(
                    f"{self._provider.name}: the provider's content filter ended the answer; ask for something else"
                )
            case _:
                raise self._broken(f"an answer that ended by {said!r}")

    def _broken(self, what: str) -> UmbelError:
        return BackendError(f"{self._provider.name}: {self._provider.host} sent {what}")
