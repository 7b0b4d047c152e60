"""The command umbel doctor: looks at what a runtime needs of this machine, and says what to do where it is missing.

    ok       as it should be
    note     umbel runs, slower or without a part
    broken   umbel does not run until it is mended; the command then returns 1

It reads only, but for the kernels, which it compiles as the first start would, to check them. It asks the hub
whether it answers, and nothing else of the network.
"""

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ..lang import __version__
from ..lang.errors import UmbelError
from .core.cache_folder import cache_folder, trusted
from .core.machine import available_memory, total_memory, usable_cores

PACKAGES = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf", "huggingface-hub")
LITTLE_DISK = 5e9  # bytes; a model of 7B in 4 bits has as many
LITTLE_MEMORY = 2e9
TOOL_SECONDS = 20.0
HUB_SECONDS = 2.0
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
AMD_DRIVER = Path("/dev/kfd")


class State(StrEnum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `remedy`: what to run or to set; "" where there is nothing to do."""

    name: str
    state: State
    text: str
    remedy: str = ""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    return argparse.ArgumentParser(
        prog="umbel doctor",
        description="Look at what umbel needs of this machine, and say what to do. Kernels that are not there yet are "
        "compiled and checked, as the first start would do: half a minute on two idle cores, once. The hub is asked "
        "whether it answers, unless HF_HUB_OFFLINE is set.",
    )


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each check. Returns 1 if something that umbel needs is broken."""
    parser().parse_args(arguments)
    broken = False
    for finding in examine():
        broken |= finding.state is State.BROKEN
        print(f"{finding.state:<7} {finding.name:<12} {finding.text}", flush=True)
        if finding.remedy:
            print(f"{'':<20} → {finding.remedy}", flush=True)
    return int(broken)


def examine() -> Iterator[Finding]:
    """Yields the findings, the fundamental ones first. A check that fails by itself is a finding, too."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        python,
        packages,
        compiler,
        kernels,
        gpu,
        triton,
        folders,
        hub,
        memory,
        huge_pages,
    )
    for check in checks:
        try:
            yield from check()
        except ModuleNotFoundError as error:
            yield _missing(error.name or check.__name__)
        except (UmbelError, OSError, RuntimeError) as error:
            yield Finding(check.__name__, State.BROKEN, f"it could not be looked at: {error}")


def _missing(package: str) -> Finding:
    return Finding(package, State.BROKEN, "not installed", "pip install 'umbel[runtime]'")


def python() -> Iterator[Finding]:
    text = f"umbel {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("umbel", State.OK, text)


def packages() -> Iterator[Finding]:
    found = []
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
            importlib.import_module(package.replace("-", "_"))
            found.append(f"{package} {version}")
        except importlib.metadata.PackageNotFoundError:
            yield _missing(package)
        except (ImportError, OSError) as error:
            reinstall = f"pip install --force-reinstall {package}"
            yield Finding(package, State.BROKEN, f"it is installed and cannot be imported: {error}", reinstall)
    if found:
        yield Finding("packages", State.OK, ", ".join(found))


# ------------------------------------------------------------------------------------ what computes


def compiler() -> Iterator[Finding]:
    from .kernels.cpu import library

    try:
        path = library.find_compiler()
    except library.NoKernels as error:
        if library.allowed_kernels() is not library.Kernels.COMPILED and not library.unfit_prebuilt(library.HOST):
            yield Finding("compiler", State.OK, "none, and none is needed: this wheel has prebuilt kernels")
        else:
            yield Finding("compiler", State.NOTE, f"{error}; without one torch computes, several times slower")
        return
    version = _output([path, "--version"])
    yield Finding("compiler", State.OK, f"{path}: {version.partition(chr(10))[0] or 'it does not say its version'}")


def kernels() -> Iterator[Finding]:
    from .kernels.cpu import library

    wanted = library.choose_isa()
    try:
        loaded = library.load_library()
    except library.NoKernels as error:
        text = f"torch computes, not umbel's kernels: {error}"
        yield Finding("kernels", State.NOTE, text, "mend what the lines above and the folders below say, and try again")
        return
    isa = library.isa_of(loaded)
    if isa is not wanted:
        text = f"{isa.value}: the {wanted.value} kernels, which this CPU lists, fail their check"
        yield Finding("kernels", State.NOTE, text, "a virtual machine may hide the instructions: ask its host for them")
    elif builder := library.compiler_of_prebuilt(loaded):
        yield Finding("kernels", State.OK, f"{isa.value}, prebuilt by {builder}, in {library.PREBUILT}")
    else:
        yield Finding("kernels", State.OK, f"{isa.value}, compiled here, in {cache_folder() / 'kernels'}")
        if library.PREBUILT.is_dir():
            unfit = (
                library.unfit_prebuilt(library.recipe_for(isa))
                or "UMBEL_KERNELS=compiled leaves the prebuilt kernels out"
            )
            yield Finding("kernels", State.NOTE, unfit)


def gpu() -> Iterator[Finding]:
    import torch

    from .core.cards import sees_cuda, unused_cards

    if torch.version.hip is not None:
        build = f"ROCm {torch.version.hip}"
    else:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    yield Finding("torch", State.OK, f"{torch.__version__} ({build} build), {torch.get_num_threads()} threads")
    if sees_cuda():
        yield from map(_device, range(torch.cuda.device_count()))
    elif (unused := unused_cards()) is not None:
        yield Finding("gpu", State.NOTE, f"{unused.cards}: {unused.reason}; the CPU computes", unused.remedy)
    else:
        other = AMD_DRIVER.exists()
        text = "an AMD GPU, which umbel does not use: the CPU computes" if other else "none: the CPU computes"
        yield Finding("gpu", State.OK, text)


def _device(index: int) -> Finding:
    """Says how a runtime computes on a CUDA device."""
    import torch

    from .core.cards import without_kernels
    from .core.step_sizes import cuda_sizes

    if (unused := without_kernels(index)) is not None:
        return Finding(f"gpu {index}", State.NOTE, f"{unused.cards}: {unused.reason}", unused.remedy)
    device = torch.cuda.get_device_properties(index)
    sizes = cuda_sizes(device.total_memory, device.multi_processor_count)
    text = (
        f"{device.name}, {device.total_memory / 1e9:.0f} GB, compute capability {device.major}.{device.minor}, "
        f"chunk_size {sizes.chunk_size}, max_running {sizes.max_running}"
    )
    if device.major < 8:
        text += "; torch computes in float16: Triton's kernels and bfloat16 need 8.0"
    return Finding(f"gpu {index}", State.OK, text)


def triton() -> Iterator[Finding]:
    from .core.cards import sees_cuda
    from .kernels.triton.launcher import missing_for_launcher

    try:
        version = importlib.metadata.version("triton")
        importlib.import_module("triton")
    except (importlib.metadata.PackageNotFoundError, ImportError) as error:
        if sees_cuda():
            text = f"it cannot be used ({error}), so torch computes on the GPU, slower"
            yield Finding("triton", State.NOTE, text, "pip install triton")
        return
    missing = missing_for_launcher() if sees_cuda() else None
    if missing is not None:
        text = f"{version}; its kernels do not run, so torch computes on the GPU, slower: {missing[0]}"
        yield Finding("triton", State.NOTE, text, missing[1])
        return
    yield Finding("triton", State.OK, version if sees_cuda() else f"{version}, for GPUs")


# -------------------------------------------------------------------------------- folders and memory


def folders() -> Iterator[Finding]:
    from .weights.catalog.places import REMOVE_CONVERTED, converted_models, model_places

    places = model_places()
    yield _folder("umbel cache", cache_folder(), "UMBEL_CACHE", private=True)
    size = sum(model.size for model in converted_models(places))
    if size:
        text = f"{size / 1e9:.1f} GB of models that an earlier umbel converted, and that are not read any more"
        yield Finding("umbel cache", State.NOTE, text, REMOVE_CONVERTED)
    yield _folder("hub cache", places.hub, "HF_HOME")
    for name, paths in (("ollama", places.ollama), ("lm studio", places.lm_studio), ("llama.cpp", (places.llama_cpp,))):
        for path in paths:
            if path.is_dir():
                yield Finding(name, State.OK, f"{path}, {size_of(path) / 1e9:.1f} GB")


def _folder(name: str, path: Path, variable: str, *, private: bool = False) -> Finding:
    """Looks at a folder that umbel writes to: its owner, its rights, its size and its disk."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    elsewhere = f"set {variable} to a folder of yours"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, State.BROKEN, f"{path} cannot be written", elsewhere)
    if private:
        try:
            trusted(there)
        except UmbelError as error:
            return Finding(name, State.BROKEN, str(error))
    free = shutil.disk_usage(there).free
    size = f"{size_of(path) / 1e9:.1f} GB" if path.is_dir() else "not made yet"
    text = f"{path}, {size}, {free / 1e9:.1f} GB free on its disk"
    if free < LITTLE_DISK:
        return Finding(
            name, State.NOTE, text, f"make room (umbel models, umbel rm NAME), or {elsewhere} on another disk"
        )
    return Finding(name, State.OK, text)


def size_of(folder: Path) -> int:
    """Adds up the bytes of a folder's files on disk. Links count nothing."""
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            try:
                state = os.lstat(os.path.join(here, name))
            except OSError:  # removed meanwhile
                continue
            total += min(state.st_size, state.st_blocks * 512)
    return total


def hub() -> Iterator[Finding]:
    from .weights.catalog.download import endpoint_of, is_offline

    get_token = importlib.import_module("huggingface_hub").get_token
    endpoint = endpoint_of()
    text = f"{endpoint}, {'a token is set' if get_token() else 'no token'}"
    if is_offline():
        yield Finding(
            "hub", State.NOTE, f"{text}; HF_HUB_OFFLINE forbids downloads", "unset HF_HUB_OFFLINE to download"
        )
    elif fault := _silence_of(endpoint):
        remedy = "models that are here run; to download others, mend the network, or set HTTPS_PROXY or HF_ENDPOINT"
        yield Finding("hub", State.NOTE, f"{text}; it was asked and does not answer: {fault}", remedy)
    else:
        yield Finding("hub", State.OK, f"{text}, answers")


def _silence_of(endpoint: str) -> str:
    """Asks the hub for its first page, by huggingface_hub's own client, which knows proxies → what went wrong; "" where
    it answers. Takes `HUB_SECONDS` at most: a thread asks, since the search for a name has no limit of its own."""
    said = [f"nothing came in {HUB_SECONDS:g} seconds"]

    def ask() -> None:
        try:
            client = importlib.import_module("huggingface_hub.utils").get_session()
            status = client.head(endpoint, timeout=HUB_SECONDS).status_code
            said[0] = f"status {status}" if status >= 500 else ""
        except Exception as error:  # of a client that differs between versions of huggingface_hub
            said[0] = str(error) or type(error).__name__

    asking = threading.Thread(target=ask, name="ask the hub", daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    return said[0]


def memory() -> Iterator[Finding]:
    available, total, cores = available_memory(), total_memory(), usable_cores()
    text = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB available, {cores} CPU threads"
    if available < LITTLE_MEMORY:
        yield Finding("memory", State.NOTE, text, "end other programs, or take a smaller model or weights='int8'")
    else:
        yield Finding("memory", State.OK, text)


def huge_pages() -> Iterator[Finding]:
    try:
        chosen = HUGE_PAGES.read_text(encoding="ascii")
    except OSError:  # not Linux, or a kernel without them
        return
    if "[never]" in chosen:
        remedy = f"echo madvise | sudo tee {HUGE_PAGES}"
        yield Finding("huge pages", State.NOTE, "switched off, which costs some speed of the CPU kernels", remedy)
    else:
        yield Finding("huge pages", State.OK, chosen.partition("[")[2].partition("]")[0] or chosen.strip())


def _output(command: list[str]) -> str:
    """Returns what a program prints; "" where it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""
