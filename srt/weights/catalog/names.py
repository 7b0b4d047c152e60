"""Resolves the names of models, without any network call.

    default, a folder, a .gguf file     as they are
    a name without a slash              a model in umbel's cache folder
    ollama:NAME, lmstudio:NAME,         a model of another program
    llama.cpp:FILE
    org/repo, @revision, :TAG           a repository of the Hugging Face hub, from a cache, or to be downloaded

A path that exists goes before a repository of the same name.
"""

import difflib
from pathlib import Path

from ....lang.errors import ModelError
from ..default_model import DEFAULT_NAME
from .other_programs import (
    LLAMA_CPP,
    LM_STUDIO,
    OLLAMA,
    find_in_llama_cpp,
    find_in_lm_studio,
    find_in_ollama,
)
from .places import IN_UMBEL, FoundModel, ModelPlaces, find_in_hubs, first_part, hub_models, umbel_models
from .repository import HubName, parse_hub_name

DEFAULT = "default"
DEFAULT_NAMES = frozenset({DEFAULT, DEFAULT_NAME})
MOST_KNOWN = 12  # names in an error
LIKE = 0.5  # least likeness of a name that may be meant
# Prefixes of hosted models on the command line → the backend that a program names.
HOSTED = {
    "openai": "OpenAI",
    "anthropic": "Anthropic",
    "gemini": "Gemini",
    "openrouter": "OpenRouter",
    "litellm": "LiteLLM",
}


def locate(name: str, places: ModelPlaces) -> FoundModel | HubName:
    """Finds a model, other than the default one, on this machine → where it is, or its name on the hub.

    Raises:
        ModelError: there is no such model, or the name may mean several.
    """
    if not name or "\0" in name:
        raise ModelError(
            f'{name!r} names no model; write "default", a folder, a .gguf file or a name such as "org/repo"'
        )
    for prefix, find in (
        (OLLAMA, find_in_ollama),
        (LM_STUDIO, find_in_lm_studio),
        (LLAMA_CPP, find_in_llama_cpp),
    ):
        if name.startswith(prefix):
            return find(name.removeprefix(prefix), places)
    try:
        path = Path(name).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # no permission, too long a name, no such user
        raise ModelError(f"{name[:200]!r} cannot be looked at ({error}); give a folder or file you may read") from error
    if is_file:
        first = first_part(path)
        return FoundModel(first.stem, first, "a file", 0)
    if is_folder:
        return FoundModel(path.resolve().name, path, "a folder", 0)
    if path.name == name and not name.startswith(".") and (places.umbel / name).is_dir():
        return FoundModel(name, places.umbel / name, IN_UMBEL, 0)
    on_hub = None if name.startswith((".", "/", "~")) or name.endswith(".gguf") else parse_hub_name(name)
    if on_hub is None:
        raise _unknown(name, places)
    return find_in_hubs(on_hub, places) or on_hub


def near_names(name: str, places: ModelPlaces) -> str:
    """Writes which models are here: those of similar names, or all, for the error about one that is not."""
    known = [
        DEFAULT,
        *(model.name for models in (umbel_models, hub_models) for model in models(places) if not model.gap),
    ]
    scores = {each: score for each in known if (score := _likeness(name, each)) >= LIKE}
    near = sorted(scores, key=lambda each: -scores[each])[:3]
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    more = f" and {len(known) - MOST_KNOWN} more (umbel models)" if len(known) > MOST_KNOWN else ""
    return f"known names: {', '.join(known[:MOST_KNOWN])}{more}."


def _likeness(name: str, known: str) -> float:
    """Compares two names: 0 for nothing in common, 1 for equal ones. Of two models of one organisation it compares what
    comes after the slash."""
    (organisation, slash, own), (other, _, another) = name.partition("/"), known.partition("/")
    if slash and organisation == other:
        name, known = own, another
    return difflib.SequenceMatcher(None, known, name).ratio()


def _unknown(name: str, places: ModelPlaces) -> ModelError:
    provider, colon, model = name.partition(":")
    if colon and provider in HOSTED:
        return ModelError(
            f"{name!r} is a hosted model; in a program, write ul.{HOSTED[provider]}({model!r}), not a Runtime"
        )
    hint = "" if "/" in name else ' For one of the Hugging Face hub, write "org/repo"; of Ollama, "ollama:NAME".'
    return ModelError(f"there is no model, folder or file {name!r}; {near_names(name, places)}{hint}")
