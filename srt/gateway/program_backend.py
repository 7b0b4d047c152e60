"""The backend of programs that run in the gateway: the gateway itself, without sockets.

Their calls take the way of all calls (validation, deadlines, salts, the queue's limit), as those of one client.
"""

from collections.abc import AsyncGenerator, Callable
from functools import cached_property
from typing import get_args

from ...lang.chat_template import ChatTemplate
from ...lang.errors import CapabilityError
from ...lang.prompt import Part, tokens_at_most
from ...lang.protocol import Capabilities, Chunk, ConstraintKind, Done, Final, GenRequest, Hint, Scored, ScoreRequest
from ...lang.transport.exchange import Exchange


class ProgramBackend:
    """What programs see of the gateway.

    Args:
        exchange: to the gateway, as one client.
        capabilities: those that clients see, so that a program is refused here what it is refused there.
        make_template: the model's chat template, compiled when a program first needs it.
    """

    def __init__(
        self, exchange: Exchange, capabilities: Capabilities, make_template: Callable[[], ChatTemplate]
    ) -> None:
        self._exchange = exchange
        self._capabilities = capabilities
        self._make_template = make_template

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return self._make_template()

    async def start(self) -> None:
        """Nothing is left to start: the gateway takes programs once it knows its model."""

    def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        return self._exchange.generate(request)

    async def score(self, request: ScoreRequest) -> Scored:
        return await self._exchange.score(request)

    def hint(self, hint: Hint) -> None:
        raise CapabilityError("a program that runs in the gateway gives no hints")

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return tokens_at_most(prompt, self._capabilities.image_tokens)

    async def control(self, verb: str) -> Done:
        raise CapabilityError(f"a program that runs in the gateway cannot ask it to {verb}; ask from the client")

    async def close(self) -> None:
        """It is the gateway's to close."""


def capabilities_of(name: str, image_tokens: int = 0) -> Capabilities:
    """Of a runtime, as a program inside of it sees them. `name`: as its clients call it, for messages. `image_tokens`:
    of a picture at most, 0 for a model that reads text only.

    It gives no hints: the calls of a fork's branches are there in the next turn of the loop, and share their prefix in
    the step that computes it. A hint that comes before them takes a step of its own.
    """
    return Capabilities(
        name=name,
        score=True,
        token_ids=True,
        logprobs=True,
        constraints=get_args(ConstraintKind),
        probability=True,
        stop_regex=True,
        images=image_tokens > 0,
        image_tokens=image_tokens,
    )
