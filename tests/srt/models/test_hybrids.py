"""Models with recurrent layers against transformers, on tiny random models of every family, in float32."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from umbel.lang.errors import ModelError, ParameterError
from umbel.lang.runtime_options import Kernels
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import Ended, EngineGenerate, Schedule
from umbel.srt.models.families import read_config
from umbel.srt.models.sharding import require_shardable
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cpu_runner import CpuRunner
from umbel.srt.runners.torch_runner import TorchRunner
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig

from .equality import VOCABULARY, assert_guesses_change_no_text, assert_texts_do_not_depend_on_the_schedule
from .reference import random_tokens, reference_logits, reference_model, relative_error, run_steps, tensors_of
from .test_families import NUM_SLOTS, WAYS, native_if, sequences

SLOTS = 66  # of the pool: room for the longest request, and not for two

DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}

MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 5}
GRANITE = {
    **MAMBA,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}

NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 5,
    "layer_norm_epsilon": 1e-4,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.1},
    ),
    "lfm2, biases, longer convolution": (
        "lfm2",
        {"full_attn_idxs": [2], "conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False},
    ),
    "qwen 3 next": ("qwen3_next", {**DELTA_NET, **EXPERTS}),
    "qwen 3 next, some layers dense": ("qwen3_next", {**DELTA_NET, **EXPERTS, "mlp_only_layers": [1]}),
    "qwen 3.5": ("qwen3_5_text", DELTA_NET),
    "qwen 3.5 with experts": ("qwen3_5_moe_text", {**DELTA_NET, **EXPERTS}),
    "granite 4 h": ("granitemoehybrid", {**GRANITE, "num_local_experts": 0}),
    "granite 4 h with experts, groups and bounded steps": (
        "granitemoehybrid",
        {
            **GRANITE,
            "num_local_experts": 5,
            "mamba_n_groups": 3,
            "mamba_proj_bias": True,
            "time_step_limit": [0.3, 0.9],
        },
    ),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1], "mamba_conv_bias": False}),
    "nemotron h": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
    ),
    "nemotron h with experts": (
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
        },
    ),
}


def by_day(*cases: str, others: Iterable[str] = tuple(CASES)) -> list[Any]:
    """These cases, and the others at night. Any: pytest does not name the type of its parameters."""
    return [*cases, *(pytest.param(case, marks=pytest.mark.nightly) for case in others if case not in cases)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def runner_of(
    model: PreTrainedModel, num_slots: int = NUM_SLOTS, kernels: Kernels = "torch"
) -> TorchRunner | CpuRunner:
    config, tensors = model.config.to_dict(), tensors_of(model)
    runner = build_runner(config, tensors, num_slots=num_slots, dtype="float32", kernels=kernels)
    assert isinstance(runner, TorchRunner if kernels == "torch" else CpuRunner)
    return runner


NATIVE_BY_DAY = by_day(
    "lfm2, biases, longer convolution",
    "qwen 3 next",
    "qwen 3.5",
    "granite 4 h with experts, groups and bounded steps",
    "nemotron h with experts",
)


@pytest.mark.parametrize("case", NATIVE_BY_DAY)
def test_native_logits_equal_those_of_transformers(case: str) -> None:
    assert_logits_equal_those_of_transformers(case, "native")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str) -> None:
    assert_logits_equal_those_of_transformers(case, "torch")


def assert_logits_equal_those_of_transformers(case: str, kernels: Kernels) -> None:
    """However the prompts are cut."""
    model_type, changes = native_if(kernels, CASES[case])
    reference = reference_model(model_type, **changes)
    runner = runner_of(reference, kernels=kernels)
    expected = [reference_logits(reference, ids.tolist()) for ids in sequences().token_ids]
    for way, steps in WAYS.items():
        runner.clear()
        for actual, logits in zip(run_steps(runner, sequences(), steps), expected, strict=True):
            assert relative_error(actual, logits) < 2e-5, way


@pytest.mark.parametrize("case", by_day("lfm2", "qwen 3.5", others=("granite 4 h", "nemotron h")))
def test_bfloat16_logits_are_as_near_to_the_truth_as_those_of_transformers(case: str) -> None:
    model_type, changes = CASES[case]
    model = reference_model(model_type, **changes).to(torch.bfloat16)
    runner = build_runner(
        model.config.to_dict(), tensors_of(model), num_slots=NUM_SLOTS, dtype="bfloat16", kernels="torch"
    )
    assert isinstance(runner, TorchRunner)
    ours = run_steps(runner, sequences(), WAYS["in chunks"])
    theirs = [reference_logits(model, ids.tolist()) for ids in sequences().token_ids]
    model = model.float()
    truth = [reference_logits(model, ids.tolist()) for ids in sequences().token_ids]
    ours_off, theirs_off = (
        torch.cat([(mine - true).flatten() for mine, true in zip(logits, truth, strict=True)]).square().mean()
        for logits in (ours, theirs)
    )
    assert ours_off < 1.5 * theirs_off


@pytest.mark.parametrize("case", by_day("lfm2", "qwen 3.5"))
def test_texts_do_not_depend_on_the_schedule(case: str) -> None:
    assert_equal_texts(case, "torch")


@pytest.mark.parametrize("case", by_day("lfm2", "qwen 3.5", "granite 4 h"))
def test_native_texts_do_not_depend_on_the_schedule(case: str) -> None:
    assert_equal_texts(case, "native")


def assert_equal_texts(case: str, kernels: Kernels) -> None:
    model_type, changes = native_if(kernels, CASES[case])
    runner = runner_of(reference_model(model_type, vocab_size=VOCABULARY, **changes), SLOTS, kernels)
    assert_texts_do_not_depend_on_the_schedule(runner)


RUNS: list[tuple[str, Kernels]] = [(case, kernels) for case in CASES for kernels in ("torch", "native")]


@pytest.mark.parametrize(
    ("case", "kernels", "seeds"),
    [
        *((case, "native", (1,)) for case in ("lfm2", "qwen 3.5", "granite 4 h")),
        *(pytest.param(*run, range(2, 24), marks=pytest.mark.nightly) for run in RUNS),
    ],
)
def test_guesses_change_no_text(case: str, kernels: Kernels, seeds: Sequence[int]) -> None:
    """At night 22 times 14 requests for each."""
    model_type, changes = native_if(kernels, CASES[case])
    runner = runner_of(reference_model(model_type, vocab_size=VOCABULARY, **changes), SLOTS, kernels)
    assert_guesses_change_no_text(runner, seeds)


@pytest.mark.parametrize("case", ["lfm2", "qwen 3.5"])
def test_a_fork_of_eight_computes_its_prefix_once(case: str) -> None:
    model_type, changes = CASES[case]
    runner = runner_of(reference_model(model_type, max_position_embeddings=8192, **changes), 4400)
    prefix = random_tokens(4096, 1)
    prompts = [[*prefix, *random_tokens(5, 2 + branch)] for branch in range(8)]
    texts, counters = texts_of(runner, prompts)
    again = counters["computed_prompt_tokens"] + counters["recomputed_tokens"] - 4096 - 8 * 5
    assert 0 <= again < 64
    runner.clear()
    alone, _ = texts_of(runner, prompts[5:6], radix_cache=False)
    assert texts[5] == alone[0]


def texts_of(
    runner: TorchRunner | CpuRunner, prompts: list[list[int]], **settings: Any
) -> tuple[list[list[int]], dict[str, float]]:
    """The greedy texts of requests that arrive together, and what the scheduler counted."""
    scheduler = Scheduler(runner, lambda _: b"", frozenset(), SchedulerConfig(**settings), VirtualClock())
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        scheduler.handle_message(EngineGenerate(number, prompt, greedy, False, Schedule()))
    texts: dict[int, list[int]] = {}
    while not scheduler.idle:
        texts |= {event.id: event.token_ids for event in scheduler.step() if isinstance(event, Ended)}
    return [texts[number] for number in range(len(prompts))], scheduler.counters


def test_half_of_the_pool_is_that_of_states() -> None:
    model = reference_model(*CASES["lfm2"][:1], **CASES["lfm2"][1])
    runner = build_runner(model.config.to_dict(), tensors_of(model), kv_bytes=1 << 20, dtype="float32", kernels="torch")
    assert isinstance(runner, TorchRunner)
    assert runner.states is not None
    states = runner.num_states * runner.states.geometry.bytes_per_slot
    keys = runner.num_slots * runner.pool.geometry.bytes_per_slot
    assert states <= 1 << 19
    assert 0.9 * (1 << 20) < states + keys <= 1 << 20
    assert runner.facts()["state_bytes"] == states


def test_checkpoints_may_have_layers_that_predict_several_tokens() -> None:
    model = reference_model(*CASES["qwen 3.5"][:1], **CASES["qwen 3.5"][1])
    tensors = {**tensors_of(model), "mtp.norm.weight": torch.ones(48)}
    build_runner(model.config.to_dict(), tensors, num_slots=20, dtype="float32", kernels="torch")


PUBLISHED = {
    "granite 4 h with experts, groups and bounded steps": {
        "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
        "block_sparse_moe.router.": "block_sparse_moe.router.layer.",
    },
    "nemotron h": {"model.": "backbone."},
    "nemotron h with experts": {"model.": "backbone."},
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_checkpoints_are_read_as_they_are_published(case: str) -> None:
    model_type, changes = CASES[case]
    model = reference_model(model_type, **changes)
    tensors = {spelled(name, PUBLISHED[case]): tensor for name, tensor in tensors_of(model).items()}
    assert tensors.keys() != tensors_of(model).keys()
    runner = build_runner(model.config.to_dict(), tensors, num_slots=NUM_SLOTS, dtype="float32", kernels="torch")
    assert isinstance(runner, TorchRunner)
    ours = run_steps(runner, sequences(), WAYS["whole"])
    assert relative_error(ours[0], reference_logits(model, sequences().token_ids[0].tolist())) < 2e-5


def spelled(name: str, names: dict[str, str]) -> str:
    for ours, published in names.items():
        name = name.replace(ours, published)
    return name


def test_the_kinds_of_layers_may_be_a_string_of_letters() -> None:
    model_type, changes = CASES["nemotron h"]
    config = reference_model(model_type, **changes).config.to_dict()
    pattern = {key: value for key, value in config.items() if key not in ("layers_block_type", "layer_types")}
    assert read_config({**pattern, "hybrid_override_pattern": "M-*M-"}) == read_config(config)


def test_states_are_not_cut_over_ranks() -> None:
    config = reference_model(*CASES["qwen 3.5"][:1], **CASES["qwen 3.5"][1]).config.to_dict()
    with pytest.raises(ParameterError, match=r"recurrent layers \(2 of 3\).*write tensor_parallel=1$"):
        require_shardable(config, 2)


WRONG = {
    "linear_num_value_heads=3 is not a multiple": ("qwen 3.5", {"linear_num_value_heads": 3}),
    "linear_conv_kernel_dim=1; write 2": ("qwen 3.5", {"linear_conv_kernel_dim": 1}),
    "layer_types .*: write 3 times 'linear_attention' or 'full_attention'": (
        "qwen 3.5",
        {"layer_types": ["conv"] * 3},
    ),
    "at least one that attends": ("qwen 3.5", {"layer_types": ["linear_attention"] * 3}),
    "conv_L_cache=1; write 2": ("lfm2", {"conv_L_cache": 1}),
    "attn_layer_indices=7; write the numbers": ("bamba", {"attn_layer_indices": 7}),
    "mamba_d_conv=1; write 2": ("bamba", {"mamba_d_conv": 1}),
    "mamba_n_heads=6 is not a multiple of mamba_n_groups=4": ("bamba", {"mamba_n_groups": 4}),
    "mamba_n_heads=7 does not divide": ("bamba", {"mamba_n_heads": 7, "mamba_d_head": "auto"}),
    "hidden_act 'tanh' is not one of": ("bamba", {"hidden_act": "tanh"}),
    "time_step_limit=.*write two numbers": ("granite 4 h", {"time_step_limit": [0.9, 0.1]}),
    "write 3 times 'mamba' or 'attention'": ("granite 4 h", {"layer_types": ["mamba", {}, "attention"]}),
    "moe_latent_size=8: experts on latents": (
        "nemotron h",
        {"layers_block_type": ["mamba", "moe", "attention"], "moe_latent_size": 8},
    ),
    "no layer attends": ("nemotron h", {"layers_block_type": ["mamba", "mlp"]}),
    "write mamba, attention, mlp or moe": ("nemotron h", {"layers_block_type": ["conv"]}),
    "use_bias and mamba_proj_bias differ": ("nemotron h", {"use_bias": True}),
    "full_attn_idxs='all'; write the numbers": ("lfm2", {"layer_types": None, "full_attn_idxs": "all"}),
}


@pytest.mark.parametrize("message", WRONG)
def test_values_that_are_refused(message: str) -> None:
    case, changes = WRONG[message]
    model_type, own = CASES[case]
    config = {**reference_model(model_type, **own).config.to_dict(), **changes}
    with pytest.raises(ModelError, match=message):
        read_config(config)
