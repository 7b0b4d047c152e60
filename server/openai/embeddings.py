"""`POST /v1/embeddings`: vectors of texts. `POST /v1/rerank`: texts by their relevance to a query.

The first has OpenAI's shape, the second that of Jina and Cohere. Names of control tokens in texts stay text.
"""

import base64
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ...interpreter.vectors import MOST_DIMENSIONS, embedded, ranked_by
from ...lang.prompt import Generated, Text
from ...lang.protocol import Usage, floats_of
from ..bodies import Body, Label, Name, Salt, UmbelBody, wrong
from ..front import Front
from ..http import Answer, Asked, Endpoint, Reply
from ..limits import MAX_BATCH
from ..tokens import check_ids
from .fields import TextsOrTokens, parts_of

Dimensions = Annotated[int, msgspec.Meta(ge=1, le=MOST_DIMENSIONS)]
RankedText = Annotated[str, msgspec.Meta(min_length=1)]


class EmbeddingBody(UmbelBody, frozen=True):
    """Asks for the vectors of texts.

    Attributes:
        input: a text, a list of texts, token ids, or a list of those.
        encoding_format: "float" is a list of numbers, "base64" their float32 in little-endian order.
        dimensions: keeps the first so many numbers, for models that are trained for it.
    """

    model: Name
    input: TextsOrTokens
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    user: Label | None = None
    # Ours.
    cache_salt: Salt | None = None

    told_as = {"prompt": "input"}


class EmbeddingEntry(msgspec.Struct, frozen=True):
    """The vector of one text."""

    index: int
    embedding: Sequence[float] | str
    object: Literal["embedding"] = "embedding"


class TextUsage(msgspec.Struct, frozen=True):
    """Tokens of texts, of which nothing is generated. `cached_tokens` of them were not computed."""

    prompt_tokens: int
    total_tokens: int
    cached_tokens: int


class EmbeddingAnswer(msgspec.Struct, frozen=True):
    """The vectors, in the order of the texts."""

    data: Sequence[EmbeddingEntry]
    model: str
    usage: TextUsage
    object: Literal["list"] = "list"


class DocumentText(Body, frozen=True):
    """A document as an object."""

    text: RankedText


class RerankBody(UmbelBody, frozen=True):
    """Asks for documents by their relevance to a query.

    Attributes:
        top_n: how many are returned; null returns all.
        return_documents: each result has its text.
        instruction: what "relevant" means, for models that are told it.
        template: the prompt, with {query} and {text} in it, where the model's chat template has no such roles.
    """

    model: Name
    query: RankedText
    documents: Annotated[tuple[RankedText | DocumentText, ...], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool = False
    user: Label | None = None
    # Ours.
    instruction: Annotated[str, msgspec.Meta(min_length=1, max_length=1 << 16)] | None = None
    template: Annotated[str, msgspec.Meta(min_length=1, max_length=1 << 16)] | None = None
    cache_salt: Salt | None = None

    told_as = {"prompt": "documents"}


class RerankResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One document: its place in the request, and its relevance between 0 and 1."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class RerankAnswer(msgspec.Struct, frozen=True):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: Sequence[RerankResult]
    usage: TextUsage


async def embed(asked: Asked[EmbeddingBody]) -> Answer:
    """Computes vectors."""
    body, front = asked.body, asked.front
    _check_model(front, body.model)
    texts = parts_of("input", body.input, control=False)
    for text in texts:
        for part in text:
            if isinstance(part, Generated):
                check_ids(front, "input", part.token_ids)
            elif part == Text(""):
                raise wrong("input", "a text is empty; leave it out")
    origin = front.origin(asked.caller, body.umbel, body.cache_salt, body.model)
    with front.open(len(texts)):
        vectors, usage = await embedded(front.backend, texts, origin, body.dimensions or 0)
    front.note(usage)
    encode = base64.b64encode if body.encoding_format == "base64" else None
    entries = [
        EmbeddingEntry(index, floats_of(vector) if encode is None else encode(vector).decode())
        for index, vector in enumerate(vectors)
    ]
    return Reply(EmbeddingAnswer(entries, body.model, _usage(usage)))


async def rerank(asked: Asked[RerankBody]) -> Answer:
    """Orders documents by their relevance."""
    body, front = asked.body, asked.front
    _check_model(front, body.model)
    texts = [document.text if isinstance(document, DocumentText) else document for document in body.documents]
    origin = front.origin(asked.caller, body.umbel, body.cache_salt, body.model)
    with front.open(len(texts)):
        ranked, usage = await ranked_by(front.backend, body.query, texts, origin, body.instruction, body.template)
    front.note(usage)
    results = [
        RerankResult(one.index, one.score, DocumentText(one.text) if body.return_documents else None)
        for one in ranked[: body.top_n]
    ]
    return Reply(RerankAnswer("rerank-" + asked.id, body.model, results, _usage(usage)))


def _check_model(front: Front, name: str) -> None:
    """Raises HttpError for a model that is not served, and for a program."""
    model = front.model(name)
    if model.program:
        raise wrong("model", f"{model.name!r} is a program; name the model itself")


def _usage(usage: Usage) -> TextUsage:
    return TextUsage(usage.prompt_tokens, usage.prompt_tokens, usage.cached_tokens)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/embeddings",
        embed,
        "Compute embeddings",
        body=EmbeddingBody,
        answer=EmbeddingAnswer,
        errors=(404, 504),
    ),
    Endpoint(
        "POST",
        "/v1/rerank",
        rerank,
        "Order documents by their relevance to a query",
        body=RerankBody,
        answer=RerankAnswer,
        errors=(404, 504),
    ),
)
