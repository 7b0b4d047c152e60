"""Memory that common models take, by format of their weights: the table of docs/install.md.

    python -m benchmarks.model_memory        # no weights, no network; seconds

Products come from umbel's own description of each family (srt/models/decoder_config.py), keys and values from the shape
of its pool. Weights of Q4_K_M follow llama.cpp's rule for which tensors keep six bits. With weights of 16 bits the head
has a copy of 8 bits, which bounds every logit. `umbel weights MODEL` measures a model that is on the machine.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from umbel.srt.models.decoder_config import DecoderConfig, linear_maps
from umbel.srt.models.families import read_config

CONTEXT = 8192  # tokens of the keys and values in the table
Q4_K, Q6_K, Q8_0 = 144 / 256, 210 / 256, 34 / 32  # bytes of a weight
GB = 1e9


@dataclass(frozen=True, slots=True)
class Model:
    """A model by the fields of its published config.json that give sizes."""

    name: str
    config: dict[str, Any]


def _model(
    name: str, kind: str, hidden: int, wide: int, layers: int, heads: int, kv: int, dim: int, **more: Any
) -> Model:
    return Model(
        name,
        {
            "model_type": kind,
            "hidden_size": hidden,
            "intermediate_size": wide,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": dim,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            **more,
        },
    )


_GEMMA: dict[str, Any] = {
    "vocab_size": 262144,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 1e4,
    "hidden_activation": "gelu_pytorch_tanh",
}
_QWEN: dict[str, Any] = {"vocab_size": 151936, "hidden_act": "silu"}
_LLAMA: dict[str, Any] = {"vocab_size": 128256, "hidden_act": "silu"}
MODELS = (
    _model("Gemma 3 270M (default)", "gemma3_text", 640, 2048, 18, 4, 1, 256, **_GEMMA),
    _model("Qwen3-0.6B", "qwen3", 1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True, **_QWEN),
    _model("Gemma 3 1B", "gemma3_text", 1152, 6912, 26, 4, 1, 256, **_GEMMA),
    _model("Llama 3.2 1B", "llama", 2048, 8192, 16, 32, 8, 64, tie_word_embeddings=True, **_LLAMA),
    _model("Qwen3-4B", "qwen3", 2560, 9728, 36, 32, 8, 128, tie_word_embeddings=True, **_QWEN),
    _model("Llama 3.1 8B", "llama", 4096, 14336, 32, 32, 8, 128, tie_word_embeddings=False, **_LLAMA),
    _model("Qwen3-8B", "qwen3", 4096, 12288, 36, 32, 8, 128, tie_word_embeddings=False, **_QWEN),
    _model("Qwen3-32B", "qwen3", 5120, 25600, 64, 64, 8, 128, tie_word_embeddings=False, **_QWEN),
)


def bytes_of_weights(config: DecoderConfig, of: Callable[[str, int, int], float]) -> float:
    """Adds up the matrices of a model; norms are left out, which are less than a thousandth.

    Args:
        of: bytes of a weight, by the name of its matrix, its layer and the number of its inputs.
    """
    total, layer = 0.0, 0
    for product in linear_maps(config):
        for path, width in zip(product.names, product.widths, strict=True):
            layer = int(path.split(".")[2])
            total += width * product.inputs * of(path.rpartition(".")[2], layer, product.inputs)
    head = config.vocab_size * config.hidden_size
    total += head * of("lm_head", layer, config.hidden_size)
    return total if config.tied else total + head * of("embed_tokens", layer, config.hidden_size)


def q4_k_m(config: DecoderConfig) -> Callable[[str, int, int], float]:
    """Returns the bytes of a weight in a GGUF file of the mixture Q4_K_M."""
    layers = len(config.layers)

    def of(name: str, layer: int, inputs: int) -> float:
        if name == "lm_head":
            return Q6_K if inputs % 256 == 0 else Q8_0
        eighth = layers // 8
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        if inputs % 256:  # blocks of 256 do not fit: llama.cpp takes blocks of 32 with more bits
            return Q8_0 if name in ("v_proj", "down_proj") and more else 22 / 32
        return Q6_K if name in ("v_proj", "down_proj") and more else Q4_K

    return of


def keys_and_values(config: DecoderConfig, tokens: int) -> int:
    """Returns the bytes that a text of so many tokens takes in a pool of bfloat16."""
    geometry = config.kv_geometry(torch.bfloat16)
    windows = geometry.bytes_per_window_slot
    return tokens * (geometry.bytes_per_slot - windows) + min(tokens, geometry.reach or tokens) * windows


def row(model: Model) -> list[str]:
    config = read_config(model.config)
    head = config.vocab_size * config.hidden_size
    sizes = (
        bytes_of_weights(config, lambda *_: 2.0) + head,
        bytes_of_weights(config, lambda name, layer, inputs: 1 + 4 / inputs),
        bytes_of_weights(config, lambda *_: Q8_0),
        bytes_of_weights(config, q4_k_m(config)),
    )
    return [model.name, *(f"{size / GB:.2f}" for size in sizes), f"{keys_and_values(config, CONTEXT) / GB:.2f}"]


def table() -> Iterator[str]:
    """Yields the lines of the table in docs/install.md."""
    yield f'| GB | bfloat16 | `weights="int8"` | GGUF Q8_0 | GGUF Q4_K_M | keys and values, {CONTEXT:,} tokens |'
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for model in MODELS:
        yield f"| {' | '.join(row(model))} |"


def main() -> int:
    print("\n".join(table()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
