"""FakeAnthropic: a server of the Anthropic dialect on loopback, for tests of programs.

It ships with umbel, as `umbel.testing.FakeAnthropic`:

    from umbel.testing import FakeAnthropic

    with FakeAnthropic({"capital of France?": "Paris."}) as server:
        backend = ul.Anthropic("claude-haiku-4-5", base_url=server.base_url, api_key=server.api_key)
        assert capital.run(country="France", backend=backend)["answer"] == "Paris."
        assert server.calls == 1 and server.usage.cached_tokens == 0
        assert server.requests[0].body["messages"][0]["role"] == "user"

The script is that of FakeOpenAI and of Echo.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ....lang import checks
from ....lang.protocol import Completion, FinishReason, Usage
from ....lang.sampling import SamplingParams
from ...backends.echo import Gate
from ...backends.echo_answers import Script, cut
from ...backends.echo_tokens import pieces
from ...backends.hosted.conversation import Conversation
from .. import provider
from ..faults import Faults
from ..provider import Answered, FakeProvider, Question, Refused
from ..server import AnswerEvents, HttpRequest, event
from ..structured import Form, of_schema
from .requests import CLAUDE, AnthropicFeatures, MessagesBody, PrefixStore, blocks, conversation, read

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}
_THOUGHT = "Let me think about this."

Json = dict[str, object]


class FakeAnthropic(FakeProvider):
    """A server of the Anthropic dialect: /v1/messages, /v1/models.

    Prompts are cached as the provider does it: where `cache_control` says so, and never else. `usage` counts what is
    read as `cached_tokens`, and what is written as `cache_write_tokens`.

    Args:
        script: as Echo's. With a schema, the answer has to satisfy it; a bare one is put into the object that the
            schema asks for where that has one member. So has the input of a tool that the model must use.
        models: names that exist.
        features: what the models can do, to play older and newer ones.
        faults: for each request for text in order, or a function of its number (from 1): a Fault, a status of HTTP,
            or None.
        gate: if given, every request for text and every streamed piece waits at it.
        retry_after: the header's value, for the fault that has one.
        record: how many requests `requests` keeps.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        models: Sequence[str] = ("claude-haiku-4-5", "claude-sonnet-4-5", "claude-opus-4-6"),
        features: AnthropicFeatures = CLAUDE,
        faults: Faults = (),
        gate: Gate | None = None,
        retry_after: str = "1",
        record: int = 1000,
    ) -> None:
        super().__init__(script, models=models, faults=faults, gate=gate, retry_after=retry_after, record=record)
        checks.instance("features", features, AnthropicFeatures)
        self.features = features
        self._store = PrefixStore(features.cache_minimum)

    @property
    def base_url(self) -> str:
        return self.address

    # -------------------------------------------------------------------------------- the dialect

    def _authorised(self, request: HttpRequest) -> bool:
        headers = request.headers
        return headers.get("x-api-key") == self.api_key or headers.get("authorization") == f"Bearer {self.api_key}"

    def _listing(self, path: str) -> object | None:
        entries: dict[str, Json] = {
            model: {"type": "model", "id": model, "display_name": model, "created_at": "2026-01-01T00:00:00Z"}
            for model in self.models
        }
        if not self.features.models:
            return None
        if path == "/v1/models":
            data = list(entries.values())
            return {"data": data, "has_more": False, "first_id": self.models[0], "last_id": self.models[-1]}
        return entries.get(path.removeprefix("/v1/models/"))

    def _question(self, path: str, body: object) -> Question:
        if path != "/v1/messages":
            raise Refused(404, f"Not found: POST {path}")
        request = read(body, self.features, self.models)
        turns, begun = conversation(request, self.features)
        meant = provider.meant(turns) if begun is None else provider.written(Conversation(turns, begun))
        thinks = self.features.thinks and request.thinking is None
        return _AnthropicQuestion(meant, 1, request, self._store, *_form(request), thinks)

    def _failure(self, refused: Refused) -> object:
        message = refused.message or "invalid x-api-key"
        kind = _KINDS.get(refused.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_fake"}

    def _error_event(self, refused: Refused) -> bytes:
        return event(self._failure(refused), "error")


@dataclass(frozen=True, slots=True)
class _AnthropicQuestion(Question):
    """A request for a message.

    Attributes:
        body: as it came.
        store: the server's prompt cache.
        form: what the answer must be.
        tool: the tool that the model must use; "" for none.
        thinks: thoughts come before the answer.
    """

    body: MessagesBody
    store: PrefixStore
    form: Form | None
    tool: str
    thinks: bool

    def answer(self, said: list[str]) -> Answered:
        sampling = SamplingParams(max_tokens=self.body.max_tokens, stop=tuple(self.body.stop_sequences or ()))
        text = said[0] if self.form is None else self.form.shaped(said[0], sampling)
        completion, texts = cut(text, sampling)
        prompt = blocks(self.body)
        read, written = self.store.charge(prompt)
        thought = len(pieces(_THOUGHT)) if self.thinks else 0
        tokens = sum(len(block.ids) for block in prompt)
        usage = Usage(tokens, read, len(completion.token_ids) + thought, 1, written)
        message = self._message(usage)
        ending: Json = {"stop_reason": self._reason(completion), "stop_sequence": self._matched(completion)}
        content = [*self._thoughts(), *([self._block(completion.text)] if completion.text else [])]
        whole = {**message, "content": content, **ending, "usage": _counted(usage)}
        return Answered(whole, self._told(message, completion, texts, ending, usage), usage)

    def _told(
        self, message: Json, completion: Completion, texts: list[str], ending: Json, usage: Usage
    ) -> AnswerEvents | None:
        if not self.body.stream:
            return None
        begun = {**message, "usage": {**_counted(usage), "output_tokens": 1}}
        opening = [event({"type": "message_start", "message": begun}, "message_start")]
        closing = []
        place = 0
        for thought in self._thoughts():
            opening += _at(place, "content_block_start", content_block={**thought, "thinking": ""})
            delta = {"type": "thinking_delta", "thinking": thought["thinking"]}
            opening += [*_at(place, "content_block_delta", delta=delta), *_at(place, "content_block_stop")]
            place += 1
        told = []
        if completion.text:
            opening += _at(place, "content_block_start", content_block=self._block(""))
            opening.append(event({"type": "ping"}, "ping"))
            seen = [*texts[: completion.kept], *([completion.tail] if completion.tail else [])]
            told = [line for text in seen for line in _at(place, "content_block_delta", delta=self._delta(text))]
            closing += _at(place, "content_block_stop")
        cost = {"output_tokens": usage.completion_tokens}
        closing.append(event({"type": "message_delta", "delta": ending, "usage": cost}, "message_delta"))
        return AnswerEvents(
            tuple(opening), tuple(told), tuple(closing), (event({"type": "message_stop"}, "message_stop"),)
        )

    def _message(self, usage: Usage) -> Json:
        """Writes a message without content."""
        return {
            "id": "msg_fake",
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _counted(usage),
        }

    def _thoughts(self) -> list[Json]:
        return [{"type": "thinking", "thinking": _THOUGHT, "signature": "fake"}] if self.thinks else []

    def _block(self, text: str) -> Json:
        """Writes a block. A tool's input cut off by max_tokens is no object and is left out."""
        if not self.tool:
            return {"type": "text", "text": text}
        try:
            given = json.loads(text or "{}")
        except (ValueError, RecursionError):
            given = {}
        return {"type": "tool_use", "id": "toolu_fake", "name": self.tool, "input": given}

    def _delta(self, text: str) -> Json:
        return {"type": "input_json_delta", "partial_json": text} if self.tool else {"type": "text_delta", "text": text}

    def _reason(self, completion: Completion) -> str:
        if completion.matched_stop is not None:
            return "stop_sequence"
        reason = _REASONS[completion.finish_reason]
        return "tool_use" if self.tool and reason == "end_turn" else reason

    def _matched(self, completion: Completion) -> str | None:
        return str(completion.matched_stop) if completion.matched_stop is not None else None


def _form(request: MessagesBody) -> tuple[Form | None, str]:
    """Returns the required form of an answer, and the tool that must be used.

    Raises:
        Refused: a tool that is not there.
    """
    tools = {tool.name: tool for tool in request.tools or ()}
    match request.tool_choice:
        case None:
            pass
        case choice if choice.type == "tool" or (choice.type == "any" and len(tools) == 1):
            name = choice.name if choice.type == "tool" else next(iter(tools))
            if name not in tools:
                raise Refused(400, f"tool_choice.name: tool {name!r} is not in the list of tools")
            return of_schema(tools[name].input_schema), name
        case choice if choice.type == "any":
            raise Refused(400, "FakeAnthropic does not choose among tools; name one in tool_choice")
    if request.output_config is not None and request.output_config.format is not None:
        return of_schema(request.output_config.format.schema), ""
    return None, ""


def _at(place: int, name: str, **fields: object) -> list[bytes]:
    """Makes an event about one block of the answer."""
    return [event({"type": name, "index": place, **fields}, name)]


def _counted(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
