"""Two users of one machine: nothing that one of them wrote is loaded by the other. Nor is what was damaged."""

import logging
import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from umbel.lang.errors import ModelError
from umbel.srt import launch
from umbel.srt.constraints import matcher_factory
from umbel.srt.core.cache_folder import make_private, read_trusted, trusted
from umbel.srt.kernels.cpu import library
from umbel.srt.kernels.cpu.library import LIBRARY, SEAL, NoKernels, host_library_path
from umbel.srt.weights import open_model

from .tiny import BY_NAME, write_folder, write_gguf

ATTACKER, VICTIM = 65534, 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming two other users needs root")


def as_user(user: int, work: Callable[[], object]) -> str:
    """Runs `work` as another user, in a process of its own → what it gives, or the error that it raises, as text."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.umask(0o022)
            try:
                answer = str(work())
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writing, answer.encode()[:60_000])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        answer = file.read()
    os.waitpid(process, 0)
    return answer


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which everybody may make files, as /tmp is."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def plant(folder: Path, mode: int = 0o777) -> Path:
    """What an attacker does: a cache with a file in every place from which something is loaded."""
    for name in ("kernels/walk-0", "models/mine", "tokenizers", "vocabularies", "tries"):
        (folder / name).mkdir(parents=True)
        (folder / name / "planted").write_bytes(b"evil")
    for path in (folder, *folder.rglob("*")):
        path.chmod(mode)
    return folder


# How a file gets to be where a victim looks: by who made it, and what is wrong on the way.
def _in_a_folder_of_the_attacker(shared: Path) -> Path:
    as_user(ATTACKER, lambda: plant(shared / "umbel", 0o755))
    return shared / "umbel" / "tries" / "planted"


def _in_an_open_folder_of_the_attacker(shared: Path) -> Path:
    as_user(ATTACKER, lambda: plant(shared / "umbel"))
    return shared / "umbel" / "tries" / "planted"


def _in_an_open_folder_of_the_victim(shared: Path) -> Path:
    as_user(VICTIM, lambda: (shared / "umbel").mkdir())
    as_user(VICTIM, lambda: (shared / "umbel").chmod(0o777))
    as_user(ATTACKER, lambda: (shared / "umbel" / "planted").write_bytes(b"evil"))
    return shared / "umbel" / "planted"


def _for_a_group(shared: Path) -> Path:
    as_user(VICTIM, lambda: (shared / "umbel").mkdir())
    os.chown(shared / "umbel", VICTIM, 100)
    (shared / "umbel").chmod(0o775)
    as_user(VICTIM, lambda: (shared / "umbel" / "mine").write_bytes(b"good"))
    return shared / "umbel" / "mine"


def _below_a_folder_of_the_attacker(shared: Path) -> Path:
    """The victim's own folder in one of the attacker, who can exchange it at any time."""
    as_user(ATTACKER, lambda: (shared / "umbel").mkdir())
    as_user(ATTACKER, lambda: (shared / "umbel").chmod(0o777))
    as_user(VICTIM, lambda: (shared / "umbel" / "own").mkdir(mode=0o700))
    as_user(VICTIM, lambda: (shared / "umbel" / "own" / "mine").write_bytes(b"good"))
    return shared / "umbel" / "own" / "mine"


def _by_a_link_to_the_attacker(shared: Path) -> Path:
    as_user(ATTACKER, lambda: plant(shared / "theirs"))
    as_user(VICTIM, lambda: (shared / "umbel").symlink_to(shared / "theirs"))
    return shared / "umbel" / "tries" / "planted"


def _by_a_link_of_the_attacker(shared: Path) -> Path:
    """To a folder of the victim: the link can be turned to another one."""
    as_user(VICTIM, lambda: (shared / "own").mkdir(mode=0o755))
    as_user(VICTIM, lambda: (shared / "own" / "mine").write_bytes(b"good"))
    as_user(ATTACKER, lambda: (shared / "umbel").symlink_to(shared / "own"))
    return shared / "umbel" / "mine"


def _a_file_that_all_may_write(shared: Path) -> Path:
    as_user(VICTIM, lambda: (shared / "umbel").mkdir(mode=0o755))
    as_user(VICTIM, lambda: (shared / "umbel" / "mine").write_bytes(b"good"))
    as_user(VICTIM, lambda: (shared / "umbel" / "mine").chmod(0o666))
    return shared / "umbel" / "mine"


def _a_file_in_a_sticky_folder(shared: Path) -> Path:
    as_user(ATTACKER, lambda: (shared / "planted").write_bytes(b"evil"))
    return shared / "planted"


PLACES = [
    _in_a_folder_of_the_attacker,
    _in_an_open_folder_of_the_attacker,
    _in_an_open_folder_of_the_victim,
    _for_a_group,
    _below_a_folder_of_the_attacker,
    _by_a_link_to_the_attacker,
    _by_a_link_of_the_attacker,
    _a_file_that_all_may_write,
    _a_file_in_a_sticky_folder,
]


@pytest.mark.sampled(4)
@as_root
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__[1:])
def test_no_file_that_another_user_could_have_written_is_read(place: Callable[[Path], Path], shared: Path) -> None:
    path = place(shared)
    for read in (trusted, read_trusted):
        answer = as_user(VICTIM, lambda read=read: read(path))  # type: ignore[misc]  # its own of each turn
        assert answer.startswith(f"ModelError: {path} is not used"), answer
        assert "UMBEL_CACHE" in answer
        assert len(answer) < 2_000


@as_root
def test_files_of_the_user_and_of_root_are_read(shared: Path) -> None:
    as_user(VICTIM, lambda: (shared / "own").mkdir(mode=0o700))
    as_user(VICTIM, lambda: (shared / "own" / "mine").write_bytes(b"good"))
    as_user(VICTIM, lambda: (shared / "link").symlink_to("own"))
    (shared / "of-root").write_bytes(b"good")
    for path in (shared / "own" / "mine", shared / "link" / "mine", shared / "link" / ".." / "own" / "mine"):
        assert as_user(VICTIM, lambda path=path: read_trusted(path)) == "b'good'"  # type: ignore[misc]
    assert as_user(VICTIM, lambda: read_trusted(shared / "of-root")) == "b'good'"
    assert as_user(VICTIM, lambda: trusted(shared / "link" / "mine")) == str(shared / "own" / "mine")


@as_root
def test_a_folder_that_everybody_may_write_to_is_no_cache(shared: Path) -> None:
    answer = as_user(VICTIM, lambda: make_private(shared / "mine" / "models"))
    assert answer == str(shared / "mine" / "models"), "a folder of one's own in /tmp is sound"
    as_user(ATTACKER, lambda: plant(shared / "umbel"))
    assert "belongs to another user" in as_user(VICTIM, lambda: make_private(shared / "umbel" / "models"))


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_no_kernels_of_another_user_are_loaded(mode: int, shared: Path) -> None:
    """The attacker's folder has the right name, a library and its seal."""
    environment = {"UMBEL_CACHE": str(shared / "umbel"), "PATH": os.environ["PATH"]}
    compiler = library.find_compiler(environment)
    folder = shared / "umbel" / "kernels" / f"host-{library._digest(library.HOST, compiler)}"

    def attack() -> None:
        folder.mkdir(parents=True)
        (folder / LIBRARY).write_bytes(b"evil")
        (folder / SEAL).write_bytes(msgspec.json.encode(library._seal(b"evil")))
        for path in (shared / "umbel", *(shared / "umbel").rglob("*")):
            path.chmod(mode)

    assert as_user(ATTACKER, attack) == "None"
    answer = as_user(VICTIM, lambda: host_library_path(environment))
    assert answer.startswith("NoKernels: ")
    assert "belongs to another user (uid 65534)" in answer
    if mode == 0o755:
        assert as_user(ATTACKER, lambda: host_library_path(environment)) == str(folder / LIBRARY), "its owner may"


@as_root
def test_no_model_of_another_user_is_opened_by_name(shared: Path) -> None:
    write_folder(shared / "made", BY_NAME["qwen2"])
    for path in (shared / "made", *(shared / "made").rglob("*")):
        path.chmod(0o755)
    as_user(ATTACKER, lambda: shutil.copytree(shared / "made", shared / "umbel" / "models" / "mine"))
    answer = as_user(VICTIM, lambda: open_model("mine", cache=shared / "umbel").path)
    assert answer.startswith("ModelError: ")
    assert "belongs to another user (uid 65534)" in answer
    assert as_user(ATTACKER, lambda: open_model("mine", cache=shared / "umbel").path).startswith(str(shared / "umbel"))


def read_tokenizer(folder: Path, cache: Path) -> None:
    open_model(folder / "tiny.gguf", cache=cache).documents.tokenizer()


def read_vocabulary(folder: Path, cache: Path) -> None:
    open_model(folder, cache=cache).vocabulary()


@as_root
@pytest.mark.parametrize(("kind", "read"), [("tokenizers", read_tokenizer), ("vocabularies", read_vocabulary)])
def test_no_file_of_another_user_is_read(
    kind: str, read: Callable[[Path, Path], None], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(shared / "model", BY_NAME["qwen2"])
    write_gguf(shared / "model" / "tiny.gguf", BY_NAME["qwen2"])
    for path in (shared / "model", *(shared / "model").rglob("*")):
        path.chmod(0o755)

    def use() -> str:
        said: list[str] = []
        monkeypatch.setattr(logging.Logger, "handle", lambda logger, record: said.append(record.getMessage()))
        read(shared / "model", shared / "umbel")
        read(shared / "model", shared / "umbel")
        assert len(said) <= 1, "a folder is named once"
        return " ".join(said)

    assert as_user(ATTACKER, use) == ""
    (kept,) = (shared / "umbel" / kind).iterdir()
    for path in (shared / "umbel", kept.parent, kept):
        path.chmod(0o777)
    answer = as_user(VICTIM, use)
    assert f"nothing is kept for the next start in {shared}" in answer
    assert "belongs to another user" in answer
    assert kept.stat().st_uid == ATTACKER, "it was not replaced"


@as_root
def test_no_trie_of_another_user_is_read(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(ATTACKER, lambda: plant(shared / "umbel"))
    monkeypatch.setenv("UMBEL_CACHE", str(shared / "umbel"))
    assert as_user(VICTIM, launch._tries_folder) == "None"
    answer = as_user(VICTIM, lambda: matcher_factory._read_ours(shared / "umbel" / "tries" / "planted"))
    assert answer.startswith("PermissionError: ")


def test_links_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ModelError, match="more than 40 symbolic links"):
        trusted(tmp_path / "a" / "x")


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="is no file"):
        read_trusted(tmp_path / "pipe")


# ------------------------------------------------------------------------------------------ damage


def _cut(path: Path, random_: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: random_.randrange(1, path.stat().st_size)])


def _flip(path: Path, random_: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[random_.randrange(len(content))] ^= random_.randint(1, 255)
    path.write_bytes(content)


def _empty(path: Path, random_: random.Random) -> None:
    path.write_bytes(b"")


def _remove(path: Path, random_: random.Random) -> None:
    path.unlink()


DAMAGES = [_cut, _flip, _flip, _flip, _flip, _empty, _remove]
Damage = Callable[[Path, random.Random], None]


@pytest.mark.parametrize("name", [LIBRARY, SEAL])
def test_a_damaged_library_is_compiled_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_compile", lambda command: Path(command[-1]).write_bytes(b"library" * 1000))
    monkeypatch.setattr(library, "_run", lambda command, seconds: None)
    environment = {"UMBEL_CACHE": str(tmp_path / "cache"), "PATH": os.environ["PATH"]}
    path = host_library_path(environment)
    whole = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    random_ = random.Random(7)
    for damage in DAMAGES * 5:
        damage(path.parent / name, random_)
        damaged = {file.name: file.read_bytes() for file in path.parent.iterdir()}
        assert host_library_path(environment) == path
        assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == whole
        assert damaged != whole


def test_a_damaged_tokenizer_is_made_again(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", BY_NAME["qwen2"])
    documents = open_model(tmp_path / "tiny.gguf", cache=tmp_path / "cache").documents
    content = documents.tokenizer()
    (kept,) = (tmp_path / "cache" / "tokenizers").iterdir()
    whole = kept.read_bytes()
    random_ = random.Random(5)
    for damage in DAMAGES:
        damage(kept, random_)
        assert documents.tokenizer() == content
        assert kept.read_bytes() == whole


def test_a_damaged_vocabulary_is_made_again(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", BY_NAME["qwen2"])
    source = open_model(tmp_path / "model", cache=tmp_path / "cache")
    vocabulary = source.vocabulary()
    (kept,) = (tmp_path / "cache" / "vocabularies").iterdir()
    whole = kept.read_bytes()
    random_ = random.Random(11)
    for damage in DAMAGES:
        damage(kept, random_)
        assert source.vocabulary() == vocabulary
        assert kept.read_bytes() == whole


def test_why_there_are_no_kernels_is_said(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(NoKernels, match=f"other users may write to {tmp_path}/cache.*chmod go-w {tmp_path}/cache"):
        host_library_path({"UMBEL_CACHE": str(tmp_path / "cache"), "PATH": os.environ["PATH"]})
