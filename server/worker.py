"""A worker of `umbel serve --http-workers N`: a process that `workers.py` starts, with a front of its own."""

import logging
import shutil
import signal
import socket
import sys
from pathlib import Path

import msgspec

from ..interpreter.backends.runtime import Runtime
from ..lang.errors import UmbelError
from ..lang.transport.lifeline import read_line, watch
from .access import Access
from .activity import Counts
from .command import LOG_FORMAT, LOG_TIMES, Server
from .cost import Recorder
from .diagnosis.head import IgnoredLines
from .front import Front
from .program_store import SharedPrograms, open_program
from .workers import WorkerStart, on_loopback


def main() -> int:
    """Serves until SIGTERM comes, or its parent is gone. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    start = msgspec.json.decode(read_line(limit=1 << 24), type=WorkerStart)
    watch(start.parent, lambda: shutil.rmtree(start.kept))
    # Warnings only: the parent logs the rest once.
    logging.basicConfig(stream=sys.stderr, format=LOG_FORMAT, datefmt=LOG_TIMES)
    listening = socket.socket(fileno=start.listening)
    access = Access(start.keys, start.admin_key, start.hosts, start.secret, on_loopback(listening))
    programs = [open_program(given, Front.now()) for given in start.programs]
    runtime = Runtime(address=start.runtime)
    recorder = None if start.record is None else Recorder(Path(start.record))
    ignored = IgnoredLines(start.ignored)
    kept = SharedPrograms(Path(start.kept), start.row)
    counts = Counts(start.workers, start.counts, start.row)
    front = Front(
        runtime,
        access,
        start.limits,
        start.names,
        programs,
        start.workers,
        recorder,
        ignored,
        counts,
        kept,
        start.alias,
    )
    with listening:
        try:
            return Server(front, runtime, listening).run()
        except UmbelError as error:
            logging.getLogger("umbel.server").error("a worker could not start: %s", error)
            return 1


if __name__ == "__main__":
    sys.exit(main())
