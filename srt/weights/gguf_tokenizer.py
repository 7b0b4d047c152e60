"""Converts GGUF metadata to tokenizer.json and tokenizer_config.json, as the `tokenizers` library reads them.

Two kinds are known. `llama`: SentencePiece BPE, for which GGUF stores pieces and scores but no merges; they are
recovered by cutting each piece into two known pieces. `gpt2`: byte-level BPE with merges, for which GGUF stores the
name of the pre-tokenizer's expression instead of the expression.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import ModelError
from ..tokenizer.rerankers import RERANK
from .gguf_file import GgufFile

Json = dict[str, object]

SPACE = "\u2581"  # a space in SentencePiece
LONGEST_MERGED = 512  # characters; merges make no longer token, and cutting one is quadratic


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# The expressions that cut text before byte-level merges, by the name GGUF uses.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
# Digits are cut out before all else, so blanks in front of one are not divided.
_REFACT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}|\s+(?=\p{N})|\s+(?!\S)|\s+"
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_NUMBERS = r"\p{N}{1,3}"
_IDEOGRAPHS = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"  # with both kana
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]*[{_LOWER}{_NO_HAN}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]+[{_LOWER}{_NO_HAN}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# Several expressions cut one after the other: each the pieces that those before it have left.
_EXPRESSIONS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),  # Phi 4, OLMo 2
    "chatglm-bpe": (_LLAMA3,),
    "glm4": (_LLAMA3,),
    "seed-coder": (_SEED,),
    "deepseek-v3": (_NUMBERS, _IDEOGRAPHS, _DEEPSEEK),
    "kimi-k2": (_KIMI,),
    "gpt-4o": (_GPT4O,),  # Phi-4-mini, gpt-oss
    "llama4": (_GPT4O,),
    "refact": (_REFACT,),  # Granite 3
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
    "gpt-2": (),  # the expression built into ByteLevel
    "exaone4": (),
    "default": (),
}
_PIECES = ("llama", "gemma4")  # kinds of SentencePiece; the latter's files hold the merges
_TURN_ENDS = frozenset(
    {
        "<|end|>",
        "<|endoftext|>",
        "<|im_end|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<eos>",
        "</s>",
    }
)
_BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_WHOLE_WORDS_FIRST = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "tekken", "glm4"}
)  # a word in the vocabulary skips merges
_COMPOSES = frozenset({"qwen2", "deepseek-r1-qwen"})  # Qwen normalises to NFC


def tokenizer_json(gguf: GgufFile) -> Json:
    """Builds the content of tokenizer.json.

    Raises:
        ModelError: the kind of tokenizer or the pre-tokenizer is unknown.
    """
    metadata = gguf.metadata
    tokens = list(metadata.texts("tokenizer.ggml.tokens"))
    types = _types(gguf, len(tokens)).tolist()
    require_known(gguf)
    if metadata.text("tokenizer.ggml.model") in _PIECES:
        return _sentencepiece(gguf, tokens, types)
    return _byte_level(gguf, tokens, types)


def require_known(gguf: GgufFile) -> None:
    """Checks the kind of tokenizer, without reading its tokens.

    Raises:
        ModelError: the kind of tokenizer or the pre-tokenizer is unknown.
    """
    kind = gguf.metadata.text("tokenizer.ggml.model")
    if kind not in (*_PIECES, "gpt2"):
        raise ModelError(
            f"{gguf.path}: tokenizer model {kind!r} is not supported as GGUF (supported: {', '.join(_PIECES)}, gpt2); "
            "use the model's safetensors folder, which holds tokenizer.json"
        )
    name = gguf.metadata.text("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and name not in _EXPRESSIONS:
        raise ModelError(
            f"{gguf.path}: pre-tokenizer {name!r} is not supported as GGUF (supported: {', '.join(_EXPRESSIONS)}); "
            "use the model's safetensors folder, which holds tokenizer.json"
        )


def tokenizer_config(gguf: GgufFile) -> Json:
    """Builds the content of tokenizer_config.json."""
    metadata = gguf.metadata
    tokens = metadata.texts("tokenizer.ggml.tokens")
    config: Json = {
        "add_bos_token": adds_bos(gguf),
        "add_eos_token": metadata.flag("tokenizer.ggml.add_eos_token", False),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        full = f"tokenizer.ggml.{key}_token_id"
        if full in metadata:
            config[f"{name}_token"] = tokens[_id(gguf, full, len(tokens))]
    default, rerank = "tokenizer.chat_template", f"tokenizer.chat_template.{RERANK}"
    if default in metadata:
        config["chat_template"] = metadata.text(default)
    if rerank in metadata:  # then there may be no other
        named = [("default", default)] * (default in metadata) + [(RERANK, rerank)]
        config["chat_template"] = [{"name": name, "template": metadata.text(key)} for name, key in named]
    return config


def eos_ids(gguf: GgufFile) -> list[int]:
    """Returns every token that ends a text or, in models with a chat template, a turn; ascending.

    GGUF names one or two of them where generation_config.json lists all, so a chat model's others are found by their
    text, as in llama.cpp.
    """
    tokens = gguf.metadata.texts("tokenizer.ggml.tokens")
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = {_id(gguf, key, len(tokens)) for key in keys if key in gguf.metadata}
    if "tokenizer.chat_template" in gguf.metadata:
        control = np.flatnonzero(_types(gguf, len(tokens)) == TokenType.CONTROL).tolist()
        ends |= {token for token in control if tokens[token] in _TURN_ENDS}
    return sorted(ends)


def adds_bos(gguf: GgufFile) -> bool:
    """Returns whether this tokenizer begins every sequence with BOS. In older files its kind decides."""
    metadata = gguf.metadata
    sentencepiece = metadata.text("tokenizer.ggml.model") in _PIECES
    usual = sentencepiece or metadata.text("tokenizer.ggml.pre", "default") in _BOS_BY_DEFAULT
    return metadata.flag("tokenizer.ggml.add_bos_token", usual) and "tokenizer.ggml.bos_token_id" in metadata


def _id(gguf: GgufFile, key: str, size: int) -> int:
    token = gguf.metadata.integer(key)
    if not 0 <= token < size:
        raise ModelError(f"{gguf.path} is damaged: {key} is {token}, the vocabulary has {size} tokens")
    return token


def _types(gguf: GgufFile, size: int) -> NDArray[np.generic]:
    if "tokenizer.ggml.token_type" not in gguf.metadata:
        return np.full(size, TokenType.NORMAL.value)
    types = gguf.metadata.numbers("tokenizer.ggml.token_type")
    if len(types) != size:
        raise ModelError(f"{gguf.path} is damaged: {len(types)} token types for {size} tokens")
    return types


# --------------------------------------------------------------------------------- SentencePiece


def _sentencepiece(gguf: GgufFile, tokens: list[str], types: list[int]) -> Json:
    gemma = gguf.architecture.startswith("gemma")
    if gemma:  # the file writes runs of spaces as spaces, and only those
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in gguf.metadata:
        merges = _stored_merges(gguf)
    else:
        merges = recover_merges(tokens, types, _merge_order(gguf, tokens, by_position=gemma))
    prefix = gguf.metadata.flag(
        "tokenizer.ggml.add_space_prefix", gguf.metadata.text("tokenizer.ggml.model") != "gemma4"
    )
    replace: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend: Json = {"type": "Prepend", "prepend": SPACE}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    if "tokenizer.ggml.unknown_token_id" in gguf.metadata:
        unknown = tokens[_id(gguf, "tokenizer.ggml.unknown_token_id", len(tokens))]
    return {
        **_frame(gguf, tokens, types),
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if prefix else replace,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges, unknown=unknown, byte_fallback=TokenType.BYTE in types),
    }


def _merge_order(gguf: GgufFile, tokens: Sequence[str], *, by_position: bool) -> list[float]:
    """Returns a number per token; of two merges the one that makes the token with the higher number comes first.

    Gemma's merges follow the positions of its tokens, not its scores.
    """
    if by_position or "tokenizer.ggml.scores" not in gguf.metadata:
        return [-float(index) for index in range(len(tokens))]
    scores = gguf.metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{gguf.path} is damaged: {len(scores)} scores for {len(tokens)} tokens")
    return [float(score) for score in scores.tolist()]


def recover_merges(tokens: Sequence[str], types: Sequence[int], order: Sequence[float]) -> list[list[str]]:
    """Returns every way to make a token of two others, best first.

    Control tokens and bytes are excluded, so that text which spells one is never merged into it.
    """
    excluded = {TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE, TokenType.UNUSED}
    ids = {token: index for index, token in enumerate(tokens) if types[index] not in excluded}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        for cut in range(1, len(token) if len(token) <= LONGEST_MERGED else 0):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-order[index], -len(left), -len(right), left, right))
    merges.sort(key=lambda merge: (merge[0], merge[1], merge[2], ids[merge[3]], ids[merge[4]]))
    return [[left, right] for _, _, _, left, right in merges]


# ------------------------------------------------------------------------------------ byte level


def _byte_level(gguf: GgufFile, tokens: list[str], types: list[int]) -> Json:
    name = gguf.metadata.text("tokenizer.ggml.pre", "default")
    expressions = _EXPRESSIONS[name]
    bytes_only: Json = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": not expressions,
    }
    splitters: list[Json] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
    ]
    merges = _stored_merges(gguf)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return {
        **_frame(gguf, tokens, types),
        "normalizer": {"type": "NFC"} if name in _COMPOSES else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splitters, bytes_only]} if expressions else bytes_only,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": _bpe(vocabulary, merges, unknown=None, byte_fallback=False, whole=name in _WHOLE_WORDS_FIRST),
    }


# ------------------------------------------------------------------------------------ both kinds


def _stored_merges(gguf: GgufFile) -> list[list[str]]:
    merges = [merge.split(" ") for merge in gguf.metadata.texts("tokenizer.ggml.merges")]
    broken = next((merge for merge in merges if len(merge) != 2), None)
    if broken is not None:
        raise ModelError(f"{gguf.path} is damaged: merge {' '.join(broken)[:40]!r} is not two pieces")
    return merges


def _frame(gguf: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Json:
    """Builds the part that all kinds share: added tokens, and BOS where the tokenizer adds it."""
    special = {TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED}  # none of them stands for text
    # Runs of spaces are user-defined too, but text reaches the vocabulary with other spaces: merges make them.
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token.strip(SPACE) and (kind in special or kind == TokenType.USER_DEFINED)
    ]
    post_processor: Json | None = None
    if adds_bos(gguf):
        bos_id = _id(gguf, "tokenizer.ggml.bos_token_id", len(tokens))
        bos = tokens[bos_id]
        start: Json = {"SpecialToken": {"id": bos, "type_id": 0}}
        text = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
        post_processor = {
            "type": "TemplateProcessing",
            "single": [start, text[0]],
            "pair": [start, text[0], text[1]],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": post_processor,
    }


def _bpe(
    vocabulary: dict[str, int],
    merges: list[list[str]],
    *,
    unknown: str | None,
    byte_fallback: bool,
    whole: bool = False,
) -> Json:
    # Pairs in one string each are the older spelling, which the library reads in two thirds of the time.
    joined = not any(" " in left or " " in right for left, right in merges)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": whole,
        "vocab": vocabulary,
        "merges": [f"{left} {right}" for left, right in merges] if joined else merges,
    }
