"""`embed` and `rerank`: calls that turn texts into vectors, and order texts by their relevance to a query.

    vectors = ul.embed(["a text", "another"])
    best = ul.rerank("a question", documents, top=3)

Texts travel in requests of a few, which a backend computes together: the runtime in the batches of its other requests.
"""

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from ..lang import checks
from ..lang.chat_template import ChatTemplate
from ..lang.errors import CapabilityError, ParameterError, shown
from ..lang.prompt import Part, Text
from ..lang.protocol import (
    Backend,
    Embedding,
    EmbedRequest,
    Origin,
    Ranking,
    RankRequest,
    Usage,
    floats_of,
)
from . import loop
from .run import chosen_backend, not_while_recording

MOST_TEXTS = 1 << 20  # of one call
MOST_CHARACTERS = 1 << 26  # of one text; the model's context is far shorter
TOGETHER = 32  # texts of one request
AT_ONCE = 8  # requests of one call: more texts than an engine computes together, fewer than a server lets in
CHARACTERS_TOGETHER = 1 << 16  # of one request, unless one text has more
MOST_DIMENSIONS = 1 << 16
LEAST_SECONDS = 0.001  # that a request is given
_FIELD = re.compile(r"\{(query|text|instruction)\}")
_numbers = itertools.count(1)

Answer = TypeVar("Answer")


class RankedText(msgspec.Struct, frozen=True):
    """Holds a text with its relevance to a query, as `rerank` returns them.

    Attributes:
        index: its place among the texts that were given, counted from 0.
        score: its relevance, between 0 and 1; comparable for one query and model.
        text: as it was given.

    Examples:
        >>> best, last = ul.RankedText(1, 0.94, "Venice sinks."), ul.RankedText(0, 0.08, "Rome is old.")
        >>> [each.text for each in (best, last) if each.score > 0.5]
        ['Venice sinks.']
    """

    index: int
    score: float
    text: str


def embed(
    texts: Iterable[str],
    *,
    dimensions: int | None = None,
    backend: Backend | None = None,
    timeout: float | None = None,
) -> list[list[float]]:
    """Returns the embedding of each text, in order. Blocks.

    The runtime computes them as the checkpoint says: pooled over the last token or over all, and normalised. A model
    that generates and was not trained for embeddings gives poor ones.

    Args:
        texts: none of them empty. Instructions that a model expects before a query are part of the text.
        dimensions: keeps the first so many numbers, for models that are trained for it; None keeps all.
        backend: a Runtime, the RuntimeEndpoint of a server, or a hosted model with embeddings; None is the default
            backend.
        timeout: seconds for all texts; None sets no limit.

    Raises:
        CapabilityError: the backend makes no embeddings.
        ContextLengthError: a text is too long.
        ParameterError: an empty list or text, or dimensions out of range.

    Examples:
        >>> texts = ["The cat sleeps.", "The kitten is asleep.", "Interest rates rose."]
        >>> with ul.Runtime() as model:
        ...     cat, kitten, rates = ul.embed(texts, backend=model)
        >>> def likeness(a, b):
        ...     return sum(x * y for x, y in zip(a, b))
        >>> likeness(cat, kitten) > likeness(cat, rates)
        True
    """
    asked, chosen = _asked_to_embed(texts, dimensions), _backend_and_timeout(backend, timeout)
    return loop.streams.run(_embedded(*asked, *chosen))


async def embed_async(
    texts: Iterable[str],
    *,
    dimensions: int | None = None,
    backend: Backend | None = None,
    timeout: float | None = None,
) -> list[list[float]]:
    """Returns the embedding of each text, in order, as `embed` does, on the caller's event loop.

    Args:
        texts: none of them empty.
        dimensions: keeps the first so many numbers, for models that are trained for it; None keeps all.
        backend: as of `embed`; None is the default backend.
        timeout: seconds for all texts; None sets no limit.

    Raises:
        UmbelError: as `embed` raises.

    Examples:
        >>> import asyncio
        >>> texts = ["The cat sleeps.", "Interest rates rose."]
        >>> with ul.Runtime() as model:
        ...     vectors = asyncio.run(ul.embed_async(texts, backend=model))
        >>> [len(vector) for vector in vectors]
        [640, 640]
    """
    asked, chosen = _asked_to_embed(texts, dimensions), _backend_and_timeout(backend, timeout)
    return await _embedded(*asked, *chosen)


def rerank(
    query: str,
    texts: Iterable[str],
    *,
    top: int | None = None,
    instruction: str | None = None,
    template: str | None = None,
    backend: Backend | None = None,
    timeout: float | None = None,
) -> list[RankedText]:
    """Returns texts by their relevance to a query, the most relevant first; of equal ones the earlier first. Blocks.

    Takes a reranker: a classifier with one or two labels, or a model whose checkpoint names the tokens it answers with.

    Args:
        query: the question to which they are to be relevant.
        texts: none of them empty.
        top: how many are returned; None returns all.
        instruction: what "relevant" means here, for models that are told it; None leaves it as it was in training.
        template: the prompt, with {query} and {text} in it, and {instruction} if one is given. Names of control tokens
            in it become these tokens, those in query and texts do not. None takes the model's chat template, which then
            knows the roles "query" and "document".
        backend: a Runtime, or the RuntimeEndpoint of a server of umbel; None is the default backend.
        timeout: seconds for all texts; None sets no limit.

    Raises:
        CapabilityError: the model is no reranker.
        ContextLengthError: a text is too long.
        ParameterError: an empty list or text, or a wrong template.
        TemplateError: no template is given, and the model's own knows no queries and documents.

    Examples:
        The oracle is a model for tests, whose scores are hashes. Write "Qwen/Qwen3-Reranker-0.6B", say, which also
        needs no template.

        >>> texts = ["Rome has seven hills.", "Venice sinks by two millimetres a year."]
        >>> pair = "Question: {query} Text: {text} Relevant:"
        >>> with ul.Runtime("oracle") as model:
        ...     best = ul.rerank("Which city is sinking?", texts, top=1, template=pair, backend=model)
        >>> print(best[0].index, best[0].text)
        1 Venice sinks by two millimetres a year.
    """
    asked = _asked_to_rank(query, texts, top, instruction, template)
    chosen = _backend_and_timeout(backend, timeout)
    return loop.streams.run(_ranked(*asked, *chosen))


async def rerank_async(
    query: str,
    texts: Iterable[str],
    *,
    top: int | None = None,
    instruction: str | None = None,
    template: str | None = None,
    backend: Backend | None = None,
    timeout: float | None = None,
) -> list[RankedText]:
    """Returns texts by their relevance to a query, as `rerank` does, on the caller's event loop.

    Args:
        query: the question to which they are to be relevant.
        texts: none of them empty.
        top: how many are returned; None returns all.
        instruction: as of `rerank`.
        template: as of `rerank`.
        backend: as of `rerank`; None is the default backend.
        timeout: seconds for all texts; None sets no limit.

    Raises:
        UmbelError: as `rerank` raises.

    Examples:
        The oracle is a model for tests, as in the example of `rerank`.

        >>> import asyncio
        >>> texts = ["Rome has seven hills.", "Venice sinks by two millimetres a year."]
        >>> pair = "Question: {query} Text: {text} Relevant:"
        >>> async def order(query):
        ...     ranked = await ul.rerank_async(query, texts, template=pair, backend=model)
        ...     return [each.index for each in ranked]
        >>> with ul.Runtime("oracle") as model:
        ...     asyncio.run(order("Which city is sinking?"))
        [1, 0]
    """
    asked = _asked_to_rank(query, texts, top, instruction, template)
    chosen = _backend_and_timeout(backend, timeout)
    return await _ranked(*asked, *chosen)


# -------------------------------------------------------------------------------- what is asked


def _asked_to_embed(texts: object, dimensions: object) -> tuple[tuple[str, ...], int]:
    not_while_recording("embed()", "call it outside of the program, and pass the vectors as an argument")
    if dimensions is not None:
        dimensions = checks.integer("dimensions", dimensions, 1, MOST_DIMENSIONS)
    return _checked_texts(texts), dimensions if isinstance(dimensions, int) else 0


def _asked_to_rank(
    query: object, texts: object, top: object, instruction: object, template: object
) -> tuple[str, tuple[str, ...], int | None, str | None, str | None]:
    not_while_recording("rerank()", "call it outside of the program, and pass its texts as an argument")
    asked = checks.text("query", query, MOST_CHARACTERS)
    most = None if top is None else checks.integer("top", top, 1, MOST_TEXTS)
    told, written = (
        None if given is None else checks.text(name, given, MOST_CHARACTERS)
        for name, given in (("instruction", instruction), ("template", template))
    )
    return asked, _checked_texts(texts), most, told, written


def _checked_texts(texts: object) -> tuple[str, ...]:
    listed = checks.members("texts", texts, MOST_TEXTS, "a list of strings; write [text] for one")
    if not listed:
        raise ParameterError("texts is empty; give at least one")
    return tuple(checks.text(f"texts[{index}]", text, MOST_CHARACTERS) for index, text in enumerate(listed))


def _backend_and_timeout(backend: object, timeout: object) -> tuple[Backend, float | None]:
    return chosen_backend(backend), None if timeout is None else checks.seconds("timeout", timeout)


# -------------------------------------------------------------------------------- how


async def _embedded(
    texts: Sequence[str], dimensions: int, backend: Backend, timeout: float | None
) -> list[list[float]]:
    await backend.start()
    vectors, _ = await embedded(backend, [(Text(text),) for text in texts], Origin(timeout=timeout), dimensions)
    return [floats_of(vector) for vector in vectors]


async def _ranked(
    query: str,
    texts: Sequence[str],
    top: int | None,
    instruction: str | None,
    template: str | None,
    backend: Backend,
    timeout: float | None,
) -> list[RankedText]:
    await backend.start()
    ranked, _ = await ranked_by(backend, query, texts, Origin(timeout=timeout), instruction, template)
    return ranked[:top]


async def embedded(
    backend: Backend, texts: Sequence[tuple[Part, ...]], origin: Origin, dimensions: int = 0
) -> tuple[list[bytes], Usage]:
    """Returns the vectors of texts, as `Embedded` has them, and what they cost. Raises as `embed`."""
    if not backend.capabilities.embeds or not isinstance(backend, Embedding):
        raise CapabilityError(
            f"{backend.capabilities.name} makes no embeddings; give backend= a Runtime with an embedding model, or "
            "ul.OpenAI('text-embedding-3-small')"
        )

    async def one(given: Sequence[tuple[Part, ...]], first: int, left: Origin) -> tuple[Sequence[bytes], Usage]:
        answer = await backend.embed(EmbedRequest(_label(), tuple(given), dimensions, left, first))
        return answer.vectors, answer.usage

    return await _together(texts, origin, one)


async def ranked_by(
    backend: Backend,
    query: str,
    texts: Sequence[str],
    origin: Origin,
    instruction: str | None = None,
    template: str | None = None,
) -> tuple[list[RankedText], Usage]:
    """Returns texts in the order of `rerank`, and what they cost. Raises as `rerank`."""
    if not backend.capabilities.ranks or not isinstance(backend, Ranking):
        raise CapabilityError(
            f"{backend.capabilities.name} is no reranker; give backend= a Runtime with one, such as "
            "ul.Runtime('Qwen/Qwen3-Reranker-0.6B') or a *ForSequenceClassification checkpoint with 1 or 2 labels"
        )
    write = await _writer(query, instruction, template, backend.chat_template)

    async def one(given: Sequence[tuple[Part, ...]], first: int, left: Origin) -> tuple[Sequence[float], Usage]:
        answer = await backend.rank(RankRequest(_label(), tuple(given), left, first))
        return answer.scores, answer.usage

    scores, usage = await _together([write(text) for text in texts], origin, one)
    ranked = [RankedText(index, score, text) for index, (score, text) in enumerate(zip(scores, texts, strict=True))]
    return sorted(ranked, key=lambda each: (-each.score, each.index)), usage


async def _writer(
    query: str, instruction: str | None, template: str | None, chat: ChatTemplate
) -> Callable[[str], tuple[Part, ...]]:
    """Returns the function that writes a text and the query as a prompt. Raises ParameterError for a wrong template."""
    if template is None:
        await chat.away(chat.pair, query, "", instruction)  # rendered once, perhaps in another process
        return lambda text: chat.pair(query, text, instruction)
    pieces = _FIELD.split(template)  # scaffolding, and names of fields between
    fields = {"query": query, **({} if instruction is None else {"instruction": instruction})}
    if set(pieces[1::2]) != {*fields, "text"}:
        wanted = " and ".join(f"{{{name}}}" for name in (*fields, "text"))
        raise ParameterError(f"template={shown(template)} must hold {wanted}, as the arguments are given")
    return lambda text: tuple(
        Text(fields.get(piece, text)) if place % 2 else Text(piece, control=True)
        for place, piece in enumerate(pieces)
        if piece
    )


async def _together(
    texts: Sequence[tuple[Part, ...]],
    origin: Origin,
    ask: Callable[[Sequence[tuple[Part, ...]], int, Origin], Awaitable[tuple[Sequence[Answer], Usage]]],
) -> tuple[list[Answer], Usage]:
    """Asks for texts in requests of a few → the answers, in order. A failure cancels the others.

    `AT_ONCE` requests are under way together. One that waits for its turn has the seconds that are left then.
    """
    clock, slots = asyncio.get_running_loop().time, asyncio.Semaphore(AT_ONCE)
    end = None if origin.timeout is None else clock() + origin.timeout

    async def within(some: Sequence[tuple[Part, ...]], first: int) -> tuple[Sequence[Answer], Usage]:
        waits = slots.locked()
        async with slots:
            if end is None or not waits:
                return await ask(some, first, origin)
            left = msgspec.structs.replace(origin, timeout=max(end - clock(), LEAST_SECONDS))
            return await ask(some, first, left)

    tasks = [asyncio.ensure_future(within(some, first)) for first, some in _parted(texts)]
    try:
        answered = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return [answer for answers, _ in answered for answer in answers], sum((usage for _, usage in answered), Usage())


def _parted(texts: Sequence[tuple[Part, ...]]) -> Iterator[tuple[int, Sequence[tuple[Part, ...]]]]:
    """Divides texts into requests, bounded by number and by characters → the place of the first text, and the texts."""
    first = characters = 0
    for index, text in enumerate(texts):
        size = sum(len(part.text) for part in text if isinstance(part, Text))
        if index > first and (index - first == TOGETHER or characters + size > CHARACTERS_TOGETHER):
            yield first, texts[first:index]
            first, characters = index, 0
        characters += size
    yield first, texts[first:]


def _label() -> str:
    return f"texts-{next(_numbers)}"
