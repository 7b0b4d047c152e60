"""Steps for which there is no memory: they run again with fewer rows, and no text changes."""

import pytest
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Batch, Logits, ShortOfMemory
from umbel.srt.core.messages import EngineFailed

from ..engine_harness import GREEDY, Engine

LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=4, max_tokens=12)


def short_of_memory(engine: Engine, most: int, steps: int) -> list[int]:
    """So many steps with more rows than that find no memory → the rows of those that were tried."""
    tried: list[int] = []
    forward = engine.runner.forward
    left = [steps]

    def limited(batch: Batch) -> Logits:
        tried.append(batch.rows)
        if batch.rows > most and left[0]:
            left[0] -= 1
            raise ShortOfMemory(batch.rows)
        return forward(batch)

    engine.runner.forward = limited  # type: ignore[method-assign]
    return tried


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_without_memory_is_tried_again_with_fewer_rows(overlap: bool) -> None:
    engine = Engine(overlap=overlap, pool=400)
    tried = short_of_memory(engine, most=7, steps=100)
    prompts = [[1, 2, 3, *range(4, 4 + first), first] for first in range(1, 9)]
    samplings = [GREEDY, DRAWN, LONG] * 3
    ids = [engine.generate(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=False)]
    engine.run()
    for message_id, prompt, sampling in zip(ids, prompts, samplings, strict=False):
        engine.assert_equals_reference(message_id, prompt, sampling)
    shortages = engine.count("memory_shortages")
    assert shortages > 1, "it is halved until it fits"
    assert shortages == engine.count("pool_rebuilds") == sum(rows > 7 for rows in tried)
    assert engine.count("failed_steps") == 0
    assert max(tried[-5:]) <= 7


def test_steps_grow_again_when_there_is_memory() -> None:
    engine = Engine(pool=2600, context=400)
    tried = short_of_memory(engine, most=4, steps=3)
    for first in range(1, 9):
        engine.generate([first, 2, 3], SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True))
    engine.run(limit=6000)
    assert engine.count("memory_shortages") == 3
    assert tried[:4] == [24, 12, 6, 3]
    assert max(tried[4:60]) <= 3, "for so many steps"
    assert max(tried[60:]) >= 8, "all of them in one step, in the end"


def test_one_row_for_which_there_is_no_memory_fails_its_request() -> None:
    engine = Engine()
    short_of_memory(engine, most=0, steps=4)
    first = engine.generate([1, 2, 3], GREEDY)
    engine.run()
    ending = engine.endings[first]
    assert isinstance(ending, EngineFailed)
    assert ending.message.startswith("there is no memory for a step of 1 rows; end other programs")
    assert (engine.count("memory_shortages"), engine.count("failed_steps")) == (1, 1)


def test_a_step_that_cannot_be_made_smaller_fails_in_the_end() -> None:
    engine = Engine(whole_texts=True, radix_cache=False)
    short_of_memory(engine, most=2, steps=1000)
    text = engine.generate([1, 2, 3, 4, 5], GREEDY)
    engine.run()
    assert isinstance(engine.endings[text], EngineFailed)
    assert engine.count("memory_shortages") == 16
