"""Runs any other causal model of transformers, with umbel's attention in place of its own.

transformers looks up attention functions by name. umbel's stores keys and values in the KV pool and attends there; the
rows of all sequences are a batch of one. It finds the current step through the model's channel, an attribute that is
set on the attention modules when the model is built: not every model passes keyword arguments to its attention.

This works for models whose only state is the keys and values of plain attention. Each model is tested for that: when it
is built, two short sequences run through the pool in pieces, and the logits must equal those of transformers' own
attention. A model that fails is refused with the reason.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig, __version__
from transformers.utils import logging

from ...lang.errors import ModelError, UmbelError, shortened, shown
from ..attention.backend import AttentionGeometry, AttentionStep, TorchBackend
from ..attention.plan import Window
from ..cache.kv_pool import KVGeometry, KVPool, LayerKV
from ..cache.state_pool import StateGeometry
from ..core.batch import Batch
from ..layers.checkpoint import Tensors, listing
from ..layers.config_values import Config, refuse_encoder
from .decoder import Rows, attention_geometry
from .read_fields import CONTEXT_LENGTH

NAME = "umbel"  # of our attention function in transformers' registry
CHANNEL = "umbel_channel"  # attribute of attention modules

# Configuration keys that would make transformers run or fetch code, or replace our attention, or are not its own.
DROPPED_KEYS = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "dtype",
    "torch_dtype",
    CONTEXT_LENGTH,  # ours, not the model's
)

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}  # relative to the largest logit
LONGEST_PROBE = 64  # tokens; a window wider than this is taken as the model states it


class Step(Protocol):
    """The part of a step that attention uses: an `AttentionStep`, or the recorder of the probe."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        window: Window,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, R, head_dim]
    key: torch.Tensor,  # [1, kv_heads, R, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # sinks, [heads]
    # Any: other arguments that a model passes; the comparison of logits finds those that matter.
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Attends in place of transformers' own attention. Returns [1, R, heads, head_dim]."""
    channel = getattr(module, CHANNEL, None)
    if channel is None or channel.step is None:
        raise ModelError(f"its {type(module).__name__} does not know which layer it is")
    if attention_mask is not None or dropout or not getattr(module, "is_causal", True):
        raise ModelError("its attention is not plain causal attention (a mask, dropout or an encoder)")
    attended = channel.step.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        window=sliding_window,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return attended[None], None


AttentionInterface.register(NAME, _attention)


class Channel:
    """Carries the current step to the attention modules of one model."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.step: Step | None = None
        for part in module.modules():
            if hasattr(part, "layer_idx"):
                setattr(part, CHANNEL, self)

    @contextmanager
    def carry(self, step: Step) -> Iterator[None]:
        assert self.step is None, "a model runs one step at a time"
        self.step = step
        try:
            yield
        finally:
            self.step = None


@dataclass(frozen=True, slots=True)
class AttentionRecord:
    """The attention of a model, as recorded from the calls of its layers."""

    layers: tuple[int, ...]  # the numbers the model gives its attention layers
    heads: int
    shapes: tuple[LayerKV, ...]  # of each
    windows: tuple[Window, ...]  # of each


class TransformersModel:
    """Runs a transformers module with keys and values in the KV pool. Made by `build_transformers_model`."""

    def __init__(
        self, module: Any, channel: Channel, record: AttentionRecord, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        config = module.config.get_text_config()
        self._module = module  # Any: transformers is untyped
        self._channel = channel
        self._keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._pool_layer = {layer: place for place, layer in enumerate(record.layers)}
        self.device = device
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self.heads = record.heads
        self.kv_geometry = KVGeometry(record.shapes, dtype)
        self.state_geometry: StateGeometry | None = None  # a model with other state than keys and values is refused
        self.windows = tuple(dict.fromkeys(record.windows))
        self._layer_windows = record.windows

    @property
    def dtype(self) -> torch.dtype:
        return self.kv_geometry.dtype

    @property
    def name(self) -> str:
        """The name of the class in transformers."""
        return type(self._module).__name__

    @property
    def geometry_by_window(self) -> dict[Window, AttentionGeometry]:
        """The heads of the layers of each window class, by which their steps are planned."""
        layers: dict[Window, list[LayerKV]] = {window: [] for window in self.windows}
        for window, shape in zip(self._layer_windows, self.kv_geometry.layers, strict=True):
            layers[window].append(shape)
        return {window: AttentionGeometry.covering(self.heads, shapes) for window, shapes in layers.items()}

    def forward(self, rows: Rows, attention: AttentionStep, *, out: torch.Tensor) -> torch.Tensor | None:
        assert rows.given is None, "models that see have a decoder of ours"
        outputs = rows.logit_rows if rows.hidden_rows is None else torch.cat([rows.logit_rows, rows.hidden_rows])
        kept = {"logits_to_keep": outputs} if self._keeps_rows else {}
        head = _HeadInputs(None if self._keeps_rows else outputs, logits=len(rows.logit_rows))
        with self._channel.carry(_LayerMap(attention, self._pool_layer)), head.taken_from(self._module):
            result = self._module(
                input_ids=rows.token_ids[None], position_ids=rows.positions[None], use_cache=False, **kept
            )
        out.copy_(result.logits[0])
        return head.hidden if rows.hidden_rows is not None else None


class _HeadInputs:
    """Stands before the head of a module: takes hidden states from its input, and leaves it the rows of logits.

    Args:
        outputs: rows of the input to take, those of logits first; None: the module has taken them.
        logits: the number of rows of logits.
    """

    def __init__(self, outputs: torch.Tensor | None, *, logits: int) -> None:
        self._outputs = outputs
        self._logits = logits
        self.hidden: torch.Tensor | None = None  # [H, hidden]

    @contextmanager
    def taken_from(self, module: Any) -> Iterator[None]:  # Any: transformers is untyped
        handle = module.get_output_embeddings().register_forward_pre_hook(self._take)
        try:
            yield
        finally:
            handle.remove()

    def _take(self, _: object, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        states = arguments[0][0]  # [rows, hidden]
        if self._outputs is not None:
            states = states.index_select(0, self._outputs)
        self.hidden = states[self._logits :]
        return (states[None, : self._logits],)


class _LayerMap:
    """Maps a step's layer numbers to those of the pool, where layers without attention have no keys."""

    def __init__(self, attention: AttentionStep, pool_layer: dict[int, int]) -> None:
        self._attention = attention
        self._pool_layer = pool_layer

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        window: Window,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        place = self._pool_layer[layer]
        return self._attention.attend(
            place, queries, keys, values, window=window, scale=scale, softcap=softcap, sinks=sinks
        )


def build_transformers_model(
    config: Config, tensors: Tensors, *, dtype: torch.dtype, device: torch.device
) -> TransformersModel:
    """Loads a model of transformers and checks that it runs on the KV pool. Raises ModelError if it does not."""
    module = _load(config, tensors, dtype=dtype, device=device)
    name = type(module).__name__
    try:
        with torch.inference_mode():
            channel, recorder = Channel(module), Recorder()
            positions = torch.arange(2, device=device)[None]
            with channel.carry(recorder):
                module(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
            record = recorder.record(module.config.get_text_config())
            model = TransformersModel(module, channel, record, dtype=dtype, device=device)
            check_logits(model, module, NAME)
    except UmbelError as error:
        raise ModelError(f"{name} cannot run on our KV pool: {error}") from error
    except Exception as error:  # a foreign model may fail in any way; each of them means that it is not usable
        raise ModelError(f"{name} cannot run on our KV pool: {type(error).__name__}: {error}") from error
    return model


def _load(config: Config, tensors: Tensors, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Loads the transformers module with umbel's attention. Any: transformers is untyped."""
    parsed = _parse(config)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    try:
        with _no_progress_bar():
            module, report = model_class.from_pretrained(
                None,
                config=parsed,
                state_dict=dict(tensors),
                dtype=dtype,
                attn_implementation=NAME,
                output_loading_info=True,
            )
    except Exception as error:  # shapes that do not fit, attention that cannot be replaced, and more
        raise ModelError(f"{model_class.__name__} cannot be loaded: {error}") from error
    for kind in ("missing_keys", "unexpected_keys"):
        if report[kind]:
            names = listing(list(report[kind]))
            raise ModelError(f"{model_class.__name__}: {kind.replace('_keys', '')} tensors {names}; check config.json")
    return module.eval().to(device)


def _parse(config: Config) -> Any:
    """Reads a configuration as transformers does. Raises ModelError when it shows that the model cannot run."""
    refuse_encoder(config)
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        code = " Its own code (auto_map) is never run." if config.get("auto_map") else ""
        raise ModelError(
            f"neither umbel nor transformers {__version__} has model_type {shown(model_type)}; choose a model of "
            f"another family (umbel models --supported), or install a transformers that has it.{code}"
        )
    values = {key: value for key, value in config.items() if key not in (*DROPPED_KEYS, "model_type")}
    try:
        parsed = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # any of the validation errors of configurations
        raise ModelError(
            f"transformers does not accept the configuration of model_type {model_type!r}: {shortened(str(error), 300)}"
        ) from error
    _refuse_growing_rope(parsed)
    if getattr(parsed, "index_topk", None):
        raise ModelError(
            f"model_type {model_type!r} chooses the keys of a row with an indexer, whose own keys our "
            "KV pool does not hold; load a model without index_topk, such as DeepSeek V3 or GLM 4.7"
        )
    if type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"transformers has no causal language model for model_type {model_type!r}")
    return parsed


def configuration_obstacle(config: Config) -> str | None:
    """Returns why a model cannot run in transformers on the KV pool, or None.

    Loads nothing: what only a forward pass shows is found when the model is loaded.
    """
    try:
        parsed = _parse(config).get_text_config()
    except ModelError as error:
        return str(error)
    kinds = getattr(parsed, "layer_types", None) or ()
    return next((reason for layer, kind in enumerate(kinds) if (reason := _layer_obstacle(layer, kind))), None)


def _layer_obstacle(layer: int, kind: str) -> str | None:
    if kind in ("sliding_attention", "full_attention"):
        return None
    return f"layer {layer} is of type {kind!r}, which has no KV cache of ours"


def _refuse_growing_rope(config: Any) -> None:  # Any: transformers is untyped
    """Refuses frequencies that change with the longest sequence: one request would depend on another."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in (parameters, *parameters.values()):
        kind = entry.get("rope_type") if isinstance(entry, dict) else None
        if kind in ("dynamic", "longrope"):
            raise ModelError(
                f"rope_type {kind!r} turns all keys anew when a sequence grows past a length, "
                "so cached keys cannot be shared; load a checkpoint without it"
            )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Switches off transformers' progress bar, which would appear in the user's output."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class Recorder:
    """Stands in for a step: records shapes and windows of each layer, and attends within the given rows only."""

    def __init__(self) -> None:
        self._heads: set[int] = set()
        self._shape_of: dict[int, LayerKV] = {}
        self._window_of: dict[int, Window] = {}

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        window: Window,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if layer in self._window_of:
            raise ModelError(f"it attends more than once in layer {layer}")
        self._window_of[layer] = window
        self._heads.add(queries.shape[1])
        self._shape_of[layer] = LayerKV(keys.shape[1], keys.shape[2], values.shape[2])
        query, key, value = (tensor.transpose(0, 1) for tensor in (queries, keys, values))
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return attended.transpose(0, 1)

    def record(self, config: Any) -> AttentionRecord:  # Any: transformers is untyped
        if not self._window_of:
            raise ModelError("it never called for attention")
        if len(self._heads) > 1:
            raise ModelError(f"its layers differ in the number of query heads: {sorted(self._heads)}")
        for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
            stated = self._window_of.get(layer)
            if kind == "sliding_attention" and stated is None:
                raise ModelError(f"layer {layer} has a sliding window that it does not pass to its attention")
            if (reason := _layer_obstacle(layer, kind)) is not None:
                raise ModelError(reason)
        layers = tuple(sorted(self._window_of))
        return AttentionRecord(
            layers=layers,
            heads=self._heads.pop(),
            shapes=tuple(self._shape_of[layer] for layer in layers),
            windows=tuple(self._window_of[layer] for layer in layers),
        )


def check_logits(model: "TransformersModel", module: Any, name: str) -> None:
    """Compares two sequences, interleaved and in pieces, with transformers' own attention on each of them whole.

    `name`: of umbel's attention function. Any: transformers is untyped.
    """
    narrow = [window for window in model.windows if isinstance(window, int) and window < LONGEST_PROBE - 4]
    length = min(max([9, *(window + 4 for window in narrow)]), model.context_length)
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, model.vocab_size, count) for count in (length, max(length - 2, 1))]

    module.set_attn_implementation("eager")
    try:
        expected = [
            module(input_ids=torch.from_numpy(ids)[None].to(model.device), use_cache=False).logits[0].float()
            for ids in sequences
        ]
    finally:
        module.set_attn_implementation(name)

    cuts = [length // 2, length // 3]
    steps = [
        [(ids, 0, cut) for ids, cut in zip(sequences, cuts, strict=True)],
        [(ids, cut, len(ids)) for ids, cut in zip(sequences, cuts, strict=True)],
    ]
    pool = KVPool(model.kv_geometry, 1 + sum(map(len, sequences)), model.device)
    actual = [_run(model, pool, step) for step in steps]
    for index, logits in enumerate(expected):
        joined = torch.cat([step[index] for step in actual])
        error = float((joined - logits).abs().max() / logits.abs().max())
        if not error <= TOLERANCES[model.kv_geometry.dtype]:  # NaN fails as well
            raise ModelError(
                f"its logits on our KV pool differ from transformers' own by {error:.1%}; "
                "it keeps state other than keys and values, or its attention is not plain causal attention"
            )


def _run(
    model: "TransformersModel", pool: KVPool, pieces: Sequence[tuple[np.ndarray[Any, Any], int, int]]
) -> list[torch.Tensor]:
    """Runs rows [start, end) of each sequence in one step. Any: the shape and type parameters of an array."""
    first_slot = np.cumsum([1] + [len(ids) for ids, _, _ in pieces])
    slots = [
        np.arange(first, first + end, dtype=np.int32)
        for first, (_, _, end) in zip(first_slot.tolist(), pieces, strict=False)
    ]
    counts = [end - start for _, start, end in pieces]
    batch = Batch(
        token_ids=np.concatenate([ids[start:end] for ids, start, end in pieces]),
        positions=np.concatenate([np.arange(start, end) for _, start, end in pieces]),
        write_slots=np.concatenate([run[start:] for run, (_, start, _) in zip(slots, pieces, strict=True)]).astype(
            np.int64
        ),
        query_lengths=np.array(counts, dtype=np.int32),
        prefix_lengths=np.array([start for _, start, _ in pieces], dtype=np.int32),
        slots=tuple(slots),
        logit_rows=np.arange(sum(counts)),
    )
    backend = TorchBackend(attention_geometry(model), model.device)
    step = AttentionStep(
        backend=backend,
        pool=pool,
        plans={window: backend.plan(batch, window) for window in model.windows},
        write_slots=torch.from_numpy(batch.write_slots).to(model.device),
    )
    rows = Rows(
        token_ids=torch.from_numpy(batch.token_ids).to(model.device),
        positions=torch.from_numpy(batch.positions).to(model.device),
        logit_rows=torch.from_numpy(batch.logit_rows).to(model.device),
    )
    out = torch.empty((sum(counts), model.vocab_size), device=model.device)
    model.forward(rows, step, out=out)
    return list(torch.split(out, counts))
