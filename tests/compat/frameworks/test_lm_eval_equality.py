"""Figures of the model `umbel` against transformers' own forward, on tiny random models, and what they cost."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed; `make frameworks` installs it")

from lm_eval.api.instance import Instance
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from umbel.compat.lm_eval import UmbelLM

from ...srt.weights.tiny import BY_NAME, write_folder

pytestmark = pytest.mark.processes

EXAMPLES = "The capital of France is Paris.\nThe capital of Japan is Tokyo.\n" * 4
QUESTIONS = ("The capital of the state of clarity is", "An essay about cities has  ", "def fork(state, n):\n    return")
ENDS = (" Paris", " Tokyo, and the capital of France", "\n\n", " evidence. A state")
PAIRS = [(EXAMPLES + question, end) for question in QUESTIONS for end in ENDS]


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])  # without BOS, and with it
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / str(request.param)
    write_folder(path, BY_NAME[request.param])
    return path


@pytest.fixture
def model(folder: Path) -> Iterator[UmbelLM]:
    made = UmbelLM(str(folder), dtype="float32", weights="float32")
    yield made
    made.close()


def scores(model: UmbelLM, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    return model.loglikelihood([Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)])


class Reference:
    """Log-likelihoods as the harness defines them, a forward of transformers for each pair."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    def split(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Returns the tokens of both, and how many of them are context."""
        start = list(self.tokenizer(context.rstrip())["input_ids"])
        return list(self.tokenizer(context + continuation)["input_ids"]), len(start)

    @torch.no_grad()
    def score(self, context: str, continuation: str) -> tuple[float, bool]:
        ids, start = self.split(context, continuation)
        logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(start, len(ids))
        total = sum(float(logprobs[place - 1, ids[place]]) for place in places)
        return total, all(int(logprobs[place - 1].argmax()) == ids[place] for place in places)


def test_log_likelihoods_are_those_of_a_forward_of_transformers(model: UmbelLM, folder: Path) -> None:
    reference = Reference(folder)
    context = PAIRS[0][0]
    ids, _ = reference.split(context, "")
    with torch.no_grad():
        best = reference.model(torch.tensor([ids])).logits[0, -1].argmax()
    found = scores(model, PAIRS)
    expected = [reference.score(*pair) for pair in PAIRS]
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    ((_, greedy),) = model._loglikelihood_tokens([(None, ids, [int(best)])])
    assert greedy


def test_a_shared_beginning_is_computed_once(model: UmbelLM, folder: Path) -> None:
    scores(model, PAIRS)
    reference = Reference(folder)
    sequences = [reference.split(*pair)[0] for pair in PAIRS]
    different = {tuple(ids[:end]) for ids in sequences for end in range(1, len(ids) + 1)}
    computed = model.usage.prompt_tokens - model.usage.cached_tokens
    assert model.usage.calls == len(PAIRS)
    assert len(different) <= computed <= len(different) + len(PAIRS)  # a request computes its last context token again
    assert computed < sum(map(len, sequences)) / 5
