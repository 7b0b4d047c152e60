"""Images and clips → prompt parts: bytes, their digest, and limits that hold before anything is read whole.

Whether the bytes are a picture that the model can take is for the backend to say, which decodes them.
"""

import io
import os
from pathlib import Path
from typing import Any

from ..lang import checks
from ..lang.errors import ParameterError, shown
from ..lang.ops import Image, Video
from ..lang.prompt import Media, media_of

MAX_MEDIA_BYTES = 20 * 1024 * 1024  # of one image or clip
_SHOWN = 200  # characters of a path, in errors


def check(op: Image | Video) -> None:
    """Checks a source without reading it, while the program's line is still on the stack.

    Raises:
        ParameterError: a URL, a path that is no file, a file or bytes over the limit, a wrong type.
    """
    kind, source = type(op).__name__.lower(), op.source
    source = checks.plain(source) if isinstance(source, str) else source
    if isinstance(source, str) and "://" in source:
        fetched = "write image(fetch_image(url, hosts=[...])), or " if kind == "image" else ""
        raise ParameterError(
            f"{kind}({source[:_SHOWN]!r}): URLs are not fetched; {fetched}download it and pass the path or its bytes"
        )
    if isinstance(source, str | os.PathLike):
        _check_size(kind, _file_size(kind, source))
    elif isinstance(source, bytes):
        _check_size(kind, len(source))
    elif isinstance(op, Video) or not callable(getattr(source, "save", None)):
        raise ParameterError(
            f"{kind}() takes a path or bytes{'' if isinstance(op, Video) else ', or a PIL image'}; "
            f"got {type(source).__name__}"
        )


def load(op: Image | Video) -> Media:
    """Reads the source. Blocks: called on a worker thread.

    Raises:
        ParameterError: the file cannot be read, the PIL image cannot be written, or it is over the limit.
    """
    kind = type(op).__name__.lower()
    data = _read(kind, op.source)
    _check_size(kind, len(data))
    return media_of(kind, data, op.num_frames if isinstance(op, Video) else 0)


def _read(kind: str, source: Any) -> bytes:  # Any: a PIL image, which is not imported to name it
    if isinstance(source, bytes):
        return source
    if isinstance(source, str | os.PathLike):
        try:
            with open(source, "rb") as file:
                return file.read(MAX_MEDIA_BYTES + 1)
        except OSError as error:
            raise ParameterError(f"{kind}({shown(str(source))}) cannot be read: {error.strerror}") from error
    buffer = io.BytesIO()
    try:
        source.save(buffer, format="PNG")
    except Exception as error:  # whatever: it is broken, closed, empty, or in other colours
        mode = getattr(source, "mode", "?")
        raise ParameterError(
            f"{kind}() of a PIL image of mode {mode!r} that cannot be saved as PNG ({error}); write "
            f"{kind}(picture.convert('RGB')), or pass the path of its file"
        ) from error
    return buffer.getvalue()


def _file_size(kind: str, source: str | os.PathLike[str]) -> int:
    """Returns the size of a file in bytes. Raises ParameterError where there is no file."""
    path, problem = Path(source), "there is no such file"
    try:
        if path.is_file():
            return path.stat().st_size
        if path.is_dir():
            problem = "it is a folder"
        elif str(source).startswith("data:"):
            problem = "a picture as text is no path: write base64.b64decode() of what comes after its comma"
    except OSError as error:  # a name that no file can have
        raise ParameterError(
            f"{kind}({str(source)[:_SHOWN]!r}): this is no path; write {kind}(base64.b64decode(text)) if it is a "
            "picture as text"
        ) from error
    raise ParameterError(f"{kind}({shown(str(source))}): {problem}; pass a path or the bytes themselves")


def _check_size(kind: str, size: int) -> None:
    if not 0 < size <= MAX_MEDIA_BYTES:
        raise ParameterError(f"{kind}() of {size} bytes; write 1 to {MAX_MEDIA_BYTES}")
