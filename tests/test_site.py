"""The site of the documentation builds without a warning, all of its links lead somewhere, and it needs no network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import umbel as ul

ROOT = Path(__file__).resolve().parents[1]


class Page(HTMLParser):
    """The places of a page, its links, and the files that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": ""}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_link_leads_to_a_place(pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target not in pages or unquote(parts.fragment) not in pages[target].places:
                dead.append(f"{path.name}: {link}")
    assert dead == []


def test_the_site_has_nothing_that_python_reads(site: Path) -> None:
    assert [path for path in site.rglob("*") if path.suffix.startswith(".py")] == []


def test_pages_load_files_of_the_site_alone(pages: dict[Path, Page]) -> None:
    missing = [
        f"{path.name}: {loaded}"
        for path, page in pages.items()
        for loaded in page.loaded
        if not loaded.startswith("data:") and not (path.parent / unquote(urlsplit(loaded).path)).exists()
    ]
    assert missing == []


def test_the_search_finds_pages_that_are_opened_from_a_disk(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ")
    assert '"location":"tutorial.html"' in index
    assert '"location":"howto/extract.html"' in index


def test_the_reference_has_every_public_name_once() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(r"^::: umbel\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted({*ul.__all__, "testing"} - {"__version__"})
