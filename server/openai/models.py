"""`GET /v1/models`: one answer for the clients of OpenAI, of Anthropic, and for gateways that look for a server."""

import datetime

import msgspec

from ..front import Front, ServedModel
from ..http import Asked, Endpoint, Reply


class ModelFacts(msgspec.Struct, frozen=True):
    """Further facts of a model.

    Attributes:
        template: "model" for the model's own chat template, "plain" where it has none: roles are written as lines then.
        program: the program that answers; "" for the model itself.
        adapter: the adapter that computes its requests; "" for the model as it is.
        images: whether it looks at pictures.
    """

    template: str
    program: str = ""
    adapter: str = ""
    images: bool = False


class ModelEntry(msgspec.Struct, frozen=True):
    """One model, with the fields that both clients require. `parent`: the model that an adapter changes."""

    id: str
    object: str
    created: int
    owned_by: str
    type: str
    display_name: str
    created_at: str
    lifecycle: str
    max_model_len: int | None
    max_input_tokens: int | None
    max_tokens: int | None
    umbel: ModelFacts
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    """The models that are served; they all fit on one page."""

    data: list[ModelEntry]
    object: str = "list"
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


def _entry(front: Front, model: ServedModel) -> ModelEntry:
    capabilities = front.backend.capabilities
    context = capabilities.max_context
    return ModelEntry(
        id=model.name,
        object="model",
        created=model.created,
        owned_by="umbel",
        type="model",
        display_name=model.name,
        created_at=datetime.datetime.fromtimestamp(model.created, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        lifecycle="active",
        max_model_len=context,
        max_input_tokens=context,
        max_tokens=context,
        umbel=ModelFacts(
            template="plain" if front.template.source is None else "model",
            program=model.program,
            adapter=model.adapter,
            images=capabilities.images,
        ),
        parent=front.models[0].name if model.adapter else None,
    )


async def list_models(asked: Asked[None]) -> Reply:
    """Lists the models."""
    asked.front.check_open()
    entries = [_entry(asked.front, model) for model in asked.front.models]
    return Reply(ModelList(entries, first_id=entries[0].id, last_id=entries[-1].id))


async def read_model(asked: Asked[None]) -> Reply:
    """Returns one model."""
    asked.front.check_open()
    return Reply(_entry(asked.front, asked.front.model(asked.path["model"])))


ENDPOINTS = (
    Endpoint("GET", "/v1/models", list_models, "List the models", answer=ModelList, errors=(503,)),
    Endpoint("GET", "/v1/models/{model:path}", read_model, "Describe one model", answer=ModelEntry, errors=(404, 503)),
)
