"""Reads the events of a Messages answer into pieces of text and its completion."""

from typing import Any, Literal

from .....lang.errors import BackendError, ConnectionLostError, RequestError
from .....lang.protocol import Completion, FinishReason, Usage
from ..constraint_params import beginning, unwrap
from ..stops import Lead, StopCutter

LONGEST_TOKEN = 256  # characters; a server that says more for each token it may say does not stop at all
MOST_EVENTS = 10_000  # of an answer, apart from those that bring text


class AnthropicAnswer:
    """Reads one answer as it streams.

    Args:
        name: of the backend, for messages.
        lead: white space that the request left out.
        stops: strings that end the text here.
        wrapped: the answer is a member of a JSON object: it is told when it is complete.
        constrained: the provider enforces a constraint.
        max_tokens: that were asked for.
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
    ) -> None:
        self._name = name
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
        except (AttributeError, TypeError) as error:
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
        text = "".join(self._told)
        cut_short = self._reason in ("max_tokens", "model_context_window_exceeded") and not self.over
        reason = FinishReason.LENGTH if cut_short else FinishReason.STOP
        matched = self._cutter.matched or self._sequence
        whole = self._constrained and not cut_short and matched is None
        return Completion(text, (), 0, text, reason, matched, guarantee="enforced" if whole else "")

    def usage(self) -> Usage:
        """Returns the provider's counts. They lack the output tokens of an answer closed at a stop of ours: its bytes
        are the bound then."""
        read, written = self._input.get("cache_read_input_tokens", 0), self._input.get("cache_creation_input_tokens", 0)
        output = min(self._max_tokens, self._heard) if self._output is None else self._output
        return Usage(self._input.get("input_tokens", 0) + read + written, read, output, 1, written)

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


def _is_thought(event: Any) -> bool:  # Any: the SDK's events
    kind = event.content_block.type if event.type == "content_block_start" else event.delta.type
    return str(kind).startswith(("thinking", "redacted_thinking", "signature"))
