"""Downloads a model from the Hugging Face hub into Hugging Face's cache, with `huggingface_hub`.

    ask for the commit and its files → choose → look at config.json → compare with the disk's room → small files, then
    weights → compare with the digests that the hub lists → name the commit in refs/

Other programs find the model there, and what they have downloaded is not downloaded again. The reference is written
last: without it no name leads to files that are not whole. Only safetensors, JSON, tokenizers, templates and GGUF are
fetched, never code or pickles. The token, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to
`huggingface_hub`.
"""

import contextlib
import errno
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ....lang import __version__
from ....lang.errors import MissingExtraError, ModelError
from ...core.cache_folder import locked, write_atomically
from ...layers.config_values import refuse_encoder
from .names import near_names
from .places import FoundModel, ModelPlaces, find_in_hubs, read_object, snapshot_of, whereabouts
from .repository import CONFIG, HubName, files_to_download, gigabytes, is_commit

ENDPOINT = "https://huggingface.co"
AT_ONCE = 4  # files; one alone does not always fill the line
ASK_SECONDS = 20.0  # for the list of files
SPARE = 64 << 20  # bytes that are left free
LOOK_SECONDS = 0.5  # between two looks at how much has come
READ_BYTES = 1 << 20
STOP_SECONDS = 0.5  # for downloads that Ctrl-C has stopped

Show = Callable[[int, int], None]  # bytes that are here, bytes of the whole


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub lists it."""

    path: str
    size: int
    sha256: str  # "" where git keeps the file itself
    git_sha1: str  # of a file that git keeps; "" for others

    @property
    def blob(self) -> str:
        """Its name in the cache's folder of blobs."""
        return self.sha256 or self.git_sha1


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """The files of a commit that make a model, small ones first."""

    name: HubName
    commit: str
    small: tuple[RemoteFile, ...]
    weights: tuple[RemoteFile, ...]

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        return (*self.small, *self.weights)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def is_offline(environment: Mapping[str, str] | None = None) -> bool:
    """Returns whether HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids the network."""
    given = os.environ if environment is None else environment
    value = given.get("HF_HUB_OFFLINE") or given.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def endpoint_of(environment: Mapping[str, str] | None = None) -> str:
    """Returns the address of the hub: $HF_ENDPOINT or Hugging Face's."""
    given = os.environ if environment is None else environment
    return (given.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def download(name: HubName, places: ModelPlaces) -> FoundModel:
    """Downloads what is missing of a model, with its progress on standard error → where it is.

    Raises:
        ModelError: the hub cannot be reached or refuses, the repository holds no model that umbel runs, a file is not
            what the hub lists, or the disk is too small. Nothing half-written can be opened afterwards.
        MissingExtraError: huggingface_hub is not installed.
    """
    return download_latest(name, places)[0]


def download_latest(name: HubName, places: ModelPlaces) -> tuple[FoundModel, int]:
    """Downloads what the cache lacks of the newest commit → where the model is, and the bytes that were downloaded.

    Raises:
        ModelError, MissingExtraError: as `download`.
    """
    plan = plan_download(name, places)
    _refuse_by_config(plan, places)
    missing = missing_bytes(plan, places)
    _check_room(plan, places)
    _remove_stale(plan, places)
    with _progress(plan, places):
        _fetch_all(plan, places)
    _name_commit(plan, places)
    found = find_in_hubs(name, places)
    if found is None:
        raise ModelError(f"{name} was downloaded into {places.hub}, but files of it are gone; run: umbel pull {name}")
    return found, missing


def plan_download(name: HubName, places: ModelPlaces) -> DownloadPlan:
    """Asks the hub for the files of a repository, and chooses those of the model.

    Raises:
        ModelError: as `download`.
        MissingExtraError: as `download`.
    """
    if is_offline():
        reason = f"HF_HUB_OFFLINE forbids connections to the hub; unset it and run: umbel pull {name}"
        raise ModelError(_without_hub(name, places, reason))
    api = _hub().HfApi(endpoint=endpoint_of(), library_name="umbel", library_version=__version__)
    with _explained(name, places):
        info = api.model_info(name.repo, revision=name.revision, files_metadata=True, timeout=ASK_SECONDS)
        files = {file.path: file for file in map(_remote_file, info.siblings or ())}
        commit = str(info.sha)
        if not is_commit(commit):
            raise ValueError(f"{commit[:60]!r} is no commit")
    small, weights = files_to_download(name, {path: file.size for path, file in files.items()})
    return DownloadPlan(name, commit, tuple(files[path] for path in small), tuple(files[path] for path in weights))


def _hub() -> Any:  # Any: an optional package
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "runtime") from error
    return huggingface_hub


def _remote_file(listed: Any) -> RemoteFile:  # Any: RepoSibling of huggingface_hub
    """Raises ValueError for a file that the hub describes in a way that no hub does."""
    path, size = listed.rfilename, listed.size
    parts = path.split("/") if isinstance(path, str) else [""]
    if any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise ValueError(f"{str(path)[:100]!r} is no path in a repository")
    sha256 = (listed.lfs or {}).get("sha256") or ""
    if not isinstance(size, int) or size < 0 or not re.fullmatch(r"[0-9a-f]{64}|", str(sha256)):
        raise ValueError(f"{path[:100]!r} has no size or digest")
    blob = "" if sha256 else str(listed.blob_id or "")
    return RemoteFile(path, size, sha256, blob if re.fullmatch(r"[0-9a-f]{40}", blob) else "")


# -------------------------------------------------------------------------------------- the files


def _fetch_all(plan: DownloadPlan, places: ModelPlaces) -> None:
    for files in (plan.small, plan.weights):
        _fetch_together(files, plan, places)


def _fetch_together(files: Sequence[RemoteFile], plan: DownloadPlan, places: ModelPlaces) -> None:
    """Downloads files, AT_ONCE of them at a time. After an error those that are begun are completed; Ctrl-C stops them.

    The threads are daemons: one that waits for the hub sees only with its next bytes that it is to stop.
    """
    waiting, stop = iter(files), _Stop()
    errors: list[Exception] = []
    ended: SimpleQueue[None] = SimpleQueue()  # a join that Ctrl-C breaks off would take its thread for ended

    def work() -> None:
        for file in waiting:
            try:
                _fetch(file, plan, places.hub, places, stop)
            except Exception as error:  # it is raised below
                errors.append(error)
            if errors:
                break
        ended.put(None)

    threads = [threading.Thread(target=work, name="download", daemon=True) for _ in files[:AT_ONCE]]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            ended.get()
    except KeyboardInterrupt:
        stop.end(threads, places.hub / plan.name.folder / "blobs")
        raise
    if errors:
        raise errors[0]


class _StoppedError(Exception):
    """Ends a download in its thread."""


class _Stop:
    """Ends downloads between two pieces: huggingface_hub tells a bar of each, and lets through what that raises."""

    def __init__(self) -> None:
        self._is_set = threading.Event()
        self._begun: set[str] = set()  # blobs of which something has come, so that their locks are held here

    def check(self) -> None:
        if self._is_set.is_set():
            raise _StoppedError

    def bar(self, blob: str) -> type[Any]:  # Any: tqdm is untyped
        """Makes the class of a bar for the download of a blob."""
        base = importlib.import_module("huggingface_hub.utils.tqdm").tqdm

        def update(bar: Any, count: float = 1) -> Any:
            self._begun.add(blob)
            self.check()
            return base.update(bar, count)

        return type("Bar", (base,), {"update": update})

    def end(self, threads: Sequence[threading.Thread], blobs: Path) -> None:
        """Stops the threads, and removes what they leave unfinished if they do not see it soon."""
        self._is_set.set()
        with contextlib.suppress(ImportError, AttributeError):  # of other versions
            importlib.import_module("huggingface_hub.utils._xet").abort_xet_session()
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join(STOP_SECONDS / AT_ONCE)
        for blob in self._begun if any(thread.is_alive() for thread in threads) else ():
            for path in _unfinished(blobs, blob):
                path.unlink(missing_ok=True)


def _unfinished(blobs: Path, blob: str) -> list[Path]:
    return list(blobs.glob(f"{blob}.????????.incomplete"))


def _remove_stale(plan: DownloadPlan, places: ModelPlaces) -> None:
    """Removes what killed downloads have left of these files. huggingface_hub begins them anew, under other names."""
    for file in plan.files:
        if not file.blob:
            continue
        begun = _unfinished(places.hub / plan.name.folder / "blobs", file.blob)
        lock = places.hub / ".locks" / plan.name.folder / f"{file.blob}.lock"
        if begun and lock.exists():
            with contextlib.suppress(ModelError, OSError), locked(lock, seconds=0.0):  # it is held by a download
                for path in begun:
                    path.unlink(missing_ok=True)


def _fetch(file: RemoteFile, plan: DownloadPlan, cache: Path, places: ModelPlaces, stop: _Stop) -> Path:
    """Downloads one file into a cache unless it is there → its path. Its content is what the hub lists."""
    repository = cache / plan.name.folder
    pointer = repository / "snapshots" / plan.commit / file.path
    was_here = pointer.exists()
    with _explained(plan.name, places):
        path = Path(
            _hub().hf_hub_download(
                plan.name.repo,
                file.path,
                revision=plan.commit,
                cache_dir=cache,
                endpoint=endpoint_of(),
                library_name="umbel",
                library_version=__version__,
                tqdm_class=stop.bar(file.blob),
            )
        )
    try:
        fault = "" if was_here and path.stat().st_size == file.size else _fault(path, file, stop)
    except _StoppedError:
        path.unlink(missing_ok=True)  # whether its content is right is not known; its blob stays
        raise
    if fault:
        blob = path.resolve()
        path.unlink(missing_ok=True)
        if blob.parent == (repository / "blobs").resolve():
            blob.unlink(missing_ok=True)
        raise ModelError(
            f"{plan.name}: the hub sent {file.path} {fault}, so it was removed; run: umbel pull {plan.name}. If that "
            f"does not help, something between here and {endpoint_of()} changes what it sends"
        )
    return path


def _fault(path: Path, file: RemoteFile, stop: _Stop) -> str:
    """Compares a file with what the hub lists → the difference, or "". Reads a gigabyte in a second or two."""
    size = path.stat().st_size
    if size != file.size:
        return f"with {size:,} bytes where it lists {file.size:,}"
    if not file.blob:
        return ""
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as content:
        while piece := content.read(READ_BYTES):
            stop.check()
            digest.update(piece)
    return "" if digest.hexdigest() == file.blob else "with another content than it lists (the digests differ)"


def _refuse_by_config(plan: DownloadPlan, places: ModelPlaces) -> None:
    """Refuses by its configuration a model that cannot run, before anything of it lies in the cache."""
    for file in plan.small:
        if file.path != CONFIG:
            continue
        with tempfile.TemporaryDirectory() as folder, _quiet_hub():
            here = _snapshot(plan, places) / CONFIG
            config = read_object(here if here.exists() else _fetch(file, plan, Path(folder), places, _Stop()))
        _refuse_code(plan.name, config)
        try:
            refuse_encoder(config)
        except ModelError as error:
            raise ModelError(f"{plan.name} is not downloaded: {error}") from error


def _refuse_code(name: HubName, config: Mapping[str, Any]) -> None:  # Any: JSON
    """Refuses a model that is defined by code in its repository."""
    family = config.get("model_type")
    if isinstance(config.get("auto_map"), dict) and not _is_known(str(family)):
        raise ModelError(
            f"{name} is defined by code in its repository (auto_map in {CONFIG}), which umbel never runs, and "
            f"neither umbel nor transformers has its model_type {family!r}; choose a model of another family: "
            "umbel models --supported"
        )


def _is_known(family: str) -> bool:
    """Looks whether umbel or transformers has a model type, without its code.

    Their tables are read as text: importing them takes torch, which the gateway does not have, and seconds.
    """
    tables = [Path(__file__).parents[2] / "models" / "families" / "__init__.py"]
    found = importlib.util.find_spec("transformers")
    if found is not None and found.origin is not None:
        auto = Path(found.origin).parent / "models" / "auto"
        tables += [auto / "configuration_auto.py", auto / "auto_mappings.py"]
    texts = [table.read_text(encoding="utf-8") for table in tables if table.is_file()]
    return bool(family) and any(f'"{family}"' in text for text in texts)


def _name_commit(plan: DownloadPlan, places: ModelPlaces) -> None:
    """Writes refs/<revision>, as huggingface_hub does."""
    if plan.name.is_commit or snapshot_of(plan.name, places.hub) == _snapshot(plan, places):
        return
    path = places.hub / plan.name.folder / "refs" / plan.name.revision
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, plan.commit.encode())
    except OSError as error:
        raise ModelError(f"{path} cannot be written ({error.strerror}); make room, or make it yours") from error


def _snapshot(plan: DownloadPlan, places: ModelPlaces) -> Path:
    return places.hub / plan.name.folder / "snapshots" / plan.commit


def missing_bytes(plan: DownloadPlan, places: ModelPlaces) -> int:
    """Returns the bytes of the files that are not whole in the cache yet."""
    snapshot = _snapshot(plan, places)
    return sum(file.size for file in plan.files if not (snapshot / file.path).exists())


def _check_room(plan: DownloadPlan, places: ModelPlaces) -> None:
    missing = missing_bytes(plan, places)
    folder = next(path for path in (places.hub, *places.hub.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if missing and missing + SPARE > free:
        raise ModelError(
            f"{plan.name} needs {gigabytes(missing)} more, and {places.hub} has {gigabytes(free)} free; make room "
            "(umbel models, umbel rm NAME), or set HF_HOME to a folder on another disk"
        )


# ----------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def _explained(name: HubName, places: ModelPlaces) -> Iterator[None]:
    """Turns what huggingface_hub raises into one ModelError that says what to do."""
    try:
        yield
    except Exception as error:  # it lets through errors of its HTTP client, whose package changed with its versions
        raise ModelError(_explain(name, places, error)) from error


def _explain(name: HubName, places: ModelPlaces, error: Exception) -> str:
    from huggingface_hub.errors import FileMetadataError

    for cause in _chain(error):
        response = getattr(cause, "response", None)
        if response is not None and isinstance(getattr(response, "status_code", None), int):
            return _explain_status(name, places, cause, response)
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{name}: the disk of {places.hub} is full; make room, or set HF_HOME to a folder on another disk"
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            return f"{name}: {places.hub} cannot be written ({cause.strerror}); set HF_HOME to a folder of yours"
        if isinstance(cause, OSError) and "Consistency check failed" in str(cause):
            return f"{name}: the hub announced another length than it sent; run: umbel pull {name}"
    at = endpoint_of()
    odd = (ValueError, TypeError, KeyError, AttributeError, FileMetadataError)
    if any(isinstance(cause, odd) for cause in _chain(error)):
        return (
            f"{name}: {at} gave no answer of a Hugging Face hub ({_first_line(error)}); a proxy or a page to log in "
            "may answer in its place: look at HF_ENDPOINT and the network"
        )
    lines = map(_first_line, reversed([*_chain(error)]))  # an outer error may say what the inner one says
    causes = "; ".join(reversed({line.partition(": ")[2]: line for line in lines}.values()))
    return _without_hub(name, places, f"the connection to {at} failed: {causes[:300]}")


def _without_hub(name: HubName, places: ModelPlaces, reason: str) -> str:
    """Writes what is here of a model, for the error that the hub cannot be reached."""
    found = find_in_hubs(name, places)
    if found is not None:
        return f"{name} is here, in {found.path}, but the hub cannot be asked for newer files: {reason}"
    return f"{whereabouts(name, places)}, and {reason}. Of models here, {near_names(str(name), places)}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _explain_status(name: HubName, places: ModelPlaces, error: BaseException, response: Any) -> str:  # Any: httpx's
    from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

    status, page = response.status_code, f"{endpoint_of()}/{name.repo}"
    token = "the token was refused" if _hub().get_token() else "no token was sent"
    give = "give a token that may read it: run hf auth login, or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return f"{name.repo} is gated: accept its terms at {page}, and {give} ({token}, HTTP {status})"
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision!r}; its branches and commits are at {page}/commits"
    if status in (401, 404):
        return (
            f"the hub has no model {name.repo!r}, or it is private (HTTP {status}): check the name at {page}; if it is "
            f"private, {give} ({token}). Of models here, {near_names(str(name), places)}"
        )
    if status == 403:
        return f"{name.repo} may not be read ({token}, HTTP 403): {give}; its page is {page}"
    if status == 429:
        after = response.headers.get("Retry-After")
        when = f"in {after} seconds" if after and after.isdigit() else "later"
        more = "" if _hub().get_token() else "; with a token (hf auth login) the hub allows more"
        return f"{name}: the hub has had too many requests from here (HTTP 429); run umbel pull {name} {when}{more}"
    if status >= 500:
        return f"{name}: the hub fails (HTTP {status}); run umbel pull {name} later"
    return f"{name}: the hub refuses (HTTP {status}: {_first_line(error)}); look at {page}"


# --------------------------------------------------------------------------------------- progress


@contextlib.contextmanager
def _progress(plan: DownloadPlan, places: ModelPlaces) -> Iterator[None]:
    """Shows how much has come until the block ends: a bar on a terminal, else a line for each tenth."""
    missing = missing_bytes(plan, places)
    if not missing:
        yield
        return
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(_bar(plan, places)) if sys.stderr.isatty() else _lines(plan, places, missing)
        stack.enter_context(_quiet_hub())
        ended = threading.Event()
        looking = threading.Thread(target=_look, args=(plan, places, show, ended), name="progress", daemon=True)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()


def _look(plan: DownloadPlan, places: ModelPlaces, show: Show, ended: threading.Event) -> None:
    while True:
        last = ended.wait(LOOK_SECONDS)
        show(_bytes_here(plan, places), plan.size)
        if last:
            return


def _bytes_here(plan: DownloadPlan, places: ModelPlaces) -> int:
    """Adds up the files that are whole, and what has come of the others."""
    snapshot, blobs = _snapshot(plan, places), places.hub / plan.name.folder / "blobs"
    found = 0
    for file in plan.files:
        if (snapshot / file.path).exists():
            found += file.size
        elif file.blob:
            sizes = []
            for begun in blobs.glob(f"{file.blob}*"):
                with contextlib.suppress(OSError):
                    state = begun.stat()
                    sizes.append(min(state.st_size, state.st_blocks * 512, file.size))  # some are made long, and filled
            found += max(sizes, default=0)
    return found


@contextlib.contextmanager
def _bar(plan: DownloadPlan, places: ModelPlaces) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("downloading {task.fields[model]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as display:
        here = _bytes_here(plan, places)
        task = display.add_task("download", total=plan.size, completed=here, model=str(plan.name))
        yield lambda have, whole: display.update(task, completed=have, total=whole)


def _lines(plan: DownloadPlan, places: ModelPlaces, missing: int) -> Show:
    print(f"umbel: downloading {plan.name} ({gigabytes(missing)}) into {places.hub}", file=sys.stderr, flush=True)
    tenths = [_bytes_here(plan, places) * 10 // plan.size]

    def show(have: int, whole: int) -> None:
        tenth = have * 10 // whole
        if tenth > tenths[0]:
            tenths[0] = tenth
            print(f"umbel: {plan.name}: {tenth * 10} % of {gigabytes(whole)}", file=sys.stderr, flush=True)

    return show


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Keeps huggingface_hub from drawing bars of its own, and its warnings from being printed twice."""
    bars, logger = importlib.import_module("huggingface_hub.utils.tqdm"), logging.getLogger("huggingface_hub")
    drawn, passed_on = not bars.are_progress_bars_disabled(), logger.propagate
    if drawn:
        bars.disable_progress_bars()
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = passed_on
        if drawn:
            bars.enable_progress_bars()
