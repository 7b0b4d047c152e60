"""Finds the GPUs of a machine, chooses the device that computes, and says why torch does not use a GPU that is there.

    device="auto"     the first CUDA device; the CPU where there is none that torch can use, with a reason
    device="cuda"     the first CUDA device, or an error with the same reason
    device="cuda:2"   the third one; ranks and replicas take those after it

CUDA's own words ("no CUDA GPUs are available") leave open which of six things is missing. So what the driver leaves in
the file system is compared with what torch was built for. Files are looked for under a root folder, which tests choose.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from ...lang.errors import ModelError, ParameterError

SYSTEM = Path("/")
NVIDIA = "0x10de"  # its number among makers of PCI cards
DISPLAY = "0x03"  # the class of PCI cards that show or compute

# Release of CUDA → the oldest Linux driver that runs it, by NVIDIA's table of minor version compatibility.
OLDEST_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
# Oldest driver → PyTorch's index of wheels for it, the newest first. That of CUDA 12.6 also has GPUs before Turing.
INDEXES = (((580, 65, 6), "cu130"), ((525, 60, 13), "cu126"))
INDEX = "https://download.pytorch.org/whl/"
NVIDIA_ONLY = "and umbel computes on GPUs of NVIDIA only"
CPU = 'write "cpu"'
IN_CONTAINERS = "in a container, start it with the GPU (docker run --gpus all)"


@dataclass(frozen=True, slots=True)
class UnusedCards:
    """The GPUs that torch does not use.

    Attributes:
        reason: a clause.
        remedy: what to do about it, an imperative; "" where nothing helps.
    """

    cards: str
    reason: str
    remedy: str

    def text(self, otherwise: str) -> str:
        """Returns all of it as a clause. otherwise: what to write where the remedy is not wanted."""
        return f"{self.cards}: {self.reason}; {f'{self.remedy}, or ' if self.remedy else ''}{otherwise}"


@dataclass(frozen=True, slots=True)
class DriverCards:
    """The NVIDIA GPUs that the system lists. `driver`: its version, "" where it is not known or not loaded."""

    names: tuple[str, ...]
    driver: str
    loaded: bool

    def __str__(self) -> str:
        names = [f"{count} x {name}" if count > 1 else name for name, count in Counter(self.names).items()]
        return ", ".join(names) + (f" (driver {self.driver})" if self.driver else "")


def sees_cuda() -> bool:
    """Returns whether torch sees an NVIDIA GPU. A ROCm build calls AMD's GPUs "cuda", too, and has none of ours."""
    return torch.version.hip is None and torch.cuda.is_available()


def chosen_device(name: str) -> str:
    """Returns the device that a name stands for: "auto" is the first GPU that torch has kernels for, or the CPU."""
    if name != "auto":
        return name
    count = torch.cuda.device_count() if sees_cuda() else 0
    first = next((index for index in range(count) if without_kernels(index) is None), None)
    if first is None:
        return "cpu"
    return f"cuda:{first}" if first else "cuda"


def unused_for(name: str, otherwise: str) -> str | None:
    """Returns which GPU the CPU computes in place of, and why, as a sentence; None: it does not, or was asked for.

    Args:
        name: of the device, as options have it: only "auto" leaves it to the machine.
        otherwise: what to write where the CPU is wanted.
    """
    if name != "auto" or chosen_device(name) != "cpu" or (unused := unused_cards()) is None:
        return None
    return f"the CPU computes, not {unused.text(otherwise)}"


def resolve_device(name: str) -> torch.device:
    """Returns the device of a name other than "auto".

    Raises:
        ParameterError: another kind of device, or an index that there is not.
        ModelError: torch cannot use a CUDA device here; the message says which GPU there is, why, and what to do.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ParameterError(f'device={name!r}; write "cpu", "cuda" or "cuda:1"') from None
    if device.type not in ("cpu", "cuda"):
        raise ParameterError(f'device={name!r}; write "cpu", "cuda" or "cuda:1"')
    if device.type == "cpu":
        return device
    if not sees_cuda():
        unused = unused_cards()
        if unused is None:
            raise ModelError(f'device={name!r}: torch sees no CUDA device here{_rocm()}; write "cpu"')
        raise ModelError(f"device={name!r}: torch cannot use {unused.text(CPU)}")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        last = 'write "cuda:0"' if count == 1 else f'write one from "cuda:0" to "cuda:{count - 1}"'
        raise ParameterError(f"device={name!r}: this machine has {cuda_devices(count)}; {last}")
    if (without := without_kernels(device.index or 0)) is not None:
        raise ModelError(f"device={name!r}: torch cannot use {without.text(CPU)}")
    return device


def cuda_devices(count: int) -> str:
    """Returns the number of CUDA devices in words. Those that CUDA_VISIBLE_DEVICES hides are not counted."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"{count} CUDA device{'' if count == 1 else 's'}" + (
        "" if shown is None else f" in CUDA_VISIBLE_DEVICES={shown!r}"
    )


def unused_cards(root: Path | None = None) -> UnusedCards | None:
    """Returns the GPUs that torch does not use, with the reason; None: there are none, or it uses them.

    Args:
        root: the folder in which /proc, /dev and /sys are looked for; None: that of the system.
    """
    if sees_cuda():
        return without_kernels(0)
    root = SYSTEM if root is None else root
    found = driver_cards(root)
    if found is None:
        if torch.version.hip is not None and torch.cuda.is_available():
            return UnusedCards(torch.cuda.get_device_name(0), f"{_rocm_build()}, {NVIDIA_ONLY}", "")
        return None
    return UnusedCards(str(found), *_why(found, root))


def driver_cards(root: Path) -> DriverCards | None:
    """Reads which NVIDIA GPUs there are from what the driver and the PCI bus list; None: there are none."""
    driver = root / "proc/driver/nvidia"
    version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _content(driver / "version"))
    names = []
    for file in sorted(driver.glob("gpus/*/information")):
        model = re.search(r"^Model:\s*(.+)$", _content(file), re.MULTILINE)
        names.append(model[1].strip() if model else "an NVIDIA GPU")
    if not names:
        names = ["an NVIDIA GPU" for _ in root.glob("dev/nvidia[0-9]*")]
    if names:
        return DriverCards(tuple(names), version[0] if version else "", loaded=True)
    if (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        return DriverCards(("an NVIDIA GPU of Windows (WSL)",), "", loaded=True)
    places = [
        card.name
        for card in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _content(card / "vendor").strip() == NVIDIA and _content(card / "class").startswith(DISPLAY)
    ]
    return DriverCards(tuple(f"an NVIDIA GPU at {place}" for place in places), "", loaded=False) if places else None


def _content(file: Path) -> str:
    """Reads a file of the system; "" where there is none, or it is another's."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _why(found: DriverCards, root: Path) -> tuple[str, str]:
    """Returns why torch does not see GPUs that are there, and what to do: the first of the things to mend."""
    if torch.version.hip is not None:
        return _rocm_build(), _install(found.driver)
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build", _install(found.driver)
    if not found.loaded:
        return "its driver is not loaded", f"install NVIDIA's driver and restart; {IN_CONTAINERS}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = None if hidden is None else hidden.partition(",")[0].strip()
    if first is not None and (first in ("", "-1") or (first.isdigit() and int(first) >= len(found.names))):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides it", "unset CUDA_VISIBLE_DEVICES"
    return _why_closed(root) or _why_too_old(found.driver) or _as_torch_says()


def _why_closed(root: Path) -> tuple[str, str] | None:
    """Returns which file of the device is not there or not ours to open, and what to do; None: all are open."""
    if (root / "dev/dxg").exists():  # of WSL, which needs no other
        return None
    cards = sorted(root.glob("dev/nvidia[0-9]*"))
    if not cards:
        return "there is no /dev/nvidia0", f"{IN_CONTAINERS}, elsewhere run sudo nvidia-modprobe -u -c 0"
    files = [*cards, *(root / "dev" / name for name in ("nvidiactl", "nvidia-uvm"))]
    closed = next((file for file in files if file.exists() and not os.access(file, os.R_OK | os.W_OK)), None)
    if closed is None:
        return None
    try:
        group = closed.group()
    except KeyError:  # it has a number only
        group = str(closed.stat().st_gid)
    path = f"/{closed.relative_to(root)}"
    return f"this user may not open {path}", f"run sudo usermod -aG {group} $USER and log in again"


def _why_too_old(driver: str) -> tuple[str, str] | None:
    """Returns that a driver is older than torch's CUDA needs, and what to do; None: it is not, or is not known."""
    cuda = torch.version.cuda or ""
    oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0] or 0))
    if not driver or oldest is None or _numbers(driver) >= oldest:
        return None
    needed = ".".join(f"{part:02}" for part in oldest)
    reason = f"CUDA {cuda} of torch {torch.__version__} needs driver {needed} or newer"
    index = _index(driver)
    return reason, "update the driver" + (f", or {_install(driver)}" if index else "")


def _as_torch_says() -> tuple[str, str]:
    """Returns the first line of torch's own error, and where to look further."""
    reason = "torch does not say why"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = f"torch says {str(error).partition(chr(10))[0]!r}"
    return reason, "run nvidia-smi; where it fails, too, restart the machine or reinstall the driver"


def without_kernels(index: int) -> UnusedCards | None:
    """Returns the device, if torch was built without kernels for it; None: it has some, as a binary or as PTX."""
    built = torch.cuda.get_arch_list()
    major, minor = torch.cuda.get_device_capability(index)
    for name in built:
        kind, _, version = name.partition("_")
        digits = version.rstrip("af")
        own = divmod(int(digits), 10)
        if version != digits:  # for one capability and no later ones
            fits = own == (major, minor)
        else:
            fits = own <= (major, minor) and (kind == "compute" or own[0] == major)
        if fits:
            return None
    if not built:
        return None
    reason = f"torch {torch.__version__} has no kernels for compute capability {major}.{minor}"
    other = "cu130" if (major, minor) >= (10, 0) else "cu126"
    remedy = f"run pip install --force-reinstall torch --index-url {INDEX}{other}"
    return UnusedCards(torch.cuda.get_device_name(index), reason, remedy)


def _rocm_build() -> str:
    return f"torch {torch.__version__} is a ROCm build"


def _rocm() -> str:
    return "" if torch.version.hip is None else f": {_rocm_build()}, {NVIDIA_ONLY}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _index(driver: str) -> str | None:
    """Returns the name of PyTorch's newest index that a driver runs; None: it runs none of them."""
    return next((name for oldest, name in INDEXES if _numbers(driver) >= oldest), None)


def _install(driver: str) -> str:
    """Returns how to install a CUDA build of torch that a driver runs. driver: its version; "": the newest."""
    index = _index(driver) if driver else INDEXES[0][1]
    update = ""
    if index is None:
        update, index = f"update the driver to {'.'.join(map(str, INDEXES[-1][0]))} or newer, and ", INDEXES[-1][1]
    return f"{update}run pip install --force-reinstall torch --index-url {INDEX}{index}"
