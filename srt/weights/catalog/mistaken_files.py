"""Recognises files that are not what their name says: pages of a site, git-lfs pointers, pickles, other formats.

They come from a download that went wrong, and the first bytes tell which: the error can then say what to do. Nothing of
the file is parsed.
"""

from pathlib import Path

BEGINNING = 512  # bytes that are looked at

_AGAIN = "download it again, a model with: umbel pull ORG/REPO"
_PICKLE = f"a pickle, as PyTorch writes .bin and .pt files: never loaded here, as that can run code; {_AGAIN}"
_STARTS: tuple[tuple[tuple[bytes, ...], str], ...] = (
    (
        (b"version https://git-lfs",),
        f"a git-lfs pointer, not the file that it stands for; run git lfs pull in its folder, or {_AGAIN}",
    ),
    ((b"GGUF",), "a GGUF file; give it a name that ends in .gguf, and that path"),
    ((b"lmgg", b"fmgg", b"tjgg", b"algg"), "a file of llama.cpp from before GGUF; convert the model again"),
    ((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), _PICKLE),
    ((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf"), "a compressed file; unpack it"),
)
_PAGES = (b"<!doctype html", b"<html", b"<head", b"<?xml")


def mistaken_for(beginning: bytes, *, wanted: str = "") -> str | None:
    """Says what a file is by its first bytes, and what to do, as in "PATH is {...}"; None: they do not tell.

    Args:
        wanted: "safetensors" for a file that should be one: a damaged one is not named as what it is.
    """
    for starts, what in _STARTS:
        if beginning.startswith(starts):
            return what
    text = beginning[:BEGINNING].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(_PAGES):
        return f"a web page, as sites send one in place of a file, to log in say; {_AGAIN}"
    if text.startswith((b'{"error"', b"{'error'")):
        shown = " ".join(beginning[:120].decode("utf-8", "replace").split())
        return f"the error message of a site ({shown}); {_AGAIN}"
    header = int.from_bytes(beginning[:8], "little")
    if wanted != "safetensors" and beginning[8:10] in (b'{"', b"{ ") and 2 <= header < 1 << 32:
        return "a safetensors file; give the folder of its model, with config.json and tokenizer.json"
    if len(beginning) >= BEGINNING and not beginning.strip(b"\0"):
        return f"filled with zeros, as an interrupted copy leaves a file; {_AGAIN}"
    return None


def beginning_of(path: Path) -> bytes:
    """Reads the bytes that `mistaken_for` looks at; b"" for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(BEGINNING)
    except OSError:
        return b""
