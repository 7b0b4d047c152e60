"""The list of models of a server, which costs nothing: what is wrong shows before money is spent."""

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from .....lang.errors import RequestError
from ..failures import Provider

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_NO_LIST = (403, 404, 405, 501)  # a key may be allowed to use models and not to list them
_MOST_NAMED = 8


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class _List(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Models:
    """What a server says of itself. `server`: its header of that name."""

    models: tuple[_Model, ...]
    server: str

    def check(self, model: str, provider: Provider) -> None:
        """Raises RequestError when the server has no such model."""
        names = [each.id for each in self.models]
        if model in names:
            return
        near = difflib.get_close_matches(model, names, n=_MOST_NAMED, cutoff=0.4) or sorted(names)[:_MOST_NAMED]
        written = ", ".join(repr(name) for name in near) or "none at all"
        more = f" and {len(names) - len(near)} more" if len(names) > len(near) else ""
        raise RequestError(f"{provider.name}: {provider.host} has no model {model!r}; it has {written}{more}")

    def owner_of(self, model: str) -> str:
        return next(each.owned_by for each in self.models if each.id == model)

    def context_of(self, model: str) -> int | None:
        return next(each.max_model_len for each in self.models if each.id == model)


async def listed(client: "AsyncOpenAI", provider: Provider) -> Models | None:
    """Ask for the list. None: the server has none. Raises what the SDK raises, and RequestError for a wrong address."""
    import openai

    from ..transport import http_library

    try:
        response = await client.get("/models", cast_to=http_library(openai).Response)
    except Exception as error:
        if getattr(error, "status_code", None) not in _NO_LIST:
            raise
        return None
    try:
        found = msgspec.json.decode(response.content, type=_List)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = response.headers.get("content-type", "something unknown").split(";")[0]
        raise RequestError(
            f"{provider.name}: {provider.host} answers with {said} where a list of models was asked for; base_url must "
            "be the address of the API, which often ends in /v1"
        ) from None
    return Models(tuple(found.data), response.headers.get("server", ""))
