"""Routes about the runtime: hints, aborts, the cache, and facts under the names that SGLang's clients and gateways ask
for."""

from typing import Annotated, Literal

import msgspec

from ...lang import __version__
from ...lang.errors import CapabilityError
from ...lang.protocol import Hint, Pinning
from ...lang.status import Observable
from ..activity import COLUMNS
from ..bodies import Json, Label, UmbelBody, wrong
from ..front import Front
from ..http import Asked, Endpoint, Reply
from ..limits import MAX_TTL
from .fields import PromptFields, check_model, warn_of_umbel

SERVER_NAME = "umbel"
WEIGHTS = "default"  # their only version: they are loaded once


HintName = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]  # with a caller's name it is an id of the runtime


class HintBody(PromptFields, frozen=True):
    """Says that this prefix will be needed by several requests soon: it is computed once, ahead of them.

    Attributes:
        id: the caller's name for it, to release its pin.
        pin: seconds after its last use for which it is kept in the cache. It gives way to a request without room.
    """

    id: HintName | None = None
    pin: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL)] | None = None


class HintAnswer(msgspec.Struct, frozen=True):
    """The name by which `DELETE /hints/NAME` ends a pin."""

    id: str


class AbortBody(UmbelBody, frozen=True):
    """Names a request of this caller: the `rid` of its /generate, or its id in `meta_info`."""

    rid: Label
    abort_all: Literal[False] | None = None


class AbortAnswer(msgspec.Struct, frozen=True):
    """Counts the requests that were in flight under this name. Their answers have the texts so far."""

    aborted: int


class ModelInfo(msgspec.Struct, frozen=True):
    """The model, as SGLang's clients ask for it.

    Attributes:
        chat_template: its Jinja source; null for our plain one.
        template_tokens: variables of the template, such as bos_token.
    """

    model_path: str
    tokenizer_path: str
    is_generation: bool
    has_image_understanding: bool
    has_audio_understanding: bool
    preferred_sampling_params: None
    weight_version: str
    context_length: int | None
    chat_template: str | None
    template_tokens: dict[str, str]


async def hint(asked: Asked[HintBody]) -> Reply:
    """Computes a prefix ahead."""
    body, front = asked.body, asked.front
    check_model(front, body.model)
    capabilities = front.backend.capabilities
    if not capabilities.hint:
        raise CapabilityError(f"{capabilities.name} takes no hints")
    if body.pin is not None and not capabilities.pins:
        raise wrong("pin", f"{capabilities.name} pins nothing; leave it out")
    name = body.id or asked.id
    origin = front.origin(asked.caller, body.umbel, body.cache_salt, body.model)
    front.backend.hint(Hint(hint_id(asked.caller.name, name), body.prompt(front), origin, body.pin))
    return Reply(HintAnswer(name))


async def release(asked: Asked[None]) -> Reply:
    """Ends the pin of a hint."""
    asked.front.check_alone("a pin ends with its seconds; leave the release out")
    backend = asked.front.backend
    if not isinstance(backend, Pinning):
        raise CapabilityError(f"{backend.capabilities.name} pins nothing")
    backend.release(hint_id(asked.caller.name, asked.path["name"]))
    return Reply(HintAnswer(asked.path["name"]))


def hint_id(caller: str, name: str) -> str:
    """Returns an id that no other caller's hint has: a caller's name has no slash."""
    return f"{caller}/{name}"


async def abort(asked: Asked[AbortBody]) -> Reply:
    """Ends requests early."""
    asked.front.check_alone("a client that hangs up ends its request")
    warn_of_umbel(asked)
    return Reply(AbortAnswer(asked.front.abort(asked.caller, asked.body.rid)))


async def flush_cache(asked: Asked[None]) -> Reply:
    """Drops every cached prefix that no running request uses."""
    asked.front.check_open()
    return Reply((await asked.front.backend.control("flush_cache")).result)


async def server_info(asked: Asked[None]) -> Reply:
    """Describes the server; to the administrator also its load and its counters, which show other callers' use."""
    front = asked.front
    front.check_open()
    names = [model.name for model in front.models]
    capabilities = front.backend.capabilities
    facts: Json = {
        "server": SERVER_NAME,
        "version": __version__,
        "model_id": names[0],
        "model_path": names[0],
        "served_model_name": names[0],
        "tp_size": 1,
        "dp_size": 1,
        "context_length": capabilities.max_context,
        "max_running_requests": front.limits.most_in_flight,
        "weight_version": WEIGHTS,
        "is_embedding": False,
        "enable_deterministic_inference": True,  # a sampling_seed is always obeyed
        "incremental_streaming_output": False,
    }
    if asked.caller.admin:
        facts |= {f"http_{name}": front.counts.total(name) for name in COLUMNS} | await _load(front)
    return Reply(facts)


async def _load(front: Front) -> Json:
    backend = front.backend
    if not isinstance(backend, Observable):
        return {}
    status = await backend.status()
    pool = status.pool
    return {
        **{name: int(count) if count == int(count) else count for name, count in status.counters.items()},
        "max_total_tokens": pool.total,
        **{f"pool_{name}": getattr(pool, name) for name in ("free", "cached", "pinned", "pins")},
        "in_flight": status.in_flight,
        "running": status.running,
        "waiting": status.waiting,
        "engine": status.engine.value,
    }


async def model_info(asked: Asked[None]) -> Reply:
    """Describes the model."""
    front = asked.front
    front.check_open()
    name, capabilities = front.models[0].name, front.backend.capabilities
    return Reply(
        ModelInfo(
            model_path=name,
            tokenizer_path=name,
            is_generation=True,
            has_image_understanding=capabilities.images,
            has_audio_understanding=False,
            preferred_sampling_params=None,
            weight_version=WEIGHTS,
            context_length=capabilities.max_context,
            chat_template=front.template.source,
            template_tokens=dict(front.template.tokens),
        )
    )


_NO_ABORT_ALL = {"abort_all": "requests are aborted by their rid; a client that hangs up aborts its own"}

ENDPOINTS = (
    Endpoint("POST", "/hints", hint, "Compute a prefix ahead", body=HintBody, answer=HintAnswer, errors=(404,)),
    Endpoint("DELETE", "/hints/{name}", release, "End the pin of a hint", answer=HintAnswer, errors=(400,)),
    *(
        Endpoint(
            "POST", path, abort, "End a request early", body=AbortBody, answer=AbortAnswer, not_offered=_NO_ABORT_ALL
        )
        for path in ("/abort", "/abort_request")
    ),
    Endpoint("POST", "/flush_cache", flush_cache, "Drop cached prefixes", answer=Json, errors=(503,), admin=True),
    *(
        Endpoint("GET", path, server_info, "Describe the server", answer=Json, errors=(503,))
        for path in ("/server_info", "/get_server_info")
    ),
    *(
        Endpoint("GET", path, model_info, "Describe the model", answer=ModelInfo, errors=(503,))
        for path in ("/model_info", "/get_model_info")
    ),
)
