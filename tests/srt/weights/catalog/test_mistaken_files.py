"""Files that are not what their name says are refused with what they are, wherever a model has them."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from umbel.lang.errors import ModelError
from umbel.srt.weights.catalog.mistaken_files import BEGINNING, mistaken_for
from umbel.srt.weights.documents import FolderDocuments, read_config
from umbel.srt.weights.gguf_file import open_gguf
from umbel.srt.weights.safetensors_folder import SINGLE, open_tensors

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
PAGE = b"\xef\xbb\xbf\n<!DOCTYPE HTML><html><title>Log in</title></html>"
HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
SAFETENSORS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(4)
MISTAKES = {
    "git-lfs pointer": POINTER,
    "web page": PAGE,
    "error message of a site .*Repository not found": b'{"error":"Repository not found"}',
    "pickle, .* never loaded here, as that can run code": b"PK\x03\x04" + bytes(40),
    "compressed file; unpack it": b"\x1f\x8b" + bytes(40),
    "filled with zeros": bytes(BEGINNING),
}
READERS: dict[str, Callable[[Path], object]] = {
    "model.gguf": open_gguf,
    SINGLE: lambda path: open_tensors(path.parent),
    "tokenizer.json": lambda path: FolderDocuments(path.parent).tokenizer(),
    "config.json": read_config,
}


@pytest.mark.parametrize("what", MISTAKES)
@pytest.mark.parametrize("name", READERS)
def test_each_reader_says_what_a_file_is(name: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(MISTAKES[what])
    if name == "config.json" and what.startswith("error message"):
        return  # an object of JSON like any other; its missing keys are named
    with pytest.raises(ModelError, match=f"{name} is (a |the |).*{what}"):
        READERS[name](path)


def test_weights_of_the_other_format_are_sent_there(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(SAFETENSORS)
    with pytest.raises(ModelError, match="is a safetensors file; give the folder of its model"):
        open_gguf(tmp_path / "model.gguf")
    (tmp_path / SINGLE).write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"is a GGUF file; give it a name that ends in \.gguf"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0", b"{}", b"plain text", bytes(range(256))])
def test_other_beginnings_say_nothing(content: bytes) -> None:
    assert mistaken_for(content) is None
