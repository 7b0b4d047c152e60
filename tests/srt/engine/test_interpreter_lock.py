"""No piece of work of a gateway or an engine that serves holds the interpreter lock for long, but one.

The one is llguidance's view of the vocabulary: its library holds the lock for half a second while it makes it, and the
view cannot be sent between processes, so no other process can make it for the engine. An engine makes it once, when it
has been idle for a second or for the first constraint of llguidance. These tests have it made before they measure.

A thread in each process notes when it gets the lock late (ticking/sitecustomize.py). It measures CPU time, so these
tests are as strict on a busy machine.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from umbel.interpreter.backends.runtime import Runtime
from umbel.lang.errors import RequestError
from umbel.lang.prompt import Text
from umbel.lang.protocol import ConstraintSpec, Final, GenRequest, ScoreRequest
from umbel.lang.sampling import SamplingParams

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not Path("/proc/self/schedstat").exists(), reason="the system does not tell CPU time of threads"
    ),
]

LONGEST = 0.2  # seconds of CPU time
TICKING = Path(__file__).parent / "ticking"


def ticking_environment(path: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join((str(TICKING), *sys.path)), "UMBEL_TICKS": str(path)}


def holds(path: Path, since: float = 0.0) -> list[tuple[float, str]]:
    """(seconds, module) of every hold that was noted after this moment."""
    found = []
    for file in path.parent.glob(f"{path.name}.*"):
        for line in file.read_text().splitlines():
            end, seconds, _, module = line.split()
            if float(end) > since:
                found.append((float(seconds), module))
    return found


def may_seize() -> bool:
    seize = "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))"
    return subprocess.run([sys.executable, "-c", seize], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("work", "held"), [("sum(range(120_000_000))", True), ("[None for _ in range(20_000_000)]", False)]
)
def test_the_ticker_tells_work_that_keeps_the_lock_from_work_that_shares_it(
    work: str, held: bool, tmp_path: Path
) -> None:
    if held and not may_seize():
        pytest.skip("without real-time priority a busy machine hides holds")
    program = f"import time; time.sleep(0.2); {work}; time.sleep(0.2)"
    path = tmp_path / "ticks"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **ticking_environment(path)}, check=True)
    assert len(list(tmp_path.iterdir())) == 1
    assert any(seconds > LONGEST for seconds, _ in holds(path)) is held


@pytest.fixture
def ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "ticks"
    for name, value in ticking_environment(path).items():
        monkeypatch.setenv(name, value)
    return path


async def begin(runtime: Runtime) -> None:
    """Has the engine make llguidance's view of the vocabulary."""
    spec = ConstraintSpec("lark", 'start: "a"')
    async for _ in runtime.generate(GenRequest("first", (Text("b"),), SamplingParams(max_tokens=2), constraint=spec)):
        pass


async def serve(runtime: Runtime) -> None:
    """Plain, many, long, too long, scored and constrained; a schema and a regex that no other has."""

    async def text(number: int, prompt: str, constraint: ConstraintSpec | None = None) -> None:
        sampling = SamplingParams(max_tokens=24, seed=number)
        async for event in runtime.generate(GenRequest(f"g{number}", (Text(prompt),), sampling, constraint=constraint)):
            assert not isinstance(event, Final) or event.completions

    long = " ".join(f"word{number}" for number in range(600))
    constraints = [
        ConstraintSpec("regex", r"(yes|no), because [a-z ]{5,20}\."),
        ConstraintSpec("json_schema", '{"type": "object", "properties": {"name": {"type": "string"}, "age": '
        '{"type": "integer"}}, "required": ["name", "age"], "additionalProperties": false}'),
    ]  # fmt: skip
    await asyncio.gather(*(text(number, f"number {number}: ") for number in range(16)))
    await text(100, long)
    with pytest.raises(RequestError, match="tokens and the context"):
        await text(101, "a" * 1_000_000)  # no boundary to cut it at
    await runtime.score(ScoreRequest("s", (Text("It is "),), ("good", "bad"), unconditional=True))
    for number, constraint in enumerate(constraints):
        await text(200 + number, "Answer: ", constraint)


@pytest.mark.parametrize("model", ["oracle", pytest.param("default", marks=[pytest.mark.model, pytest.mark.nightly])])
def test_nothing_that_is_served_holds_the_interpreter_lock_for_long(model: str, ticks: Path) -> None:
    with Runtime(model, context_length=16_384 if model == "oracle" else None) as runtime:
        asyncio.run(begin(runtime))
        since = time.monotonic()
        asyncio.run(serve(runtime))
    modules = {file.name for file in ticks.parent.iterdir()}
    assert len(modules) >= 2, "gateway and engine have tickers"
    assert [hold for hold in holds(ticks, since) if hold[0] > LONGEST] == []
