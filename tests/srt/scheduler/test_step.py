"""What a step asks of its rows, and that tokens do not depend on who chooses them."""

import numpy as np
import pytest
import torch
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Batch, Logits, RowNeed
from umbel.srt.core.messages import EngineFailed
from umbel.srt.scheduler import step
from umbel.srt.scheduler.step import MAX_SAMPLED_TOP_K, needs_only_token

from ..engine_harness import Ending, Engine

PROMPTS = [[1, 2, 3, 4, 5, seed] for seed in range(6, 18)]
KINDS = [
    *({"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.8}, {"top_k": 1}),
    *({"temperature": 0.0, "logprobs": True}, {"top_logprobs": 2}, {"frequency_penalty": 0.5}),
    *({"temperature": 0.0, "min_tokens": 3}, {"temperature": 0.0, "prompt_logprobs_from": 2}),
]


def run(*, asks: bool, answers: bool) -> tuple[Engine, list[Ending]]:
    """All kinds of requests in one batch. asks: the scheduler says what it needs; answers: the runner uses it."""
    engine = Engine(partial_logits=asks)
    engine.runner.picks_tokens = answers
    wanted = [SamplingParams(max_tokens=6, seed=7 + i, **kind) for i, kind in enumerate(KINDS)]
    ids = [engine.generate(prompt, sampling) for prompt, sampling in zip(PROMPTS, wanted, strict=True)]
    engine.score([[1, 2, 3, 9], [1, 2, 3, 10, 11]], 3)
    engine.run()
    for message_id, prompt, sampling in zip(ids, PROMPTS, wanted, strict=True):
        engine.assert_equals_reference(message_id, prompt, sampling)
    return engine, [engine.endings[message_id] for message_id in sorted(engine.endings)]


def test_generations_are_equal_whoever_chooses_the_tokens() -> None:
    everything, endings = run(asks=False, answers=False)
    assert everything.count("picked_rows") == 0
    completed, same = run(asks=True, answers=False)
    assert completed.count("picked_rows") == 0
    picked, again = run(asks=True, answers=True)
    assert endings == same == again
    assert picked.count("logit_rows") == everything.count("logit_rows")
    assert picked.count("picked_rows") > picked.count("logit_rows") / 3


def test_nobody_answers_with_tokens_when_the_switch_is_off() -> None:
    engine, _ = run(asks=False, answers=True)
    assert engine.count("picked_rows") == 0


@pytest.mark.parametrize(
    ("changes", "token_is_enough"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 100_000, "min_p": 0.5}, True),
        ({"temperature": 0.5, "top_k": MAX_SAMPLED_TOP_K, "min_p": 0.5}, True),
        ({"temperature": 0.5, "top_k": MAX_SAMPLED_TOP_K + 1}, False),
        ({"temperature": 0.5, "top_p": 0.99}, False),
        ({"temperature": 0.0, "logprobs": True}, False),
        ({"temperature": 0.0, "top_logprobs": 1}, False),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, False),
        ({"temperature": 0.0, "presence_penalty": 0.1}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, False),
    ],
)
def test_a_token_is_enough_when_nothing_looks_at_other_logits(
    changes: dict[str, object], token_is_enough: bool
) -> None:
    assert needs_only_token(SamplingParams(**changes)) is token_is_enough  # type: ignore[arg-type]


def asked(engine: Engine) -> list[list[int]]:
    """Runs the engine; what each step asked of its rows of logits."""
    seen: list[list[int]] = []
    forward = engine.runner.forward

    def spy(batch: Batch) -> Logits:
        assert batch.row_requests is not None
        seen.append(batch.row_requests.kinds.tolist())
        return forward(batch)

    engine.runner.forward = spy  # type: ignore[method-assign]
    engine.run()
    return seen


def test_tokens_that_may_not_end_the_text_yet_need_all_logits() -> None:
    engine = Engine()
    engine.generate([1, 2, 3], SamplingParams(temperature=0.0, min_tokens=2, max_tokens=4))
    assert asked(engine)[:2] == [[RowNeed.LOGITS], [RowNeed.LOGITS]]
    engine = Engine()
    engine.generate([1, 2, 3], SamplingParams(temperature=0.0, min_tokens=2, max_tokens=2, ignore_eos=True))
    assert asked(engine) == [[RowNeed.ARGMAX], [RowNeed.ARGMAX]], "nothing ends the text: nothing is forbidden"


def test_rows_of_known_tokens_need_all_logits_and_the_last_row_only_its_token() -> None:
    engine = Engine()
    engine.generate([1, 2, 3, 4], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs_from=2))
    engine.score([[1, 5, 6]], 1)
    (kinds,) = asked(engine)
    assert sorted(kinds) == [RowNeed.LOGITS] * 4 + [RowNeed.ARGMAX]


def test_a_runner_that_answers_nothing_for_a_row_fails_the_step() -> None:
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logprobs=True)):
        engine = Engine()
        engine.runner.forward = lambda batch: Logits(  # type: ignore[method-assign]
            torch.zeros(0, 24), np.array([-1]), np.array([-1])
        )
        message_id = engine.generate([1, 2], sampling)
        engine.step()
        ending = engine.endings[message_id]
        assert isinstance(ending, EngineFailed)
        assert "neither logits nor a token" in ending.message


def test_rows_of_texts_that_decode_have_the_arrays_of_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    single_rows, sizes = step._single_rows, []

    def compared(planned: list[step.PlannedRows]) -> step._RowArrays:
        arrays = single_rows(planned)
        others = step._ranges_of_rows(planned)
        for name, own, other in zip(arrays._fields, arrays, others, strict=True):
            if name == "paths":
                assert own == other
                continue
            for one, two in zip(own, other, strict=True) if name == "slots" else [(own, other)]:
                assert one.dtype == two.dtype
                assert one.tolist() == two.tolist()
        sizes.append(len(planned))
        return arrays

    monkeypatch.setattr(step, "_single_rows", compared)
    engine = Engine()
    for prompt in PROMPTS[:3]:
        engine.generate(prompt, SamplingParams(max_tokens=4, seed=1))
    engine.run()
    assert sizes == [3, 3], "after the step of the prompts"
