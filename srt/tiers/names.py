"""Names of pages: chained SHA-256 over everything that the keys and values of a page depend on.

    root    = H(format, weights, adapter, KV dtype, layout, rank, ranks, page size, salt)
    page 0  = H(root, namespaces, pictures, tokens)          tokens [0, 64)
    page 1  = H(page 0, namespaces, pictures, tokens)        tokens [64, 128), after exactly those of page 0

Every field is hashed after its length, so ("a", "bc") and ("ab", "c") have two names. Equal names mean equal content,
in this process, after a restart, and on another machine. A picture enters by the digest of its pixels: its number
belongs to one gateway, and names another picture after a restart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from ...lang.prompt import Borders
from ..core.batch import PICTURE_BASE

FORMAT = 1  # of names and pages; a change makes all older pages misses
PAGE_TOKENS = 64
NAME_BYTES = 32


@dataclass(frozen=True, slots=True)
class PageScheme:
    """Describes the pages of one engine. Engines of equal schemes can read each other's pages.

    Attributes:
        fingerprint: digest of the model's weights and of what else changes its keys, such as options of its attention.
        kv_dtype: dtype of the pool.
        layout: order of layers, keys and values in a payload.
        rank, ranks: of tensor_parallel; each rank has a part of the heads.
    """

    fingerprint: bytes
    kv_dtype: str
    layout: str
    rank: int = 0
    ranks: int = 1
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        assert self.fingerprint, "pages of two models must differ in name"
        assert 0 <= self.rank < self.ranks, "ranks are counted from 0"
        assert self.page_tokens >= 1, "a page has tokens"

    @property
    def digest(self) -> bytes:
        """SHA-256 of all of it: what each page says of itself outside this process."""
        return self.root("")

    def root(self, salt: str, adapter: bytes = b"") -> bytes:
        """Returns the name before the first page of a sequence.

        Args:
            adapter: digest of the adapter's weights; empty: none is used.
        """
        return _hashed(
            b"umbel root",
            FORMAT.to_bytes(4, "little"),
            self.fingerprint,
            adapter,
            self.kv_dtype.encode(),
            self.layout.encode(),
            self.rank.to_bytes(4, "little"),
            self.ranks.to_bytes(4, "little"),
            self.page_tokens.to_bytes(4, "little"),
            salt.encode("utf-8", "surrogatepass"),
        )


def page_names(
    root: bytes,
    tokens: NDArray[np.integer] | Sequence[int],
    *,
    page_tokens: int = PAGE_TOKENS,
    borders: Borders = (),
    digest_of: Callable[[int], bytes | None] = lambda number: None,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Returns the names of the whole pages of a sequence, head first.

    Args:
        root: of the sequence's salt, `PageScheme.root`.
        borders: places from which on the sequence lies in a private namespace.
        digest_of: a picture's number → the digest of its pixels; None: not known, and neither that page nor a later
            one has a name.
        known: the first of the names, which are not computed again.
    """
    ids = np.ascontiguousarray(tokens, dtype="<i4")
    names = list(known)
    first, count = len(names), len(ids) // page_tokens
    described = {place // page_tokens for place, _ in borders}  # pages with more than tokens of a vocabulary
    seen = ids[first * page_tokens : count * page_tokens]
    if len(seen) and int(seen.max()) >= PICTURE_BASE:
        described.update((first + np.unique(np.flatnonzero(seen >= PICTURE_BASE) // page_tokens)).tolist())
    parent = names[-1] if names else root
    size = 4 * page_tokens
    between = _BEFORE_TOKENS + size.to_bytes(8, "little")
    data = memoryview(ids.tobytes())
    for index in range(first, count):
        if index in described:
            page = _described(ids, index, page_tokens, borders, digest_of)
            if page is None:
                break
            parent = _hashed(_PAGE, parent, *page)
        else:
            parent = sha256(
                b"".join((_BEFORE_PARENT, parent, between, data[index * size : index * size + size]))
            ).digest()
        names.append(parent)
    return names


def _described(
    ids: NDArray[np.int32], index: int, page_tokens: int, borders: Borders, digest_of: Callable[[int], bytes | None]
) -> tuple[bytes, bytes, bytes] | None:
    """Returns the namespaces, pictures and tokens of a page as fields; None: a picture has no digest."""
    start, end = index * page_tokens, (index + 1) * page_tokens
    page = ids[start:end]
    opened = [
        field
        for place, namespace in borders
        if start <= place < end
        for field in ((place - start).to_bytes(4, "little"), namespace.encode("utf-8", "surrogatepass"))
    ]
    shown: list[bytes] = []
    is_picture = page >= PICTURE_BASE
    if is_picture.any():
        changes = np.flatnonzero(np.diff(page, prepend=-1))  # places at which another run of equal ids begins
        for place, after in zip(changes.tolist(), [*changes.tolist()[1:], page_tokens], strict=True):
            if not is_picture[place]:
                continue
            digest = digest_of(int(page[place]) - PICTURE_BASE)
            if not digest:
                return None
            shown += [place.to_bytes(4, "little"), (after - place).to_bytes(4, "little"), digest]
        page = np.where(is_picture, np.int32(-1), page)
    return _framed(*opened), _framed(*shown), page.tobytes()


def _framed(*fields: bytes) -> bytes:
    """Joins fields, each after its length: no two lists of fields give the same bytes."""
    return b"".join(part for field in fields for part in (len(field).to_bytes(8, "little"), field))


def _hashed(*fields: bytes) -> bytes:
    return sha256(_framed(*fields)).digest()


# A page without pictures and borders, around its parent and its tokens: the same bytes as `_hashed` would take.
_PAGE = b"umbel page"
_BEFORE_PARENT = _framed(_PAGE) + NAME_BYTES.to_bytes(8, "little")
_BEFORE_TOKENS = _framed(b"", b"")  # no namespaces, no pictures
