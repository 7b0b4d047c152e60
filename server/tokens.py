"""Checks and spells token ids for all dialects."""

from collections.abc import Mapping, Sequence

from ..lang.errors import CapabilityError
from ..lang.protocol import Tokenizing
from .bodies import wrong
from .front import Front


def tokenizing(front: Front) -> Tokenizing:
    """Returns the backend, which knows its tokens. Raises CapabilityError for one that does not."""
    backend = front.backend
    if not isinstance(backend, Tokenizing):
        raise CapabilityError(f"{backend.capabilities.name} gives no token ids; send text")
    return backend


def check_ids(front: Front, name: str, token_ids: Sequence[int]) -> None:
    """Raises HttpError, for the field `name`, for an id outside of the vocabulary."""
    size = tokenizing(front).vocabulary.size
    highest = max(token_ids, default=0)
    if highest >= size:
        raise wrong(name, f"token {highest} is outside the vocabulary; write 0 to {size - 1}")


def spelled(token_id: int, text: str, data: bytes, names: Mapping[int, str]) -> str:
    r"""Spells a token so that two of them have two spellings.

    A control token has its name; one that holds a part of a character has its bytes, as OpenAI writes them:
    "bytes:\xc3".
    """
    if not data:
        return names.get(token_id, text)
    if "\ufffd" in text and text.encode() != data:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text
