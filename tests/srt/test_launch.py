"""Options that change the model of an engine itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from umbel.lang.errors import ModelError, ParameterError
from umbel.lang.runtime_options import RuntimeOptions
from umbel.lang.sampling import SamplingParams
from umbel.srt import launch
from umbel.srt.core.instruments import VirtualClock, no_faults
from umbel.srt.core.messages import Ended, EngineGenerate
from umbel.srt.launch import Engine, open_engine
from umbel.srt.runners.torch_runner import TorchRunner

from .fake_cards import FakeMachine
from .models.reference import Piece, Sequences, random_tokens, reference_logits, relative_error, run_steps
from .weights.tiny import BY_NAME, auto, write_folder

SLOTS = 150
ORIGINAL = 64  # tokens that the tiny Phi was first made for; its context is 512


def runner_of(folder: Path, context: int | None) -> TorchRunner:
    torch.set_num_threads(1)
    options = RuntimeOptions(
        model=str(folder), context_length=context, dtype="float32", kernels="torch", pool_tokens=SLOTS
    )
    engine = open_engine(options, clock=VirtualClock(), faults=no_faults, phase=lambda _: None)
    engine.close()
    assert isinstance(engine.runner, TorchRunner)
    return engine.runner


def test_context_length_chooses_the_factors_of_longrope(tmp_path: Path) -> None:
    """transformers chooses by the length of each sequence: here of a short one, and of a long one."""
    model = write_folder(tmp_path / "phi", BY_NAME["phi3"])
    for context, length in ((ORIGINAL, ORIGINAL - 4), (None, ORIGINAL + 4)):
        ids = random_tokens(length, 3, model.config.vocab_size)
        runner = runner_of(tmp_path / "phi", context)
        assert runner.context_length == (context or 512)
        logits = run_steps(runner, Sequences([ids], SLOTS), [[Piece(0, 0, 20)], [Piece(0, 20, length - 20)]])[0]
        assert relative_error(logits, reference_logits(model, ids)) < 1e-4


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "phi", BY_NAME["phi3"])
    with pytest.raises(ParameterError, match="context_length=513 is more than the 512 tokens phi was made for"):
        runner_of(tmp_path / "phi", 513)


def texts_of(engine: Engine) -> list[list[int]]:
    """What the engine says to three prompts, two of them together."""
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    ended: dict[int, list[int]] = {}
    for group in ([(1, [5, 9, 7], greedy), (2, [5, 9, 8], drawn)], [(3, [5, 9, 7, 4], drawn)]):
        for number, prompt, sampling in group:
            engine.scheduler.handle_message(EngineGenerate(number, prompt, sampling, False))
        while not engine.scheduler.idle:
            ended |= {event.id: event.token_ids for event in engine.scheduler.step() if isinstance(event, Ended)}
    return [ended[number] for number in sorted(ended)]


def opened(folder: Path, **options: object) -> Engine:
    given = RuntimeOptions(model=str(folder), dtype="float32", pool_tokens=SLOTS, **options)  # type: ignore[arg-type]
    return open_engine(given, clock=VirtualClock(), faults=no_faults, phase=lambda _: None)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_a_draft_saves_steps_and_changes_no_text(family: str, tmp_path: Path) -> None:
    """The model is its own draft: right but where the sources guess. gemma3 has window layers, its draft one pool."""
    torch.set_num_threads(1)
    write_folder(tmp_path / "model", BY_NAME[family])
    truth, steps = [], []
    for draft in (None, str(tmp_path / "model")):
        engine = opened(tmp_path / "model", draft_model=draft)
        truth.append(texts_of(engine))
        counters = engine.scheduler.counters
        steps.append(counters["steps"])
        engine.close()
    assert truth[0] == truth[1]
    assert counters["accepted_draft_rows"] > 0.9 * counters["guessed_draft_rows"] > 30
    assert steps[1] < 0.5 * steps[0]


def test_a_draft_of_another_tokenizer_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", BY_NAME["llama"])
    write_folder(tmp_path / "other", BY_NAME["qwen2"])
    with pytest.raises(
        ModelError, match=r"other: it cannot guess for model: token \d+ is another one in its tokenizer"
    ):
        opened(tmp_path / "model", draft_model=str(tmp_path / "other"))


def test_a_draft_may_pad_its_vocabulary_otherwise(tmp_path: Path) -> None:
    """As Qwen 2.5 does by size. The files of the tokenizer differ, its tokens do not."""
    padded = replace(BY_NAME["llama"], build=lambda size: BY_NAME["llama"].build(size + 24))
    write_folder(tmp_path / "model", BY_NAME["llama"])
    write_folder(tmp_path / "padded", padded)
    file = tmp_path / "padded" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    without = opened(tmp_path / "model")
    engine = opened(tmp_path / "model", draft_model=str(tmp_path / "padded"))
    assert texts_of(engine) == texts_of(without)
    assert engine.scheduler.counters["draft_rows"] > 0
    assert engine.scheduler.counters["guess_failures"] == 0
    for one in (engine, without):
        one.close()


def test_a_draft_with_recurrent_states_is_refused(tmp_path: Path) -> None:
    build = auto("lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8, block_ffn_dim_multiplier=1.1)
    write_folder(tmp_path / "model", BY_NAME["llama"])
    write_folder(tmp_path / "states", replace(BY_NAME["llama"], build=build))
    with pytest.raises(ModelError, match="a draft has no recurrent states"):
        opened(tmp_path / "model", draft_model=str(tmp_path / "states"))


def test_an_engine_takes_what_its_control_groups_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "model", BY_NAME["llama"])
    threads = torch.get_num_threads()
    options = RuntimeOptions(model=str(tmp_path / "model"), dtype="float32")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch, "usable_cores", lambda: 1)
    launch._threads_of_torch.cache_clear()
    slots = []
    try:
        for free in (4 << 20, 16 << 20):
            torch.set_num_threads(2)
            monkeypatch.setattr(launch, "available_memory", lambda free=free: free)
            engine = open_engine(options, clock=VirtualClock(), faults=no_faults, phase=lambda _: None)
            slots.append(engine.scheduler.kv.pool.total)
            assert torch.get_num_threads() == 1
            engine.close()
    finally:
        torch.set_num_threads(threads)
        launch._threads_of_torch.cache_clear()
    assert slots[1] == pytest.approx(4 * slots[0], rel=0.1)


def test_a_gpu_that_is_unused_is_said_once_and_the_cpu_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    write_folder(tmp_path / "model", BY_NAME["llama"])
    expected = opened(tmp_path / "model", device="cpu")
    machine = FakeMachine(monkeypatch, tmp_path / "root")
    machine.torch(None, version="2.13.0+cpu")
    machine.has_driver("550.54.15", "NVIDIA L4")
    engine = opened(tmp_path / "model")
    assert texts_of(engine) == texts_of(expected)
    assert [message for message in caplog.messages if "NVIDIA" in message] == [
        "the CPU computes, not NVIDIA L4 (driver 550.54.15): torch 2.13.0+cpu is a CPU build; run pip install "
        '--force-reinstall torch --index-url https://download.pytorch.org/whl/cu126, or write device="cpu"'
    ]
    for one in (engine, expected):
        one.close()


def test_a_share_of_a_gpu_is_refused_where_the_cpu_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "model", BY_NAME["llama"])
    FakeMachine(monkeypatch, tmp_path / "root")
    options = RuntimeOptions(model=str(tmp_path / "model"), memory_share=0.4)
    with pytest.raises(
        ParameterError, match=r"memory_share=0.4 is a part of a GPU's memory, and the CPU computes; write"
    ):
        open_engine(options, clock=VirtualClock(), faults=no_faults, phase=lambda _: None)
