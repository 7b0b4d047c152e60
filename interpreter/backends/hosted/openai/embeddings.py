"""Embeddings by `/embeddings` of the OpenAI dialect."""

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from .....lang.errors import BackendError, CapabilityError
from .....lang.prompt import Text
from .....lang.protocol import Embedded, EmbedRequest, Usage
from ..errors import Provider
from ..session import Session

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MOST_NUMBERS = 1 << 16  # of a vector


class _Vector(msgspec.Struct):
    index: int
    embedding: list[float]


class _Spent(msgspec.Struct):
    prompt_tokens: int = 0


class _Answer(msgspec.Struct):
    data: list[_Vector]
    usage: _Spent | None = None


async def embeddings(
    session: "Session[AsyncOpenAI]", provider: Provider, model: str, request: EmbedRequest, extra: Mapping[str, object]
) -> Embedded:
    """Returns the vectors that a server computes.

    Args:
        extra: fields added to the body.

    Raises:
        CapabilityError: a text is more than text.
        BackendError: the answer is none of this API, or the call failed.
    """
    texts: list[str] = []
    for text in request.texts:
        if not all(isinstance(part, Text) for part in text):
            raise CapabilityError(f"{provider.name} makes embeddings of text alone; leave pictures and token ids out")
        texts.append("".join(part.text for part in text if isinstance(part, Text)))
    body: dict[str, object] = {"model": model, "input": texts, "encoding_format": "float"}
    if request.dimensions:
        body["dimensions"] = request.dimensions
    deadline = session.deadline(request.origin.timeout)
    async with session.slot(deadline) as client:
        data = await session.retried(
            lambda: client.post("/embeddings", cast_to=object, body={**body, **extra}), deadline
        )
    try:
        answer = msgspec.convert(data, _Answer, strict=False)
        places = sorted(answer.data, key=lambda vector: vector.index)
        if [vector.index for vector in places] != list(range(len(texts))):
            raise BackendError(f"{provider.name}: {provider.host} sent {len(places)} vectors for {len(texts)} texts")
        vectors = tuple(_packed(vector.embedding) for vector in places)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise BackendError(f"{provider.name}: {provider.host} sent what are no embeddings: {error}") from None
    spent = 0 if answer.usage is None else answer.usage.prompt_tokens
    return Embedded(request.id, vectors, Usage(spent, 0, 0, 1))


def _packed(numbers: list[float]) -> bytes:
    """Packs a vector as `Embedded` has it. Raises OverflowError for one that is too long, or too large a number."""
    if not 0 < len(numbers) <= MOST_NUMBERS:
        raise OverflowError(f"a vector of {len(numbers)} numbers")
    return struct.pack(f"<{len(numbers)}f", *numbers)
