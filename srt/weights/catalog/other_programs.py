"""Finds the models of Ollama, LM Studio and older versions of llama.cpp, where those programs keep them.

Ollama      <models>/manifests/<host>/<user>/<name>/<tag> lists layers, which are <models>/blobs/sha256-<digest>
            <models>/manifests-v2/... the same; a tag there may be a list of manifests, by the program that runs it
LM Studio   <models>/<publisher>/<model>/<file>
llama.cpp   <cache>/<org>_<repo>_<file>
"""

import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ....lang.errors import ModelError
from .places import (
    IN_LLAMA_CPP,
    IN_LM_STUDIO,
    IN_OLLAMA,
    FoundModel,
    ModelPlaces,
    gguf_model,
    listing_of,
    matching,
    models_of,
    read_object,
)
from .repository import gguf_choices, the_gguf

OLLAMA = "ollama:"
LM_STUDIO = "lmstudio:"
LLAMA_CPP = "llama.cpp:"
OLLAMA_HOSTS = ("registry.ollama.ai", "ollama.com")  # of models without a host; the second since manifests-v2
OLLAMA_MANIFESTS = ("manifests-v2", "manifests")

_OLLAMA_NAME = re.compile(r"(?:(?:(?P<host>[\w.-]+)/)?(?P<user>[\w.-]+)/)?(?P<name>[\w.-]+)(?::(?P<tag>[\w.-]+))?")
_LM_STUDIO_NAME = re.compile(r"(?:(?P<publisher>[\w.-]+)/)?(?P<model>[\w.-]+)(?::(?P<tag>[\w.-]+))?")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_LAYER = "application/vnd.ollama.image."


def find_in_ollama(name: str, places: ModelPlaces) -> FoundModel:
    """Finds a model of Ollama by the name that it has there: "llama3.2", "llama3.2:1b", "user/name:tag".

    Raises:
        ModelError: it is not there, or stored in a way that umbel does not read.
    """
    parsed = _OLLAMA_NAME.fullmatch(name)
    if parsed is None:
        raise ModelError(
            f"{OLLAMA}{name[:200]} names no model; write {OLLAMA}NAME or {OLLAMA}NAME:TAG, as ollama list does"
        )
    hosts = (parsed["host"],) if parsed["host"] else OLLAMA_HOSTS
    rest = Path(parsed["user"] or "library", parsed["name"], parsed["tag"] or "latest")
    for store in places.ollama:
        for manifests in OLLAMA_MANIFESTS:
            for host in hosts:
                manifest = store / manifests / host / rest
                if ".." not in manifest.parts and os.path.isfile(manifest):
                    return read_ollama_model(f"{OLLAMA}{name}", store, manifest)
    known = [model.name for model in ollama_models(places)]
    where = " and ".join(str(store) for store in places.ollama)
    raise ModelError(f"Ollama has no model {name!r} in {where}; {known_names(f'{OLLAMA}{name}', known)}")


def ollama_models(places: ModelPlaces) -> Iterator[FoundModel]:
    """Yields the models in the stores of Ollama. One that umbel does not read has the reason as its `gap`."""
    seen = set()
    for store in places.ollama:
        for manifests in OLLAMA_MANIFESTS:
            root = store / manifests
            for path in matching(root, "*/*/*/*"):
                host, user, model, tag = path.relative_to(root).parts
                given = f"{model}:{tag}" if user == "library" else f"{user}/{model}:{tag}"
                name = OLLAMA + (given if host in OLLAMA_HOSTS else f"{host}/{user}/{model}:{tag}")
                if name in seen or not os.path.isfile(path):
                    continue
                seen.add(name)
                try:
                    yield read_ollama_model(name, store, path)
                except ModelError as error:
                    yield FoundModel(name, path, IN_OLLAMA, 0, gap=str(error))


def read_ollama_model(name: str, store: Path, manifest: Path) -> FoundModel:
    """Reads a manifest → the GGUF file among its layers.

    Raises:
        ModelError: the manifest is damaged, or its model is no single GGUF file.
    """
    layers = _ollama_layers(store, manifest)
    kinds = [str(layer.get("mediaType")).removeprefix(_LAYER).partition(";")[0] for layer in layers]
    if "adapter" in kinds:
        raise ModelError(f"{name} is a model with an adapter (LoRA) next to it; give the model that it was made from")
    if kinds.count("model") != 1:
        raise ModelError(
            f"{name} is not stored as one GGUF file; pull another tag of it, or give a repository of the hub"
        )
    layer = layers[kinds.index("model")]
    digest, size = _DIGEST.fullmatch(str(layer.get("digest"))), layer.get("size")
    if digest is None:
        raise ModelError(f"{manifest} is damaged: a layer has no digest; run: ollama pull {name.removeprefix(OLLAMA)}")
    blob = store / "blobs" / f"sha256-{digest[1]}"
    try:
        there = blob.stat().st_size
    except OSError as error:
        raise ModelError(
            f"{name}: its file {blob} cannot be read ({error.strerror}); run: ollama pull {name.removeprefix(OLLAMA)}"
        ) from error
    if there != size:
        raise ModelError(
            f"{name}: its file {blob} has {there:,} bytes, its manifest says {size}; "
            f"run: ollama pull {name.removeprefix(OLLAMA)}"
        )
    return FoundModel(name, blob, IN_OLLAMA, there, files=(blob,))


def _ollama_layers(store: Path, manifest: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Reads the layers of a manifest, or of the entry of a list of manifests that llama.cpp runs."""
    content = read_object(manifest)
    entries = content.get("manifests")
    if isinstance(entries, list):
        runners = {entry.get("runner"): entry for entry in entries if isinstance(entry, dict)}
        content = runners.get("ollama") or runners.get("llamacpp") or {}
        digest = _DIGEST.fullmatch(str(content.get("digest")))
        if "layers" not in content and digest is not None:
            content = read_object(store / "blobs" / f"sha256-{digest[1]}")
    layers = content.get("layers")
    return [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []


def find_in_lm_studio(name: str, places: ModelPlaces) -> FoundModel:
    """Finds a model of LM Studio: "publisher/model", or "model"; with ":TAG" where its folder has several files.

    Raises:
        ModelError: it is not there, or the name may mean several.
    """
    parsed = _LM_STUDIO_NAME.fullmatch(name)
    if parsed is None or ".." in name:
        raise ModelError(f"{LM_STUDIO}{name[:200]} names no model; write {LM_STUDIO}PUBLISHER/MODEL")
    tag = parsed["tag"] or ""
    wanted = {parsed["model"].lower(), f"{parsed['model'].lower()}-gguf"}
    folders = [
        folder
        for folder in _lm_studio_models(places)
        if folder.name.lower() in wanted and parsed["publisher"] in (None, folder.parent.name)
    ]
    if len(folders) > 1:
        names = ", ".join(f"{LM_STUDIO}{folder.parent.name}/{folder.name}" for folder in folders)
        raise ModelError(f"{LM_STUDIO}{name} may mean {names}; write one of them")
    if not folders:
        where = " and ".join(str(folder) for folder in places.lm_studio)
        known = [model.name for model in lm_studio_models(places)]
        raise ModelError(f"LM Studio has no model {name!r} in {where}; {known_names(f'{LM_STUDIO}{name}', known)}")
    found = models_of(folders[0], LM_STUDIO + name.removesuffix(f":{tag}"), IN_LM_STUDIO)
    if len(found) == 1 and (not tag or found[0].label == tag.upper()):
        return found[0]
    choice = the_gguf(f"{LM_STUDIO}{name}", gguf_choices(listing_of(folders[0])), tag)
    return gguf_model(f"{LM_STUDIO}{name}", folders[0], choice, IN_LM_STUDIO)


def lm_studio_models(places: ModelPlaces) -> Iterator[FoundModel]:
    """Yields the models in the folders of LM Studio."""
    for folder in _lm_studio_models(places):
        yield from models_of(folder, f"{LM_STUDIO}{folder.parent.name}/{folder.name}", IN_LM_STUDIO)


def _lm_studio_models(places: ModelPlaces) -> list[Path]:
    found = (folder for models in places.lm_studio for folder in matching(models, "*/*"))
    return [folder for folder in found if os.path.isdir(folder)]


def find_in_llama_cpp(name: str, places: ModelPlaces) -> FoundModel:
    """Finds a file that an older llama.cpp has downloaded, by its name with or without ".gguf".

    Raises:
        ModelError: it is not there.
    """
    models = list(llama_cpp_models(places))
    for model in models:
        if name.removesuffix(".gguf") in (model.path.stem, model.name.removeprefix(LLAMA_CPP)):
            return model
    known = known_names(f"{LLAMA_CPP}{name}", [model.name for model in models])
    raise ModelError(f"llama.cpp has no file {name!r} in {places.llama_cpp}; {known}")


def llama_cpp_models(places: ModelPlaces) -> Iterator[FoundModel]:
    """Yields the files that older versions of llama.cpp have downloaded."""
    for choice in gguf_choices(listing_of(places.llama_cpp, deep=False)):
        stem = choice.files[0].removesuffix(".gguf")
        yield gguf_model(LLAMA_CPP + stem, places.llama_cpp, choice, IN_LLAMA_CPP)


def known_names(name: str, known: list[str]) -> str:
    """Writes which names a program knows: near ones, or else all."""
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"it has {', '.join(known[:20])}" if known else "it has none"
