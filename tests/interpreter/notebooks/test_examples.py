"""The notebooks of examples/: they run in a kernel, and what is stored in them is what a run shows."""

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
MOST_BYTES = 40_000  # of a notebook with its outputs
# The oracle model computes no texts that mean anything, and finds any wrong reuse of a key.
ON_THE_ORACLE = """
%reset -f
import umbel as ul
from umbel.srt.in_process import LocalBackend
ul.Runtime = LocalBackend
"""


def read(name: str) -> NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def codes(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def kernel() -> Iterator[AsyncKernelManager]:
    """One kernel for all notebooks: a start takes seconds."""
    manager = AsyncKernelManager(kernel_name="python3")
    yield manager
    if manager.has_kernel:
        asyncio.run(manager.shutdown_kernel(now=True))


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs_on_the_oracle(name: str, kernel: AsyncKernelManager) -> None:
    notebook = read(name)
    run = copy.deepcopy(notebook)
    for cell in codes(run):
        cell.outputs = []
    run.cells.insert(0, nbformat.v4.new_code_cell(ON_THE_ORACLE))
    NotebookClient(run, km=kernel, timeout=120).execute()
    kinds = [[output.output_type for output in cell.outputs] for cell in codes(run)[1:]]
    assert [set(found) for found in kinds] == [{o.output_type for o in cell.outputs} for cell in codes(notebook)]


@pytest.mark.model
@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs_on_the_default_model(name: str) -> None:
    NotebookClient(read(name), timeout=300).execute()


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_notebook_is_whole_small_and_names_no_machine(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    notebook = read(name)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in codes(notebook)]
    assert counts == list(range(1, len(counts) + 1))  # run from top to bottom
    assert sum(bool(cell.outputs) for cell in codes(notebook)) >= len(counts) / 2
    assert not any(output.output_type == "error" for cell in codes(notebook) for output in cell.outputs)
    assert len(text) < MOST_BYTES
    assert "/tmp/" not in text
    assert "/home/" not in text
    assert not any("execution" in cell.metadata for cell in notebook.cells)


def test_there_are_three() -> None:
    assert NAMES == ["extraction", "first_steps", "judge"]
