"""Tells a step for which there is no memory from one that fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..core.batch import ShortOfMemory

# As torch's CPU allocator and cuBLAS say it, in RuntimeErrors.
_SHORT = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def room_for_step(rows: int, give_back: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Raises ShortOfMemory in place of what says that there is no memory for a step.

    Args:
        rows: of the step.
        give_back: called then, to return memory that is kept for reuse.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        give_back()
        raise ShortOfMemory(rows) from error
    except RuntimeError as error:
        if not any(text in str(error) for text in _SHORT):
            raise
        give_back()
        raise ShortOfMemory(rows) from error
