"""The shapes of models that people run. Their weights are random (`srt/testing/random_weights.py`): no files."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of Llama's family."""

    name: str
    layers: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    vocab: int
    context: int = 32_768  # more than the models were trained for: what is measured does not depend on it

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def config(self) -> dict[str, Any]:
        """As Hugging Face writes it. Any: strings, numbers and flags."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
        }

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all parameters."""
        kv = self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            found |= {
                f"{prefix}input_layernorm.weight": (self.hidden,),
                f"{prefix}post_attention_layernorm.weight": (self.hidden,),
                f"{prefix}self_attn.q_proj.weight": (self.hidden, self.hidden),
                f"{prefix}self_attn.k_proj.weight": (kv, self.hidden),
                f"{prefix}self_attn.v_proj.weight": (kv, self.hidden),
                f"{prefix}self_attn.o_proj.weight": (self.hidden, self.hidden),
                f"{prefix}mlp.gate_proj.weight": (self.width, self.hidden),
                f"{prefix}mlp.up_proj.weight": (self.width, self.hidden),
                f"{prefix}mlp.down_proj.weight": (self.hidden, self.width),
            }
        return found

    @property
    def read_parameters(self) -> int:
        """Numbers that a step reads: all but the embedding, of which it reads a row for each token."""
        return sum(math.prod(shape) for shape in self.tensor_shapes.values()) - self.vocab * self.hidden

    @property
    def multiplied_parameters(self) -> int:
        """Numbers that every row of a prompt is multiplied with: without the output map, which few rows reach."""
        return self.read_parameters - self.vocab * self.hidden

    def read_numbers(self, keys: int) -> int:
        """Numbers that a step reads where its sequences have so many keys together."""
        return self.read_parameters + keys * self.kv_numbers

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


LLAMA_2_7B = Shape("Llama 2 7B", 32, 4096, 11_008, 32, 32, 32_000)
LLAMA_3_8B = Shape("Llama 3 8B", 32, 4096, 14_336, 32, 8, 128_256)
TINY = Shape("tiny", 2, 32, 48, 2, 1, 512, context=512)
