"""`/runtime`: the messages of the runtime over HTTP, for `umbel.RuntimeEndpoint`.

    GET  /runtime    what the client needs before its first message: capabilities, template, vocabulary
    POST /runtime    {"message": MESSAGE} ─▶ a stream of {"message": MESSAGE}, the last of which is the ending

A message is one of `lang/protocol.py` or `lang/programs.py`, as base64 of msgpack: JSON has neither bytes nor
infinities, and what comes out has to be what went in. So prompts keep their parts, constraints their options, errors
their class, and a whole program is one request. Salt and rights are those of the caller, whatever a message says; what
shows or changes the work of all callers takes the admin key.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, assert_never

import msgspec

from ...lang import __version__
from ...lang.errors import CapabilityError, ParameterError, UmbelError
from ...lang.programs import ProgramEnded, ProgramRunner, RunProgram
from ...lang.protocol import (
    CacheRequest,
    Capabilities,
    Control,
    CreateCache,
    DeleteCache,
    Detokenize,
    Embedding,
    EmbedRequest,
    ExtendCache,
    Failure,
    Final,
    GenRequest,
    Hint,
    Locate,
    Locating,
    Pinning,
    Ranking,
    RankRequest,
    ReadCaches,
    ReadStatus,
    Release,
    Scored,
    ScoreRequest,
    StatusRead,
    Survey,
    Surveyed,
    Tokenize,
    VocabularyInfo,
)
from ...lang.status import Observable
from ..access import Caller
from ..bodies import Body, wrong
from ..front import Front
from ..http import DONE, EVENTS, Asked, Endpoint, EventStream, Reply, sse
from ..limits import MAX_TTL, check_constraint
from ..openai.chat import ask_caches
from ..tokens import tokenizing
from .runtime import SERVER_NAME, hint_id

Question = (
    GenRequest
    | ScoreRequest
    | EmbedRequest
    | RankRequest
    | CacheRequest
    | Locate
    | Tokenize
    | Detokenize
    | Control
    | ReadStatus
    | Survey
    | RunProgram
    | Hint
    | Release
)

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Question)


class RuntimeFacts(msgspec.Struct, frozen=True):
    """The runtime, as a client of its messages needs to know it. Messages are understood by the same version only.

    Attributes:
        chat_template: Jinja source; null for our plain one. `template_options`: its extra variables.
    """

    server: str
    version: str
    model: str
    capabilities: Capabilities
    vocabulary: VocabularyInfo
    chat_template: str | None
    template_tokens: dict[str, str]
    template_options: dict[str, Any]  # Any: JSON


class MessageBody(Body, frozen=True):
    """One message to the runtime: base64 of msgpack."""

    told_as = {"prompt": "message"}

    message: bytes


async def facts(asked: Asked[None]) -> Reply:
    """Describes the runtime."""
    front = asked.front
    front.check_open()
    template = front.template
    return Reply(
        RuntimeFacts(
            server=SERVER_NAME,
            version=__version__,
            model=front.models[0].name,
            capabilities=front.backend.capabilities,
            vocabulary=tokenizing(front).vocabulary,
            chat_template=template.source,
            template_tokens=template.tokens,
            template_options=template.options,
        )
    )


async def message(asked: Asked[MessageBody]) -> EventStream:
    """Answers one message."""
    try:
        question = read_question(asked.body.message)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
        raise wrong("message", f"it is no message of umbel {__version__}: {error}") from None
    return EventStream(_events(asked, question))


def read_question(data: bytes) -> Question:
    """Reads a message of a client. Raises msgspec.DecodeError, ValueError, RecursionError or MemoryError."""
    question: Question = _decoder.decode(data)
    return question


async def _events(asked: Asked[MessageBody], question: Question) -> AsyncGenerator[bytes, None]:
    """Yields the answers under the label of the client; an error of umbel is one of them, and keeps its class.

    Within the runtime the question has an id of its own: labels of different clients may be equal."""
    front, label = asked.front, question.id
    with front.open(_places(question)):
        try:
            async with aclosing(_answers(front, asked.caller, asked.id, question)) as answers:
                async for answer in answers:
                    yield _event(_without_load(msgspec.structs.replace(answer, id=label)))
        except UmbelError as error:
            yield _event(Failure(label, type(error).__name__, str(error)))
    yield DONE


def _places(question: Question) -> int:
    """Returns how many of the requests that run or wait a question counts for. A look at the state is none of them."""
    match question:
        case GenRequest(sampling=sampling):
            return sampling.n
        case ScoreRequest(choices=choices):
            return len(choices)
        case EmbedRequest(texts=texts) | RankRequest(prompts=texts):
            return len(texts)
        case ReadStatus():
            return 0
        case _:
            return 1


def _without_load(answer: msgspec.Struct) -> msgspec.Struct:
    """Returns an answer whose place is explained without the load of other callers."""
    if not isinstance(answer, Final | Scored) or answer.placed is None:
        return answer
    reason = f"{answer.placed.kind.words}; {answer.placed.cached} tokens cached there"
    return msgspec.structs.replace(answer, placed=msgspec.structs.replace(answer.placed, reason=reason))


def _event(answer: msgspec.Struct) -> bytes:
    return sse(MessageBody(message=_encode(answer)))


async def _answers(front: Front, caller: Caller, id: str, question: Question) -> AsyncGenerator[Any, None]:
    """Yields the answers to a question, structs with an id; none to a hint."""
    backend = front.backend
    match question:
        case GenRequest():
            request = _owned(front, caller, _within_limits(front, question), id)
            async with aclosing(front.events([request])) as events:
                async for _, event in events:
                    yield event
        case RunProgram():
            if not isinstance(backend, ProgramRunner):
                raise CapabilityError(f"{backend.capabilities.name} runs no programs itself; write server=False")
            async with aclosing(backend.run_program(_owned(front, caller, question, id))) as program:
                async for piece in program:
                    if isinstance(piece, ProgramEnded):
                        front.note(piece.usage)
                    yield piece
        case ScoreRequest():
            scored = await backend.score(_owned(front, caller, _within_limits(front, question), id))
            front.note(scored.usage)
            yield scored
        case EmbedRequest():
            if not isinstance(backend, Embedding):
                raise CapabilityError(f"{backend.capabilities.name} makes no embeddings")
            embedded = await backend.embed(_owned(front, caller, question, id))
            front.note(embedded.usage)
            yield embedded
        case RankRequest():
            if not isinstance(backend, Ranking):
                raise CapabilityError(f"{backend.capabilities.name} is no reranker")
            ranked = await backend.rank(_owned(front, caller, question, id))
            front.note(ranked.usage)
            yield ranked
        case CreateCache() | ReadCaches() | ExtendCache() | DeleteCache():
            found = await ask_caches(front, _owned(front, caller, _within_limits(front, question), id))
            if isinstance(question, CreateCache):
                front.note(found.usage)
            yield found
        case Locate():
            if not isinstance(backend, Locating):
                raise CapabilityError(f"{backend.capabilities.name} does not tell where tokens are")
            yield await backend.locate(_owned(front, caller, question, id))
        case Tokenize():
            yield await tokenizing(front).tokenize(_owned(front, caller, question, id))
        case Detokenize():
            yield await tokenizing(front).detokenize(msgspec.structs.replace(question, id=id))
        case Control():
            _check_admin(caller, repr(question.verb[:40]))
            yield await backend.control(question.verb)
        case ReadStatus():
            yield StatusRead(id, await _observed(front, caller, "the status").status())
        case Survey(most=most, text=text):
            yield Surveyed(id, await _observed(front, caller, "the radix tree").survey(most, text))
        case Hint():
            _check_seconds("pin", question.pin)
            backend.hint(_owned(front, caller, question, hint_id(caller.name, question.id)))
        case Release():
            if isinstance(backend, Pinning):
                backend.release(hint_id(caller.name, question.id))
        case _:
            assert_never(question)


def _check_admin(caller: Caller, what: str) -> None:
    if not caller.admin:
        raise CapabilityError(f"{what} takes the admin key of the server")


def _observed(front: Front, caller: Caller, what: str) -> Observable:
    """Returns the backend, for a question that shows all callers. Raises CapabilityError for any but the admin."""
    _check_admin(caller, f"{what}, which shows all callers,")
    backend = front.backend
    if not isinstance(backend, Observable):
        raise CapabilityError(f"{backend.capabilities.name} does not show {what}")
    return backend


def _check_seconds(name: str, seconds: float | None) -> None:
    if seconds is not None and seconds > MAX_TTL:
        raise ParameterError(f"{name}={seconds:g} is too long; write at most {MAX_TTL:g} seconds")


# Any: the type of the question
def _within_limits(front: Front, question: Any) -> Any:
    """Returns the question with no smaller minimum than the server's. Raises ParameterError for a TTL or a constraint
    that is too long."""
    least = front.limits.cache_minimum
    if isinstance(question, GenRequest) and question.constraint is not None:
        check_constraint("constraint.source", question.constraint)
    match question:
        case GenRequest(caching=caching) | ScoreRequest(caching=caching) if caching is not None:
            for mark in caching.marks:
                _check_seconds("cache_point ttl", mark.ttl)
            caching = msgspec.structs.replace(caching, minimum=max(caching.minimum, least))
            return msgspec.structs.replace(question, caching=caching)
        case CreateCache(ttl=ttl, minimum=minimum):
            _check_seconds("ttl", ttl)
            return msgspec.structs.replace(question, minimum=max(minimum, least))
        case ExtendCache(ttl=ttl):
            _check_seconds("ttl", ttl)
    return question


# Any: the type of the question, which is one with an origin
def _owned(front: Front, caller: Caller, question: Any, id: str) -> Any:
    """Returns the question with an id of this server, in the caller's part of the cache."""
    salt = front.access.salt(caller, question.origin.salt or None)
    return msgspec.structs.replace(question, id=id, origin=msgspec.structs.replace(question.origin, salt=salt))


ENDPOINTS = (
    Endpoint(
        "GET",
        "/runtime",
        facts,
        "Describe the runtime to a client of its messages",
        answer=RuntimeFacts,
        errors=(503,),
    ),
    Endpoint("POST", "/runtime", message, "Send the runtime a message", body=MessageBody, media=(EVENTS,)),
)
