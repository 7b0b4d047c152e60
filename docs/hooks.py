"""Prepares `mkdocs build`: the sources of the reference, and a search that loads nothing from elsewhere.

mkdocstrings reads every file of a package that it is given. All of this repository takes it a minute, the parts with
public names five seconds. The theme's search in pages on a disk takes a script from a host; ours is a file of the site.
"""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("__init__.py", "testing.py", "lang", "interpreter", "compiler", "fsm", "compat")


def on_startup(command: str, dirty: bool) -> None:
    """Called by mkdocs before it reads any page."""
    folder = ROOT / "build" / "reference" / "umbel"
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        link = folder / part
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT / part)


def on_config(config: Any) -> Any:  # Any: a MkDocsConfig; mkdocs is no dependency of the package
    """Called by mkdocs after the plugins have changed its settings."""
    config.extra["polyfills"] = ["assets/file_worker.js"]
    return config
