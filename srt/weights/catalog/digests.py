"""Digests of what decides the keys and values of a model: every byte of its weights, its configuration, its adapters.

Pages of keys and values outlive a process and are exchanged between machines, so a name, a size or a time of change is
not enough. A file is read once: the cache folder notes its digest next to everything that changes when the file does
(path, device, inode, size, times of content and of state; the last one is set by the system alone).
"""

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ....lang.errors import ModelError
from ...core.cache_folder import keep, read_trusted
from ..adapters import CONFIG, TENSORS

READ_BYTES = 4 << 20
_LARGE = 1 << 30  # bytes; reading them takes a second

log = logging.getLogger("umbel.engine")


# Any: config.json, as it is
def weights_digest(config: Mapping[str, Any], files: Iterable[Path], cache: Path) -> bytes:
    """Computes the digest of a model: of its configuration and of all files of its weights."""
    return sha256(json.dumps(config, sort_keys=True).encode() + _all_of(files, cache)).digest()


def adapter_digests(adapters: Mapping[str, str], cache: Path) -> tuple[bytes, ...]:
    """Computes the digest of each adapter, in the order in which they are given."""
    return tuple(_all_of((Path(folder) / name for name in (CONFIG, TENSORS)), cache) for folder in adapters.values())


def file_digest(path: Path, cache: Path) -> bytes:
    """Computes SHA-256 of a file's content, or reads it from the cache folder.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        found = path.resolve()
        state = found.stat()
        known = (str(found), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        note = cache / "digests" / sha256(repr(known).encode()).hexdigest()
        with contextlib.suppress(OSError, ModelError):  # missing, or another user could have written it
            content = read_trusted(note)
            if len(content) == sha256().digest_size:
                return content
        if state.st_size > _LARGE:
            log.info("computing the digest of %s, once: %.1f GB", path.name, state.st_size / 1e9)
        digest = sha256()
        with found.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; it is read to name pages of the cache") from error
    keep(note, digest.digest())
    return digest.digest()


def _all_of(paths: Iterable[Path], cache: Path) -> bytes:
    return sha256(b"".join(file_digest(path, cache) for path in paths)).digest()
