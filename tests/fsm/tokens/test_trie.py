"""The trie on disk: the same one comes back, and what is damaged is built anew."""

import io
import random
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from umbel.fsm.tokens import trie
from umbel.fsm.tokens.trie import Trie, build_trie, kept_trie
from umbel.fsm.tokens.vocabulary import Vocabulary

VOCABULARY = Vocabulary([b"a", b"an", b"at", b"b", b"an", "é".encode(), b'"', b""], [7])


def same(one: Trie, other: Trie) -> bool:
    arrays = ("nodes", "groups", "texts", "leaves")
    return one.sections == other.sections and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays
    )


def test_what_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kept_trie(VOCABULARY, tmp_path)
    assert same(first, build_trie(VOCABULARY))
    monkeypatch.setattr(trie, "build_trie", None)
    assert same(kept_trie(VOCABULARY, tmp_path), first)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_vocabulary_has_a_file_of_its_own(tmp_path: Path) -> None:
    kept_trie(VOCABULARY, tmp_path)
    other = Vocabulary([b"a", b"b", b""], [2])
    assert same(kept_trie(other, tmp_path), build_trie(other))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 half an archive"])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: bytes) -> None:
    kept_trie(VOCABULARY, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert same(kept_trie(VOCABULARY, tmp_path), build_trie(VOCABULARY))
    assert path.stat().st_size > 500


def test_a_flipped_byte_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    kept_trie(VOCABULARY, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    random_ = random.Random(5)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[random_.randrange(len(whole))] ^= random_.randint(1, 255)
        path.write_bytes(damaged)
        assert trie._read(VOCABULARY, path, Path.read_bytes) is None
    for length in (0, 1, 31, 32, 33, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert trie._read(VOCABULARY, path, Path.read_bytes) is None
    assert same(kept_trie(VOCABULARY, tmp_path), build_trie(VOCABULARY))
    assert path.read_bytes() == whole


def test_nodes_that_lead_outside_are_not_walked(tmp_path: Path) -> None:
    kept_trie(VOCABULARY, tmp_path)
    (path,) = tmp_path.iterdir()
    with np.load(io.BytesIO(path.read_bytes()[32:])) as file:
        content = dict(file)
    content["nodes"][0, 0] = 10**6
    archive = io.BytesIO()
    np.savez(archive, **content)
    path.write_bytes(sha256(archive.getvalue()).digest() + archive.getvalue())
    assert same(kept_trie(VOCABULARY, tmp_path), build_trie(VOCABULARY))


def test_a_folder_that_is_not_there_costs_nothing_but_the_time(tmp_path: Path) -> None:
    assert same(kept_trie(VOCABULARY, tmp_path / "none"), build_trie(VOCABULARY))
