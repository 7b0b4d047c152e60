"""The decoder families on fused kernels: the same reading as `models.decoder`, with fewer passes over the rows.

                          in torch                                       here
    residual + norm       sum, norm, cast                                one kernel
    queries, keys         norm, cast, turn, two copies to the pool       one kernel
    gate                  activation, product                            one kernel, of few rows that of its map, too
    logits                product, conversion                            of few rows one kernel

Products of few rows are kernels of ours, all others are torch's (cuBLAS). The residual is one tensor that kernels add
to. After the last attention only rows whose logits are asked for go on. R rows, L of them with logits, D = head_dim.
"""

from dataclasses import dataclass

import torch

from ...attention.backend import AttentionGeometry, AttentionStep
from ...cache.kv_pool import KVGeometry
from ...core.model import Given
from ...distributed.communicator import ALONE, Team
from ...kernels.triton.head_norm import HeadNorm
from ...kernels.triton.rope_table import rope_table
from ...layers.checkpoint import Checkpoint, Tensors
from ...layers.rope import RopeConfig
from ...models.decoder import landmarks
from ...models.decoder_config import DecoderConfig, LayerConfig
from ...models.experts import Experts
from ...models.sharding import portion
from ...models.vocab_parallel import Embedding, TeamHead
from .head import DeviceHead
from .kernels import FusedKernels


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The rows of one step, on the device."""

    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    logit_rows: torch.Tensor | None  # int64 [L] ascending; None: all
    given: Given | None = None


class CudaDecoder:
    """A whole model on one device, or the part of it that a rank of `team` has, see `models.decoder.Decoder`.

    Args:
        kv_dtype: of the KV pool, which may be float8.
        kernels: what it is made of besides products.

    Raises:
        ModelError: configuration or tensors that cannot be used.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Tensors,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        kernels: FusedKernels,
        team: Team = ALONE,
    ) -> None:
        weights = Checkpoint(tensors, dtype=dtype, device=device)
        weights.require(landmarks(config))
        self.config = config
        self.device = device
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.windows = config.windows
        self.kv_geometry = KVGeometry(len(config.layers), config.kv_heads, config.head_dim, kv_dtype)
        self._kernels = kernels
        self._team = team
        first, end = portion(config.vocab_size, team.rank, team.ranks)
        embedding = weights.take("model.embed_tokens.weight", end - first, config.hidden_size)
        self._embedding = Embedding(embedding, vocab_size=config.vocab_size, dtype=dtype, team=team)
        self._embedding_scale = None
        if config.embedding_scale is not None:  # rounded to the model's dtype before the product, as trained
            self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device=device)
        self._layers = [_Layer(index, layer, config, weights, kernels) for index, layer in enumerate(config.layers)]
        self._norm = weights.take("model.norm.weight", config.hidden_size)
        head = embedding
        if not config.tied:
            head = weights.take("lm_head.weight", end - first, config.hidden_size)
        own = DeviceHead(head.to(dtype), softcap=config.logit_softcap, kernels=kernels)
        self._head = TeamHead(own, vocab_size=config.vocab_size, team=team)
        weights.finish(ignored=frozenset({"lm_head.weight"}) if config.tied else frozenset())
        self._tables: dict[RopeConfig, torch.Tensor] = {
            rope: rope_table(rope, config.head_dim, config.context_length, dtype=dtype, device=device)
            for rope in {layer.rope for layer in config.layers}
        }

    def forward(self, rows: DeviceRows, attention: AttentionStep, *, out: torch.Tensor) -> None:
        """Keys and values of all rows go to the pool, logits to `out` (float32 [L, vocab])."""
        config, kernels = self.config, self._kernels
        residual = self._embed(rows)  # [R, hidden]
        x = kernels.rms_norm(residual, self._layers[0].before_attention, eps=config.norm_eps, centered=self._centered)
        last = self._layers[-1]
        for layer, following in zip(self._layers, [*self._layers[1:], None], strict=True):
            attended = self._attend(layer, x, rows, attention)
            if layer is last and rows.logit_rows is not None:
                attended = attended.index_select(0, rows.logit_rows)
                residual = residual.index_select(0, rows.logit_rows)
            x = self._team.sum(kernels.linear(attended, layer.output, layer.output_bias))
            x = self._add_norm(x, residual, layer.before_mlp, after=layer.after_attention)
            x = self._team.sum(layer.mlp(x))
            following_norm = self._norm if following is None else following.before_attention
            x = self._add_norm(x, residual, following_norm, after=layer.after_mlp)
        self._head(x, out)

    def _embed(self, rows: DeviceRows) -> torch.Tensor:
        x = self._embedding(rows.token_ids)
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        return x if rows.given is None else x.index_copy_(0, rows.given.rows, rows.given.values)

    @property
    def _centered(self) -> bool:
        return self.config.centered_norm

    def _add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, after: torch.Tensor | None
    ) -> torch.Tensor:
        return self._kernels.add_rms_norm(
            x, residual, weight, eps=self.config.norm_eps, centered=self._centered, after=after
        )

    def _attend(self, layer: "_Layer", x: torch.Tensor, rows: DeviceRows, attention: AttentionStep) -> torch.Tensor:
        """[R, hidden] → what the output map reads: [R, heads · D]."""
        pool = attention.pool
        queries = self._kernels.turn_and_store(
            self._kernels.linear(x, layer.qkv, layer.qkv_bias),
            rows.positions,
            attention.write_slots,
            self._tables[layer.rope],
            pool.keys[layer.index],
            pool.values[layer.index],
            head_norm=layer.head_norm,
        )
        attended = attention.backend.attend(
            layer.index, queries, pool, attention.plans[layer.window], scale=self.config.attention_scale
        )
        return attended.flatten(1)


class _Layer:
    """The weights of one layer, fused where one product does for several."""

    def __init__(
        self, index: int, layer: LayerConfig, config: DecoderConfig, weights: Checkpoint, kernels: FusedKernels
    ) -> None:
        self.index = index
        self.window = layer.window
        self.rope = layer.rope
        hidden, head_dim = config.hidden_size, config.head_dim
        prefix = f"model.layers.{index}"

        def norm(name: str) -> torch.Tensor:
            return weights.take(f"{prefix}.{name}.weight", hidden)

        self.before_attention = norm("input_layernorm")
        heads, kv = config.heads * head_dim, config.kv_heads * head_dim
        attention = f"{prefix}.self_attn"
        names = [f"{attention}.{name}_proj" for name in "qkv"]
        self.qkv, self.qkv_bias = _stacked(names, [heads, kv, kv], hidden, weights, biased=config.qkv_bias)
        self.head_norm: HeadNorm | None = None
        if config.qk_norm:
            query = weights.take(f"{attention}.q_norm.weight", head_dim)
            key = weights.take(f"{attention}.k_norm.weight", head_dim)
            self.head_norm = HeadNorm(query, key, eps=config.norm_eps, centered=config.centered_norm)
        self.output = weights.take(f"{attention}.o_proj.weight", hidden, heads)
        self.output_bias = weights.take(f"{attention}.o_proj.bias", hidden) if config.output_bias else None

        self.after_attention = self.after_mlp = None
        if config.sandwich_norm:
            self.after_attention = norm("post_attention_layernorm")
            self.before_mlp = norm("pre_feedforward_layernorm")
            self.after_mlp = norm("post_feedforward_layernorm")
        else:
            self.before_mlp = norm("post_attention_layernorm")  # Llama names it by its place, not its use
        self.mlp: _MLP | Experts
        if layer.experts is None:
            self.mlp = _MLP(f"{prefix}.mlp", config, weights, kernels)
        else:
            self.mlp = Experts(
                prefix, layer.experts, weights, hidden=hidden, activation=config.activation, kernels=kernels
            )


class _MLP:
    """down(activation(gate(x)) × up(x)), gate and up from one product."""

    def __init__(self, prefix: str, config: DecoderConfig, weights: Checkpoint, kernels: FusedKernels) -> None:
        hidden, wide = config.hidden_size, config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up, self._gate_up_bias = _stacked(names, [wide, wide], hidden, weights, biased=config.mlp_bias)
        self._down = weights.take(f"{prefix}.down_proj.weight", hidden, wide)
        self._down_bias = weights.take(f"{prefix}.down_proj.bias", hidden) if config.mlp_bias else None
        self._activation = config.activation
        self._kernels = kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        middle = self._kernels.gated(x, self._gate_up, self._gate_up_bias, self._activation)
        return self._kernels.linear(middle, self._down, self._down_bias)


def _stacked(
    names: list[str], widths: list[int], inputs: int, weights: Checkpoint, *, biased: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Several maps as one: weight [sum of widths, inputs] and bias."""
    weight = weights.take_fused([f"{name}.weight" for name in names], [(width, inputs) for width in widths])
    if not biased:
        return weight, None
    return weight, weights.take_fused([f"{name}.bias" for name in names], [(width,) for width in widths])


def attention_geometry(config: DecoderConfig) -> AttentionGeometry:
    return AttentionGeometry(config.heads, config.kv_heads, config.head_dim)
