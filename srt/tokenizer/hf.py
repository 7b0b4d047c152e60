"""Runs a model's tokenizer.json in the `tokenizers` library, as a `Tokenizer` of the runtime.

Three things differ from the library's defaults. Control tokens in plain text stay text: only template
scaffolding may name them. Nothing is added around a text; the prompt encoder adds BOS. And
the space that SentencePiece tokenizers put before a text is put before the first text of a sequence
only, never in the middle of one.
"""

import itertools
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from ...fsm.tokens.vocabulary import Spellings
from ...lang.errors import MissingExtraError, ModelError, ParameterError, RequestError
from .boundaries import find_boundary as boundary_of
from .file import Component, TokenizerFile, adds_bos, closing_token, members_key, unknown_id
from .vocabulary import Vocabulary

LONG_PIECE = 16_384  # characters; they take about 10 ms of CPU time


class Prefix(Enum):
    """The rule for a space before the first text of a sequence."""

    NONE = "none"
    ALWAYS = "always"  # SentencePiece's dummy prefix
    UNLESS_SPACE = "unless the text begins with a space"


class HFTokenizer:
    """Implements `Tokenizer` on the `tokenizers` library.

    Args:
        file: the content of tokenizer.json.
        vocabulary: the bytes of its tokens, at least as many as it has.
        config: the content of tokenizer_config.json; {} when there is none.
        chat_template: Jinja source, or None.
        eos_ids: the tokens that end a text.
        name: for messages.
        path: of tokenizer.json, for messages.
        find_boundary: False leaves `boundary` None, for texts that are never cut; finding it takes 0.25 s.

    Raises:
        ModelError: the library refuses the file.
        MissingExtraError: the library is not installed.
    """

    def __init__(
        self,
        file: TokenizerFile,
        *,
        vocabulary: Vocabulary,
        config: Mapping[str, Any],
        chat_template: str | None,
        eos_ids: Iterable[int],
        name: str,
        path: Path,
        find_boundary: bool = True,
    ) -> None:
        self.name = name
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self.eos_ids = frozenset(eos_ids)
        self.special_ids = {token.content: token.id for token in file.added_tokens if token.special}
        self.template_tokens = template_tokens(config)
        self.chat_template = chat_template
        bos = self.template_tokens.get("bos_token")
        self.bos_id = self.special_ids.get(bos) if bos and adds_bos(file, config, bos) else None
        self.closing_id = self.special_ids.get(closing_token(file, config) or "")
        self._control = frozenset(self.special_ids.values()) - {unknown_id(file, path)}
        bare, self._prefix, self._prefix_text = without_prefix(file)
        self._tokenizer = library_tokenizer(msgspec.json.encode(bare), path)
        self.boundary = boundary_of(bare, vocabulary, self._encode_plain) if find_boundary else None

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Encodes plain text → ids; see `Tokenizer.encode`. Raises ParameterError for text that is not Unicode."""
        if not text:
            return []
        if first and self._takes_prefix(text):
            text = self._prefix_text + text
        try:
            encoding = self._encode(text)
        except (UnicodeEncodeError, TypeError) as error:
            place = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if place is None:
                raise
            raise ParameterError(
                f"the text holds the lone surrogate {text[place]!r} at character {place}; "
                "write text.encode('utf-8', 'replace').decode() to replace it"
            ) from error
        ids: list[int] = encoding.ids
        if self._control.isdisjoint(ids):
            return ids
        return self._encode_defused(text, encoding)

    def _encode_plain(self, text: str) -> list[int]:
        return self.encode(text, first=False)

    def _encode(self, text: str) -> Any:  # tokenizers.Encoding
        """Encodes one piece, as a batch when it is long: the library releases the interpreter lock for batches only.

        A text without any boundary comes in one piece, of megabytes perhaps."""
        if len(text) < LONG_PIECE:
            return self._tokenizer.encode(text, add_special_tokens=False)
        text.encode("utf-8")  # raises for what is not Unicode; the library panics there
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def token_bytes(self, token_id: int) -> bytes:
        return self.vocabulary.token_bytes(token_id)

    def spellings(self) -> Spellings:
        return Spellings(self.vocabulary.blob, self.vocabulary.offsets)

    def _takes_prefix(self, text: str) -> bool:
        match self._prefix:
            case Prefix.NONE:
                return False
            case Prefix.ALWAYS:
                return True
            case Prefix.UNLESS_SPACE:
                return not text.startswith((" ", self._prefix_text))

    def _encode_defused(self, text: str, encoding: Any) -> list[int]:  # Any: tokenizers.Encoding
        """Encodes text again that the model joined into control tokens: cuts inside every such token.

        Some Unigram models list control tokens as pieces."""
        cuts = [0]
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._control:
                if end - start < 2:
                    raise RequestError(
                        f"{self.name} spells {text[start:end]!r} only as a control token; remove it from the text"
                    )
                cuts.append(start + 1)
        cuts.append(len(text))
        ids: list[int] = []
        for start, end in itertools.pairwise(cuts):
            ids.extend(self.encode(text[start:end], first=False))
        return ids


def template_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of `bos_token`, `eos_token`, …; the config writes some as a string and some as an object."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token") and isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    return tokens


# ------------------------------------------------------------------------------------------ how


def library_tokenizer(content: bytes, path: Path) -> Any:  # Any: tokenizers.Tokenizer, a compiled class without types
    """Makes the library's tokenizer from the content of tokenizer.json, whose file is `path`.

    Raises:
        ModelError: the library refuses the content.
        MissingExtraError: the library is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError("tokenizers", "runtime") from error
    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    except BaseException as error:  # plain Exception, and for some files its panic, which is not one
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{path} is refused by the tokenizers library ({error}); download it again") from error
    tokenizer.encode_special_tokens = True  # special tokens in the text are not looked for
    return tokenizer


def without_prefix(file: TokenizerFile) -> tuple[TokenizerFile, Prefix, str]:
    """Removes first space, post-processor, truncation and padding → the file, rule and text of the first space."""
    found: list[tuple[Prefix, str]] = []
    bare = msgspec.structs.replace(
        file,
        normalizer=_strip(file.normalizer, found),
        pre_tokenizer=_strip(file.pre_tokenizer, found),
        post_processor=None,
        truncation=None,
        padding=None,
    )
    prefix, text = found[0] if found else (Prefix.NONE, "")
    return bare, prefix, text


def _strip(component: Component | None, found: list[tuple[Prefix, str]]) -> Component | None:
    """Copies a component without the prefix it adds; appends the prefix to `found`."""
    if component is None:
        return None
    match component["type"]:
        case "Sequence":
            key = members_key(component)
            kept = [_strip(member, found) for member in component[key]]
            return {**component, key: [member for member in kept if member is not None]}
        case "Prepend":
            found.append((Prefix.ALWAYS, component["prepend"]))
            return None
        case "Metaspace":
            if component.get("prepend_scheme", "always") != "never" and component.get("add_prefix_space", True):
                found.append((Prefix.UNLESS_SPACE, component["replacement"]))
            kept_fields = {key: value for key, value in component.items() if key != "add_prefix_space"}
            return {**kept_fields, "prepend_scheme": "never"}
        case "ByteLevel" if component.get("add_prefix_space", True):
            found.append((Prefix.UNLESS_SPACE, " "))
            return {**component, "add_prefix_space": False}
        case _:
            return component
