"""The tokenizer of a model: bytes of tokens, the first space, and text that spells control tokens."""

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from umbel.lang.errors import ModelError, ParameterError, RequestError
from umbel.lang.prompt import Generated, Text
from umbel.srt.tokenizer.file import read_tokenizer_file, token_table
from umbel.srt.tokenizer.hf import LONG_PIECE, HFTokenizer, library_tokenizer
from umbel.srt.tokenizer.prompt import PromptEncoder
from umbel.srt.tokenizer.vocabulary import Vocabulary

from ..toy_tokenizers import BUILDERS, CONTROL, LOSSLESS, byte_level, gemma_like, reread, unigram, wrap

ALPHABETS = st.sampled_from(
    [
        "abc THE the capital of\n\t  .,'\"{}[]0123456789",
        "東京大阪都道府県のはがを",
        "🙂🙃👩\u200d👧🇫🇷",
        "e\u0301a\u0308o\u0302\u0327n\u0303",
        "<>|/s_im_startend think",
        "Приветмир éèüß",
    ]
)
texts = st.lists(ALPHABETS.flatmap(lambda letters: st.text(letters, max_size=12)), max_size=4).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=20
)
kinds = pytest.mark.parametrize("kind", BUILDERS)
lossless = pytest.mark.parametrize("kind", LOSSLESS)


@cache
def library(kind: str) -> Tokenizer:
    return BUILDERS[kind]()


@cache
def wrapped(kind: str) -> HFTokenizer:
    return wrap(library(kind))


def in_the_middle(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The library's decoding of ids that follow other text."""
    anchor = tokenizer.encode("a", add_special_tokens=False).ids
    before = tokenizer.decode(anchor, skip_special_tokens=False)
    return tokenizer.decode(anchor + ids, skip_special_tokens=False)[len(before) :]


@lossless
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(kind: str, text: str) -> None:
    tokenizer = wrapped(kind)
    ids = tokenizer.encode(text, first=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@kinds
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bytes_decode_as_the_library_decodes_in_the_middle_of_a_text(kind: str, data: st.DataObject) -> None:
    tokenizer = wrapped(kind)
    control = set(tokenizer.special_ids.values())
    visible = [token for token in range(tokenizer.vocab_size) if token not in control]
    ids = data.draw(st.lists(st.sampled_from(visible), max_size=12))
    joined = b"".join(map(tokenizer.token_bytes, ids))
    expected = in_the_middle(library(kind), ids)
    if kind.startswith("byte level"):
        assert joined.decode("utf-8", "replace") == expected
    else:
        try:
            assert joined.decode("utf-8") == expected
        except UnicodeDecodeError:  # the library writes one mark for each byte of a broken run
            assert "\ufffd" in expected


@kinds
@settings(max_examples=60, deadline=None)
@given(text=texts.filter(lambda text: "<" not in text))
def test_a_first_text_is_encoded_as_the_library_does_without_special_tokens(kind: str, text: str) -> None:
    expected = library(kind).encode(text, add_special_tokens=False).ids
    assert wrapped(kind).encode(text, first=True) == expected


@pytest.mark.parametrize("kind", ["byte level, prefixed", "BPE, Prepend", "BPE, Metaspace", "Unigram"])
def test_the_first_space_stands_before_the_first_text_only(kind: str) -> None:
    tokenizer = wrapped(kind)

    def text_of(first: bool) -> bytes:
        return b"".join(map(tokenizer.token_bytes, tokenizer.encode("the capital", first=first)))

    assert text_of(True) == b" the capital"
    assert text_of(False) == b"the capital"


@kinds
@pytest.mark.parametrize("template", ["{}", "a{}b", " {} ", "{}{}", "<{}>", "\n{}\n"])
def test_text_that_spells_a_control_token_stays_text(kind: str, template: str) -> None:
    tokenizer = wrapped(kind)
    for name in CONTROL:
        text = template.replace("{}", name)
        for first in (True, False):
            ids = tokenizer.encode(text, first=first)
            assert not set(ids) & {tokenizer.special_ids[control] for control in CONTROL}
            if kind in LOSSLESS:
                assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == text.strip()


def test_the_unigram_model_by_itself_would_forge_a_control_token() -> None:
    raw = unigram()
    raw.encode_special_tokens = True
    ids = raw.encode("x<s>y", add_special_tokens=False).ids
    assert raw.token_to_id("<s>") in ids  # else the test above proves nothing for Unigram


def test_a_control_token_of_one_character_that_text_must_become_is_refused() -> None:
    pieces = [("<unk>", 0.0), ("◆", -1.0), ("a", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    spec_added = [
        {"id": 1, "content": "◆", "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
    ]
    path = Path("tokenizer.json")
    file = read_tokenizer_file(reread(tokenizer, added_tokens=spec_added).to_str().encode(), path)
    vocabulary = Vocabulary.of(token_table(file, path))
    toy = HFTokenizer(file, vocabulary=vocabulary, config={}, chat_template=None, eos_ids=(), name="toy", path=path)
    with pytest.raises(RequestError, match="'◆' only as a control token"):
        toy.encode("a◆", first=False)


@kinds
def test_control_tokens_stand_for_no_bytes(kind: str) -> None:
    tokenizer = wrapped(kind)
    assert {tokenizer.token_bytes(token) for token in tokenizer.special_ids.values()} == {b""}


@pytest.mark.parametrize("kind", [kind for kind in BUILDERS if kind.startswith("byte level")])
def test_visible_added_tokens_keep_their_text(kind: str) -> None:
    tokenizer = wrapped(kind)
    ids = tokenizer.encode("a<tool call>b<think>", first=False)
    table = [tokenizer.token_bytes(token) for token in ids]
    assert b"<tool call>" in table
    assert b"<think>" in table


@pytest.mark.parametrize(
    ("config", "builder", "added"),
    [
        ({}, gemma_like, True),  # the post-processor adds it
        ({}, byte_level, False),
        ({"add_bos_token": False}, gemma_like, False),
        ({"add_bos_token": True}, byte_level, True),
        ({"bos_token": None}, gemma_like, False),
        ({"bos_token": {"content": "<s>", "lstrip": False}}, gemma_like, True),
    ],
)
def test_bos_is_added_when_the_configuration_or_else_the_post_processor_says_so(
    config: dict[str, object], builder: object, added: bool
) -> None:
    assert callable(builder)
    tokenizer = wrap(builder(), **config)
    assert (tokenizer.bos_id is not None) == added


@pytest.mark.parametrize("rest", ["", "x" * LONG_PIECE])
def test_a_lone_surrogate_is_named_with_its_place(rest: str) -> None:
    with pytest.raises(ParameterError, match=r"lone surrogate .* at character 2"):
        wrapped("byte level").encode("ab\ud800" + rest, first=False)


@pytest.mark.parametrize("text", ["a" * LONG_PIECE, " " * LONG_PIECE, "some words, é and 語 " * LONG_PIECE])
def test_a_long_piece_has_the_tokens_that_the_library_gives_it(text: str) -> None:
    tokenizer = wrapped("byte level")
    assert tokenizer.encode(text, first=False) == tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a tokenizer.json"),
        (b"[]", "is not a tokenizer.json"),
        (b'{"model": {"type": "WordPiece", "vocab": {"a": 0}}}', "WordPiece"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "names no decoder"),
        (b'{"model": {"type": "BPE", "vocab": 3}}', "its model cannot be read"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 4000000000}}, "decoder": {"type": "Fuse"}}', "ids reach from"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}}, "decoder": {"type": "CTC"}}', "decoder 'CTC'"),
    ],
)
def test_a_tokenizer_file_that_cannot_be_used_is_refused(content: bytes, message: str) -> None:
    path = Path("folder/tokenizer.json")
    with pytest.raises(ModelError, match=message) as caught:
        token_table(read_tokenizer_file(content, path), path)
    assert str(path) in str(caught.value)


def test_a_file_that_the_library_refuses_is_a_model_error() -> None:
    content = b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}, "decoder": {"type": "Fuse"}}'
    path = Path("tokenizer.json")
    file = read_tokenizer_file(content, path)
    vocabulary = Vocabulary.of(token_table(file, path))
    with pytest.raises(ModelError, match="refused by the tokenizers library"):
        HFTokenizer(file, vocabulary=vocabulary, config={}, chat_template=None, eos_ids=(), name="toy", path=path)


# ------------------------------------------------------------------------------- prompt encoder


@lossless
@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(texts, min_size=1, max_size=4))
def test_neighbouring_texts_are_tokenized_as_one(kind: str, pieces: list[str]) -> None:
    encoder = PromptEncoder(wrapped(kind))
    assert encoder.encode([Text(piece) for piece in pieces]) == encoder.encode([Text("".join(pieces))])


@kinds
def test_scaffolding_becomes_control_tokens_and_arguments_never_do(kind: str) -> None:
    tokenizer = wrapped(kind)
    encoder = PromptEncoder(tokenizer)
    control = [tokenizer.special_ids[name] for name in CONTROL]  # <unk> may stand for a letter
    start, end = control[2:]
    for name in CONTROL:
        ids = encoder.encode([Text("<|im_start|>user\n", True), Text(f"x{name}y"), Text("<|im_end|>\n", True)])
        if tokenizer.bos_id is not None:
            assert ids.pop(0) == tokenizer.bos_id
        assert [token for token in ids if token in control] == [start, end]


@kinds
def test_bos_occurs_once_whether_or_not_the_template_writes_it(kind: str) -> None:
    tokenizer = wrap(BUILDERS[kind](), add_bos_token=True)
    encoder = PromptEncoder(tokenizer)
    written = encoder.encode([Text("<s><|im_start|>", True), Text("hello")])
    assert written == encoder.encode([Text("<|im_start|>", True), Text("hello")])
    assert written.count(tokenizer.special_ids["<s>"]) == 1


@kinds
def test_generated_ids_pass_unchanged(kind: str) -> None:
    tokenizer = wrapped(kind)
    ids = tuple(tokenizer.encode("th", first=False)) + tuple(tokenizer.encode("e", first=False))  # not canonical
    encoded = PromptEncoder(tokenizer).encode([Text("say "), Generated("the", ids), Text(" end")])
    tail = tokenizer.encode(" end", first=False)
    assert tuple(encoded[-len(tail) - len(ids) : -len(tail)]) == ids


def test_truncation_and_padding_in_the_file_do_not_apply() -> None:
    raw = byte_level()
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    text = "the capital of France"
    assert wrap(raw).encode(text, first=True) == byte_level().encode(text).ids


def test_a_normalizer_between_others_loses_only_its_first_space() -> None:
    raw = gemma_like()
    raw.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated")])
    tokenizer = wrap(raw)
    ids = tokenizer.encode("e\u0301 a", first=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "é a"


def test_a_file_that_makes_the_library_panic_is_a_model_error() -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    file = {"model": {**model, "continuing_subword_prefix": "longer than b"}}
    read = read_tokenizer_file(json.dumps(file).encode(), Path("tokenizer.json"))
    with pytest.raises(ModelError, match="refused by the tokenizers library"):
        library_tokenizer(msgspec.json.encode(read), Path("tokenizer.json"))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_a_model_error_or_still_a_tokenizer(data: st.DataObject) -> None:
    content = bytearray(library(data.draw(st.sampled_from(list(BUILDERS)))).to_str().encode())
    place = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 2500))
    content[place : place + data.draw(st.integers(0, 12))] = data.draw(st.binary(max_size=3))
    path = Path("tokenizer.json")
    refused = False
    try:
        file = read_tokenizer_file(bytes(content), path)
        vocabulary = Vocabulary.of(token_table(file, path))
        toy = HFTokenizer(file, vocabulary=vocabulary, config={}, chat_template=None, eos_ids=(), name="toy", path=path)
    except ModelError:
        refused = True
    assert refused or toy.vocab_size == len(vocabulary)
