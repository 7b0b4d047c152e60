"""Which peers this machine has: said on the command line, or in the environment."""

import argparse
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from .peer import Peer, PeerError, PeerOptions

NAMES = ("vllm_cpu", "openvino_genai", "llama_cpp", "transformers_generate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--peer-python` and `--peer-model`, as `find` takes them."""
    for part, meaning in (
        ("python", "interpreter of the peer's virtual environment"),
        ("model", "what the peer loads: a safetensors folder, an OpenVINO folder or a GGUF file"),
    ):
        parser.add_argument(
            f"--peer-{part}",
            action="append",
            default=[],
            metavar="NAME=PATH",
            help=f"{meaning}; NAME is one of {', '.join(NAMES)}. Also UMBEL_PEER_<NAME>_{part.upper()}",
        )


def find(pythons: Iterable[str], models: Iterable[str], environment: Mapping[str, str]) -> dict[str, PeerOptions]:
    """The peers that are known with an interpreter and a model.

    What the command line says wins. A data type other than the peer's own choice is said by the environment:
    `UMBEL_PEER_<NAME>_DTYPE`.

    Raises:
        PeerError: a NAME=PATH that is not one, an unknown name, a path that is not there, or an interpreter without
            a model.
    """
    interpreters = _paths("python", pythons, environment)
    loaded = _paths("model", models, environment)
    found = {}
    for name, python in interpreters.items():
        model = loaded.get(name)
        if model is None:
            raise PeerError(
                f"{name} has an interpreter and no model; write --peer-model {name}=PATH "
                "(python -m benchmarks.peers.folder PATH writes the default model as a safetensors folder)"
            )
        dtype = environment.get(f"UMBEL_PEER_{name.upper()}_DTYPE") or None
        found[name] = PeerOptions(python=python, model=model, dtype=dtype)
    return found


def create(name: str, options: PeerOptions) -> Peer:
    """The peer of that name, not started."""
    if name not in NAMES:
        raise PeerError(f"no peer {name!r}; there are {', '.join(NAMES)}")
    peer: Peer = importlib.import_module(f".{name}", __package__).Peer(options)
    return peer


def _paths(part: str, given: Iterable[str], environment: Mapping[str, str]) -> dict[str, Path]:
    paths = {}
    for name in NAMES:
        variable = f"UMBEL_PEER_{name.upper()}_{part.upper()}"
        if environment.get(variable):
            paths[name] = _existing(variable, environment[variable])
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or name not in NAMES:
            raise PeerError(f"--peer-{part} {text!r}; write NAME=PATH, NAME one of {', '.join(NAMES)}")
        paths[name] = _existing(f"--peer-{part} {name}", path)
    return paths


def _existing(where: str, text: str) -> Path:
    path = Path(text).expanduser().absolute()  # not resolved: an environment's interpreter is a link
    if not path.exists():
        raise PeerError(f"{where}: {text!r} does not exist")
    return path
