"""LoRA adapters as PEFT writes them, read for a model; everything else is refused with a reason."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from umbel.lang.errors import ModelError
from umbel.srt.weights.adapters import read_adapters

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
PREFIX = "base_model.model.model.layers"
# What PEFT 0.17 writes, with its defaults.
CONFIG: dict[str, Any] = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "org/base",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "down_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


def pair(module: str, outputs: int, inputs: int, rank: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(module))
    return {
        f"{module}.lora_A.weight": torch.randn(rank, inputs, generator=generator),
        f"{module}.lora_B.weight": torch.randn(outputs, rank, generator=generator),
    }


USUAL = {
    name: tensor
    for layer in range(2)
    for name, tensor in {
        **pair(f"{PREFIX}.{layer}.self_attn.q_proj", 48, 48),
        **pair(f"{PREFIX}.{layer}.mlp.down_proj", 48, 72),
    }.items()
}


def write(folder: Path, tensors: dict[str, torch.Tensor] = USUAL, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def read(path: str, config: dict[str, Any] = LLAMA) -> Any:
    (adapter,) = read_adapters({"sql": path}, config, "tiny")
    return adapter


def test_an_adapter_has_the_matrices_and_the_scale_of_each_map(tmp_path: Path) -> None:
    adapter = read(write(tmp_path / "a"))
    assert sorted(adapter.changes) == sorted(
        f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    )
    change = adapter.changes["model.layers.1.mlp.down_proj"]
    assert change.scale == 2.0
    assert torch.equal(change.down, USUAL[f"{PREFIX}.1.mlp.down_proj.lora_A.weight"])
    assert torch.equal(change.up, USUAL[f"{PREFIX}.1.mlp.down_proj.lora_B.weight"])


def test_patterns_and_the_root_of_the_rank_make_the_scale(tmp_path: Path) -> None:
    tensors = {**USUAL, **pair(f"{PREFIX}.1.mlp.down_proj", 48, 72, rank=9)}
    path = write(
        tmp_path / "a",
        tensors,
        use_rslora=True,
        rank_pattern={r"^model\.layers\.1\.mlp.*": 9},
        alpha_pattern={"0.self_attn.q_proj": 5, "(k|down)_proj$": 3.0},
    )
    changes = read(path).changes
    assert {name: change.scale for name, change in changes.items()} == {
        "model.layers.0.self_attn.q_proj": 5 / 2,
        "model.layers.0.mlp.down_proj": 3 / 2,
        "model.layers.1.self_attn.q_proj": 8 / 2,
        "model.layers.1.mlp.down_proj": 3 / math.sqrt(9),
    }


def test_fused_maps_are_cut_into_those_of_the_model(tmp_path: Path) -> None:
    fused = {
        **pair(f"{PREFIX}.0.self_attn.qkv_proj", 48 + 24 + 24, 48),
        **pair(f"{PREFIX}.1.mlp.gate_up_proj", 144, 48),
    }
    changes = read(write(tmp_path / "a", fused, target_modules="all-linear")).changes
    up = fused[f"{PREFIX}.0.self_attn.qkv_proj.lora_B.weight"]
    parts = [changes[f"model.layers.0.self_attn.{name}_proj"].up for name in "qkv"]
    assert torch.equal(torch.cat(parts), up)
    assert [len(part) for part in parts] == [48, 24, 24]
    assert len(changes["model.layers.1.mlp.up_proj"].up) == 72


def test_modules_of_a_model_that_sees_are_those_of_its_decoder(tmp_path: Path) -> None:
    tensors = {
        **pair("base_model.model.model.language_model.layers.0.self_attn.q_proj", 48, 48),
        **pair("base_model.model.language_model.model.layers.1.self_attn.q_proj", 48, 48),
    }
    assert sorted(read(write(tmp_path / "a", tensors, target_modules=["q_proj"])).changes) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3': only LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
        ({"bias": "all"}, "bias='all'"),
        ({"use_dora": True}, "DoRA is not implemented"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication'="),
        ({"lora_bias": True}, "'lora_bias'=True is not implemented"),
        ({"of_next_year": 3}, "'of_next_year'=3 is not implemented"),
        ({"r": 5}, "is that of rank 5 for this model"),
        ({"r": 0}, "r=0; write a whole number"),
        ({"lora_alpha": "8"}, "lora_alpha='8'"),
        ({"alpha_pattern": {"(q": 1}}, r"alpha_pattern: '\(q' cannot be read"),
        ({"alpha_pattern": {"q_proj": -1}}, "q_proj=-1"),
        ({"rank_pattern": {"(a|a)*" * 600 + "[": 3}}, "rank_pattern"),
        ({"target_modules": ["q_proj", "o_proj"]}, "target_modules names 'o_proj'"),
        ({"target_modules": 3}, "target_modules=3; write a list"),
    ],
)
def test_what_would_compute_something_else_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=f"adapter 'sql': .*{problem}"):
        read(write(tmp_path / "a", **changes))


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({}, "no lora_A and lora_B"),
        (pair(f"{PREFIX}.7.self_attn.q_proj", 48, 48), "1.*no place for|2 tensors that tiny has no place for"),
        (pair("base_model.model.model.embed_tokens", 97, 48), "has no place for"),
        ({f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(48)}, "has no place for"),
        ({f"{PREFIX}.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 48)}, "lacks .*lora_B"),
        (pair(f"{PREFIX}.0.self_attn.q_proj", 48, 64), r"shape \[4, 64\], and \[4, 48\]"),
        (pair(f"{PREFIX}.0.self_attn.k_proj", 48, 48), r"shape \[48, 4\], and \[24, 4\]"),
        (
            {**pair(f"{PREFIX}.0.self_attn.k_proj", 24, 48), **pair(f"{PREFIX}.0.self_attn.qkv_proj", 96, 48)},
            "changes .*k_proj twice",
        ),
        ({name: tensor * torch.nan for name, tensor in USUAL.items()}, "not finite"),
        ({name: tensor.double() for name, tensor in USUAL.items()}, "has type F64"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        read(write(tmp_path / "a", tensors, target_modules=None))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    weights, config = tmp_path / "a/adapter_model.safetensors", tmp_path / "a/adapter_config.json"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match="truncated or damaged"):
        read(path)
    weights.unlink()
    (tmp_path / "a/adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match=r"adapter_model\.bin, which can run code .* umbel reads adapter_model"):
        read(path)
    (tmp_path / "a/adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=r"a has no adapter_model\.safetensors; give the folder that PEFT"):
        read(path)
    save_file(USUAL, weights)
    pointer = b"version https://git-lfs.github.com/spec/v1"
    wrong = {b"[]": "not a JSON object", b"{": "is no JSON", b" " * (1 << 21): "more than 1048576"}
    for content, problem in ({pointer: "git-lfs pointer"} | wrong).items():
        config.write_bytes(content)
        with pytest.raises(ModelError, match=problem):
            read(path)
    config.unlink()
    (tmp_path / "a/config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"which holds a whole model, has no adapter_config\.json; .*save_pretrained"):
        read(path)
    with pytest.raises(ModelError, match="is a file; give the folder"):
        read(str(weights))
    with pytest.raises(ModelError, match=r"org/lora is no folder; .* hf download org/lora"):
        read("org/lora")


def test_a_wrong_rank_is_refused_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"adapter 'sql': {tmp_path}/a: configuration: r=0; write a whole number"):
        read(write(tmp_path / "a", r=0))


def test_a_model_that_runs_in_transformers_takes_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'gpt2'.*merge the adapter"):
        read(write(tmp_path / "a"), {"model_type": "gpt2"})
