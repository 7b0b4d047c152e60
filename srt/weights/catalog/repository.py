"""Names of repositories on the Hugging Face hub, and the files of one that make a model.

    org/repo            its safetensors, or its GGUF file where it has one
    org/repo:Q4_K_M     its GGUF file of that quantisation, which may be in parts
    org/repo@revision   at a branch, a tag or a commit; before the colon

The same rules choose among the files on the hub and among those that lie in a cache.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from ....lang.errors import ModelError
from ..safetensors_folder import INDEX, SINGLE

MAIN = "main"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
MOST_LISTED = 24  # quantisations in an error

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"  # of a repository's name
_NAME = re.compile(
    rf"(?:hf:|(?:https?://)?(?:hf\.co|huggingface\.co)/)?(?P<repo>{_PART}/{_PART})"
    r"(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?(?::(?P<tag>[\w.-]+))?/?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PARTS = re.compile(r"-(\d{5})-of-(\d{5})$")
_LABEL = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d|TQ\d|MXFP\d|NVFP\d|BF16|FP?16|FP?32)(?:_[A-Z0-9]+)*", re.IGNORECASE
)
# Next to the weights; what a repository has of them is downloaded. Code (.py) and pickles (.bin, .pt) never are.
_SMALL = re.compile(
    r"[^/]+\.(?:json|jinja|model)|(?:merges|vocab)\.txt|chat_templates?/[^/]+\.jinja"
    r"|\d+_[A-Za-z]+/(?:config\.json|model\.safetensors)"  # how vectors are made, see `vector_config.py`
)
_UNREAD = re.compile(r"(?i)(?:mmproj|.*\bimatrix\b).*")  # GGUF files that are no language model
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub. `tag`: of a GGUF file; "" for none."""

    repo: str  # "org/name"
    revision: str = MAIN
    tag: str = ""

    @property
    def folder(self) -> str:
        """The folder of the repository in a cache of Hugging Face."""
        return f"models--{self.repo.replace('/', '--')}"

    @property
    def is_commit(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        at = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo}{at}{':' if self.tag else ''}{self.tag}"


def parse_hub_name(text: str) -> HubName | None:
    """Reads "org/repo", with "@revision" and ":TAG" where they are given; None for any other text."""
    found = _NAME.fullmatch(text)
    if found is None or ".." in text or "--" in found["repo"]:
        return None
    return HubName(found["repo"], found["revision"] or MAIN, found["tag"] or "")


def repository_of(folder: str) -> str | None:
    """Returns the repository whose folder in a cache has this name; None where it is no model's."""
    parts = folder.split("--")
    return "/".join(parts[1:]) if parts[0] == "models" and len(parts) == 3 and all(parts) else None


def is_commit(text: str) -> bool:
    return _COMMIT.fullmatch(text) is not None


def with_short_commit(name: str) -> str:
    """Shortens the commit in a model's name to the digits by which it is found on this machine."""
    return re.sub(r"(?<=@)([0-9a-f]{8})[0-9a-f]{32}(?=:|$)", r"\1", name)


@dataclass(frozen=True, slots=True)
class GgufChoice:
    """One GGUF model of a folder: a file, or all parts of one."""

    label: str  # its quantisation, such as "Q4_K_M"; "" when its name says none
    files: tuple[str, ...]  # in order
    size: int  # bytes
    whole: bool  # no part is missing


def gguf_choices(files: Mapping[str, int]) -> list[GgufChoice]:
    """Groups the GGUF files of a listing (path → bytes) into models, by path."""
    groups: dict[tuple[str, int], list[str]] = {}
    for path in sorted(files):
        if not path.endswith(".gguf") or _UNREAD.fullmatch(PurePosixPath(path).name):
            continue
        stem = path.removesuffix(".gguf")
        part = _PARTS.search(stem)
        key = (stem, 1) if part is None else (stem[: part.start()], int(part[2]))
        groups.setdefault(key, []).append(path)
    return [
        GgufChoice(_label(stem), tuple(members), sum(files[path] for path in members), len(members) == count)
        for (stem, count), members in groups.items()
    ]


def _label(stem: str) -> str:
    """Reads the quantisation from the end of a file's name, or else from its folder's."""
    found = _LABEL.findall(stem)
    return found[-1].upper() if found else ""


def pick_gguf(choices: Iterable[GgufChoice], tag: str) -> list[GgufChoice]:
    """Returns the models that a tag may mean: of the quantisation, else of a name that contains or is the tag."""
    choices, wanted = list(choices), tag.upper()
    if not tag:
        return choices
    word = re.compile(rf"(?<![A-Z0-9]){re.escape(wanted)}(?![A-Z0-9_])")
    return (
        [choice for choice in choices if choice.label == wanted]
        or [choice for choice in choices if wanted in (name.upper() for name in _names(choice))]
        or [choice for choice in choices if word.search(choice.files[0].upper())]
    )


def _names(choice: GgufChoice) -> tuple[str, str]:
    name = PurePosixPath(choice.files[0]).name
    return name, name.removesuffix(".gguf")


def the_gguf(name: str, choices: list[GgufChoice], tag: str) -> GgufChoice:
    """Returns the one GGUF model that is meant.

    Raises:
        ModelError: there is none of that tag, or there are several; the message lists them.
    """
    found = pick_gguf(choices, tag)
    if len(found) == 1:
        return found[0]
    bare = name.removesuffix(f":{tag}") if tag else name
    if not choices:
        raise ModelError(f"{bare} has no GGUF files, so {tag!r} names nothing in it; write {bare}")
    if not found:
        raise ModelError(f"{bare} has no GGUF file {tag!r}; it has {listed(choices)}; write {bare}:TAG")
    which = f"several GGUF files that {tag!r} may mean" if tag else "several GGUF files"
    raise ModelError(f"{bare} has {which}: {listed(found)}; write {bare}:TAG, or the name of a file for TAG")


def listed(choices: Iterable[GgufChoice]) -> str:
    """Writes GGUF models by their tags and sizes: "Q4_K_M (0.8 GB), Q8_0 (1.3 GB)"."""
    choices = list(choices)
    labels = [choice.label for choice in choices]
    texts = [
        f"{choice.label if choice.label and labels.count(choice.label) == 1 else _names(choice)[0]} "
        f"({gigabytes(choice.size)})"
        for choice in choices
    ]
    more = "" if len(texts) <= MOST_LISTED else f" and {len(texts) - MOST_LISTED} more"
    return (", ".join(texts[:MOST_LISTED]) or "no GGUF file") + more


def gigabytes(size: float) -> str:
    """Writes a number of bytes: "1.3 GB", "270 MB", "12 kB"."""
    for unit, name, digits in ((1e9, "GB", 1), (1e6, "MB", 0), (1e3, "kB", 0)):
        if size >= unit:
            return f"{size / unit:.{digits}f} {name}"
    return f"{size:.0f} bytes"


def files_to_download(name: HubName, files: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Chooses the files of a repository that are downloaded → (small ones, weights).

    Args:
        files: path → bytes of everything in the repository.

    Raises:
        ModelError: it holds no model that umbel reads, or the name does not say which of several.
    """
    choices = gguf_choices(files)
    safetensors = sorted(path for path in files if "/" not in path and path.endswith(".safetensors"))
    small = sorted(path for path in files if _SMALL.fullmatch(path))
    if name.tag or (choices and not safetensors):
        choice = the_gguf(str(name), choices, name.tag)
        if not choice.whole:
            raise ModelError(
                f"{name.repo} holds only some parts of {choice.files[0]}; choose another: {listed(choices)}"
            )
        return [], list(choice.files)
    if not safetensors:
        pickles = sorted(path for path in files if path.endswith(_PICKLES))
        if pickles:
            raise ModelError(
                f"{name.repo} holds its weights as {pickles[0]}, which can run code when loaded; umbel reads "
                "safetensors and GGUF only: look for a repository that has them, or convert it"
            )
        raise ModelError(
            f"{name.repo} holds neither safetensors nor GGUF files; give the repository of a language model"
        )
    for needed in (CONFIG, TOKENIZER):
        if needed not in files:
            raise ModelError(
                f"{name.repo} holds no {needed}, which umbel needs; look for a repository of the same model that has it"
            )
    # A repository may hold the same weights twice, as shards and whole ("consolidated.safetensors").
    whole = [SINGLE] if SINGLE in safetensors else safetensors
    shards = [path for path in safetensors if re.search(r"-\d{5}-of-\d{5}\.safetensors$", path)]
    return small, shards if INDEX in files and shards else whole
