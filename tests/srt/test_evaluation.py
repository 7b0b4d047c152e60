"""`umbel weights`: the figures of weight formats, against transformers and against each other."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from umbel.interpreter.cli import main
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import Kernels
from umbel.srt import evaluation
from umbel.srt.core import cards
from umbel.srt.core.cards import UnusedCards
from umbel.srt.evaluation import EvaluationSettings, FormatResult, count_weights, evaluate, memory_of, weight_bytes
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cpu_runner import CpuRunner
from umbel.srt.runners.torch_runner import TorchRunner
from umbel.srt.weights import ModelSource, open_model
from umbel.srt.weights.packed_tensors import dense_view

from .models.reference import reference_logits, reference_model, tensors_of
from .weights.packed_formats import BY_NAME as BY_FORMAT
from .weights.tiny import BY_NAME, write_folder

TEXT = "The judge reads the essay, and then says what is good about it. " * 6
SETTINGS = EvaluationSettings(dtype="float32", context=40)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, ModelSource]:
    folder = tmp_path_factory.mktemp("eval") / "tiny"
    model = write_folder(folder, BY_NAME["qwen3"])
    return model, open_model(folder, cache=folder.parent / "cache")


def measured(source: ModelSource, *formats: evaluation.Weights) -> list[FormatResult]:
    return evaluate(source, formats, TEXT, SETTINGS)


def test_exact_weights_have_no_divergence_and_the_perplexity_of_transformers(
    tiny: tuple[PreTrainedModel, ModelSource],
) -> None:
    model, source = tiny
    (exact,) = measured(source, "float32")
    tokenizer = source.tokenizer()
    ids = tokenizer.encode(TEXT, first=True)
    head = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    body = SETTINGS.context - len(head)
    losses: list[float] = []
    for window in ([*head, *ids[first : first + body]] for first in range(0, len(ids), body)):
        if len(window) > 1:
            log = reference_logits(model, window).log_softmax(-1)
            losses += [-float(log[place, token]) for place, token in enumerate(window[1:])]
    assert (exact.kl, exact.kl_99, exact.same_token) == (0.0, 0.0, 1.0)
    assert exact.tokens == len(losses)
    assert exact.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_fewer_bits_diverge_and_take_less_memory(tiny: tuple[PreTrainedModel, ModelSource]) -> None:
    exact, half, quarter = measured(tiny[1], "float32", "bf16", "int8")
    assert half.kl == 0.0  # the checkpoint has bfloat16
    assert 1e-6 < quarter.kl < 0.1
    assert exact.resident_bytes > half.resident_bytes > quarter.resident_bytes
    assert 0.9 * exact.bits_per_weight > half.bits_per_weight > quarter.bits_per_weight


def test_small_steps_give_the_same_figures(
    tiny: tuple[PreTrainedModel, ModelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = measured(tiny[1], "int8")
    monkeypatch.setattr(evaluation, "LOGIT_BYTES", 7 * 4 * tiny[1].vocab_size)
    (pieces,) = measured(tiny[1], "int8")
    assert pieces.perplexity == pytest.approx(whole.perplexity, rel=1e-6)
    assert pieces.kl == pytest.approx(whole.kl, rel=0.01)  # 1e-5: the difference of logs in float32


def test_weights_of_packed_matrices_are_counted_as_numbers() -> None:
    parts, values = BY_FORMAT["gptq"].write(torch.randn(64, 96))
    stored = {"norm.weight": torch.ones(7), **{f"a.{suffix}": part for suffix, part in parts.items()}}
    _, tensors = dense_view({"quantization_config": BY_FORMAT["gptq"].config}, stored)
    assert count_weights(tensors) == values.numel() + 7


def test_memory_that_two_parts_share_counts_once() -> None:
    base = torch.zeros(8, 4)
    assert memory_of({"embedding": base, "head": [base, base[:2]], "norm": torch.zeros(4)}) == 128 + 16


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_weights_that_embedding_and_head_share_count_once(kernels: Kernels) -> None:
    model = reference_model("gemma3_text", vocab_size=640, hidden_size=64, intermediate_size=128, head_dim=16)
    runner = build_runner(model.config.to_dict(), tensors_of(model), num_slots=8, dtype="float32", kernels=kernels)
    assert isinstance(runner, CpuRunner | TorchRunner)
    bits = 8 * weight_bytes(runner.model) / count_weights(tensors_of(model))
    assert 32 <= bits < 33, "what is left over are norms and padding"
    assert memory_of(runner.model) > weight_bytes(runner.model)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("x", SETTINGS, "fewer than 2 tokens"),
        (TEXT, EvaluationSettings(context=513), "context=513 is more than the 512 tokens of tiny; write at most that"),
    ],
    ids=["short text", "long context"],
)
def test_what_cannot_be_measured_is_refused(
    tiny: tuple[PreTrainedModel, ModelSource], text: str, settings: EvaluationSettings, message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        evaluate(tiny[1], ["float32"], text, settings)


def test_the_command_prints_a_table_or_json(
    tiny: tuple[PreTrainedModel, ModelSource],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = ["weights", str(tiny[1].path), "--text", str(text), "--context", "40"]
    assert main([*arguments, "--weights", "int8,bf16,int8", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [entry["weights"] for entry in printed["formats"]] == ["int8", "bf16"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "auto" in table
    assert "KL and same token against float32 weights" in table


def test_the_command_says_why_a_gpu_that_is_there_does_not_compute(
    tiny: tuple[PreTrainedModel, ModelSource],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On standard error: what is printed stays JSON."""
    monkeypatch.setattr(cards, "sees_cuda", lambda: False)
    monkeypatch.setattr(cards, "unused_cards", lambda: UnusedCards("NVIDIA L4", "torch is a CPU build", "install it"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = ["weights", str(tiny[1].path), "--text", str(text), "--context", "40", "--tokens", "40", "--json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["device"] == "cpu"
    assert err == "the CPU computes, not NVIDIA L4: torch is a CPU build; install it, or write --device cpu\n"
    assert main([*arguments, "--device", "cpu"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "int9", "--text", "t"], "--weights 'int9': no such format; write some of auto, float32"),
        (["--text", "missing.txt"], "--text 'missing.txt': No such file or directory; write the path of a text file"),
    ],
    ids=["format", "text"],
)
def test_wrong_options_say_what_to_write(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", "default", *arguments]) == 1
    assert message in capsys.readouterr().err
