"""The tokenizer of forced texts makes the tokens that the library makes, for every BPE tokenizer."""

from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from umbel.srt.tokenizer.file import read_tokenizer_file, token_table
from umbel.srt.tokenizer.hf import HFTokenizer
from umbel.srt.tokenizer.merges import MergeTables, MergeTokenizer, merge_tables
from umbel.srt.tokenizer.vocabulary import Vocabulary

from ..toy_tokenizers import BUILDERS, CONTROL, CORPUS, LOSSLESS, reread, wrap

PATH = Path("tokenizer.json")
TEXTS = [
    *CORPUS,
    "",
    '{"name": "Ann", "tags": ["a", "b"]}',
    "don't  <think>no</think>  \n\n\n<tool call>",
    "x<|im_start|>system</s> <s><unk>",
    "naïve 東京 🙂‍↔️ \x00\x01 ~~~~ ññññ",
    "aaaaaaaaaaaaaaaa the the the theththe",
]


def whole_words(tokenizer: Tokenizer) -> Tokenizer:
    """As Llama 3: a word of the vocabulary is one token, whatever its merges."""
    model = msgspec.json.decode(tokenizer.to_str())["model"]
    return reread(tokenizer, model={**model, "ignore_merges": True, "merges": model["merges"][::-1]})


KINDS = {**{kind: BUILDERS[kind] for kind in LOSSLESS}, "whole words": lambda: whole_words(BUILDERS["byte level"]())}


def tables_of(tokenizer: Tokenizer) -> MergeTables | None:
    return merge_tables(read_tokenizer_file(tokenizer.to_str().encode(), PATH), PATH)


@cache
def both(kind: str) -> tuple[MergeTokenizer, HFTokenizer]:
    raw = KINDS[kind]()
    tables, whole = tables_of(raw), wrap(raw)
    assert tables is not None
    vocabulary = Vocabulary.of(token_table(read_tokenizer_file(raw.to_str().encode(), PATH), PATH))
    kept = MergeTables.of_bytes(tables.to_bytes())
    return MergeTokenizer(kept, vocabulary, eos_ids=whole.eos_ids, path=PATH, open_whole=lambda: whole), whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_known_texts_have_the_tokens_of_the_library(kind: str, text: str) -> None:
    ours, library = both(kind)
    assert ours.encode(text, first=False) == library.encode(text, first=False)


ALPHABET = st.sampled_from('theancitys{}":,<>|_/ \n\t09éñ東🙂')


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), text=st.text(max_size=40) | st.text(ALPHABET, max_size=80))
def test_any_text_has_the_tokens_of_the_library(kind: str, text: str) -> None:
    ours, library = both(kind)
    assert ours.encode(text, first=False) == library.encode(text, first=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_is_that_of_the_whole_tokenizer(kind: str) -> None:
    ours, library = both(kind)
    assert (ours.vocab_size, ours.eos_ids, ours.special_ids) == (
        library.vocab_size,
        library.eos_ids,
        library.special_ids,
    )
    assert [*map(ours.token_bytes, range(ours.vocab_size))] == [*map(library.token_bytes, range(library.vocab_size))]


def test_the_merge_of_lowest_rank_goes_first_wherever_it_stands() -> None:
    """ "abcd": (b, c) before (a, b) and (c, d); of "aaa" the first two."""
    model = models.BPE(
        vocab={"a": 0, "b": 1, "c": 2, "d": 3, "bc": 4, "ab": 5, "cd": 6, "abc": 7, "aa": 8},
        merges=[("b", "c"), ("a", "b"), ("c", "d"), ("a", "bc"), ("a", "a")],
    )
    tables = tables_of(reread(BUILDERS["byte level"](), model=msgspec.json.decode(Tokenizer(model).to_str())["model"]))
    assert tables is not None
    vocabulary = Vocabulary.of(b"a b c d bc ab cd abc aa".split())
    ours = MergeTokenizer(tables, vocabulary, eos_ids=[0], path=PATH, open_whole=pytest.fail)
    assert ours.encode("abcd", first=False) == [7, 3]
    assert ours.encode("aaacd", first=False) == [8, 0, 6]


def test_a_text_with_a_control_token_is_left_to_the_library() -> None:
    """A merge that spells a control token: `HFTokenizer` cuts the text there."""
    raw = BUILDERS["byte level"]()
    model = msgspec.json.decode(raw.to_str())["model"]
    spelled = CONTROL[0]  # "<s>"
    model["vocab"].update({"<s": len(model["vocab"]) + 50})
    model["merges"] = [["<", "s"], ["<s", ">"], *model["merges"]]
    raw = reread(raw, model=model)
    tables, whole = tables_of(raw), wrap(raw)
    assert tables is not None
    ours = MergeTokenizer(tables, whole.vocabulary, eos_ids=whole.eos_ids, path=PATH, open_whole=lambda: whole)
    expected = whole.encode(f"a{spelled}b", first=False)
    assert whole.special_ids[spelled] not in expected
    assert ours.encode(f"a{spelled}b", first=False) == expected


def changed(**fields: object) -> Tokenizer:
    raw = BUILDERS["BPE, Metaspace"]()
    return reread(raw, model={**msgspec.json.decode(raw.to_str())["model"], **fields})


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(lambda: BUILDERS["Unigram"](), id="unigram"),
        pytest.param(lambda: changed(dropout=0.5), id="dropout"),
        pytest.param(lambda: changed(ignore_merges=True), id="whole words with byte fallback"),
    ],
)
def test_tokenizers_that_tables_cannot_stand_for_have_none(raw: "object") -> None:
    assert callable(raw)
    assert tables_of(raw()) is None


def test_damaged_tables_are_refused() -> None:
    tables = tables_of(BUILDERS["byte level"]())
    assert tables is not None
    content = bytearray(tables.to_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (bytes(content), b"", bytes(40)):
        with pytest.raises(ValueError, match="damaged"):
            MergeTables.of_bytes(damaged)
