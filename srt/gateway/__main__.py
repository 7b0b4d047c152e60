"""Runs the gateway process: `python -m umbel.srt.gateway`.

An engine takes longest to start. So its process is started before this one imports the gateway's modules, and loads its
own meanwhile. Both make files that only this user can read.
"""

import os

from .engine_process import EngineProcess


def main() -> None:
    umask = os.umask(0o077)
    try:
        engine = EngineProcess()
    except OSError:
        engine = None  # the supervision tries again, and reports why
    from .server import run  # after the engine's process: it takes a quarter of a second

    run(umask, engine)


if __name__ == "__main__":
    main()
