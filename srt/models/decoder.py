"""The decoder of Llama, Mistral, Qwen 2, Qwen 3 and Gemma 3, dense or with experts: families are configurations.

    token ids → embedding → layers × [ norm → attention → +   norm → MLP → + ] → norm → logits of the rows asked for
                    ↑ in the rows of pictures what a tower sees in them

Rows of all sequences are one flat list: only attention knows which row belongs to whom. The rounding of every
intermediate follows transformers, so that greedy text is the same in the same dtype. R rows, D = head_dim.

On several ranks each has some of the heads and a slice of every MLP (parallel/shares.py): to it, they are the model's.
What comes out of attention and MLP is added up over the ranks, and everything between is the same on all of them.
"""

import torch

from ..attention.backend import AttentionStep
from ..cache.kv_pool import KVGeometry
from ..distributed.communicator import ALONE, Team
from ..layers.checkpoint import Checkpoint, Tensors
from ..layers.config_values import Config
from ..layers.layers import ACTIVATIONS, Head, Linear, RMSNorm
from ..layers.rope import Rope, turn
from .decoder_config import DecoderConfig, LayerConfig, read_config
from .experts import Experts, expert_kernels
from .model import Rows
from .sharding import portion
from .vocab_parallel import Embedding, TeamHead

MLP_ROWS = 1024  # rows of one pass through an MLP, which has by far the widest intermediates


class Attention:
    """Queries, keys and values from one product; norm and turn of queries and keys in one go."""

    def __init__(self, index: int, layer: LayerConfig, config: DecoderConfig, weights: Checkpoint, *, pack: bool):
        self._index = index
        self._window = layer.window
        self._config = config
        prefix = f"model.layers.{index}.self_attn"
        hidden, head_dim = config.hidden_size, config.head_dim
        widths = [config.heads * head_dim, config.kv_heads * head_dim, config.kv_heads * head_dim]
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        weight = weights.take_fused([f"{name}.weight" for name in names], [(width, hidden) for width in widths])
        bias = None
        if config.qkv_bias:
            bias = weights.take_fused([f"{name}.bias" for name in names], [(width,) for width in widths])
        self._qkv = Linear(weight, bias, packed=pack)
        output_bias = weights.take(f"{prefix}.o_proj.bias", hidden) if config.output_bias else None
        self._output = Linear(weights.take(f"{prefix}.o_proj.weight", hidden, widths[0]), output_bias, packed=pack)
        self._head_norm = self._read_head_norm(prefix, weights) if config.qk_norm else None

    def _read_head_norm(self, prefix: str, weights: Checkpoint) -> RMSNorm:
        """The weights of all query heads above those of all key heads: [heads + kv_heads, D]."""
        config = self._config
        query = weights.take(f"{prefix}.q_norm.weight", config.head_dim).expand(config.heads, -1)
        key = weights.take(f"{prefix}.k_norm.weight", config.head_dim).expand(config.kv_heads, -1)
        return RMSNorm(torch.cat([query, key]), eps=config.norm_eps, centered=config.centered_norm)

    def __call__(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], attention: AttentionStep
    ) -> torch.Tensor:
        config = self._config
        turned = config.heads + config.kv_heads
        qkv = self._qkv(x).view(len(x), -1, config.head_dim)  # [R, heads + 2 kv_heads, D]
        query_key, values = qkv[:, :turned], qkv[:, turned:]
        if self._head_norm is not None:
            query_key = self._head_norm(query_key)
        query_key = turn(query_key, angles)
        attended = attention.attend(
            self._index,
            query_key[:, : config.heads],
            query_key[:, config.heads :],
            values,
            window=self._window,
            scale=config.attention_scale,
        )
        return self._output(attended.flatten(1))


class MLP:
    """down(activation(gate(x)) × up(x)), gate and up from one product."""

    def __init__(self, index: int, config: DecoderConfig, weights: Checkpoint, *, pack: bool):
        prefix = f"model.layers.{index}.mlp"
        hidden, wide = config.hidden_size, config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        gate_up = weights.take_fused([f"{name}.weight" for name in names], [(wide, hidden)] * 2)
        gate_up_bias = down_bias = None
        if config.mlp_bias:
            gate_up_bias = weights.take_fused([f"{name}.bias" for name in names], [(wide,)] * 2)
            down_bias = weights.take(f"{prefix}.down_proj.bias", hidden)
        self._gate_up = Linear(gate_up, gate_up_bias, packed=pack)
        self._down = Linear(weights.take(f"{prefix}.down_proj.weight", hidden, wide), down_bias, packed=pack)
        self._activation = ACTIVATIONS[config.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > MLP_ROWS:
            return torch.cat([self(rows) for rows in torch.split(x, MLP_ROWS)])
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._activation(gate).mul_(up))


class Layer:
    """Attention and MLP, each inside a residual sum; Gemma normalises their results as well."""

    def __init__(
        self, index: int, layer: LayerConfig, config: DecoderConfig, weights: Checkpoint, team: Team, *, pack: bool
    ):
        def norm(name: str) -> RMSNorm:
            weight = weights.take(f"model.layers.{index}.{name}.weight", config.hidden_size)
            return RMSNorm(weight, eps=config.norm_eps, centered=config.centered_norm)

        self.rope = layer.rope
        self._team = team
        self._before_attention = norm("input_layernorm")
        self._attention = Attention(index, layer, config, weights, pack=pack)
        self._mlp: MLP | Experts = (
            MLP(index, config, weights, pack=pack)
            if layer.experts is None
            else Experts(
                f"model.layers.{index}",
                layer.experts,
                weights,
                hidden=config.hidden_size,
                activation=config.activation,
                kernels=expert_kernels(weights.device),
            )
        )
        if config.sandwich_norm:
            self._after_attention: RMSNorm | None = norm("post_attention_layernorm")
            self._before_mlp = norm("pre_feedforward_layernorm")
            self._after_mlp: RMSNorm | None = norm("post_feedforward_layernorm")
        else:
            self._after_attention = self._after_mlp = None
            self._before_mlp = norm("post_attention_layernorm")  # Llama names it by its place, not its use

    def __call__(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], attention: AttentionStep
    ) -> torch.Tensor:
        attended = self._team.sum(self._attention(self._before_attention(x), angles, attention))
        x = x + (self._after_attention(attended) if self._after_attention else attended)
        mixed = self._team.sum(self._mlp(self._before_mlp(x)))
        return x + (self._after_mlp(mixed) if self._after_mlp else mixed)


class Decoder:
    """A whole model, or the part of it that a rank of `team` has.

    Args:
        config, tensors: of that part; the vocabulary's size is that of the whole.
        pack: lay weights out for oneDNN (CPU only), see `layers.Linear`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Tensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pack: bool,
        team: Team = ALONE,
    ) -> None:
        weights = Checkpoint(tensors, dtype=dtype, device=device)
        weights.require(landmarks(config))
        self.config = config
        self.device = device
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.heads = config.heads
        self.kv_geometry = KVGeometry(len(config.layers), config.kv_heads, config.head_dim, dtype)
        self.windows = config.windows

        # Only the rows of a step are converted, unless the head is the same matrix and has to be converted anyway.
        take = weights.take if config.tied and not pack else weights.take_as_stored
        first, end = portion(config.vocab_size, team.rank, team.ranks)
        embedding = take("model.embed_tokens.weight", end - first, config.hidden_size)
        self._embedding = Embedding(embedding, vocab_size=config.vocab_size, dtype=dtype, team=team)
        self._embedding_scale = None
        if config.embedding_scale is not None:  # rounded to the model's dtype before the product, as trained
            self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device=device)
        self._layers = [
            Layer(index, layer, config, weights, team, pack=pack) for index, layer in enumerate(config.layers)
        ]
        final = weights.take("model.norm.weight", config.hidden_size)
        self._norm = RMSNorm(final, eps=config.norm_eps, centered=config.centered_norm)
        head = embedding
        if not config.tied:
            head = weights.take_as_stored("lm_head.weight", end - first, config.hidden_size)
        self._head = TeamHead(
            Head(head, dtype=dtype, softcap=config.logit_softcap, packed=pack), vocab_size=config.vocab_size, team=team
        )
        weights.finish(ignored=frozenset({"lm_head.weight"}) if config.tied else frozenset())
        self._ropes = {rope: Rope(rope, config.head_dim, device) for rope in {layer.rope for layer in config.layers}}

    def forward(self, rows: Rows, attention: AttentionStep, *, out: torch.Tensor) -> torch.Tensor:
        x = self._embedding(rows.token_ids)  # [R, hidden]
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        if rows.given is not None:
            x = x.index_copy(0, rows.given.rows, rows.given.values)
        angles = {config: rope.angles(rows.positions, x.dtype) for config, rope in self._ropes.items()}
        for layer in self._layers:
            x = layer(x, angles[layer.rope], attention)
        x = self._norm(x.index_select(0, rows.logit_rows))  # [L, hidden]
        self._head(x, out)
        return out


def landmarks(config: DecoderConfig) -> list[str]:
    """Names that tell early whether the checkpoint is of this family at all, and complete."""
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    if not config.tied:
        names.append("lm_head.weight")
    return names + [
        f"model.layers.{index}.{part}.weight"
        for index, layer in enumerate(config.layers)
        for part in ("input_layernorm", "self_attn.q_proj", "mlp.down_proj")
        if part != "mlp.down_proj" or layer.experts is None  # which are spelled in several ways: see `experts.py`
    ]


def build_decoder(
    config: Config, tensors: Tensors, *, dtype: torch.dtype, device: torch.device, pack: bool, team: Team = ALONE
) -> Decoder:
    """A decoder of one of `decoder_config.FAMILIES`. Raises ModelError when config or tensors do not fit."""
    return Decoder(read_config(config), tensors, dtype=dtype, device=device, pack=pack, team=team)
