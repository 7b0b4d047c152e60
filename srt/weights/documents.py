"""Reads the documents of a model next to its weights: configuration, tokenizer, chat template.

    FolderDocuments    files of a safetensors folder
    GgufDocuments      made from the metadata of a GGUF file, in memory

Making tokenizer.json from a GGUF's metadata takes seconds for a large vocabulary, so it is kept in the cache folder,
under the digest of the metadata. It is the only one that is kept.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ...lang.errors import ModelError
from ..core.cache_folder import keep, read_trusted
from ..tokenizer.rerankers import RERANK
from .catalog.mistaken_files import BEGINNING, beginning_of, mistaken_for
from .gguf_config import pooling_of
from .gguf_file import GgufFile
from .gguf_tokenizer import tokenizer_config, tokenizer_json

TOKENIZER_FORMAT = 2  # of the tokenizer.json that is made; raised when it would be made differently
DIGEST_BYTES = 32
MOST_README = 1 << 16  # bytes of it that are read
_POOLED = json.dumps(
    [
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Normalize"},  # as llama.cpp does
    ]
)


class Documents(Protocol):
    """The documents of a model.

    Attributes:
        path: its folder or file, for messages.
        title: the name that its makers have given it; "": none.
        tokenizer_path: the file that the tokenizer is read from, for messages.
    """

    path: Path

    @property
    def title(self) -> str: ...

    @property
    def tokenizer_path(self) -> Path: ...

    def read(self, name: str) -> dict[str, Any]:  # Any: JSON
        """Returns a JSON object by its file name; {} when there is none. Raises ModelError for other JSON."""

    def text(self, name: str) -> str | None:
        """Returns a text by its file name; None when there is none."""

    def tokenizer(self) -> bytes:
        """Returns the content of tokenizer.json."""

    def tokenizer_digest(self) -> str:
        """Returns a digest that changes with tokenizer.json, hexadecimal."""


class FolderDocuments:
    """Implements `Documents` for a folder as it is downloaded."""

    def __init__(self, folder: Path) -> None:
        self.path = folder

    @property
    def title(self) -> str:
        """The first heading of README.md."""
        try:
            with (self.path / "README.md").open("rb") as file:
                lines = file.read(MOST_README).decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    def read(self, name: str) -> dict[str, Any]:
        return read_config(self.path / name)

    def text(self, name: str) -> str | None:
        path = self.path / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def tokenizer(self) -> bytes:
        try:
            content = self.tokenizer_path.read_bytes()
        except OSError as error:
            raise ModelError(
                f"{self.path} has no readable tokenizer.json ({error.strerror}); download it from the model's page"
            ) from error
        if (what := mistaken_for(content[:BEGINNING])) is not None:
            raise ModelError(f"{self.tokenizer_path} is {what}")
        return content

    def tokenizer_digest(self) -> str:
        return sha256(self.tokenizer()).hexdigest()


class GgufDocuments:
    """Implements `Documents` for a GGUF file.

    Args:
        cache: the cache folder, which keeps tokenizer.json.
    """

    def __init__(self, gguf: GgufFile, cache: Path) -> None:
        self.path = gguf.path
        self._gguf = gguf
        self._kept = cache / "tokenizers" / self.tokenizer_digest()

    @property
    def title(self) -> str:
        stated = (self._gguf.metadata.get(f"general.{key}") for key in ("name", "basename"))
        return " ".join(text for text in stated if isinstance(text, str))

    @property
    def tokenizer_path(self) -> Path:
        return self.path

    def read(self, name: str) -> dict[str, Any]:
        match name:
            case "tokenizer_config.json":
                return tokenizer_config(self._gguf)
            case "1_Pooling/config.json":
                return {"pooling_mode": pooling_of(self._gguf)}
            case _:
                return {}

    def text(self, name: str) -> str | None:
        return _POOLED if name == "modules.json" and pooling_of(self._gguf) is not None else None

    def tokenizer(self) -> bytes:
        with contextlib.suppress(OSError, ModelError):  # missing or not trusted: it is made, and replaced
            content = read_trusted(self._kept)
            if sha256(content[DIGEST_BYTES:]).digest() == content[:DIGEST_BYTES]:
                return content[DIGEST_BYTES:]
        content = msgspec.json.encode(tokenizer_json(self._gguf))
        keep(self._kept, sha256(content).digest() + content)
        return content

    def tokenizer_digest(self) -> str:
        return sha256(f"{TOKENIZER_FORMAT}/{self._gguf.digest}".encode()).hexdigest()


def read_config(path: Path) -> dict[str, Any]:  # Any: JSON
    """Reads a JSON object of a model folder; {} if the file does not exist. Raises ModelError if it is no object."""
    try:
        content = json.loads(path.read_bytes(), object_hook=_tagged_number)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        what = mistaken_for(beginning_of(path))
        if what is None:
            raise ModelError(f"{path} cannot be read as JSON ({error}); download it again") from error
        raise ModelError(f"{path} is {what}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a JSON object; download it again")
    return content


def _tagged_number(value: dict[str, Any]) -> object:  # Any: JSON
    """Returns the number that transformers writes as {"__float__": "Infinity"}, or the object as it is."""
    tag = value.get("__float__")
    return float(tag) if len(value) == 1 and tag in ("Infinity", "-Infinity", "NaN") else value


def chat_template_of(config: Mapping[str, Any], documents: Documents) -> str | None:
    """Returns the template in chat_template.jinja, else in tokenizer_config.json, else in chat_template.json.

    Of several templates it is the one named "default". A GGUF file may have that of a reranker alone.

    Raises:
        ModelError: there are several and none is the default.
    """
    separate = documents.text("chat_template.jinja")
    if separate is not None:
        return separate
    stated = config.get("chat_template") or documents.read("chat_template.json").get("chat_template")
    if isinstance(stated, list):
        named = named_templates(stated)
        stated = named.get("default")
        if stated is None and list(named) != [RERANK]:
            raise ModelError(f"{documents.path} has chat templates named {sorted(named)}, but none named 'default'")
    return stated if isinstance(stated, str) else None


def named_templates(stated: object) -> dict[str, str]:
    """Returns the templates of a list as tokenizer_config.json has it, by name; {} for anything else."""
    entries: Iterable[object] = stated if isinstance(stated, list) else ()
    return {
        str(entry.get("name")): entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("template"), str)
    }
