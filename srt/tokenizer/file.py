"""Reads tokenizer.json, apart from encoding: added tokens, the bytes of every token, BOS, the first space.

The file is read as typed JSON and its `model` (megabytes of vocabulary and merges) only when the bytes
are asked for, so that opening a tokenizer does not parse it twice.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...lang.errors import ModelError

Component = dict[str, Any]  # Any: a normalizer, pre-tokenizer or decoder as the file spells it

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class AddedToken(msgspec.Struct, frozen=True):
    """A token matched in the text before the model. `special`: a control token, which stands for no text."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


class TokenizerFile(msgspec.Struct, frozen=True):
    """The content of tokenizer.json. Unknown fields are dropped, as the library itself ignores them."""

    model: msgspec.Raw
    added_tokens: list[AddedToken] = []
    normalizer: Component | None = None
    pre_tokenizer: Component | None = None
    post_processor: Component | None = None
    decoder: Component | None = None
    version: str = "1.0"
    truncation: Component | None = None
    padding: Component | None = None


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]]
    type: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _Unknown(msgspec.Struct, frozen=True):
    unk_token: str | None = None
    unk_id: int | None = None


def read_tokenizer_file(content: bytes, path: Path) -> TokenizerFile:
    """Parses tokenizer.json. Raises ModelError when the content is not one."""
    try:
        file = msgspec.json.decode(content, type=TokenizerFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not a tokenizer.json ({error}); download it again") from error
    for component in (file.normalizer, file.pre_tokenizer, file.post_processor, file.decoder):
        if component is not None and not _well_formed(component):
            raise ModelError(f"{path} is damaged: {str(component)[:80]} is no part of a tokenizer; download it again")
    return file


def components(component: Component | None) -> list[Component]:
    """Returns a component's parts in order: the members of a Sequence, or the component itself."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [part for member in component[members_key(component)] for part in components(member)]


def members_key(sequence: Component) -> str:
    """Returns the key under which a Sequence holds its members."""
    return next(key for key in _MEMBERS if key in sequence)


_MEMBERS = ("normalizers", "pretokenizers", "processors", "decoders")


def _well_formed(component: object) -> bool:
    """Checks the shape that the code here relies on; the library would refuse others later."""
    if not isinstance(component, dict):
        return False
    match component.get("type"):
        case "Sequence":
            members = next((component[key] for key in _MEMBERS if key in component), None)
            return isinstance(members, list) and all(map(_well_formed, members))
        case "Prepend":
            return isinstance(component.get("prepend"), str)
        case "Metaspace":
            return isinstance(component.get("replacement"), str)
        case kind:
            return isinstance(kind, str)


def token_table(file: TokenizerFile, path: Path, *, size: int = 0) -> list[bytes]:
    """Returns the bytes of every token by id, padded with b"" to `size` (models pad their matrices).

    Raises:
        ModelError: the tokenizer does not stand for bytes in a way known here.
    """
    model = _model(file, path)
    named = model.vocab.items() if isinstance(model.vocab, dict) else _numbered(model.vocab)
    as_bytes = _decoding(file, model, path)
    ids = {token_id: as_bytes(token) for token, token_id in named}
    for added in file.added_tokens:
        ids[added.id] = b"" if added.special else _added_bytes(file, added)
    highest = max(ids, default=-1)
    if min(ids, default=0) < 0 or highest >= max(4 * len(ids) + 1024, size):  # far apart: the file is wrong
        raise ModelError(f"{path} is damaged: token ids reach from {min(ids)} to {highest} for {len(ids)} tokens")
    return [ids.get(token_id, b"") for token_id in range(max(highest + 1, size))]


def unknown_id(file: TokenizerFile, path: Path) -> int | None:
    """Returns the id for text that the vocabulary cannot spell, if there is one."""
    try:
        unknown = msgspec.json.decode(file.model, type=_Unknown)  # skips the vocabulary
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: its model cannot be read ({error}); download it again") from error
    if unknown.unk_id is not None:
        return unknown.unk_id
    return next((added.id for added in file.added_tokens if added.content == unknown.unk_token), None)


def model_type(file: TokenizerFile, path: Path) -> str:
    """Returns "BPE" or "Unigram". Raises ModelError for any other model."""
    return _kind(_model(file, path), path)


def _kind(model: _Model, path: Path) -> str:
    kind = model.type or ("BPE" if isinstance(model.vocab, dict) else "Unigram")
    if kind not in ("BPE", "Unigram") or model.continuing_subword_prefix or model.end_of_word_suffix:
        raise ModelError(f"{path}: a {kind} tokenizer of this kind is not supported; use a BPE or Unigram tokenizer")
    return kind


def _model(file: TokenizerFile, path: Path) -> _Model:
    try:
        model = msgspec.json.decode(file.model, type=_Model)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: its model cannot be read ({error}); use a BPE or Unigram tokenizer") from error
    _kind(model, path)
    return model


def _numbered(vocabulary: list[tuple[str, float]]) -> list[tuple[str, int]]:
    return [(token, token_id) for token_id, (token, _) in enumerate(vocabulary)]


class _Decoding:
    """Turns a token's spelling into bytes: replacements, then `<0xNN>`; or the byte-level alphabet."""

    def __init__(self, *, byte_level: bool, replacements: list[tuple[str, str]], byte_fallback: bool) -> None:
        self.byte_level = byte_level
        self.replacements = replacements
        self.byte_fallback = byte_fallback

    def __call__(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([_ALPHABET[character] for character in token])
            except KeyError:  # not spelled in the alphabet: it is the text itself
                return token.encode("utf-8")
        for old, new in self.replacements:
            token = token.replace(old, new)
        found = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes([int(found.group(1), 16)]) if found else token.encode("utf-8")


def _decoding(file: TokenizerFile, model: _Model, path: Path) -> _Decoding:
    byte_level, byte_fallback = False, False
    replacements: list[tuple[str, str]] = []
    parts = components(file.decoder)
    for part in parts:
        match part:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Metaspace", "replacement": str(character)}:
                replacements.append((character, " "))
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Fuse" | "Strip"}:
                pass  # they join tokens, or act on the beginning of a text only
            case _:
                raise ModelError(
                    f"{path}: decoder {part.get('type')!r} is not supported; use a BPE or Unigram tokenizer"
                )
    if not parts:
        raise ModelError(f"{path} names no decoder, so its tokens do not stand for text; use the model's own tokenizer")
    return _Decoding(byte_level=byte_level, replacements=replacements, byte_fallback=byte_fallback)


def _added_bytes(file: TokenizerFile, added: AddedToken) -> bytes:
    """Returns the bytes of an added token: its text, but SentencePiece vocabularies write its spaces their way."""
    text = added.content
    for part in components(file.decoder):
        match part:
            case {"type": "Metaspace", "replacement": str(character)}:
                text = text.replace(character, " ")
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                text = text.replace(old, new)
    return text.encode("utf-8")


def byte_alphabet() -> dict[str, int]:
    """Returns the byte-level BPE alphabet, character → byte: a visible byte is itself, others are U+0100 and on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_ALPHABET = byte_alphabet()


# ---------------------------------------------------------------------- the files next to tokenizer.json


def adds_bos(file: TokenizerFile, config: Mapping[str, Any], bos: str | None) -> bool:
    """Returns whether tokenizer_config.json or the post-processor begins a sequence with BOS."""
    if bos is None:
        return False
    stated = config.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    for part in components(file.post_processor):
        match part:
            case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": first}}, *_]}:
                return bool(first == bos)
            case {"type": "BertProcessing" | "RobertaProcessing", "cls": [first, _]}:
                return bool(first == bos)
    return False


def closing_token(file: TokenizerFile, config: Mapping[str, Any]) -> str | None:
    """Returns the token that ends a text of which a vector is made: the post-processor's, else EOS if it is added.

    None: a text ends with its own last token.
    """
    for part in components(file.post_processor):
        match part:
            case {"type": "TemplateProcessing", "single": [*_, {"SpecialToken": {"id": str(last)}}] as single}:
                return last if len(single) > 1 and "Sequence" in single[-2] else None
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    return eos if config.get("add_eos_token") is True and isinstance(eos, str) else None
