"""The device of the kernels' tests. Without a GPU they run in Triton's interpreter (see tests/conftest.py)."""

from collections.abc import Iterator

import pytest
import torch
import triton
from triton import knobs

COMPILED = not knobs.runtime.interpret


@pytest.fixture(scope="session")
def device() -> torch.device:
    if not COMPILED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip(f"there is a GPU that torch {torch.__version__} does not see; set TRITON_INTERPRET=1")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Shapes are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where kernels are compiled, `pytest -m gpu` runs all tests that run one; elsewhere those that need a GPU are
    skipped."""
    here = [item for item in items if "triton" in item.path.parts]
    for item in here:
        if COMPILED and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        elif not COMPILED and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"triton {triton.__version__} finds no GPU to compile for"))
