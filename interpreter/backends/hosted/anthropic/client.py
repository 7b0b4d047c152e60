"""The provider's SDK: a client for each event loop, and the events of an answer. Nothing else here speaks with it."""

from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..surroundings import Patience, Surroundings
from .cache import Leaders

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic


@dataclass(frozen=True, slots=True)
class Desk:
    """What one event loop has."""

    client: "AsyncAnthropic"
    leaders: Leaders


def open_desk(
    key: str,
    address: str,
    headers: Mapping[str, str],
    patience: Patience,
    concurrency: int,
    surroundings: Surroundings,
    counts: Counter[str],
) -> Desk:
    """Imports the SDK. `counts`: of the desk's leaders."""
    import anthropic

    from ..transport import open_client

    client = anthropic.AsyncAnthropic(
        api_key=key,
        base_url=address,
        max_retries=0,  # ours know when an answer has begun
        default_headers=headers,
        http_client=open_client(anthropic, patience, concurrency, surroundings.wire),
    )
    return Desk(client, Leaders(counts))


async def close_desk(desk: Desk) -> None:
    await desk.client.close()


# Any below: the SDK's events, and its stream of them.
async def events_of(client: "AsyncAnthropic", arguments: Mapping[str, Any]) -> AsyncGenerator[Any]:
    """The SDK's events once the answer has begun; its whole Message, where no text is asked for (the provider does not
    stream that)."""
    if not arguments["max_tokens"]:
        return _whole(await client.messages.create(stream=False, **arguments))
    return _streamed(await client.messages.create(stream=True, **arguments))


async def _whole(message: Any) -> AsyncGenerator[Any]:
    yield message


async def _streamed(stream: Any) -> AsyncGenerator[Any]:
    try:
        async for event in stream:
            yield event
    finally:
        await stream.close()


async def next_of(events: AsyncGenerator[Any]) -> Any:  # an event, or None
    return await anext(events, None)
