"""Steps that are launched behind others: tokens that only the device knows, and answers that stay."""

import dataclasses

import numpy as np
import pytest
import torch
from umbel.srt.core.batch import Allowed, Batch, LogitsError, RowNeed, RowRequests
from umbel.srt.runners.cuda.runner import CudaRunner
from umbel.srt.sampling.sampler import TorchSampling, draw_keys, draws_of

from ...models.reference import Piece, Sequences
from .engines import mixed_steps, on_host, only_last_rows, sequences, tiny_model

PROMPTS = (6, 11, 3)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    return tiny_model("qwen 3")  # type: ignore[return-value]


def picks(kinds: list[RowNeed], position: int = 0, **changes: object) -> RowRequests:
    count = len(kinds)
    plain = RowRequests(
        kinds=np.array(kinds, dtype=np.uint8),
        inverse_temperatures=np.full(count, 1.25),
        keys=draw_keys(list(range(count)), [position] * count),
        top_k=np.zeros(count, dtype=np.int32),
        min_p=np.zeros(count),
        top_p=np.ones(count),
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def prompts(ids: Sequences, kinds: list[RowNeed]) -> Batch:
    batch = only_last_rows(ids.batch([Piece(i, 0, length) for i, length in enumerate(PROMPTS)]))
    return dataclasses.replace(batch, row_requests=picks(kinds))


def decodes(ids: Sequences, step: int, tokens: list[int] | None, kinds: list[RowNeed]) -> Batch:
    """tokens: of the rows; None: those that the step before is choosing."""
    batch = ids.batch([Piece(i, length + step, 1) for i, length in enumerate(PROMPTS)])
    known = np.zeros(3, dtype=np.int64) if tokens is None else np.array(tokens, dtype=np.int64)
    sources = np.arange(3, dtype=np.int64) if tokens is None else None
    return dataclasses.replace(batch, token_ids=known, token_sources=sources, row_requests=picks(kinds, step + 1))


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("kinds", [[RowNeed.ARGMAX] * 3, [RowNeed.SAMPLE, RowNeed.ARGMAX, RowNeed.SAMPLE]])
def test_tokens_that_only_the_device_knows_are_those_of_steps_one_by_one(
    model: tuple[dict[str, object], dict[str, torch.Tensor]], kinds: list[RowNeed], cuda_graphs: bool
) -> None:
    ids = sequences((12, 17, 9))
    one_by_one, launched = (on_host(*model, cuda_graphs=cuda_graphs) for _ in range(2))
    expected = [one_by_one.forward(prompts(ids, kinds)).tokens.tolist()]
    for step in range(5):
        expected.append(one_by_one.forward(decodes(ids, step, expected[-1], kinds)).tokens.tolist())

    pending = [launched.launch(prompts(ids, kinds))]
    pending.extend(launched.launch(decodes(ids, step, None, kinds)) for step in range(5))
    assert [answer.result().tokens.tolist() for answer in pending] == expected
    assert len({tuple(tokens) for tokens in expected}) > 1


def test_rows_may_know_their_tokens_while_others_do_not(
    model: tuple[dict[str, object], dict[str, torch.Tensor]],
) -> None:
    """A request that joins takes row 0; the others come from rows 2 and 0 of the step before."""
    ids, kinds = sequences((12, 17, 9)), [RowNeed.ARGMAX] * 3
    first, second = on_host(*model), on_host(*model)
    tokens = first.forward(prompts(ids, kinds)).tokens.tolist()
    known = decodes(ids, 0, [5, tokens[2], tokens[0]], kinds)
    second.launch(prompts(ids, kinds))
    unknown = dataclasses.replace(
        known, token_ids=np.array([5, 0, 0]), token_sources=np.array([-1, 2, 0], dtype=np.int64)
    )
    assert second.launch(unknown).result().tokens.tolist() == first.forward(known).tokens.tolist()


def test_rows_that_are_chosen_for_are_chosen_as_the_definition_says(
    model: tuple[dict[str, object], dict[str, torch.Tensor]],
) -> None:
    """Each kind of restriction, against TorchSampling on the whole logits."""
    ids = sequences((12, 17, 9))
    bits = np.zeros(4, dtype=np.uint32)
    bits[1] = 0xFFFF
    for changes in (
        {},
        {"top_k": np.array([3, 0, 1], dtype=np.int32)},
        {"min_p": np.array([0.3, 0.0, 0.9])},
        {"top_p": np.array([0.5, 0.9, 0.1])},
        {"allowed": {0: Allowed(np.array([4, 90], dtype=np.int32), None), 2: Allowed(None, bits)}},
    ):
        asked = dataclasses.replace(
            prompts(ids, [RowNeed.SAMPLE] * 3), row_requests=picks([RowNeed.SAMPLE] * 3, **changes)
        )
        logits = on_host(*model).forward(dataclasses.replace(asked, row_requests=None)).values
        assert asked.row_requests is not None
        rows = np.arange(3)
        expected = TorchSampling().choose(logits, draws_of(asked.row_requests, rows, rows, 97))
        assert on_host(*model).forward(asked).tokens.tolist() == expected.tolist(), changes


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("changes", [{}, {"top_p": np.array([0.5, 0.9, 0.1])}])
def test_rows_choose_later_what_they_would_choose_at_once(
    model: tuple[dict[str, object], dict[str, torch.Tensor]], changes: dict[str, object], cuda_graphs: bool
) -> None:
    """Two of three rows; the step after refers to the tokens of all, and its third row is not asked for any more."""
    ids = sequences((12, 17, 9))
    allowed = {0: Allowed(np.array([4, 90], dtype=np.int32), None), 2: Allowed(None, np.full(4, 0xFF0F, np.uint32))}
    at_once, later = (on_host(*model, cuda_graphs=cuda_graphs) for _ in range(2))
    asked = picks([RowNeed.SAMPLE] * 3, allowed=allowed, **changes)
    expected = at_once.launch(dataclasses.replace(prompts(ids, [RowNeed.SAMPLE] * 3), row_requests=asked))
    after = at_once.launch(decodes(ids, 0, None, [RowNeed.SAMPLE, RowNeed.SAMPLE, RowNeed.LOGITS]))

    some = np.array([0, 2])
    kinds = np.array([RowNeed.LATER, RowNeed.SAMPLE, RowNeed.LATER], dtype=np.uint8)
    known = dataclasses.replace(asked, kinds=kinds, allowed={})
    first = later.launch(dataclasses.replace(prompts(ids, [RowNeed.SAMPLE] * 3), row_requests=known))
    first.choose(some, asked.take(some))
    second = later.launch(decodes(ids, 0, None, [RowNeed.LATER, RowNeed.SAMPLE, RowNeed.LATER]))
    second.choose(some[:1], picks([RowNeed.SAMPLE] * 3, 1).take(some[:1]))
    assert first.result().tokens.tolist() == expected.result().tokens.tolist()
    answer = second.result()
    assert answer.tokens.tolist() == after.result().tokens.tolist()
    assert answer.places.tolist() == [-1, -1, -1]


def test_steps_tell_when_they_ran_and_how_long_their_late_rows_waited(
    model: tuple[dict[str, object], dict[str, torch.Tensor]],
) -> None:
    """On the host a mark is passed when it is made: spans are those between the marks."""
    ids, runner, later = sequences((12, 17, 9)), on_host(*model), [RowNeed.LATER] * 3
    runner.time_steps()
    first = runner.launch(prompts(ids, [RowNeed.SAMPLE] * 3))
    second = runner.launch(decodes(ids, 0, None, later))
    second.choose(np.arange(3), picks([RowNeed.SAMPLE] * 3, 1))
    third = runner.launch(decodes(ids, 1, None, [RowNeed.SAMPLE] * 3))
    for answer in (first, second, third):
        answer.result()
    one, two, three = (answer.times() for answer in (first, second, third))
    assert one.idle == one.waited == one.chosen == three.waited == 0.0
    assert min(one.forward, two.idle, two.forward, two.waited, two.chosen, three.idle, three.forward) > 0.0
    whole = third.mark.seconds_since(first.began)
    assert sum(map(sum, (one, two, three))) == pytest.approx(whole)


def test_rows_that_want_logits_get_them_beside_rows_that_want_a_token(
    model: tuple[dict[str, object], dict[str, torch.Tensor]],
) -> None:
    ids, kinds = sequences((12, 17, 9)), [RowNeed.LOGITS, RowNeed.ARGMAX, RowNeed.ARGMAX]
    runner = on_host(*model)
    whole = runner.forward(dataclasses.replace(prompts(ids, kinds), row_requests=None)).values
    described = np.array([False, False, True])
    answer = runner.forward(dataclasses.replace(prompts(ids, kinds), row_requests=picks(kinds, described=described)))
    assert answer.places.tolist() == [0, -1, 1]
    assert answer.tokens.tolist() == [-1, *whole.argmax(-1)[1:].tolist()]
    assert torch.equal(answer.values, whole[[0, 2]])


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_logits_stay_while_later_steps_run(
    model: tuple[dict[str, object], dict[str, torch.Tensor]], cuda_graphs: bool
) -> None:
    ids, everything = sequences((12, 17, 9)), [RowNeed.LOGITS] * 3
    runner = on_host(*model, cuda_graphs=cuda_graphs)
    tokens = runner.forward(prompts(ids, [RowNeed.ARGMAX] * 3)).tokens.tolist()
    answer = runner.launch(decodes(ids, 0, tokens, everything)).result()
    before = answer.values.clone()
    runner.launch(decodes(ids, 1, [1, 2, 3], everything)).result()
    assert torch.equal(answer.values, before)
    answer.values.add_(1)  # a sampler may write to them


def test_logits_that_are_no_numbers_are_an_error_of_each_of_their_rows(
    model: tuple[dict[str, object], dict[str, torch.Tensor]],
) -> None:
    config, tensors = model
    broken = {**tensors, "model.norm.weight": torch.full_like(tensors["model.norm.weight"], float("nan"))}
    answer = on_host(config, broken).forward(
        prompts(sequences((12, 17, 9)), [RowNeed.ARGMAX, RowNeed.LOGITS, RowNeed.ARGMAX])
    )
    assert answer.tokens.tolist() == [-1, -1, -1]
    assert {row: type(error) for row, error in answer.errors.items()} == {0: LogitsError, 2: LogitsError}


def test_a_step_of_any_kind_may_follow_any_other(model: tuple[dict[str, object], dict[str, torch.Tensor]]) -> None:
    """Answers are read one step late throughout."""
    plain, late = on_host(*model), on_host(*model)
    batches = [only_last_rows(sequences().batch(pieces)) for pieces in mixed_steps()]
    expected = [plain.forward(batch).values.clone() for batch in batches]
    assert [torch.equal(*pair) for pair in zip(_late(late, batches), expected, strict=True)] == [True] * len(batches)


def _late(runner: CudaRunner, batches: list[Batch]) -> list[torch.Tensor]:
    values = []
    before = None
    for batch in batches:
        launched = runner.launch(batch)
        if before is not None:
            values.append(before.result().values)
        before = launched
    assert before is not None
    return [*values, before.result().values]
