"""The table of the tokens, and the tries that are made of it."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.tokens.trie import PLAIN_CLASSES, Trie, build_trie, fewest_tokens
from umbel.fsm.tokens.vocabulary import Spellings, Vocabulary, pack, pack_few, unpack, unpack_few

from ..vocabularies import ALPHABET, letters, vocabularies


def test_control_and_eos_ids_spell_nothing() -> None:
    vocabulary = Vocabulary([b"a", b"<s>", b"</s>", b"<b>"], [2], control=[1], size=6)
    assert [vocabulary.token_bytes(token) for token in range(6)] == [b"a", b"", b"", b"<b>", b"", b""]
    assert vocabulary.texts.tolist() == [3, 0]
    assert vocabulary.eos_ids == (2,)


def test_tokens_of_no_bytes_are_no_part_of_a_text() -> None:
    vocabulary = Vocabulary([b"a", b"", b"b"], [1])
    assert vocabulary.spells([0, 2], b"ab")
    assert not vocabulary.spells([0, 1, 2], b"ab")
    assert not vocabulary.spells([0, 7], b"a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_bytes": [b"a"], "eos_ids": []}, "without EOS ids"),
        ({"token_bytes": [b"a"], "eos_ids": [1]}, "id 1 in a vocabulary of 1"),
        ({"token_bytes": [b"a"], "eos_ids": [0], "control": [-1]}, "id -1 in a vocabulary of 1"),
        ({"token_bytes": [b"a", b"b"], "eos_ids": [0], "size": 1}, "size=1 for 2 tokens"),
    ],
)
def test_a_table_that_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Vocabulary(**arguments)


def test_a_vocabulary_keeps_no_object_for_each_token() -> None:
    spellings = Spellings.of([b"</s>", *(format(n, "x").encode() for n in range(20_000))])
    before = sys.getallocatedblocks()
    vocabulary = Vocabulary(spellings, [0], size=20_480)
    trie = build_trie(vocabulary)
    assert trie.find(b"4e1f") is not None
    assert trie.find(b"4e20") is None  # 20,000
    assert sys.getallocatedblocks() - before < 2_000


def test_a_model_may_lack_the_last_tokens_of_a_table() -> None:
    spellings = Spellings.of([b"a", b"</s>", b"bc", b"d"])
    vocabulary = Vocabulary(spellings.first(3), [1])
    assert [vocabulary.token_bytes(token) for token in range(len(vocabulary))] == [b"a", b"", b"bc"]
    assert vocabulary.digest == Vocabulary([b"a", b"", b"bc"], [1]).digest
    assert len(spellings.first(9)) == 4


def test_vocabularies_of_one_content_have_one_digest() -> None:
    table = [b"a", b"bc", b""]
    assert Vocabulary(table, [2]).digest == Vocabulary(table, [2]).digest
    assert Vocabulary(table, [2]).digest != Vocabulary([b"ab", b"c", b""], [2]).digest


@pytest.mark.parametrize(
    ("data", "characters"),
    [
        (b"word", 4),
        ("é漢😀".encode(), 3),
        (b'a"', 0),
        (b"\\", 0),
        (b"a\n", 0),
        (b"\x7f", 0),
        (b"\xc3", 0),
        (b"\xa9a", 0),
        ("a\u2028".encode(), 0),  # no `.` of a pattern takes it
        ("\u2029b".encode(), 0),
        ("\u2027\u202a".encode(), 2),
        (b"\xed\xa0\x80", 0),  # a surrogate
        (b"\xc0\x80", 0),  # too long a spelling of a control character
    ],
)
def test_plain_tokens_are_whole_characters_that_json_does_not_escape(data: bytes, characters: int) -> None:
    assert Vocabulary([data, b""], [1]).plain_characters.tolist() == [characters, 0]


@given(st.sets(st.integers(0, 199)))
def test_packed_tokens_come_back(tokens: set[int]) -> None:
    packed = pack(np.array(sorted(tokens), np.int32), 7)
    assert unpack(packed).tolist() == unpack_few(packed) == sorted(tokens)
    assert pack_few(sorted(tokens), 7).tolist() == packed.tolist()
    assert all(bool(packed[token // 32] >> (token % 32) & 1) == (token in tokens) for token in range(200))


def texts_of(trie: Trie, begin: int, end: int) -> list[tuple[bytes, list[int]]]:
    """Every token of a range of nodes with its bytes, read as the module's drawing says."""
    found, above = [], []
    for node in range(begin, end):
        _, _, step = trie.nodes[node].tolist()
        del above[(step >> 8) - 1 :]
        above.append(step & 0xFF)
        if tokens := trie.tokens_at(node):
            found.append((bytes(above), sorted(tokens)))
    return found


def grouped(vocabulary: Vocabulary, tokens: list[int]) -> list[tuple[bytes, list[int]]]:
    spelled: dict[bytes, list[int]] = {}
    for token in tokens:
        spelled.setdefault(vocabulary.token_bytes(token), []).append(token)
    return sorted(spelled.items())


@settings(max_examples=100, deadline=None)
@given(vocabularies())
def test_a_trie_holds_every_token_once_under_its_bytes(vocabulary: Vocabulary) -> None:
    trie = build_trie(vocabulary)
    texts = [token for token in range(len(vocabulary)) if vocabulary.token_bytes(token)]
    everything, not_words, not_plain, *classes = trie.sections
    assert texts_of(trie, everything.begin, everything.end) == grouped(vocabulary, texts)
    sentences = [token for token in texts if not vocabulary.token_bytes(token).isalnum()]
    assert texts_of(trie, not_words.begin, not_words.end) == grouped(vocabulary, sentences)
    plain = vocabulary.plain_characters
    special = [token for token in texts if not plain[token]]
    assert texts_of(trie, not_plain.begin, not_plain.end) == grouped(vocabulary, special)
    for section, low, high in zip(classes, (1, *(n + 1 for n in PLAIN_CLASSES)), (*PLAIN_CLASSES, 999), strict=True):
        members = [token for token in texts if low <= plain[token] <= high]
        assert texts_of(trie, section.begin, section.end) == grouped(vocabulary, members)


@settings(max_examples=100, deadline=None)
@given(vocabularies(), st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=3).map(b"".join))
def test_a_prefix_is_found_with_all_tokens_that_begin_with_it(vocabulary: Vocabulary, prefix: bytes) -> None:
    trie = build_trie(vocabulary)
    node = trie.find(prefix)
    texts = [token for token in range(len(vocabulary)) if vocabulary.token_bytes(token).startswith(prefix)]
    assert (node is None) == (not texts)
    if node is not None:
        end = int(trie.nodes[node, 0])
        assert sorted(t for below in range(node, end) for t in trie.tokens_at(below)) == texts
        assert int(trie.nodes[node, 2]) >> 8 == len(prefix)


@settings(max_examples=100, deadline=None)
@given(vocabularies(spells_all=True), st.lists(st.sampled_from(ALPHABET), max_size=4).map(b"".join))
def test_the_fewest_tokens_spell_the_text(vocabulary: Vocabulary, text: bytes) -> None:
    tokens = fewest_tokens(build_trie(vocabulary), text)
    assert tokens is not None
    assert vocabulary.spells(tokens, text)
    spellings = {vocabulary.token_bytes(token) for token in range(len(vocabulary))} - {b""}
    fewest = [0]
    for end in range(1, len(text) + 1):
        fewest.append(min(fewest[begin] + 1 for begin in range(end) if text[begin:end] in spellings))
    assert len(tokens) == fewest[-1]


def test_what_cannot_be_spelled_has_no_tokens() -> None:
    assert fewest_tokens(build_trie(letters()), "aé".encode()) is None
    assert fewest_tokens(build_trie(letters()), b"") == []
