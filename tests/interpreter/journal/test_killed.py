"""A batch that is killed goes on with the calls that it has not paid for yet."""

import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import umbel as ul
from umbel.interpreter.fakes.openai import FakeOpenAI
from umbel.interpreter.journal.file import JournalFile

from ...test_house import ROOT
from .killed_child import AT_ONCE, PROGRAMS, run

pytestmark = pytest.mark.processes
CHILD = "tests.interpreter.journal.killed_child"  # however the checkout is called
NUMBER = re.compile(r"Question (\d+)\?")


class Provider:
    """Answers questions, and kills its client at a question that is chosen before."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._deadly = 0
        self._started = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None

    def answer(self, text: str) -> str:
        number = int(NUMBER.findall(text)[-1])
        with self._lock:
            self.asked[number] += 1
            deadly = self.asked.total() == self._deadly
        if deadly:
            assert self._started.wait(60)
            assert self._child is not None
            self._child.kill()
        return f"Answer {number * 7919 % 1000}."

    def run_until(self, question: int, server: FakeOpenAI, journal: Path) -> None:
        """Runs the batch in a child, which is killed at the question of this number."""
        self._deadly = question
        command = [sys.executable, "-m", CHILD, server.base_url, server.api_key, str(journal)]
        self._child = subprocess.Popen(command, cwd=ROOT)
        self._started.set()
        assert self._child.wait(120) == -9


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[list[str]]:
    with FakeOpenAI(Provider().answer) as server:
        yield [state["answer"] for state in run(server.base_url, server.api_key, None)]


def kill_and_resume(seed: int, undisturbed: list[str], journal: Path) -> None:
    provider = Provider()
    with FakeOpenAI(provider.answer, record=0) as server:
        provider.run_until(random.Random(seed).randint(1, PROGRAMS), server, journal)
        with JournalFile(str(journal), writes=False) as file:
            finished = set(map(int, file.calls))
        states = run(server.base_url, server.api_key, str(journal))
    cost = sum((state.cost for state in states), ul.Cost())
    assert (cost.read.calls, cost.usage.calls) == (len(finished), PROGRAMS - len(finished))
    assert [state["answer"] for state in states] == undisturbed
    # Nothing is paid twice but what the provider had answered, or was about to, when its client died.
    again = {number for number, times in provider.asked.items() if times > 1}
    assert not again & finished
    assert len(again) <= AT_ONCE
    with JournalFile(str(journal), writes=False) as file:
        assert sum(len(places) for places in file.calls.values()) == PROGRAMS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.filterwarnings("ignore::umbel.interpreter.journal.file.JournalWarning")
def test_a_killed_batch_goes_on_without_paying_twice(seed: int, undisturbed: list[str], tmp_path: Path) -> None:
    kill_and_resume(seed, undisturbed, tmp_path / "run.jsonl")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5, 50))
@pytest.mark.filterwarnings("ignore::umbel.interpreter.journal.file.JournalWarning")
def test_a_batch_killed_at_any_moment_goes_on(seed: int, undisturbed: list[str], tmp_path: Path) -> None:
    kill_and_resume(seed, undisturbed, tmp_path / "run.jsonl")


def test_another_process_cannot_have_the_file(tmp_path: Path) -> None:
    gate, journal = ul.Gate(), tmp_path / "run.jsonl"
    with FakeOpenAI(Provider().answer, gate=gate) as server:
        command = [sys.executable, "-m", CHILD, server.base_url, server.api_key, str(journal)]
        child = subprocess.Popen(command, cwd=ROOT)
        gate.wait_for(1)
        try:
            with pytest.raises(ul.JournalError, match="in use by another run"):
                run(server.base_url, server.api_key, str(journal))
        finally:
            child.kill()
            child.wait()
            gate.open()
