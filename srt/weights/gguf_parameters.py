"""Lists the parameters of a GGUF file under Hugging Face's names, and checks that the file holds them all.

Every parameter that the config implies must be present with its shape, and no tensor may be unknown. The experts of a
layer, and the maps of heads in latent attention, are one tensor in the file and a parameter each here:

    blk.3.ffn_up_exps.weight [E, width, hidden]   →   model.layers.3.mlp.experts.0.up_proj.weight [width, hidden], …
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from ...lang.errors import ModelError
from .gguf_architectures import Architecture, ExpertSpelling, Keys
from .gguf_config import FileExperts, experts_of
from .gguf_file import GgufFile, GgufTensor
from .gguf_rope import LONGROPE_FACTORS, Config

# Read by llama.cpp, but no parameters in Hugging Face: RoPE tables, whose parameters are in the config.
_NOT_PARAMETERS = frozenset({"rope_freqs.weight", *LONGROPE_FACTORS})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model: rows of `source` from `first_row` on.

    `heads` is set where rows have to be put back into Hugging Face's order.
    """

    name: str
    shape: tuple[int, ...]
    source: GgufTensor
    heads: int | None = None
    subtract: float = 0.0
    first_row: int = 0

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of a layer, or of the model, in the file.

    Attributes:
        names: of Hugging Face. With several, the matrix (each matrix of a stack) has them above each other, all equally
            high. In a stack `{}` stands for the number of the matrix.
        shape: in the file.
        heads: as of `Parameter`.
        own_shape: of the parameter, where the file may leave out a dimension.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    heads: int | None = None
    own_shape: tuple[int, ...] | None = None

    def parameters(self, source: GgufTensor, prefix: str, subtract: float) -> Iterator[Parameter]:
        if len(self.shape) < 3:
            assert len(self.names) == 1, "only stacks have several names"
            shape = self.own_shape or self.shape
            yield Parameter(prefix + self.names[0], shape, source, self.heads, subtract)
            return
        count, high, inputs = self.shape
        rows = high // len(self.names)
        for matrix in range(count):
            for place, name in enumerate(self.names):
                first = matrix * high + place * rows
                yield Parameter(prefix + name.format(matrix), (rows, inputs), source, first_row=first)


_Table = dict[str, _Stored]


def parameters_of(gguf: GgufFile, architecture: Architecture, config: Config) -> list[Parameter]:
    """Returns the parameters that the config implies.

    Raises:
        ModelError: a tensor is missing, has another shape than the config says, or has no name here.
    """
    sizes = _Sizes(config)
    experts = experts_of(gguf, architecture)
    expected = {source: ("", stored) for source, stored in _of_model(sizes, config).items()}
    for index in range(sizes("num_hidden_layers")):
        layer = _of_layer(gguf, architecture, config, experts, index)
        expected |= {f"blk.{index}.{source}": (f"model.layers.{index}.", stored) for source, stored in layer.items()}
    layers, shared = sizes("num_hidden_layers"), config.get("num_kv_shared_layers", 0)
    keyless = range(layers - (shared if isinstance(shared, int) else 0), layers)
    drafts = range(layers, Keys(gguf.metadata, architecture.name).integer("block_count"))
    others = (name for name in gguf.tensors if name not in expected)
    unknown = sorted(name for name in others if not _is_no_parameter(name, architecture, drafts, keyless))
    if unknown:
        raise ModelError(
            f"{gguf.path}: tensor {unknown[0]!r} (and {len(unknown) - 1} more) is not part of a "
            f"{architecture.name} model as umbel knows it; use the model's safetensors folder"
        )
    parameters: list[Parameter] = []
    for source_name, (prefix, stored) in expected.items():
        tensor = gguf.tensors.get(source_name)
        if tensor is None:
            raise ModelError(f"{gguf.path} lacks tensor {source_name!r}; download the whole model again")
        if tensor.shape not in (stored.shape, stored.own_shape):
            raise ModelError(f"{gguf.path} is damaged: {source_name!r} has shape {tensor.shape}, not {stored.shape}")
        shifted = architecture.adds_one_to_norms and source_name.endswith("norm.weight")
        parameters += stored.parameters(tensor, prefix, 1.0 if shifted else 0.0)
    return parameters


class _Sizes:
    """Reads sizes of a config that `config_of` made and checked."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def __call__(self, key: str) -> int:
        value = self._config[key]
        assert isinstance(value, int), "config_of checked it"
        return value


def _is_no_parameter(name: str, architecture: Architecture, drafts: range, keyless: range) -> bool:
    """Returns whether a tensor is a table, of a layer of a draft model, there in another form too, or of a layer that
    reads the keys of another."""
    block, _, rest = name.removeprefix("blk.").partition(".")
    layer = int(block) if name.startswith("blk.") and block.isdecimal() else -1
    if layer in drafts or (layer in keyless and rest.startswith(("attn_k", "attn_v"))):
        return True
    return name in _NOT_PARAMETERS or (architecture.latent and name.endswith(".attn_kv_b.weight"))


def _of_model(sizes: _Sizes, config: Config) -> _Table:
    vocabulary = sizes("vocab_size"), sizes("hidden_size")
    table = {
        "token_embd.weight": _Stored(("model.embed_tokens.weight",), vocabulary),
        "output_norm.weight": _Stored(("model.norm.weight",), (sizes("hidden_size"),)),
    }
    if not config["tie_word_embeddings"]:
        table["output.weight"] = _Stored(("lm_head.weight",), vocabulary)
    width = config.get("hidden_size_per_layer_input", 0)
    if isinstance(width, int) and width:
        all_layers = width * sizes("num_hidden_layers")
        table |= {
            "per_layer_token_embd.weight": _Stored(
                ("model.embed_tokens_per_layer.weight",), (sizes("vocab_size_per_layer_input"), all_layers)
            ),
            "per_layer_model_proj.weight": _Stored(
                ("model.per_layer_model_projection.weight",), (all_layers, sizes("hidden_size"))
            ),
            "per_layer_proj_norm.weight": _Stored(("model.per_layer_projection_norm.weight",), (width,)),
        }
    return table


def _of_layer(
    gguf: GgufFile, architecture: Architecture, config: Config, experts: FileExperts | None, index: int
) -> _Table:
    sizes = _Sizes(config)
    hidden = sizes("hidden_size")

    def stored(name: str) -> bool:
        return f"blk.{index}.{name}" in gguf.tensors

    if architecture.latent:
        table = _latent_attention(sizes, config, stored)
    elif architecture.layers_differ:
        table = _differing_attention(sizes, config, index)
    else:
        table = _attention(architecture, sizes, config)
    if experts is not None and experts.are_in(index):
        assert architecture.experts is not None, "experts_of found them"
        table |= _experts(architecture.experts, experts, hidden, stored)
    else:
        inner = sizes("intermediate_size_mlp" if "intermediate_size_mlp" in config else "intermediate_size")
        doubled = config.get("use_double_wide_mlp") is True and not _has_keys(sizes, config, index)
        table |= _mlp(architecture, 2 * inner if doubled else inner, hidden)
    for theirs, ours in architecture.norms.items():
        table[f"{theirs}.weight"] = _Stored((f"{ours}.weight",), (hidden,))
    if architecture.sinks:
        table["attn_sinks.weight"] = _Stored(("self_attn.sinks",), (sizes("num_attention_heads"),))
    return table


def _attention(architecture: Architecture, sizes: _Sizes, config: Config) -> _Table:
    hidden, head_dim = sizes("hidden_size"), sizes("head_dim")
    heads, kv_heads = sizes("num_attention_heads"), sizes("num_key_value_heads")
    query, key = heads * head_dim, kv_heads * head_dim
    turned, turned_keys = (heads, kv_heads) if architecture.rotates_pairs else (None, None)
    table = {"attn_output.weight": _Stored(("self_attn.o_proj.weight",), (hidden, query))}
    if architecture.fused_qkv:
        table["attn_qkv.weight"] = _Stored(("self_attn.qkv_proj.weight",), (query + 2 * key, hidden))
    else:
        table["attn_q.weight"] = _Stored(("self_attn.q_proj.weight",), (query, hidden), turned)
        table["attn_k.weight"] = _Stored(("self_attn.k_proj.weight",), (key, hidden), turned_keys)
        table["attn_v.weight"] = _Stored(("self_attn.v_proj.weight",), (key, hidden))
    if config["attention_bias"]:
        table["attn_q.bias"] = _Stored(("self_attn.q_proj.bias",), (query,), turned)
        table["attn_k.bias"] = _Stored(("self_attn.k_proj.bias",), (key,), turned_keys)
        table["attn_v.bias"] = _Stored(("self_attn.v_proj.bias",), (key,))
        if not architecture.query_key_bias:  # Llama's attention_bias covers the output projection too
            table["attn_output.bias"] = _Stored(("self_attn.o_proj.bias",), (hidden,))
    if architecture.query_key_norm:
        widths = (query, key) if architecture.whole_norm else (head_dim, head_dim)
        table["attn_q_norm.weight"] = _Stored(("self_attn.q_norm.weight",), widths[:1])
        table["attn_k_norm.weight"] = _Stored(("self_attn.k_norm.weight",), widths[1:])
    return table


def _has_keys(sizes: _Sizes, config: Config, index: int) -> bool:
    """Returns whether a layer computes keys, of a model in which some read those of others."""
    return index < sizes("num_hidden_layers") - sizes("num_kv_shared_layers")


def _differing_attention(sizes: _Sizes, config: Config, index: int) -> _Table:
    """Lists Gemma 4's attention and what else only its layers have."""
    hidden, heads, kinds = sizes("hidden_size"), sizes("num_attention_heads"), config["layer_types"]
    assert isinstance(kinds, list), "config_of made it"
    full = kinds[index] == "full_attention"
    head_dim = sizes("global_head_dim" if full else "head_dim")
    keys = sizes("num_global_key_value_heads" if full else "num_key_value_heads") * head_dim
    table = {
        "attn_q.weight": _Stored(("self_attn.q_proj.weight",), (heads * head_dim, hidden)),
        "attn_q_norm.weight": _Stored(("self_attn.q_norm.weight",), (head_dim,)),
        "attn_output.weight": _Stored(("self_attn.o_proj.weight",), (hidden, heads * head_dim)),
        "layer_output_scale.weight": _Stored(("layer_scalar",), (1,)),
    }
    if _has_keys(sizes, config, index):
        table["attn_k.weight"] = _Stored(("self_attn.k_proj.weight",), (keys, hidden))
        table["attn_k_norm.weight"] = _Stored(("self_attn.k_norm.weight",), (head_dim,))
        if not (full and config["attention_k_eq_v"]):
            table["attn_v.weight"] = _Stored(("self_attn.v_proj.weight",), (keys, hidden))
    width = sizes("hidden_size_per_layer_input")
    if width:
        table["inp_gate.weight"] = _Stored(("per_layer_input_gate.weight",), (width, hidden))
        table["proj.weight"] = _Stored(("per_layer_projection.weight",), (hidden, width))
        table["post_norm.weight"] = _Stored(("post_per_layer_input_norm.weight",), (hidden,))
    return table


def _latent_attention(sizes: _Sizes, config: Config, stored: Callable[[str], bool]) -> _Table:
    """Lists latent attention. Newer files hold the map out of latents as two, of keys (transposed) and of values; some
    hold both forms, and the whole one is left out."""
    hidden, heads, rank = sizes("hidden_size"), sizes("num_attention_heads"), sizes("kv_lora_rank")
    plain, rotated, value = sizes("qk_nope_head_dim"), sizes("qk_rope_head_dim"), sizes("v_head_dim")
    queries = heads * (plain + rotated)
    table = {
        "attn_kv_a_mqa.weight": _Stored(("self_attn.kv_a_proj_with_mqa.weight",), (rank + rotated, hidden)),
        "attn_kv_a_norm.weight": _Stored(("self_attn.kv_a_layernorm.weight",), (rank,)),
        "attn_output.weight": _Stored(("self_attn.o_proj.weight",), (hidden, heads * value)),
    }
    if config["q_lora_rank"] is None:
        table["attn_q.weight"] = _Stored(("self_attn.q_proj.weight",), (queries, hidden))
    else:
        query_rank = sizes("q_lora_rank")
        table["attn_q_a.weight"] = _Stored(("self_attn.q_a_proj.weight",), (query_rank, hidden))
        table["attn_q_a_norm.weight"] = _Stored(("self_attn.q_a_layernorm.weight",), (query_rank,))
        table["attn_q_b.weight"] = _Stored(("self_attn.q_b_proj.weight",), (queries, query_rank))
    if stored("attn_k_b.weight"):
        table["attn_k_b.weight"] = _Stored(("self_attn.k_b_proj.{}.weight",), (heads, rank, plain))
        table["attn_v_b.weight"] = _Stored(("self_attn.v_b_proj.{}.weight",), (heads, value, rank))
    else:
        table["attn_kv_b.weight"] = _Stored(("self_attn.kv_b_proj.weight",), (heads * (plain + value), rank))
    return table


def _mlp(architecture: Architecture, inner: int, hidden: int) -> _Table:
    block = architecture.mlp
    table = {"ffn_down.weight": _Stored((f"{block}.down_proj.weight",), (hidden, inner))}
    if architecture.fused_gate_up:
        table["ffn_up.weight"] = _Stored((f"{block}.gate_up_proj.weight",), (2 * inner, hidden))
    else:
        table["ffn_gate.weight"] = _Stored((f"{block}.gate_proj.weight",), (inner, hidden))
        table["ffn_up.weight"] = _Stored((f"{block}.up_proj.weight",), (inner, hidden))
    return table


def _experts(spelling: ExpertSpelling, experts: FileExperts, hidden: int, stored: Callable[[str], bool]) -> _Table:
    count, width, block = experts.count, experts.width, spelling.block
    gate, up, down = (f"{block}.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down"))
    table = {
        "ffn_gate_inp.weight": _Stored((f"{block}.{spelling.router}.weight",), (count, hidden)),
        "ffn_down_exps.weight": _Stored((down,), (count, hidden, width)),
    }
    if stored("ffn_gate_up_exps.weight"):
        table["ffn_gate_up_exps.weight"] = _Stored((gate, up), (count, 2 * width, hidden))
    else:
        table["ffn_gate_exps.weight"] = _Stored((gate,), (count, width, hidden))
        table["ffn_up_exps.weight"] = _Stored((up,), (count, width, hidden))
    if spelling.biased:
        table["ffn_gate_inp.bias"] = _Stored((f"{block}.{spelling.router}.bias",), (count,))
        for name, outputs in (("gate", width), ("up", width), ("down", hidden)):
            table[f"ffn_{name}_exps.bias"] = _Stored((f"{block}.experts.{name}_proj_bias",), (count, outputs))
    if spelling.correction is not None:
        table["exp_probs_b.bias"] = _Stored((f"{block}.{spelling.correction}",), (count,))
    if experts.shared_width:
        shared, inner = spelling.shared, experts.shared_width
        table["ffn_gate_shexp.weight"] = _Stored((f"{shared}.gate_proj.weight",), (inner, hidden))
        table["ffn_up_shexp.weight"] = _Stored((f"{shared}.up_proj.weight",), (inner, hidden))
        table["ffn_down_shexp.weight"] = _Stored((f"{shared}.down_proj.weight",), (hidden, inner))
        if spelling.shared_gate is not None:
            table["ffn_gate_inp_shexp.weight"] = _Stored(
                (f"{spelling.shared_gate}.weight",), (hidden,), own_shape=(1, hidden)
            )
    return table
