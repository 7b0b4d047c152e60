"""Keys for runtimes that are reached over TCP: CURVE encrypts, and both ends know the other by its public key.

A key file, 0600, made by `umbel keys`            A list of the clients that a gateway admits
    public = "<40 characters>"                        laptop = "<public key, 40 characters>"
    secret = "<40 characters>"                        notebook-2 = "<public key>"
    server = "<40 characters>"    of a client: the public key of the one server that it talks to

Both are TOML. CURVE alone lets every client in that knows the server's public key, so a gateway without such a list
does not listen.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ParameterError, shown

MOST_BYTES = 1 << 20  # of a file
MOST_CLIENTS = 10_000

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85: no quote and no backslash
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of one end.

    `server`: the public key of the server, in the key file of a client.
    """

    public: str
    secret: str
    server: str | None = None


class Listen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks a gateway to listen on a TCP port.

    Attributes:
        address: "tcp://HOST:PORT"; the port "*" takes a free one.
        key: path of the server's key file.
        clients: path of the list of clients that are admitted. A change counts for the connections after it.
    """

    address: str
    key: str
    clients: str


def check_public_key(name: str, key: object) -> str:
    """Raises ParameterError unless this is a public key in Z85."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ParameterError(f"{name}={shown(key)} is no public key; write the 40 characters that `umbel keys` printed")
    return key


def read_key(path: str | Path) -> KeyPair:
    """Reads a key file.

    Raises:
        ParameterError: no such file, not a key file, or one that other users may read.
    """
    given = _read(path, "a key file", "make one with `umbel keys FILE`", private=True)
    try:
        pair = msgspec.convert(given, KeyPair)
    except msgspec.ValidationError as error:
        raise ParameterError(f"{shown(str(path))} is no key file: {error}; make one with `umbel keys FILE`") from None
    for name, key in (("public", pair.public), ("secret", pair.secret), ("server", pair.server)):
        if key is not None and not _KEY.fullmatch(key):  # the value is not quoted: it may be the secret
            raise ParameterError(f"{shown(str(path))}: {name} is no key; make a file with `umbel keys FILE`")
    return pair


def write_key(path: str | Path, pair: KeyPair) -> None:
    """Writes a new key file, 0600. Raises ParameterError when there is a file, or none can be made."""
    lines = ["# Made by `umbel keys`. The secret proves who this client or server is: keep the file to yourself."]
    lines += [f'{name} = "{key}"' for name, key in msgspec.structs.asdict(pair).items() if key is not None]
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ParameterError(f"{shown(str(path))} exists; write another path, or remove the old key first") from None
    except OSError as error:
        raise ParameterError(f"{shown(str(path))} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write("\n".join(lines) + "\n")


def read_clients(path: str | Path) -> dict[str, str]:
    """Reads a list of clients → public key to name.

    Raises:
        ParameterError: no such file, no such list, or an empty one.
    """
    given = _listed(path)
    if not given:
        raise ParameterError(
            f'{shown(str(path))} lists no client, so none could come in; write a line for each: name = "public key"'
        )
    return {key: name for name, key in given.items()}


def add_client(path: str | Path, name: str, public: str) -> None:
    """Appends a client to a list, which is made if there is none. Raises ParameterError for a name that is taken."""
    if not _NAME.fullmatch(name):
        raise ParameterError(f"name={shown(name)} is no name of a client; write letters, digits, - and _, at most 64")
    if Path(path).exists() and name in _listed(path):
        raise ParameterError(f"{shown(str(path))} has a client {name!r}; write another name, or remove its line first")
    try:
        with open(path, "a", encoding="ascii") as file:
            file.write(f'\n{name} = "{public}"\n')  # the last line may have no end
    except OSError as error:
        raise ParameterError(f"{shown(str(path))} cannot be written: {error.strerror}") from None


def _listed(path: str | Path) -> dict[str, str]:
    """Reads a list of clients → name to public key; it may be empty."""
    given = _read(path, "a list of clients", 'write a line for each client: name = "public key"')
    if len(given) > MOST_CLIENTS:
        raise ParameterError(f"{shown(str(path))} lists {len(given)} clients; at most {MOST_CLIENTS} are read")
    return {name: check_public_key(name, key) for name, key in given.items()}


def _read(path: str | Path, kind: str, instead: str, *, private: bool = False) -> dict[str, Any]:  # Any: as TOML has it
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ParameterError(f"{shown(str(path))} cannot be read as {kind} ({error}); {instead}") from None
    if private and os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ParameterError(f"{shown(str(path))} may be read by other users; write chmod 600 {path}")
    if len(content) > MOST_BYTES:
        raise ParameterError(f"{shown(str(path))} is too large for {kind}; {instead}")
    import tomllib  # here: programs without keys do without it

    try:
        return tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ParameterError(f"{shown(str(path))} is not {kind}: {error}; {instead}") from None
