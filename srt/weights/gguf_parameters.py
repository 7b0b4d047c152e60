"""Lists the parameters of a GGUF file under Hugging Face's names, and checks that the file holds them all.

Every parameter that the config implies must be present with its shape, and no tensor may be unknown. The experts of a
layer, and the maps of heads in latent attention, are one tensor in the file and a parameter each here:

    blk.3.ffn_up_exps.weight [E, width, hidden]   →   model.layers.3.mlp.experts.0.up_proj.weight [width, hidden], …
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import assert_never

from ...lang.errors import ModelError
from .gguf_architectures import Architecture, ExpertSpelling, Keys, RecurrentKind
from .gguf_config import CLASSIFIER, FileExperts, experts_of
from .gguf_file import GgufFile, GgufTensor
from .gguf_hybrids import LayerKind, layer_kinds
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
    negative_exponential: bool = False  # the file has −exp(w)

    @property
    def rows(self) -> int:
        """Rows of the source, which may be of another shape."""
        return prod(self.shape) // self.source.shape[-1]


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of a layer, or of the model, in the file.

    Attributes:
        names: of Hugging Face. With several, the matrix (each matrix of a stack) has them above each other, all equally
            high. In a stack `{}` stands for the number of the matrix.
        shape: in the file.
        heads: as of `Parameter`.
        own_shape: of the parameter, where the file may have more or fewer dimensions.
        negative_exponential: as of `Parameter`.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    heads: int | None = None
    own_shape: tuple[int, ...] | None = None
    negative_exponential: bool = False

    def parameters(self, source: GgufTensor, prefix: str, subtract: float) -> Iterator[Parameter]:
        if len(self.shape) < 3:
            assert len(self.names) == 1, "only stacks have several names"
            shape = self.own_shape or self.shape
            name, exponential = prefix + self.names[0], self.negative_exponential
            yield Parameter(name, shape, source, self.heads, subtract, negative_exponential=exponential)
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
    expected = {source: ("", stored) for source, stored in _of_model(gguf, architecture, config).items()}
    kinds = layer_kinds(architecture, Keys(gguf.metadata, architecture.name), sizes("num_hidden_layers"))
    for index, kind in enumerate(kinds):
        layer = _of_layer(gguf, architecture, config, experts, index, kind)
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
        shifted = architecture.adds_one_to_norms and source_name.endswith("norm.weight") and "ssm_" not in source_name
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


def _of_model(gguf: GgufFile, architecture: Architecture, config: Config) -> _Table:
    sizes = _Sizes(config)
    vocabulary = sizes("vocab_size"), sizes("hidden_size")
    norm = next((name for name in architecture.final_norms if name in gguf.tensors), architecture.final_norms[0])
    table = {
        "token_embd.weight": _Stored(("model.embed_tokens.weight",), vocabulary),
        norm: _Stored(("model.norm.weight",), (sizes("hidden_size"),)),
    }
    if CLASSIFIER in gguf.tensors:
        labels = config["id2label"]
        assert isinstance(labels, dict), "config_of made it"
        table[CLASSIFIER] = _Stored(("score.weight",), (len(labels), sizes("hidden_size")))
    if not config["tie_word_embeddings"]:
        table["output.weight"] = _Stored(("lm_head.weight",), vocabulary)
    if "altup_num_inputs" in config:
        square = sizes("altup_num_inputs") - 1, sizes("hidden_size"), sizes("hidden_size")
        table["altup_proj.weight"] = _Stored(("model.altup_projections.{}.weight",), square)
        table["altup_unembd_proj.weight"] = _Stored(("model.altup_unembed_projections.{}.weight",), square)
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
    gguf: GgufFile,
    architecture: Architecture,
    config: Config,
    experts: FileExperts | None,
    index: int,
    kind: LayerKind,
) -> _Table:
    sizes = _Sizes(config)
    hidden = sizes("hidden_size")

    def stored(name: str) -> bool:
        return f"blk.{index}.{name}" in gguf.tensors

    table: _Table = {}
    if kind is LayerKind.RECURRENT:
        table = _recurrent(architecture, config, stored)
    elif architecture.latent:
        table = _latent_attention(sizes, config, stored)
    elif architecture.layers_differ:
        table = _differing_attention(sizes, config, index)
    elif kind is LayerKind.ATTENTION:
        table = _attention(architecture, sizes, config)
    if architecture.parts_alone and kind is not LayerKind.MLP:
        pass  # the layer has no MLP
    elif experts is not None and experts.are_in(index):
        assert architecture.experts is not None, "experts_of found them"
        table |= _experts(architecture.experts, experts, hidden, stored)
    else:
        inner = _width(sizes, config, index)
        doubled = config.get("use_double_wide_mlp") is True and not _has_keys(sizes, config, index)
        table |= _mlp(architecture, 2 * inner if doubled else inner, hidden)
    for theirs, ours in architecture.norms.items():
        table[f"{theirs}.weight"] = _Stored((f"{ours}.weight",), (hidden,))
    if architecture.sinks:
        table["attn_sinks.weight"] = _Stored(("self_attn.sinks",), (sizes("num_attention_heads"),))
    return {source: _renamed(stored, architecture) for source, stored in table.items()}


def _renamed(stored: _Stored, architecture: Architecture) -> _Stored:
    names = stored.names
    for ours, theirs in architecture.renamed.items():
        names = tuple(name.replace(ours, theirs) for name in names)
    return replace(stored, names=names)


def _width(sizes: _Sizes, config: Config, index: int) -> int:
    """Returns the width of a layer's dense MLP."""
    widths = config["intermediate_size"]
    if isinstance(widths, list):
        return int(widths[index])
    return sizes("intermediate_size_mlp" if "intermediate_size_mlp" in config else "intermediate_size")


def _attention(architecture: Architecture, sizes: _Sizes, config: Config) -> _Table:
    hidden, head_dim = sizes("hidden_size"), sizes("head_dim")
    heads, kv_heads = sizes("num_attention_heads"), sizes("num_key_value_heads")
    query, key = heads * head_dim, kv_heads * head_dim
    gated_query = 2 * query if architecture.gated_attention else query
    turned, turned_keys = (heads, kv_heads) if architecture.rotates_pairs else (None, None)
    table = {"attn_output.weight": _Stored(("self_attn.o_proj.weight",), (hidden, query))}
    if architecture.fused_qkv:
        table["attn_qkv.weight"] = _Stored(("self_attn.qkv_proj.weight",), (query + 2 * key, hidden))
    else:
        table["attn_q.weight"] = _Stored(("self_attn.q_proj.weight",), (gated_query, hidden), turned)
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
    """Lists the attention of Gemma 3n and 4, and what else only their layers have."""
    hidden, heads, kinds = sizes("hidden_size"), sizes("num_attention_heads"), config["layer_types"]
    assert isinstance(kinds, list), "config_of made it"
    full = kinds[index] == "full_attention"
    head_dim = sizes("global_head_dim" if full else "head_dim")
    keys = sizes("num_global_key_value_heads" if full else "num_key_value_heads") * head_dim
    table = {
        "attn_q.weight": _Stored(("self_attn.q_proj.weight",), (heads * head_dim, hidden)),
        "attn_q_norm.weight": _Stored(("self_attn.q_norm.weight",), (head_dim,)),
        "attn_output.weight": _Stored(("self_attn.o_proj.weight",), (hidden, heads * head_dim)),
    }
    if "altup_num_inputs" in config:
        table |= _streams(sizes("altup_num_inputs"), sizes("laurel_rank"), hidden)
    else:
        table["layer_output_scale.weight"] = _Stored(("layer_scalar",), (1,))
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


def _streams(count: int, rank: int, hidden: int) -> _Table:
    return {
        "altup_correct_coef.weight": _Stored(("altup.correction_coefs.weight",), (count, count)),
        "altup_correct_scale.weight": _Stored(("altup.correct_output_scale",), (hidden,)),
        "altup_predict_coef.weight": _Stored(("altup.prediction_coefs.weight",), (count * count, count)),
        "altup_router.weight": _Stored(("altup.modality_router.weight",), (count, hidden)),
        "altup_router_norm.weight": _Stored(("altup.router_norm.weight",), (hidden,)),
        "laurel_l.weight": _Stored(("laurel.linear_left.weight",), (rank, hidden)),
        "laurel_r.weight": _Stored(("laurel.linear_right.weight",), (hidden, rank)),
        "laurel_post_norm.weight": _Stored(("laurel.post_laurel_norm.weight",), (hidden,)),
    }


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


def _recurrent(architecture: Architecture, config: Config, stored: Callable[[str], bool]) -> _Table:
    """Lists the tensors of a recurrent layer. stored: whether the file has a tensor of the layer."""
    sizes = _Sizes(config)
    match architecture.recurrent:
        case RecurrentKind.CONVOLUTION:
            return _convolution_tensors(sizes)
        case RecurrentKind.MAMBA:
            return _mamba_tensors(architecture, sizes)
        case RecurrentKind.DELTA_NET:
            return _delta_net_tensors(architecture, sizes, stored)
        case None:
            raise AssertionError("called for recurrent layers")
        case other:
            assert_never(other)


def _convolution_tensors(sizes: _Sizes) -> _Table:
    hidden, kernel = sizes("hidden_size"), sizes("conv_L_cache")
    return {
        "shortconv.in_proj.weight": _Stored(("conv.in_proj.weight",), (3 * hidden, hidden)),
        "shortconv.conv.weight": _Stored(("conv.conv.weight",), (hidden, kernel), own_shape=(hidden, 1, kernel)),
        "shortconv.out_proj.weight": _Stored(("conv.out_proj.weight",), (hidden, hidden)),
    }


def _state_tensors(module: str, channels: int, kernel: int, heads: int) -> _Table:
    """Lists what Mamba 2 and delta nets have in common."""
    decay = _Stored((f"{module}.A_log",), (heads, 1), own_shape=(heads,), negative_exponential=True)
    return {
        "ssm_conv1d.weight": _Stored((f"{module}.conv1d.weight",), (channels, kernel), own_shape=(channels, 1, kernel)),
        "ssm_dt.bias": _Stored((f"{module}.dt_bias",), (heads,)),
        "ssm_a": decay,
    }


def _mamba_tensors(architecture: Architecture, sizes: _Sizes) -> _Table:
    hidden = sizes("hidden_size")
    if architecture.model_type == "nemotron_h":
        module, keys = "mixer", ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    else:
        module = "mamba"
        keys = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    heads, head_dim, groups, states, kernel = map(sizes, keys)
    width = heads * head_dim
    channels = width + 2 * groups * states
    return _state_tensors(module, channels, kernel, heads) | {
        "ssm_in.weight": _Stored((f"{module}.in_proj.weight",), (width + channels + heads, hidden)),
        "ssm_conv1d.bias": _Stored((f"{module}.conv1d.bias",), (channels,)),
        "ssm_d": _Stored((f"{module}.D",), (heads, 1), own_shape=(heads,)),
        "ssm_norm.weight": _Stored((f"{module}.norm.weight",), (groups, width // max(groups, 1)), own_shape=(width,)),
        "ssm_out.weight": _Stored((f"{module}.out_proj.weight",), (hidden, width)),
    }


def _delta_net_tensors(architecture: Architecture, sizes: _Sizes, stored: Callable[[str], bool]) -> _Table:
    hidden, module = sizes("hidden_size"), "linear_attn"
    heads, value_dim = sizes("linear_num_value_heads"), sizes("linear_value_head_dim")
    values = heads * value_dim
    channels = 2 * sizes("linear_num_key_heads") * sizes("linear_key_head_dim") + values
    table = _state_tensors(module, channels, sizes("linear_conv_kernel_dim"), heads) | {
        "ssm_norm.weight": _Stored((f"{module}.norm.weight",), (value_dim,)),
        "ssm_out.weight": _Stored((f"{module}.out_proj.weight",), (hidden, values)),
        "attn_qkv.weight": _Stored((f"{module}.in_proj_qkv.weight",), (channels, hidden)),
        "attn_gate.weight": _Stored((f"{module}.in_proj_z.weight",), (values, hidden)),
    }
    if architecture.model_type == "qwen3_next":
        if stored("ssm_in.weight"):
            raise ModelError(
                "an early GGUF of Qwen3-Next, with one first map; convert it again with a current llama.cpp"
            )
        table["ssm_ba.weight"] = _Stored((f"{module}.in_proj_ba.weight",), (2 * heads, hidden))
        return table
    table["ssm_beta.weight"] = _Stored((f"{module}.in_proj_b.weight",), (heads, hidden))
    table["ssm_alpha.weight"] = _Stored((f"{module}.in_proj_a.weight",), (heads, hidden))
    return table


def _mlp(architecture: Architecture, inner: int, hidden: int) -> _Table:
    block = architecture.mlp
    table = {"ffn_down.weight": _Stored((f"{block}.down_proj.weight",), (hidden, inner))}
    if architecture.fused_gate_up:
        table["ffn_up.weight"] = _Stored((f"{block}.gate_up_proj.weight",), (2 * inner, hidden))
        return table
    table["ffn_up.weight"] = _Stored((f"{block}.up_proj.weight",), (inner, hidden))
    if architecture.gated_mlp:
        table["ffn_gate.weight"] = _Stored((f"{block}.gate_proj.weight",), (inner, hidden))
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
        table["ffn_up_exps.weight"] = _Stored((up,), (count, width, hidden))
        if spelling.gated:
            table["ffn_gate_exps.weight"] = _Stored((gate,), (count, width, hidden))
    if spelling.biased:
        table["ffn_gate_inp.bias"] = _Stored((f"{block}.{spelling.router}.bias",), (count,))
        for name, outputs in (("gate", width), ("up", width), ("down", hidden)):
            table[f"ffn_{name}_exps.bias"] = _Stored((f"{block}.experts.{name}_proj_bias",), (count, outputs))
    if spelling.correction is not None:
        table["exp_probs_b.bias"] = _Stored((f"{block}.{spelling.correction}",), (count,))
    if experts.shared_width:
        shared, inner = spelling.shared, experts.shared_width
        if spelling.gated:
            table["ffn_gate_shexp.weight"] = _Stored((f"{shared}.gate_proj.weight",), (inner, hidden))
        table["ffn_up_shexp.weight"] = _Stored((f"{shared}.up_proj.weight",), (inner, hidden))
        table["ffn_down_shexp.weight"] = _Stored((f"{shared}.down_proj.weight",), (hidden, inner))
        if spelling.shared_gate is not None:
            table["ffn_gate_inp_shexp.weight"] = _Stored(
                (f"{spelling.shared_gate}.weight",), (hidden,), own_shape=(1, hidden)
            )
    return table
