"""Where Triton's kernels run in tests: compiled where there is a GPU, in Triton's interpreter elsewhere.

Triton reads TRITON_INTERPRET when it is imported, and whatever imports it first decides for the whole process: so it
is set here, before any file of tests is read. Processes that tests start inherit it.
"""

import ctypes
import os


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
