"""The command `python -m benchmarks.record`: draws the plots of stored results anew, and the one of the first page.

python -m benchmarks.record                        # all folders of benchmarks/results, and docs/assets
python -m benchmarks.record FOLDER ...             # the plots of these folders
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import hero, plots
from .results import read

RESULTS = Path(__file__).resolve().parents[1] / "results"
ASSETS = RESULTS.parents[1] / "docs" / "assets" / "images"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with a message where a folder holds no results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.record", description="Draw the plots of stored results anew; nothing is measured."
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="with a results.json; all if left out")
    folders = parser.parse_args(arguments).folders
    for folder in folders or stored():
        if not (folder / "results.json").is_file():
            print(
                f"benchmarks.record: {folder} holds no results.json; name a folder of {RESULTS.name}/", file=sys.stderr
            )
            return 2
        for path in plots.write(read(folder / "results.json"), folder):
            print(path)
    if not folders:
        for path in hero.write(RESULTS, ASSETS):
            print(path)
    return 0


def stored() -> list[Path]:
    """Returns the folders of results that plots are drawn of."""
    return sorted(path.parent for path in RESULTS.glob("*/results.json"))


if __name__ == "__main__":
    sys.exit(main())
