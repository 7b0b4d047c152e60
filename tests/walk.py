"""Runs a program on the oracle in this process and prints the files of umbel that its second run passes through.

    python -m tests.walk

Prints one line of JSON: {"plain": [files], "constrained": [files]}, each in the order of the first visit. The first run
of a program is not recorded: it imports modules and compiles the constraint.
"""

import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType

import umbel as ul
from umbel.srt.in_process import LocalBackend

ROOT = os.path.realpath(Path(ul.__file__).parent) + os.sep
PARTS = ("lang/", "interpreter/", "compiler/", "fsm/", "srt/")


class Recorder:
    """Collects the files whose functions are called while it is on, in every thread."""

    def __init__(self) -> None:
        self.files: dict[str, None] | None = None  # None: off
        self._paths: dict[str, str] = {}  # of code objects; the package may be reached by a link

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        files = self.files
        if files is None or event != "call":
            return
        name = frame.f_code.co_filename
        path = self._paths.get(name) or self._paths.setdefault(name, os.path.realpath(name))
        if path.startswith(ROOT) and path[len(ROOT) :].startswith(PARTS):
            files[path[len(ROOT) :]] = None


@ul.function
def plain(s):
    s += "The capital of France is"
    s += ul.gen("x", max_tokens=4, temperature=0, ignore_eos=True)


@ul.function
def constrained(s):
    s += "The capital of France is"
    s += ul.gen("x", max_tokens=6, regex=r"[a-z]{3}")


def main() -> None:
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    backend = LocalBackend("oracle")
    walks = {}
    for name, program in {"plain": plain, "constrained": constrained}.items():
        program.run(backend=backend)["x"]
        recorder.files = {}
        program.run(backend=backend)["x"]
        walks[name], recorder.files = list(recorder.files), None
    print(json.dumps(walks), flush=True)
    os._exit(0)  # threads that wait for more programs are not joined


if __name__ == "__main__":
    main()
