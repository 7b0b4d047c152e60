"""`umbel warm`: everything that a first start of a model makes and keeps."""

import argparse
import time
from collections.abc import Sequence

from ...lang.generation import gen
from ...lang.state import State
from ..backends.runtime import Runtime
from ..program import Program, maker
from ..run import get_server_info
from .models import NAMED


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel warm",
        description="Starts a model, lets it answer, and starts it again, so that the next start finds all that a "
        "first one makes: the model from the hub, compiled kernels, tables for constraints. For the image of a "
        "container, or after an update.",
    )
    made.add_argument("model", nargs="?", metavar="MODEL", help=NAMED)
    made.add_argument("--device", default="auto", help='as for Runtime: "cpu", "cuda", "cuda:1"; default: auto')
    made.add_argument("--dtype", default="auto", help="as for Runtime")
    made.add_argument("--weights", default="auto", help="as for Runtime")
    made.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="as for Runtime")
    return made


def main(arguments: Sequence[str]) -> int:
    """Starts a runtime, lets it answer, and starts it again: the first start makes what the second one finds."""
    options = parser().parse_args(arguments)
    given = {name: getattr(options, name) for name in ("device", "dtype", "weights", "tensor_parallel")}
    seconds = []
    for _ in range(2):
        began = time.monotonic()
        with Runtime(options.model, **given) as runtime:
            runtime.wait_ready()
            seconds.append(time.monotonic() - began)
            if len(seconds) == 1:
                print(f"it says: {_warmed.run(backend=runtime).text()}", flush=True)
            kernels = get_server_info(runtime).get("kernels")
    print(f"first start {seconds[0]:.1f} s, the next one {seconds[1]:.1f} s ({kernels} kernels)")
    return 0


@maker(Program)
def _warmed(s: State) -> None:
    s += "A number: "
    s += gen("number", regex="[1-9][0-9]", max_tokens=8)
