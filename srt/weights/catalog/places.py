"""Finds models on this machine by name, in the folders of several programs, without any network call.

    umbel          <cache>/models/<name>/
    Hugging Face   <hub>/models--<org>--<repo>/refs/<revision>   names a commit
                   .../snapshots/<commit>/<file>                 a link to blobs/<digest>, made when that is whole
    llama.cpp      the same layout, in LLAMA_CACHE or in Hugging Face's folder; once <cache>/<org>_<repo>_<file>

Ollama and LM Studio: other_programs.py. Nothing here is written, and no file is opened but small JSON. What these
programs have not finished they keep under other names, so it is not found.
"""

import contextlib
import glob
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...core.cache_folder import cache_folder
from ..safetensors_folder import INDEX
from .repository import (
    CONFIG,
    MAIN,
    TOKENIZER,
    GgufChoice,
    HubName,
    gguf_choices,
    is_commit,
    listed,
    pick_gguf,
    repository_of,
    the_gguf,
)

IN_UMBEL, IN_HUB, IN_LLAMA_CPP, IN_OLLAMA, IN_LM_STUDIO = "umbel", "Hugging Face", "llama.cpp", "Ollama", "LM Studio"
CONVERTED = "umbel.json"  # in folders that earlier versions of umbel have converted
REMOVE_CONVERTED = "umbel rm --converted"
MOST_JSON = 16 << 20  # bytes of a manifest or an index


@dataclass(frozen=True, slots=True)
class ModelPlaces:
    """The folders in which models may lie; some may not exist."""

    umbel: Path
    hubs: tuple[Path, ...]  # caches of Hugging Face's layout; downloads go into the first
    llama_cpp: Path  # files of older versions of llama.cpp
    ollama: tuple[Path, ...]
    lm_studio: tuple[Path, ...]

    @property
    def hub(self) -> Path:
        return self.hubs[0]


def model_places(cache: Path | None = None, environment: Mapping[str, str] | None = None) -> ModelPlaces:
    """Reads the variables that name the folders, as the programs that own them do.

    Args:
        cache: umbel's folder; None takes `cache_folder()`.
        environment: None for this process's, as it is now.
    """
    given = os.environ if environment is None else environment
    home = Path(given["HOME"]) if given.get("HOME") else Path.home()
    caches = Path(given.get("XDG_CACHE_HOME") or home / ".cache")

    def path(name: str, default: Path) -> Path:
        value = given.get(name)
        return Path(os.path.expandvars(value)).expanduser() if value else default

    hub = path("HF_HUB_CACHE", path("HUGGINGFACE_HUB_CACHE", path("HF_HOME", caches / "huggingface") / "hub"))
    mac = sys.platform == "darwin"
    llama = path("LLAMA_CACHE", (home / "Library" / "Caches" if mac else caches) / "llama.cpp")
    shared = () if mac or given.get("OLLAMA_MODELS") else (Path("/usr/share/ollama/.ollama/models"),)  # of the service
    return ModelPlaces(
        umbel=(cache or cache_folder(given)) / "models",
        hubs=tuple(dict.fromkeys((hub, llama) if given.get("LLAMA_CACHE") else (hub,))),
        llama_cpp=llama,
        ollama=(path("OLLAMA_MODELS", home / ".ollama" / "models"), *shared),
        lm_studio=_lm_studio_folders(home, caches),
    )


def _lm_studio_folders(home: Path, caches: Path) -> tuple[Path, ...]:
    """LM Studio says in a file where its folder is, and in its settings where its models are."""
    own = home / ".lmstudio"
    with contextlib.suppress(OSError, ValueError):
        pointer = (home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
        own = Path(pointer) if pointer else own
    chosen = read_object(own / "settings.json").get("downloadsFolder")
    folders = [Path(chosen)] if isinstance(chosen, str) and Path(chosen).is_absolute() else []
    return tuple(dict.fromkeys((*folders, own / "models", caches / "lm-studio" / "models")))


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on disk: the folder of safetensors, or the first GGUF file.

    Attributes:
        name: by which it is opened again.
        label: quantisation of a GGUF file; "" for a folder, or where its name says none.
        files: every file that belongs to it alone; of a folder all in it.
        gap: what is missing of it; "" for a whole model.
    """

    name: str
    path: Path
    place: str  # one of the names above; "a file" or "a folder" for a path
    size: int  # bytes
    label: str = ""
    files: tuple[Path, ...] = ()
    gap: str = ""


def umbel_models(places: ModelPlaces) -> Iterator[FoundModel]:
    """Yields the finished models in umbel's folder."""
    return (model for model in _in_umbel(places) if not (model.path / CONVERTED).exists())


def converted_models(places: ModelPlaces) -> Iterator[FoundModel]:
    """Yields what earlier versions of umbel have made of GGUF files, which are read as they are now."""
    return (model for model in _in_umbel(places) if (model.path / CONVERTED).exists())


def _in_umbel(places: ModelPlaces) -> Iterator[FoundModel]:
    for folder in matching(places.umbel, "*"):
        files = listing_of(folder)
        if CONFIG in files:
            paths = tuple(folder / file for file in files)
            yield FoundModel(folder.name, folder, IN_UMBEL, sum(files.values()), files=paths, gap=gap_of(folder, files))


# ----------------------------------------------------------------------------------- Hugging Face


def find_in_hubs(name: HubName, places: ModelPlaces) -> FoundModel | None:
    """Finds a model in the caches; None when it is not there, or not whole.

    Raises:
        ModelError: several GGUF files are there and the name does not say which.
    """
    for hub in places.hubs:
        snapshot = snapshot_of(name, hub)
        found = None if snapshot is None else _in_snapshot(name, snapshot)
        if found is not None and not found.gap:
            return found
    prefix = f"{name.repo.replace('/', '_')}_"
    flat = {file: size for file, size in listing_of(places.llama_cpp, deep=False).items() if file.startswith(prefix)}
    choices = [choice for choice in pick_gguf(gguf_choices(flat), name.tag) if choice.whole]
    if name.revision != MAIN or not choices:
        return None
    choice = the_gguf(str(name), choices, name.tag)
    return gguf_model(str(name), places.llama_cpp, choice, IN_LLAMA_CPP)


def whereabouts(name: HubName, places: ModelPlaces) -> str:
    """Writes what of a model is in the caches, for the error that it cannot be opened."""
    for hub in places.hubs:
        snapshot = snapshot_of(name, hub)
        found = None if snapshot is None else _in_snapshot(name, snapshot)
        if found is not None and found.gap:
            return f"{name} is here without {found.gap} (in {found.path})"
        others = sorted(listing_of(hub / name.folder / "refs"))
        if snapshot is not None and name.tag:
            choices = gguf_choices(listing_of(snapshot))
            return f"{name} is not on this machine: {snapshot} has {listed(choices)}"
        if others and name.revision not in others:
            return f"{name} is not on this machine: {hub / name.folder} has the revisions {', '.join(others)}"
    return f"{name} is not on this machine (looked in {', '.join(map(str, places.hubs))})"


def snapshot_of(name: HubName, hub: Path) -> Path | None:
    """Returns the folder of a revision in a cache; None when it is not there. Eight digits are enough of a commit."""
    repository = hub / name.folder
    commit = name.revision
    if not is_commit(commit):
        try:
            commit = (repository / "refs" / name.revision).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            here = matching(repository / "snapshots", f"{commit}*") if re.fullmatch("[0-9a-f]{8,}", commit) else []
            commit = here[0].name if len(here) == 1 else ""
    snapshot = repository / "snapshots" / commit
    return snapshot if is_commit(commit) and os.path.isdir(snapshot) else None


def _in_snapshot(name: HubName, snapshot: Path) -> FoundModel | None:
    files = listing_of(snapshot)
    choices = gguf_choices(files)
    if name.tag or (choices and not has_safetensors(files)):
        choices = [choice for choice in pick_gguf(choices, name.tag) if choice.whole]
        if not choices:
            return None
        choice = the_gguf(str(name), choices, name.tag)
        return gguf_model(str(name), snapshot, choice, IN_HUB)
    if CONFIG not in files:
        return None
    paths = tuple(snapshot / file for file in files)
    return FoundModel(str(name), snapshot, IN_HUB, sum(files.values()), files=paths, gap=gap_of(snapshot, files))


def has_safetensors(files: Iterable[str]) -> bool:
    return any(file.endswith(".safetensors") for file in files)


def gap_of(folder: Path, files: Mapping[str, int]) -> str:
    """Names what is missing of a model in a folder of safetensors; "" for nothing.

    Args:
        files: path in the folder → bytes.
    """
    for needed in (CONFIG, TOKENIZER):
        if needed not in files:
            return needed
    if INDEX in files:
        shards = read_object(folder / INDEX).get("weight_map")
        names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
        missing = [shard for shard in names if shard not in files]
        if missing or not names:
            return f"{len(missing)} of {len(names)} files of weights" if names else f"a readable {INDEX}"
        return ""
    return "" if has_safetensors(files) else "its safetensors file"


def listing_of(folder: Path, *, deep: bool = True) -> dict[str, int]:
    """Lists the files of a folder → path in it: bytes. Broken links are left out.

    Args:
        deep: the files of its folders, too.
    """
    found: dict[str, int] = {}
    for here, folders, names in os.walk(folder):
        if not deep:
            folders.clear()
        for name in names:
            path = Path(here, name)
            try:
                found[str(path.relative_to(folder))] = path.stat().st_size
            except OSError:
                continue
    return found


def matching(folder: Path, pattern: str) -> list[Path]:
    """Lists what matches in a folder, without hidden names, by name; [] where the folder cannot be read."""
    return sorted(folder / name for name in glob.glob(pattern, root_dir=folder))


def gguf_model(name: str, folder: Path, choice: GgufChoice, place: str) -> FoundModel:
    paths = tuple(folder / file for file in choice.files)
    return FoundModel(name, paths[0], place, choice.size, choice.label, paths)


def models_of(folder: Path, name: str, place: str) -> list[FoundModel]:
    """Lists the models of a folder: its safetensors, and each GGUF file."""
    files = listing_of(folder)
    choices = gguf_choices(files)
    found = []
    if CONFIG in files and (has_safetensors(files) or not choices):
        own = {path: size for path, size in files.items() if not path.endswith(".gguf")}
        paths = tuple(folder / path for path in own)
        found.append(FoundModel(name, folder, place, sum(own.values()), files=paths, gap=gap_of(folder, own)))
    for choice in choices:
        tag = choice.label if [each.label for each in choices].count(choice.label) == 1 else ""
        model = gguf_model(f"{name}:{tag or Path(choice.files[0]).name}", folder, choice, place)
        found.append(model if choice.whole else replace(model, gap="some of its parts"))
    return found


def hub_models(places: ModelPlaces) -> Iterator[FoundModel]:
    """Yields the models in caches of Hugging Face's layout, each by the revision that names its commit, or by that."""
    for hub in places.hubs:
        for repository in matching(hub, "models--*--*"):
            repo = repository_of(repository.name)
            if repo is None:
                continue
            refs = sorted(listing_of(repository / "refs"), key=lambda ref: (ref != MAIN, ref))
            named = {snapshot_of(HubName(repo, ref), hub): ref for ref in reversed(refs)}
            for snapshot in matching(repository / "snapshots", "*"):
                name = str(HubName(repo, named.get(snapshot, snapshot.name)))
                yield from models_of(snapshot, name, IN_HUB)


def first_part(path: Path) -> Path:
    """Returns the first part of a GGUF file in parts, if it is there, and any other path as it is."""
    first = path.with_name(re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"-00001\1", path.name))
    return first if os.path.isfile(first) else path


def read_object(path: Path) -> dict[str, Any]:  # Any: JSON
    """Reads a JSON object of another program; {} where there is none that can be read."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MOST_JSON))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
