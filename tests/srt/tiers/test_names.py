"""Names of pages: equal for equal content, and different as soon as one thing differs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from umbel.srt.core.batch import PICTURE_BASE, picture_tokens
from umbel.srt.tiers.names import PageScheme, page_names

SCHEME = PageScheme(b"w" * 32, "bfloat16", "layers", 0, 2, 4)
TOKENS = list(range(1, 17))


def names_of(scheme: PageScheme = SCHEME, salt: str = "s", adapter: bytes = b"", **more: Any) -> list[bytes]:
    return page_names(scheme.root(salt, adapter), more.pop("tokens", TOKENS), page_tokens=scheme.page_tokens, **more)


@pytest.mark.parametrize(
    "other",
    [
        lambda: names_of(replace(SCHEME, fingerprint=b"v" * 32)),
        lambda: names_of(replace(SCHEME, kv_dtype="float8")),
        lambda: names_of(replace(SCHEME, layout="tokens")),
        lambda: names_of(replace(SCHEME, rank=1)),
        lambda: names_of(replace(SCHEME, ranks=1)),
        lambda: names_of(replace(SCHEME, page_tokens=8)),
        lambda: names_of(salt="t"),
        lambda: names_of(adapter=b"a"),
        lambda: names_of(borders=((0, "s/acme"),)),
        lambda: names_of(tokens=[9, *TOKENS[1:]]),
    ],
    ids=["weights", "dtype", "layout", "rank", "ranks", "page", "salt", "adapter", "namespace", "token"],
)
def test_each_field_changes_every_name(other: Callable[[], list[bytes]]) -> None:
    assert not set(names_of()) & set(other())


def test_a_change_of_the_format_changes_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names_of()
    monkeypatch.setattr("umbel.srt.tiers.names.FORMAT", 2)
    assert not set(before) & set(names_of())


def test_fields_do_not_run_into_each_other() -> None:
    assert SCHEME.root("a", b"bc") != SCHEME.root("ab", b"c")
    assert replace(SCHEME, kv_dtype="a", layout="bc").root("") != replace(SCHEME, kv_dtype="ab", layout="c").root("")
    assert replace(SCHEME, fingerprint=b"a").root("", b"bc") != replace(SCHEME, fingerprint=b"ab").root("", b"c")
    two, one = ((0, "s/a"), (1, "s/a/b")), ((0, "s/a" + "\1\0\0\0" + "s/a/b"),)
    assert names_of(borders=two) != names_of(borders=one)


def test_a_page_without_more_than_tokens_is_hashed_as_any_other() -> None:
    """The fast path and the general one give the same names."""
    plain = names_of(tokens=[*TOKENS, *picture_tokens(3, 4)], digest_of={3: b"p"}.get)
    assert plain[:4] == names_of()
    assert names_of(borders=((16, "s/acme"),)) == names_of(), "the namespace opens after the last page"


def test_a_namespace_changes_the_pages_from_its_place_on() -> None:
    public, private = names_of(), names_of(borders=((9, "s/acme"),))
    assert public[:2] == private[:2]
    assert not set(public[2:]) & set(private[2:])
    assert private[2:] != names_of(borders=((10, "s/acme"),))[2:]
    assert private[2:] != names_of(borders=((9, "s/globex"),))[2:]


def with_picture(number: int) -> list[int]:
    return [1, 2, *picture_tokens(number, 5), 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_pictures_enter_by_their_digest_and_not_by_their_number() -> None:
    first = names_of(tokens=with_picture(3), digest_of={3: b"cat"}.get)
    assert first == names_of(tokens=with_picture(12), digest_of={12: b"cat"}.get)
    assert not set(first) & set(names_of(tokens=with_picture(3), digest_of={3: b"dog"}.get))


def test_a_picture_without_a_digest_ends_the_names() -> None:
    tokens = [1, 2, 3, 4, *with_picture(3)]
    assert len(names_of(tokens=tokens)) == 1
    assert len(names_of(tokens=tokens, digest_of={3: b"cat"}.get)) == 5


def test_where_a_picture_lies_in_a_page_changes_the_name() -> None:
    shapes = [[0, 0, 3, 3], [0, 3, 3, 0], [3, 3, 0, 0], [3, 3, 3, 0], [3, 0, 3, 0]]
    names = {
        names_of(tokens=[PICTURE_BASE + 3 if one else 7 for one in shape], digest_of={3: b"cat"}.get)[0]
        for shape in shapes
    }
    assert len(names) == len(shapes)


tokens = st.lists(st.integers(0, 5) | st.sampled_from([PICTURE_BASE, PICTURE_BASE + 1]), max_size=40)
DIGESTS = {0: b"cat", 1: b"dog"}


@given(tokens, tokens)
def test_names_are_equal_as_far_as_the_tokens_are(left: list[int], right: list[int]) -> None:
    one, two = (names_of(tokens=each, digest_of=DIGESTS.get) for each in (left, right))
    same = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert one[: same // 4] == two[: same // 4]
    assert not set(one[same // 4 :]) & set(two[same // 4 :])
    assert len({*one, *two}) == len(one) + len(two) - same // 4


@given(tokens, st.integers(0, 10), st.integers(0, 39))
def test_names_go_on_from_those_that_are_known(ids: list[int], count: int, place: int) -> None:
    whole = names_of(tokens=ids, borders=((place, "s/acme"),), digest_of=DIGESTS.get)
    assert whole == names_of(tokens=ids, borders=((place, "s/acme"),), digest_of=DIGESTS.get, known=whole[:count])


def test_all_integers_give_the_same_names() -> None:
    assert names_of(tokens=np.array(TOKENS, dtype=np.int64)) == names_of(tokens=np.array(TOKENS, dtype=np.int32))
