"""Describes a decoder as data: families differ by these fields and by the names of their tensors, not by code.

A file of `families/` reads them from a Hugging Face configuration. Three executors run them: `decoder.py` in torch,
`cpu_decoder.py` on the native CPU kernels, `runners/cuda/decoder.py` on Triton's.

    embedding → layers × [ norm → qkv → (head norms) → rope → attention → output → (norm) → +
                           norm → gate_up → activation → down → (norm) → + ] → norm → head

Only some families have the parts in brackets. Several maps (queries, keys and values; gate and up) are one product.
"""

from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist
from typing import Any

import torch

from ..attention.backend import AttentionGeometry
from ..attention.plan import BothWays, Chunk, Window
from ..cache.kv_pool import KVGeometry, LayerKV
from ..cache.state_pool import StateGeometry
from ..layers.checkpoint import ONES, LinearTensors
from ..layers.linear import QuantMethod
from ..layers.rope import QueryScale, RopeConfig
from .recurrent_config import Recurrent

LEAST_WINDOW_SHARE = 0.2
# Tokens of a usual sequence: a quarter of the context, but within these.
SHORT_SEQUENCE = 8192
LONG_SEQUENCE = 32768


class RouterScore(Enum):
    """The scores that a router gives the experts: of its logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class ProjectionNames:
    """The linear maps of a layer, by their names in the checkpoint.

    `qkv` and `gate_up` have one name where one tensor holds them all, one above the other in this order.
    """

    attention: str = "self_attn"  # the module of the following
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    mlp: str = "mlp"  # the module of the following
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The tensors of experts, by their names in the checkpoint and by the order of their numbers."""

    block: str = "mlp"  # the module of the following
    router: str = "gate"
    correction: str | None = None  # added to scores where experts are chosen, not where they are weighed
    shared: str = "shared_expert"
    shared_maps: ProjectionNames | None = None  # of that MLP, where it is a module of the layer; None: of the block
    inputs_first: bool = False  # stacks are [experts, inputs, outputs]
    alternating: bool = False  # outputs of gate and up alternate; else all those of the gate come first


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The gate of gpt-oss: (up + 1) · gate · sigmoid(alpha · gate), with gate at most `limit` and up within ±limit."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: every token uses the `chosen` of `count` MLPs that a router finds most probable."""

    count: int
    chosen: int
    width: int
    renormalise: bool  # the weights of a token's experts sum to one
    rounded: bool  # weights are rounded to the model's dtype before they multiply
    shared_width: int = 0  # of one more MLP that every token uses; 0: there is none
    shared_gated: bool = True  # that MLP is multiplied by the sigmoid of a gate of its own
    scoring: RouterScore = RouterScore.SOFTMAX
    groups: int = 1  # experts lie in groups of equal size, and a token's are among those of its `chosen_groups` best
    chosen_groups: int = 1
    scale: float = 1.0  # multiplies the weights
    weigh_input: bool = False  # weights multiply what goes into an expert; else what comes out
    biased: bool = False  # router and experts add biases
    gated: bool = True  # False: each MLP, the shared one too, is down(activation(up(x)))
    gate: ClampedGate | None = None  # None: the activation of dense MLPs
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The fields that may differ from layer to layer."""

    window: Window
    rope: RopeConfig
    experts: ExpertsConfig | None = None  # None: the MLP is dense
    query_scale: QueryScale | None = None  # None: queries are not scaled by their position
    bare_head_norm: bool = False  # each head of queries and keys is normalised, without weights
    head_dim: int | None = None  # this and the following: None: those of the model
    kv_heads: int | None = None
    width: int | None = None  # of a dense MLP
    keys_of: int | None = None  # an earlier layer whose keys and values this one reads; it has no maps of its own
    sparsity: float = 0.0  # the part of the gate's numbers that are cut to zero in a dense MLP, as if they were normal
    values_are_keys: bool = False  # one map gives both, which part in the norms and in the rotation
    recurrent: Recurrent | None = None  # in place of attention, so its window is not used
    mixes: bool = True  # the layer has attention or a recurrent state; False: it is an MLP alone
    mlp: bool = True  # the layer has an MLP, or experts

    @property
    def attends(self) -> bool:
        return self.mixes and self.recurrent is None


@dataclass(frozen=True, slots=True)
class NormNames:
    """The norms of a layer, by the names of their weights in the checkpoint. None: there is no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # before the residual sum
    before_mlp: str | None = "post_attention_layernorm"  # Llama names it by its place, not its use
    after_mlp: str | None = None  # before the residual sum


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention (DeepSeek V2, section 2.1): what is cached of a token is one latent, and one key for all heads.

    A head's key is a map of the latent, followed by the common key, which is all that is rotated; its value is another
    map of the latent. The map of keys is applied to queries instead, and the map of values after attention, so latents
    are read as they are cached: one key head of `rank + rotated` numbers, whose first `rank` are its values.

        x → [ query latent | latent | common key ]      query latent → norm → queries [heads, plain + rotated]
    """

    query_rank: int  # of the latent from which queries are made; 0: they are a map of x
    rank: int
    plain: int  # numbers of a head's key that are not rotated
    rotated: int
    value_dim: int  # numbers of a head's value
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        return self.plain + self.rotated

    @property
    def key_dim(self) -> int:
        """Numbers of a token in the pool."""
        return self.rank + self.rotated

    def queries(self, heads: int) -> int:
        """Outputs of the first map that become queries."""
        return self.query_rank or heads * self.query_dim

    @property
    def names(self) -> tuple[str, str]:
        """The first maps of x, by their names in the checkpoint."""
        return "q_a_proj" if self.query_rank else "q_proj", "kv_a_proj_with_mqa"


@dataclass(frozen=True, slots=True)
class SideConfig:
    """Per-layer embeddings (Gemma 3n): every layer adds what it makes of an embedding of its own.

    side = (token's side embedding · √width + norm(map of the embedding / √hidden)) / √2        [layers, width]
    after the MLP:  x += norm(map(activation(gate(x)) · side of the layer))
    """

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    """Residual streams in parallel, of which a layer reads and updates one (alternating updates, Gemma 3n).

    predicted = streams + coefficients(streams[active]) · streams
    updated = the layer of predicted[active], in which attention's residual is averaged with x + norm(low rank map of x)
    streams = predicted + (updated − predicted[active]) · (1 + coefficients(updated))
    and what per-layer embeddings add, gated by streams[active] · scale, is added to all streams but the first
    """

    count: int
    active: int
    scaled: bool  # False: that scale is one
    residual_rank: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder, whole or the part of one rank. The defaults are those of a plain decoder like Llama's."""

    vocab_size: int
    context_length: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    activation: str
    norm_eps: float
    tied: bool  # the output map is the embedding
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True  # False: the MLP is down(activation(up(x)))
    qk_norm: bool = False  # each head of queries and keys is normalised before its rotary embedding
    gated_attention: bool = False  # each query has a gate next to it, whose sigmoid multiplies the attention's output
    qk_norm_whole: bool = False  # with qk_norm: not each head, but all queries of a row as one, and all its keys
    norms: NormNames = NormNames()
    projections: ProjectionNames = ProjectionNames()
    centered_norm: bool = False  # norm weights are stored minus one
    embedding_scale: float | None = None
    residual_scale: float = 1.0  # multiplies what attention and MLP add to the residual
    attention_scale: float = 1.0
    attention_softcap: float = 0.0  # scores become cap · tanh(score / cap); 0: there is no cap
    logit_scale: float = 1.0  # multiplies the logits, before their cap
    logit_softcap: float = 0.0
    latent: LatentConfig | None = None  # not None: kv_heads is 1, and head_dim what is rotated
    layers_after: int = 0  # further layers that the checkpoint may have, of a draft model (multi-token prediction)
    value_norm: bool = False  # each head of values is normalised, without weights
    side: SideConfig | None = None  # None: there are no per-layer embeddings
    streams: StreamsConfig | None = None  # None: there is one residual
    layer_scales: bool = False  # the residual is multiplied by a number of the layer after it
    sinks: bool = False  # each head has a logit of its own for a key that every row sees, whose value is zero

    @property
    def windows(self) -> tuple[Window, ...]:
        """Window classes, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers if layer.attends))

    @property
    def both_ways(self) -> bool:
        """Returns whether tokens see those after them, so that texts run whole and no prefix can be shared."""
        return any(isinstance(layer.window, BothWays) for layer in self.layers)

    @staticmethod
    def layer_prefix(index: int) -> str:
        """Returns the beginning of the names of a layer's tensors in the checkpoint."""
        return f"model.layers.{index}"

    @property
    def attention_geometry(self) -> AttentionGeometry:
        """The heads that steps are planned for."""
        return AttentionGeometry.covering(self.heads, self.kv_geometry(torch.float32).layers)

    @property
    def geometry_by_window(self) -> dict[Window, AttentionGeometry]:
        """The heads of the layers of each window class, by which their steps are planned."""
        layers: dict[Window, list[LayerKV]] = {window: [] for window in self.windows}
        attending = (layer for layer in self.layers if layer.attends)
        for layer, shape in zip(attending, self.kv_geometry(torch.float32).layers, strict=True):
            layers[layer.window].append(shape)
        return {window: AttentionGeometry.covering(self.heads, shapes) for window, shapes in layers.items()}

    def kv_geometry(self, dtype: torch.dtype) -> KVGeometry:
        """Returns the shape of a pool of `dtype`, which has the layers that attend, in their order."""
        attending = [index for index, layer in enumerate(self.layers) if layer.attends]
        if self.latent is not None:
            latents = LayerKV(1, self.latent.key_dim, self.latent.rank, latent=True)
            return KVGeometry((latents,) * len(attending), dtype)
        places = {index: place for place, index in enumerate(attending)}
        reach = self._reach
        shapes = []
        for index in places:
            head_dim, source = self.head_dim_of(index), self.layers[index].keys_of
            shared = None if source is None else places[source]
            windowed = reach > 0 and self.layers[index].window is not None
            shapes.append(LayerKV(self.kv_heads_of(index), head_dim, head_dim, source=shared, windowed=windowed))
        return KVGeometry(tuple(shapes), dtype, reach, self._window_share(reach))

    @property
    def _reach(self) -> int:
        """The tokens that a row sees in layers with a window; 0: they cannot have a pool of their own.

        They cannot where other layers read their keys, next to recurrent states, or where texts are seen both ways.
        """
        attending = [layer for layer in self.layers if layer.attends]
        windows = [layer.window for layer in attending if layer.window is not None]
        reach = max((_reach_of(window) for window in windows), default=0)
        apart = all(
            (layer.window is None) == (self.layers[layer.keys_of].window is None)
            for layer in attending
            if layer.keys_of is not None
        )
        recurrent = any(layer.recurrent is not None for layer in self.layers)
        alone = apart and not recurrent and not self.both_ways
        return reach if alone and reach < self.context_length else 0

    def _window_share(self, reach: int) -> float:
        """Returns the number of window slots for each slot: for two windows in each sequence of a usual length.

        Twice, because the tree keeps windows of earlier requests. Short sequences are all window, so it is never below
        a fifth.
        """
        usual = min(self.context_length, max(SHORT_SEQUENCE, min(self.context_length // 4, LONG_SEQUENCE)))
        return min(1.0, max(LEAST_WINDOW_SHARE, 2 * reach / usual))

    def place_of(self, index: int) -> int:
        """Returns the place of a layer among those of the pool."""
        return sum(layer.attends for layer in self.layers[:index])

    def state_geometry(self, dtype: torch.dtype) -> StateGeometry | None:
        """Returns the recurrent state of a sequence in a model of `dtype`; None: all layers attend."""
        states = tuple(layer.recurrent.state(dtype) for layer in self.layers if layer.recurrent is not None)
        return StateGeometry(states) if states else None

    def head_dim_of(self, index: int) -> int:
        """Returns the head size of a layer."""
        return self.layers[index].head_dim or self.head_dim

    def kv_heads_of(self, index: int) -> int:
        """Returns the number of key heads that a layer reads."""
        return self.layers[index].kv_heads or self.kv_heads

    def own_kv_heads(self, index: int) -> int:
        """Returns the number of key heads that a layer computes: 0 where it reads those of another."""
        return self.kv_heads_of(index) if self.layers[index].keys_of is None else 0

    def width_of(self, index: int) -> int:
        """Returns the width of a layer's dense MLP."""
        return self.layers[index].width or self.intermediate_size

    def angles_of(self, index: int) -> tuple[RopeConfig, int]:
        """Returns the frequencies of a layer, and the size of the heads that they rotate."""
        return self.layers[index].rope, self.head_dim_of(index)

    @property
    def angles(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The sets of angles, each once, in the order of the layers."""
        return tuple(dict.fromkeys(map(self.angles_of, range(len(self.layers)))))


def deviations_of(sparsity: float) -> float:
    """Returns the standard deviations above its mean from which on a normal gate counts, given the share below."""
    return NormalDist().inv_cdf(sparsity)


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LatentTensors:
    """The further tensors of latent attention. Norms are the full names of their weights."""

    query_norm: str | None  # [query_rank]; None: there is no latent of queries
    query: LinearTensors | None
    norm: str  # [rank]
    expand: LinearTensors  # latent → keys and values of all heads, [heads, plain + value_dim]
    # In place of that, head by head (`NAME.7.weight`): the map of keys, transposed, [rank, plain], and that of values.
    keys: str
    values: str


@dataclass(frozen=True, slots=True)
class SideTensors:
    """The tensors of a layer for its per-layer embedding."""

    gate: LinearTensors
    output: LinearTensors
    norm: str


PARALLEL_STREAMS = "residual streams in parallel (AltUp)"  # for messages
SIDE_EMBEDDING = "model.embed_tokens_per_layer.weight"
SIDE_MAP = "model.per_layer_model_projection"
SIDE_NORM = "model.per_layer_projection_norm.weight"


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one layer, by their names in the checkpoint.

    Norms are the full names of their weights, [hidden] or [head_dim] (of queries and keys as wholes: [heads · head_dim]
    and [kv_heads · head_dim]); None: there is no such norm.
    """

    prefix: str  # of all names; `qkv`, the norms of heads and `output` belong to layers that attend
    before_attention: str | None
    qkv: LinearTensors
    query_norm: str | None
    key_norm: str | None
    value_norm: str | None
    sinks: str | None  # [heads]
    latent: LatentTensors | None
    output: LinearTensors
    after_attention: str | None
    before_mlp: str | None
    gate_up: LinearTensors  # this and `down`: of a dense MLP; experts read their own, see `experts.py`
    down: LinearTensors
    after_mlp: str | None
    side: SideTensors | None
    scale: str | None  # [1]


def layer_tensors(config: DecoderConfig, index: int) -> LayerTensors:
    prefix, names = config.layer_prefix(index), config.projections
    attention, mlp = f"{prefix}.{names.attention}", f"{prefix}.{names.mlp}"
    hidden, wide, layer = config.hidden_size, config.width_of(index), config.layers[index]
    queries, keys = config.heads * config.head_dim_of(index), config.own_kv_heads(index) * config.head_dim_of(index)
    latent = config.latent

    def norm(name: str | None) -> str | None:
        return None if name is None else f"{prefix}.{name}.weight"

    def head_norm(name: str) -> str | None:
        return ONES if layer.bare_head_norm else f"{attention}.{name}.weight" if config.qk_norm else None

    def maps(
        module: str, leaves: tuple[str, ...], widths: tuple[int, ...], biased: bool, *, fine: bool = False
    ) -> LinearTensors:
        paths = tuple(f"{module}.{leaf}" for leaf in leaves)
        return LinearTensors(paths, widths if len(leaves) > 1 else (sum(widths),), hidden, biased, fine)

    return LayerTensors(
        prefix=prefix,
        before_attention=norm(config.norms.before_attention),
        # Fine inputs here and at the head: with 8 bits everywhere the default model in Q8_0 has a KL of 0.0030 to its
        # exact weights. 16 bits take away: q, k, v 0.0007; output 0.0001; gate and up 0.0008; down 0.0008; head 0.0005.
        # A product with 16 bits costs up to twice the time in prompts, so the cheapest two bring it below 0.002.
        qkv=maps(attention, *_qkv(config, layer, queries, keys), config.qkv_bias, fine=True)
        if latent is None
        else maps(attention, latent.names, (latent.queries(config.heads), latent.key_dim), config.qkv_bias, fine=True),
        query_norm=head_norm(names.query_norm),
        key_norm=head_norm(names.key_norm) if keys else None,
        value_norm=ONES if config.value_norm and keys else None,
        sinks=f"{attention}.sinks" if config.sinks else None,
        latent=None if latent is None else _latent_tensors(config, latent, attention),
        output=LinearTensors(
            (f"{attention}.{names.output}",),
            (hidden,),
            queries if latent is None else config.heads * latent.value_dim,
            config.output_bias,
        ),
        after_attention=norm(config.norms.after_attention),
        before_mlp=norm(config.norms.before_mlp),
        gate_up=maps(mlp, names.gate_up, (wide, wide) if config.gated_mlp else (wide,), config.mlp_bias),
        down=LinearTensors((f"{mlp}.{names.down}",), (hidden,), wide, config.mlp_bias),
        after_mlp=norm(config.norms.after_mlp),
        side=None if config.side is None else _side_tensors(prefix, hidden, config.side.width),
        scale=f"{prefix}.layer_scalar" if config.layer_scales else None,
    )


def _qkv(config: DecoderConfig, layer: LayerConfig, queries: int, keys: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the names of the maps of queries, keys and values, and their widths."""
    names = config.projections.qkv
    if layer.keys_of is not None:
        return names[:1], (queries,)
    widths = (queries * (1 + config.gated_attention), keys, keys)
    return (*names[:2], names[1]) if layer.values_are_keys else names, widths


def _side_tensors(prefix: str, hidden: int, width: int) -> SideTensors:
    return SideTensors(
        gate=LinearTensors((f"{prefix}.per_layer_input_gate",), (width,), hidden),
        output=LinearTensors((f"{prefix}.per_layer_projection",), (hidden,), width),
        norm=f"{prefix}.post_per_layer_input_norm.weight",
    )


def linear_maps(config: DecoderConfig) -> list[LinearTensors]:
    """Returns the maps that adapters may change: all products but those of experts."""
    products: list[LinearTensors] = []
    for index, layer in enumerate(config.layers):
        tensors = layer_tensors(config, index)
        products += recurrent_maps(config, index)
        if layer.attends:
            products += [tensors.qkv, tensors.output]
        if layer.mlp and layer.experts is None:
            products += [tensors.gate_up, tensors.down]
    return products


def recurrent_maps(config: DecoderConfig, index: int) -> list[LinearTensors]:
    """Returns the products of a layer's recurrent part; none: it has no such part."""
    recurrent = config.layers[index].recurrent
    if recurrent is None:
        return []
    return recurrent.maps(f"{config.layer_prefix(index)}.{recurrent.name}", config.hidden_size)


def uncut_part(config: DecoderConfig) -> str | None:
    """Returns, as a noun, a part that is not cut for several ranks; None: there is none."""
    if config.streams is not None:
        return PARALLEL_STREAMS
    recurrent = sum(layer.recurrent is not None for layer in config.layers)
    if recurrent:
        return f"recurrent layers ({recurrent} of {len(config.layers)})"
    if config.gated_attention:
        return "gated attention"
    if not config.gated_mlp:
        return "MLPs without a gate"
    alone = sum(not (layer.mixes and layer.mlp) for layer in config.layers)
    return f"layers of attention or MLP alone ({alone} of {len(config.layers)})" if alone else None


def _latent_tensors(config: DecoderConfig, latent: LatentConfig, attention: str) -> LatentTensors:
    query = LinearTensors((f"{attention}.q_b_proj",), (config.heads * latent.query_dim,), latent.query_rank)
    return LatentTensors(
        query_norm=f"{attention}.q_a_layernorm.weight" if latent.query_rank else None,
        query=query if latent.query_rank else None,
        norm=f"{attention}.kv_a_layernorm.weight",
        expand=LinearTensors(
            (f"{attention}.kv_b_proj",), (config.heads * (latent.plain + latent.value_dim),), latent.rank
        ),
        keys=f"{attention}.k_b_proj",
        values=f"{attention}.v_b_proj",
    )


# Any: only the method reads its weights.
def landmarks(config: DecoderConfig, method: QuantMethod[Any]) -> list[str]:
    """Returns names that show, before any tensor is read, whether the checkpoint is of this family and complete.

    Args:
        method: the weight format of the layers' linear maps, which says which tensors they have.
    """
    names = [EMBEDDING, FINAL_NORM]
    if not config.tied:
        names.append(HEAD)
    for index, layer in enumerate(config.layers):
        tensors = layer_tensors(config, index)
        norm = tensors.before_attention or tensors.after_attention if layer.mixes else tensors.before_mlp
        names += [] if norm is None else [norm]
        if layer.mixes:
            names.append(method.stored([*recurrent_maps(config, index), tensors.qkv][0])[0])
        if layer.mlp and layer.experts is None:  # experts are spelled in several ways: see `experts.py`
            names.append(method.stored(tensors.down)[0])
    return names


def is_unused(config: DecoderConfig, name: str) -> bool:
    """Returns whether a checkpoint may contain a tensor of this name although the model does not read it."""
    shared = (index for index, layer in enumerate(config.layers) if layer.keys_of is not None)
    left = (f"model.layers.{index}.self_attn.{part}" for index in shared for part in ("k_", "v_"))
    first = len(config.layers)
    after = (f"model.layers.{index}." for index in range(first, first + config.layers_after))
    return (config.tied and name == HEAD) or name.startswith((*after, *left))


def _reach_of(window: int | Chunk | BothWays) -> int:
    """Returns the most tokens before a row, its own included, that it sees; 0 for all."""
    return window if isinstance(window, int) else window.size or 0
