"""Key files, and lists of clients."""

from pathlib import Path

import pytest
import zmq
from umbel.lang.errors import ParameterError
from umbel.lang.transport.keys import KeyPair, add_client, check_public_key, read_clients, read_key, write_key

PUBLIC, SECRET = (key.decode() for key in zmq.curve_keypair())


def test_a_key_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    pair = KeyPair(PUBLIC, SECRET, PUBLIC)
    write_key(path, pair)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path) == pair
    path.chmod(0o640)
    with pytest.raises(ParameterError, match="may be read by other users; write chmod 600"):
        read_key(path)


def test_a_key_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    write_key(path, KeyPair(PUBLIC, SECRET))
    with pytest.raises(ParameterError, match="exists; write another path"):
        write_key(path, KeyPair(PUBLIC, SECRET))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("public = 3", "is no key file: "),
        (f'public = "{PUBLIC}"', "missing required field `secret`"),
        (f'public = "{PUBLIC}"\nsecret = "short"', "secret is no key"),
        (f'public = "{PUBLIC}"\nsecret = "{SECRET}"\nsever = "x"', "unknown field"),
        ("public", "is not a key file"),
        ("\xff", "is not a key file"),
    ],
    ids=["number", "half", "short", "unknown", "no file", "no text"],  # the keys are drawn
)
def test_what_is_no_key_file_is_refused_without_quoting_it(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    path.touch(0o600)
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ParameterError, match=says) as caught:
        read_key(path)
    assert SECRET not in str(caught.value)
    assert "short" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"none.key' cannot be read as a key file .*`umbel keys FILE`"):
        read_key(tmp_path / "none.key")


def test_a_list_of_clients_grows_by_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "clients"
    other = zmq.curve_keypair()[0].decode()
    add_client(path, "laptop", PUBLIC)
    add_client(path, "notebook-2", other)
    assert read_clients(path) == {PUBLIC: "laptop", other: "notebook-2"}
    with pytest.raises(ParameterError, match="has a client 'laptop'"):
        add_client(path, "laptop", other)
    with pytest.raises(ParameterError, match="is no name of a client"):
        add_client(path, "a b", other)


def test_a_list_with_a_wrong_key_or_without_a_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "clients"
    path.write_text('laptop = "x"')
    with pytest.raises(ParameterError, match="laptop='x' is no public key"):
        read_clients(path)
    path.write_text("# none yet")
    with pytest.raises(ParameterError, match="lists no client"):
        read_clients(path)
    add_client(path, "first", PUBLIC)
    assert read_clients(path) == {PUBLIC: "first"}


def test_every_key_that_zmq_makes_is_one() -> None:
    for _ in range(50):
        public, secret = zmq.curve_keypair()
        assert check_public_key("key", public.decode()) == public.decode()
        assert check_public_key("key", secret.decode())
