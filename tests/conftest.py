"""Where Triton's kernels run in tests, which files come first, and which examples hypothesis draws.

Triton's kernels are compiled where there is a GPU, and run in Triton's interpreter elsewhere. Triton
reads TRITON_INTERPRET when it is imported, and whatever imports it first decides for the whole process: so it is set
here, before any file of tests is read. Processes that tests start inherit it.

Files that start processes or load the default model come first, then kernels, steps and compiled programs: they take
longest, and a worker that began one of them last would keep the others waiting. (pytest-xdist would begin with the
files of most tests instead; the Makefile says --no-loadscope-reorder.)

Hypothesis draws the same examples in every run, so that a change is judged by what it changed, and a sixth of those
that a test asks for. `make nightly` draws all, others each time (`--hypothesis-profile=nightly`); what it finds becomes
an `@example`. Of a test marked `sampled(N)` the default suite runs one of N cases, spread over all its parameters, and
`make nightly` the rest.
"""

import ctypes
import gc
import math
import os
import random
import signal
import sys
from collections import defaultdict

import pytest
from hypothesis import settings


def _gpus() -> int:
    """As the driver counts them: torch would take seconds, in runs that need none of it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


if not _gpus():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Two workers of pytest-xdist share two cores: threads of OpenMP that spin while they wait would starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Shells start jobs in the background with Ctrl-C ignored, and Python leaves it so: tests of it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Reading 550 files of tests makes objects that stay, and collections would take half of its time: see
# pytest_collection_finish.
gc.disable()

settings.register_profile("same-examples", derandomize=True, deadline=None)
settings.register_profile("nightly", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("same-examples")


_LONG = ("srt/kernels/", "srt/runners/", "srt/scheduler/", "compiler/running/", "fsm/schema/")


@pytest.hookimpl(trylast=True)  # after pytest has put its own hook there
def pytest_configure(config: pytest.Config) -> None:
    """Ignores finalizers that fail for lack of stack: they run wherever a test nests deep and a collection falls."""
    report = sys.unraisablehook

    def unless_too_deep(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is not RecursionError:
            report(unraisable)

    sys.unraisablehook = unless_too_deep


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_to_nightly(items)
    _share_examples(items, nightly=settings.get_current_profile_name() == "nightly")
    slow = {item.path for item in items if item.get_closest_marker("processes") or item.get_closest_marker("model")}
    long = {item.path for item in items if item.nodeid.removeprefix("tests/").startswith(_LONG)}
    items.sort(key=lambda item: (item.path not in slow, item.path not in long))


def _leave_to_nightly(items: list[pytest.Item]) -> None:
    """Marks the cases of `sampled` tests that the default suite leaves out: the same ones in every run."""
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None and item.get_closest_marker("nightly") is None:
            cases[item.nodeid.partition("[")[0], sampled.args[0]].append(item)
    for (name, every), found in cases.items():
        kept = random.Random(name).sample(range(len(found)), math.ceil(len(found) / every))
        for index, item in enumerate(found):
            if index not in kept:
                item.add_marker(pytest.mark.nightly)


def _share_examples(items: list[pytest.Item], *, nightly: bool) -> None:
    """Lets properties draw a sixth of the examples that they ask for, of few all; the nightly group runs all."""
    properties: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            machine = item.cls if isinstance(getattr(item.cls, "settings", None), settings) else None
            if machine is not None or hasattr(item.function, "_hypothesis_internal_use_settings"):
                properties[machine or item.function].append(item)
    for test, cases in properties.items():
        if nightly:
            for item in cases:
                item.add_marker(pytest.mark.nightly)
        else:  # there is no public way to change those of a function
            name = "settings" if isinstance(test, type) else "_hypothesis_internal_use_settings"
            asked = getattr(test, name)
            setattr(test, name, settings(asked, max_examples=min(asked.max_examples, max(6, asked.max_examples // 6))))


def pytest_collection_finish() -> None:
    """Exempts 18,000 tests from collections, each of which would take a second: seventy tests ask for one."""
    gc.collect()
    gc.freeze()
    gc.enable()
