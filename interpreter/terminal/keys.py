"""`umbel keys`: the keys of a runtime that listens on a TCP port, and of its clients."""

import argparse
from collections.abc import Sequence

from ...lang.errors import ParameterError
from ..backends.runtime_remote import make_key


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel keys",
        description="Makes a key and prints its public part: that of a runtime that listens on a TCP port, or, with "
        "--server, that of a client.",
    )
    made.add_argument("file", help="the new key file, for its owner alone (0600)")
    made.add_argument("--server", help="for a client: the server's public key, or the path of its key file")
    made.add_argument("--clients", metavar="LIST", help="add the public key to this list of clients")
    made.add_argument("--name", help="in that list; default: the name of the file")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit status; raises ParameterError."""
    options = parser().parse_args(arguments)
    if options.name is not None and options.clients is None:
        raise ParameterError("--name is the name in a list; write --clients LIST, too")
    print(make_key(options.file, server=options.server, clients=options.clients, name=options.name).public)
    return 0
