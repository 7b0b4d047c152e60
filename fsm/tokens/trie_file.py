"""The trie of a vocabulary, kept on disk: reading it takes a quarter of the time of building it.

<folder>/<digest of the vocabulary>-<format>.trie, one file for each vocabulary, about 20 MB for 262,144 tokens: the
SHA-256 of an archive of arrays, and the archive. The folder is the caller's, and so is who may write there. A file that
is damaged, or that cannot be written, costs the time and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np

from .trie import END, STEP, Section, Trie, build_trie
from .vocabulary import Vocabulary

_DIGEST = 32  # bytes, before the arrays
_FORMAT = 2  # to be raised when nodes or sections change their meaning


def kept_trie(vocabulary: Vocabulary, folder: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> Trie:
    """Returns the trie from its file; built, and written for the next time, where there is none.

    Args:
        read: gives a file's content, or raises OSError where it is not to be used.
    """
    path = folder / f"{vocabulary.digest}-{_FORMAT}.trie"
    trie = _read(vocabulary, path, read)
    if trie is None:
        trie = build_trie(vocabulary)
        with contextlib.suppress(OSError):
            _write(trie, path)
    return trie


def _read(vocabulary: Vocabulary, path: Path, read: Callable[[Path], bytes]) -> Trie | None:
    try:
        content = read(path)
        digest, arrays = content[:_DIGEST], memoryview(content)[_DIGEST:]
        if sha256(arrays).digest() != digest:
            return None
        with np.load(io.BytesIO(arrays), allow_pickle=False) as file:
            texts = file["texts"]
            if not ((texts >= 0) & (texts < vocabulary.size)).all():
                return None
            trie = Trie(
                nodes=file["nodes"],
                groups=file["groups"],
                texts=texts,
                spellings=list(map(vocabulary.token_bytes, texts.tolist())),
                leaves=file["leaves"],
                sections=tuple(Section(begin, end) for begin, end in file["sections"].tolist()),
                depth=vocabulary.longest,
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return trie if _sound(trie, vocabulary) else None


def _sound(trie: Trie, vocabulary: Vocabulary) -> bool:
    """Checks what a walk relies on without looking: the file has a digest, so this is about files of another kind."""
    arrays = (trie.nodes, trie.groups, trie.texts, trie.leaves)
    if any(array.dtype != np.int32 for array in arrays) or trie.nodes.shape[1:] != (3,) or not trie.sections:
        return False
    count = len(trie.nodes)
    ends, depths = trie.nodes[:, END], trie.nodes[:, STEP] >> 8
    return bool(
        len(trie.texts) == len(trie.leaves) <= vocabulary.size
        and (ends > np.arange(count)).all()
        and (ends <= count).all()
        and (depths <= trie.depth).all()
        and (np.array([section.end for section in trie.sections]) <= count).all()
    )


def _write(trie: Trie, path: Path) -> None:
    """Writes under another name until the file is whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".making-", suffix=".trie")
    try:
        with os.fdopen(handle, "wb") as file:
            sections = np.array([(section.begin, section.end) for section in trie.sections], np.int64)
            archive = io.BytesIO()
            np.savez(
                archive, nodes=trie.nodes, groups=trie.groups, texts=trie.texts, leaves=trie.leaves, sections=sections
            )
            file.write(sha256(archive.getbuffer()).digest())
            file.write(archive.getbuffer())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
