"""Runs a real model through steps of many shapes, and records how long each takes."""

import random
import tempfile
from pathlib import Path

from ...lang.runtime_options import DebugOptions, RuntimeOptions
from ...lang.sampling import SamplingParams
from ..core.instruments import SystemClock, no_faults
from ..core.messages import EngineGenerate
from ..launch import open_engine
from .step_model import RecordedStep, read_steps

_SEQUENCES = (1, 2, 4, 8, 16, 32)
_PROMPTS = (30, 150, 600)  # tokens
_ANSWER = 10  # tokens
_MOST_TOKENS = 6_000  # of the prompts of a round
_SMALLEST_ID, _LARGEST_ID = 1_000, 10_000


def measure(model: str, *, seed: int = 1, most: int | None = None) -> list[RecordedStep]:
    """Records the steps of rounds of calls: so many sequences with prompts of such a length, then their answers.

    A first round, which is not recorded, brings the model's pages into memory.

    Args:
        most: rounds, for tests; None runs all.

    Raises:
        ModelError: the model cannot be opened.
    """
    draw = random.Random(seed)
    rounds = [(count, length) for count in _SEQUENCES for length in _PROMPTS if count * length <= _MOST_TOKENS]
    draw.shuffle(rounds)
    with tempfile.TemporaryDirectory(prefix="umbel-steps-") as folder:
        path = Path(folder) / "steps.jsonl"
        options = RuntimeOptions(model=model, debug=DebugOptions(recording=str(path)))
        engine = open_engine(options, clock=SystemClock(), faults=no_faults, phase=lambda _: None)
        scheduler = engine.scheduler
        sampling = SamplingParams(max_tokens=_ANSWER, temperature=0.0, ignore_eos=True)
        largest = min(engine.runner.vocab_size, _LARGEST_ID)
        smallest = min(_SMALLEST_ID, largest // 2)
        id, before = 0, 0
        for number, (count, length) in enumerate([rounds[0], *rounds[:most]]):
            for _ in range(count):
                id += 1
                prompt = [draw.randrange(smallest, largest) for _ in range(length)]
                scheduler.handle_message(EngineGenerate(id, prompt, sampling, stream=False))
            while not scheduler.idle:
                scheduler.step()
            if not number:
                before = len(read_steps(path)[0])
        engine.close()
        return read_steps(path)[0][before:]
