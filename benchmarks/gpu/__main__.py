"""`python -m benchmarks.gpu`: finds out what is here before anything of it is imported.

Triton reads TRITON_INTERPRET when it is imported, and so does everything behind it: a dry run sets it first.
"""

import os
import subprocess
import sys

from . import packages


def prepare(arguments: list[str]) -> list[str]:
    """The command's arguments. Without a GPU they get `--dry-run`, and standard error says so.

    Raises:
        SystemExit: a package is missing without which nothing runs.
    """
    try:
        installed = packages.install()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"wheels/ cannot be installed from: {error}; delete the folder, or make it again") from error
    if installed:
        print(f"installed from wheels/: {', '.join(installed)}", file=sys.stderr)
    packages.find_umbel()
    absent = packages.missing(packages.KERNELS)
    if absent:
        raise SystemExit(
            f"{', '.join(absent)} cannot be imported by {sys.executable}; run `make gpu GPU_PYTHON=...`, with the "
            "Python that has them, or install umbel with its runtime: pip install -e '.[runtime]'"
        )
    if not {"--dry-run", "-h", "--help"} & set(arguments):
        reason = _without_gpu()
        if reason is not None:
            print(f"{reason}; this is a dry run: tiny shapes on the CPU, nothing is measured", file=sys.stderr)
            arguments = ["--dry-run", *arguments]
    if "--dry-run" in arguments:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    return arguments


def _without_gpu() -> str | None:
    """Why nothing can be measured here; None when it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


if __name__ == "__main__":
    wanted = prepare(sys.argv[1:])
    from .command import main

    raise SystemExit(main(wanted))
