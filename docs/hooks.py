"""Prepares `mkdocs build`: sources of the reference, titles of links, a search that loads nothing from elsewhere.

mkdocstrings reads every file of a package that it is given. All of this repository takes it a minute, the parts with
public names five seconds. The theme's search in pages on a disk takes a script from a host; ours is a file of the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("__init__.py", "testing.py", "lang", "interpreter", "compiler", "fsm", "compat")
LINK_NAMED_AS_ITS_FILE = re.compile(r"\[(?:docs/)?[\w-]+\.md\]\((?P<path>[\w/.-]+\.md)(?P<place>#[\w-]+)?\)")


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


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs with the text of a page. Links that are named as a file get the title of its page.

    A reader of the sources looks for `models.md`, a reader of the site for "Models" in the navigation.
    """

    def titled(link: re.Match[str]) -> str:
        folder = posixpath.dirname(page.file.src_uri)
        target = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, link["path"])))
        return link[0] if target is None else f"[{target.page.title}]({link['path']}{link['place'] or ''})"

    return LINK_NAMED_AS_ITS_FILE.sub(titled, markdown)
