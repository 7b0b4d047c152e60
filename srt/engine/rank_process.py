"""The process of a rank other than 0: loads its part of the model, and runs the steps that rank 0 sends."""

import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from ...lang.errors import EngineError, UmbelError
from ...lang.transport.lifeline import read_line, watch
from ..distributed.ranks import RankFailed, RankReady, RankStart, encode, follow, to_rank
from ..launch import open_rank
from ..processes import child

log = logging.getLogger("umbel.engine")


def main() -> None:
    start = msgspec.json.decode(read_line(), type=RankStart)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program; this process ends when it ends
    child.die_with_parent_thread(start.parent)
    watch(start.parent, lambda: None)
    logging.basicConfig(
        level=start.options.log_level.upper(),
        stream=sys.stderr,
        format=f"umbel engine[%(process)d] rank {start.rank} %(levelname)s %(message)s",
    )
    end = socket.socket(fileno=start.socket)
    try:
        _serve(start, end)
    except OSError:
        log.debug("rank 0 is gone")
    except BaseException:
        log.exception("the rank ends")
    os._exit(1)  # at once: rank 0 sees it, and ends as well


def _serve(start: RankStart, end: socket.socket) -> None:
    try:
        runner = open_rank(start.options, start.rank, Path(start.rendezvous), start.replica)
    except UmbelError as error:
        end.sendall(encode(RankFailed(type(error).__name__, str(error))))
        return
    except Exception as error:
        log.exception("the rank could not start")
        end.sendall(encode(RankFailed(EngineError.__name__, f"{type(error).__name__}: {str(error)[:500]}")))
        return
    gc.freeze()  # exempt from collections, which would stop a step for tens of milliseconds
    end.sendall(encode(RankReady(runner.num_slots)))
    follow(runner, to_rank(end))


if __name__ == "__main__":
    main()
