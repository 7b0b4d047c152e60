"""Lists the parameters of a GGUF file under Hugging Face's names, and checks that the file holds them all.

Every parameter that the config implies must be present with its shape, and no tensor may be unknown.
"""

from dataclasses import dataclass

from ...lang.errors import ModelError
from .gguf_config import LONGROPE_FACTORS, Architecture, Config
from .gguf_file import GgufFile, GgufTensor

# Read by llama.cpp, but no parameters in Hugging Face: RoPE tables, whose parameters are in the config.
_NOT_PARAMETERS = frozenset({"rope_freqs.weight", *LONGROPE_FACTORS})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model. `heads` is set where rows have to be put back into Hugging Face's order."""

    name: str
    shape: tuple[int, ...]
    source: GgufTensor
    heads: int | None = None
    subtract: float = 0.0


def parameters_of(gguf: GgufFile, architecture: Architecture, config: Config) -> list[Parameter]:
    """Returns the parameters that the config implies.

    Raises:
        ModelError: a tensor is missing, has another shape than the config says, or has no name here.
    """
    expected = _expected(architecture, config)
    unknown = sorted(set(gguf.tensors) - set(expected) - _NOT_PARAMETERS)
    if unknown:
        raise ModelError(
            f"{gguf.path}: tensor {unknown[0]!r} (and {len(unknown) - 1} more) is not part of a "
            f"{architecture.name} model as umbel knows it; use the model's safetensors folder"
        )
    parameters = []
    for source_name, (name, shape, heads) in expected.items():
        tensor = gguf.tensors.get(source_name)
        if tensor is None:
            raise ModelError(f"{gguf.path} lacks tensor {source_name!r}; download the whole model again")
        if tensor.shape != shape:
            raise ModelError(f"{gguf.path} is damaged: {source_name!r} has shape {tensor.shape}, not {shape}")
        shifted = architecture.adds_one_to_norms and name.endswith("norm.weight")
        parameters.append(Parameter(name, shape, tensor, heads, 1.0 if shifted else 0.0))
    return parameters


def _expected(architecture: Architecture, config: Config) -> dict[str, tuple[str, tuple[int, ...], int | None]]:
    """Returns GGUF name → (name, shape, heads whose rows are reordered)."""

    def size(key: str) -> int:
        value = config[key]
        assert isinstance(value, int), "config_of checked it"
        return value

    hidden, inner, head_dim = size("hidden_size"), size("intermediate_size"), size("head_dim")
    heads, kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    query, key = heads * head_dim, kv_heads * head_dim
    table: dict[str, tuple[str, tuple[int, ...], int | None]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (size("vocab_size"), hidden), None),
        "output_norm.weight": ("model.norm.weight", (hidden,), None),
    }
    if not config["tie_word_embeddings"]:
        table["output.weight"] = ("lm_head.weight", (size("vocab_size"), hidden), None)
    turned = architecture.rotates_pairs
    layer: dict[str, tuple[str, tuple[int, ...], int | None]] = {
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, query), None),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, inner), None),
    }
    if architecture.fused_qkv:
        layer["attn_qkv.weight"] = ("self_attn.qkv_proj.weight", (query + 2 * key, hidden), None)
    else:
        layer["attn_q.weight"] = ("self_attn.q_proj.weight", (query, hidden), heads if turned else None)
        layer["attn_k.weight"] = ("self_attn.k_proj.weight", (key, hidden), kv_heads if turned else None)
        layer["attn_v.weight"] = ("self_attn.v_proj.weight", (key, hidden), None)
    if architecture.fused_gate_up:
        layer["ffn_up.weight"] = ("mlp.gate_up_proj.weight", (2 * inner, hidden), None)
    else:
        layer["ffn_gate.weight"] = ("mlp.gate_proj.weight", (inner, hidden), None)
        layer["ffn_up.weight"] = ("mlp.up_proj.weight", (inner, hidden), None)
    for theirs, ours in architecture.norms.items():
        layer[f"{theirs}.weight"] = (f"{ours}.weight", (hidden,), None)
    if config["attention_bias"]:
        layer["attn_q.bias"] = ("self_attn.q_proj.bias", (query,), heads if turned else None)
        layer["attn_k.bias"] = ("self_attn.k_proj.bias", (key,), kv_heads if turned else None)
        layer["attn_v.bias"] = ("self_attn.v_proj.bias", (key,), None)
        if not architecture.query_key_bias:  # Llama's attention_bias covers the output projection too
            layer["attn_output.bias"] = ("self_attn.o_proj.bias", (hidden,), None)
    if architecture.query_key_norm:
        widths = (query, key) if architecture.whole_norm else (head_dim, head_dim)
        layer["attn_q_norm.weight"] = ("self_attn.q_norm.weight", widths[:1], None)
        layer["attn_k_norm.weight"] = ("self_attn.k_norm.weight", widths[1:], None)
    for index in range(size("num_hidden_layers")):
        for source, (name, shape, reordered) in layer.items():
            table[f"blk.{index}.{source}"] = (f"model.layers.{index}.{name}", shape, reordered)
    return table
