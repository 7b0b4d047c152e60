"""Writes a request as the body of an API request, and plans the processing of its answer."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .....lang import checks
from .....lang.agents.dialogue import dialogue_of
from .....lang.errors import CapabilityError, ParameterError
from .....lang.prompt import Media, Part, namespace
from .....lang.protocol import ConstraintSpec, GenRequest
from .....lang.sampling import SamplingParams
from .. import conversation
from ..constraint_params import WRAPPING_TOKENS, ConstraintParams, Fields
from ..conversation import (
    Message,
    PlainText,
    in_base64,
    media_type,
    read,
    read_beginning,
    sendable_text,
    text_of,
)
from ..places import Block, Places, cut
from . import tools
from .profiles import Mode, Profile, lower

MOST_BREAKPOINTS = 4  # of a request: OpenAI stores the last three, and finds what others have stored at any
_BREAKPOINT: Fields = {"prompt_cache_breakpoint": {"mode": "explicit"}}
_DEFAULTS = SamplingParams()
_ROLES = ("system", "developer", "user", "assistant")
# Fields that users may not set by extra_body, as the answer is read by them.
RESERVED = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", "n", "stop", "logprobs", "echo", "tools", "tool_choice"}
)


def checked_extra(given: Mapping[str, Any] | None, reserved: frozenset[str] = RESERVED) -> Fields:
    """Checks extra fields. Raises ParameterError for reserved ones, or values that are no JSON."""
    if given is None:
        return {}
    extra = checks.entries("extra_body", given, 256, "a dict of JSON values")
    for name in extra:
        checks.text("a name in extra_body", name, 256)
        if name in reserved:
            raise ParameterError(f"extra_body sets {name!r}, which is the program's to say; leave it out of extra_body")
    try:
        json.dumps(extra, allow_nan=False).encode()
    except Exception as error:  # what is no JSON, or contains itself
        raise ParameterError(f"extra_body cannot be written as JSON ({type(error).__name__}: {error})") from None
    return extra


@dataclass(frozen=True, slots=True)
class Plan:
    """One call.

    Attributes:
        path: after the base address.
        body: JSON.
        cuts: stop strings to look for here.
        wrapped: the answer is a member of a JSON object, and is given out when it is whole.
        n: continuations.
        most_tokens: of each.
        continues_text: a chat model is asked to go on with a text outside of roles.
        offers_tools: the answer may have calls of tools.
        one_call: one at most: further ones are left out, as not every server has a field that says so.
        enforces_calls: the server writes no other ones than the tools and their schemas admit.
    """

    path: str
    body: Fields
    cuts: tuple[str, ...]
    wrapped: Literal["", "text", "json"]
    n: int
    most_tokens: int
    continues_text: bool
    offers_tools: bool = False
    one_call: bool = False
    enforces_calls: bool = False

    @property
    def streams(self) -> bool:
        return self.body.get("stream") is True


@dataclass(frozen=True, slots=True)
class OpenAIPlanner:
    """Plans the calls to one model.

    Args:
        backend: its name, for messages.
        model: its name, for the server.
        profile: what the server can do.
        mode: which of its two APIs.
        extra: fields that the user adds to every request.
        points: places that the program wants to be kept.
    """

    backend: str
    model: str
    profile: Profile
    mode: Mode
    extra: Mapping[str, Any]  # Any: JSON
    points: Places

    def plan(self, request: GenRequest) -> Plan:
        """Plans a call.

        Raises:
            CapabilityError: the request needs a feature that the server lacks; nothing is left out.
            RequestError: a text that cannot be sent.
        """
        sampling = request.sampling
        self._check(request)
        lowered = self.lowered(request.constraint)
        # A stop inside a constrained text is a fact about the text that the answer does not tell, so it is found here.
        here = len(sampling.stop) > self.profile.stops or (lowered is not None and not self.profile.names_stop)
        wrapped = lowered.wrapped if lowered is not None else ""
        cuts = sampling.stop if here or wrapped else ()
        most_tokens = sampling.max_tokens + (WRAPPING_TOKENS if wrapped else 0)
        dialogue = dialogue_of(request)
        continues_text = enforces_calls = False
        if dialogue is None:
            prompt, continues_text = self._prompt(request.prompt)
        else:
            prompt, enforces_calls = tools.fields(dialogue, self.backend, self.profile.enforced_calls)
        body: Fields = {"model": self.model, **prompt, **self._choosing(sampling, most_tokens)}
        if sampling.stop and not cuts:
            body["stop"] = list(sampling.stop)
        if lowered is not None:
            body |= lowered.fields
        if salt := namespace(request.origin.salt, request.prompt):
            body["cache_salt"] = salt
        if request.stream or cuts:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "/chat/completions" if self.mode == "chat" else "/completions"
        return Plan(
            path,
            {**body, **self.extra},
            cuts,
            wrapped,
            sampling.n,
            most_tokens,
            continues_text,
            offers_tools=dialogue is not None,
            one_call=dialogue is not None and not dialogue.choice.parallel,
            enforces_calls=enforces_calls,
        )

    def lowered(self, constraint: ConstraintSpec | None) -> ConstraintParams | None:
        """Returns a constraint's parameters. Raises CapabilityError for one that the server does not enforce."""
        if constraint is None:
            return None
        lowered = lower(constraint, self.profile, self.mode)
        if lowered is None:
            raise CapabilityError(
                f"{self.backend} does not enforce this {constraint.kind}: {constraint.source[:120]!r}; write a simpler "
                "one, or have the text looked at and asked for again"
            )
        return lowered

    def keep(self, beginning: tuple[Part, ...]) -> None:
        """Remembers a place: later requests that begin with it get a breakpoint there.

        Raises:
            CapabilityError: as a request.
        """
        said = read_beginning(beginning, self.backend)
        if isinstance(said, PlainText):
            turns = conversation.ask_to_continue_text(said)
        else:
            turns = (*said.turns, Message("assistant", said.begun)) if said.begun else said.turns
        self.points.remember(_blocks(turns))

    # -------------------------------------------------------------------------------- prompts

    def _prompt(self, parts: tuple[Part, ...]) -> tuple[Fields, bool]:
        """Returns the prompt's fields, and whether a chat model is asked to continue a plain text."""
        if self.mode == "completion":
            return {"prompt": self.text(parts)}, False
        asked = read(parts, self.backend)
        if isinstance(asked, PlainText):
            if not asked.content:
                raise CapabilityError(f"{self.backend} is a chat model, and the prompt is empty; write user(...) first")
            return {"messages": self._messages(conversation.ask_to_continue_text(asked))}, True
        if not asked.turns and not asked.begun:
            raise CapabilityError(
                f"{self.backend} answers a conversation, and there is none yet; write user(...) first"
            )
        if asked.begun and self.profile.continues:
            messages = self._messages((*asked.turns, Message("assistant", asked.begun)))
            return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}, False
        return {"messages": self._messages(conversation.ask_to_continue_turn(asked))}, False

    def text(self, parts: Iterable[Part]) -> str:
        """Returns a prompt as one text, for the completion API."""
        parts = tuple(parts)
        if any(isinstance(part, Media) for part in parts):
            raise CapabilityError(f"{self.backend} in completion mode takes no images; write mode='chat'")
        return sendable_text(text_of(parts), self.backend)

    def _messages(self, messages: Sequence[Message]) -> list[Fields]:
        blocks = _blocks(messages)
        pieces, ends = cut(blocks, self.points.within(blocks))
        points = [index for index in ends if pieces[index].role != "assistant"]  # the API takes none in answers
        written: list[Fields] = []
        rest = iter(enumerate(pieces))
        for each in messages:
            content: list[tuple[Block, bool]] = []
            while each.content and not (content and content[-1][0].closes):
                index, piece = next(rest)
                content.append((piece, index in points[-MOST_BREAKPOINTS:]))
            written.append({"role": self._role(each.role), "content": self._content(content)})
        return written

    def _role(self, role: str) -> str:
        if role not in _ROLES:
            raise CapabilityError(
                f"{self.backend} takes turns of {', '.join(_ROLES)}; {role}(...) belongs to calls of tools, which are "
                "not made here; write user(...)"
            )
        return role

    def _content(self, content: Sequence[tuple[Block, bool]]) -> str | list[Fields]:
        """Writes the blocks of a turn, each with whether a breakpoint stands at its end."""
        if len(content) == 1 and isinstance(text := content[0][0].content, str) and not content[0][1]:
            return sendable_text(text, self.backend)
        if not content:
            return ""
        return [self._part(block) | (_BREAKPOINT if ends else {}) for block, ends in content]

    def _part(self, block: Block) -> Fields:
        if isinstance(block.content, Media):
            return self._picture(block.content)
        assert isinstance(block.content, str), "calls and results of tools are written from a dialogue"
        return {"type": "text", "text": sendable_text(block.content, self.backend)}

    def _picture(self, part: Media) -> Fields:
        if not self.profile.images:
            raise CapabilityError(f"{self.backend} takes no images; use a model that does")
        return {
            "type": "image_url",
            "image_url": {"url": f"data:{media_type(part, self.backend)};base64,{in_base64(part)}"},
        }

    # -------------------------------------------------------------------------------- sampling

    def _choosing(self, sampling: SamplingParams, most_tokens: int) -> Fields:
        profile = self.profile
        name = profile.max_tokens if self.mode == "chat" else "max_tokens"
        fields: Fields = {name: most_tokens}
        for field in sorted(profile.sampling):
            value = getattr(sampling, field)
            if field in profile.always or value != getattr(_DEFAULTS, field):
                fields[field] = value
        if fields.get("top_k") == -1:
            fields["top_k"] = profile.all_top_k
        if "logit_bias" in fields:
            fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if "stop_token_ids" in fields:
            fields["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.n != 1:
            fields["n"] = sampling.n
        if sampling.logprobs or sampling.top_logprobs:
            fields |= self._logprobs(sampling.top_logprobs)
        return fields

    def _logprobs(self, top: int) -> Fields:
        if self.mode == "completion":
            return {"logprobs": top}
        return {"logprobs": True, **({"top_logprobs": top} if top else {})}

    def _check(self, request: GenRequest) -> None:
        """Raises CapabilityError for parameters that this server would drop."""
        sampling, profile = request.sampling, self.profile
        for field in SamplingParams.__struct_fields__:
            if field in profile.sampling or field in ("max_tokens", "n", "stop", "logprobs", "top_logprobs"):
                continue
            if getattr(sampling, field) != getattr(_DEFAULTS, field):
                raise self._lacks(f"{field}={getattr(sampling, field)!r}", "leave it out")
        if sampling.n > profile.n:
            most = "one continuation" if profile.n == 1 else f"{profile.n} continuations"
            raise self._lacks(f"n={sampling.n}", f"fork the program instead, as it gives {most} a call")
        asks_logprobs = sampling.logprobs or sampling.top_logprobs
        if asks_logprobs and sampling.top_logprobs > profile.top_logprobs:
            raise self._lacks(
                f"logprobs with top_logprobs={sampling.top_logprobs}",
                f"it gives at most {max(profile.top_logprobs, 0)}",
            )
        if request.token_healing:
            raise self._lacks("token_healing=True", "leave it out")
        if not profile.salts and namespace(request.origin.salt, request.prompt):
            what = f"salt={request.origin.salt!r}" if request.origin.salt else "private()"
            raise self._lacks(what, "its prefix cache cannot be kept apart; leave it out")
        if asks_logprobs and (lowered := self.lowered(request.constraint)) is not None and lowered.wrapped:
            raise self._lacks("log-probabilities of a constrained text", "ask for one of both")

    def _lacks(self, what: str, instead: str) -> CapabilityError:
        another = self.backend.startswith("openai ") and not self.profile.name.startswith("openai")
        hint = "; OpenAI(..., profile=Profile(...)) says what another server can do" if another else ""
        return CapabilityError(
            f"{self.backend} ({self.profile.name}) does not take {what}; {instead}, or use a model or a Runtime that "
            f"does{hint}"
        )


def _blocks(messages: Iterable[Message]) -> list[Block]:
    """Returns the contents of turns, each part a block."""
    return [
        Block(
            each.role,
            part if isinstance(part, Media) else part.text,
            opens=number == 0,
            closes=number == len(each.content) - 1,
        )
        for each in messages
        for number, part in enumerate(each.content)
    ]
