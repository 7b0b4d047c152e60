"""Runs any other causal model of transformers, with umbel's attention in place of its own.

transformers looks up attention functions by name. umbel's stores keys and values in the KV pool and attends there; the
rows of all sequences are a batch of one. It finds the current step through the model's channel, an attribute that is
set on the attention modules when the model is built: not every model passes keyword arguments to its attention.

This works for models whose only state is the keys and values of plain attention. Each model is tested for that: when it
is built, two short sequences run through the pool in pieces, and the logits must equal those of transformers' own
attention. A model that fails is refused with the reason.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig
from transformers.utils import logging

from ...lang.errors import ModelError, UmbelError
from ..attention.backend import AttentionStep
from ..cache.kv_pool import KVGeometry
from ..layers.checkpoint import Tensors, listing
from ..layers.config_values import Config
from .model import Rows
from .transformers_probe import AttentionRecord, Recorder, check_logits

NAME = "umbel"  # of our attention function in transformers' registry
CHANNEL = "umbel_channel"  # attribute of attention modules

# Configuration keys that would make transformers run or fetch code, or replace our attention.
DROPPED_KEYS = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "dtype",
    "torch_dtype",
)


class Step(Protocol):
    """The part of a step that attention uses: an `AttentionStep`, or the recorder of the probe."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        window: int | None,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""


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
    )
    return attended[None], None


AttentionInterface.register(NAME, _attention)


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
        self.kv_geometry = KVGeometry(len(record.layers), record.kv_heads, record.head_dim, dtype)
        self.windows = record.windows

    def forward(self, rows: Rows, attention: AttentionStep, *, out: torch.Tensor) -> torch.Tensor:
        assert rows.given is None, "models that see have a decoder of ours"
        kept = {"logits_to_keep": rows.logit_rows} if self._keeps_rows else {}
        with self._channel.carry(_LayerMap(attention, self._pool_layer)):
            result = self._module(
                input_ids=rows.token_ids[None], position_ids=rows.positions[None], use_cache=False, **kept
            )
        logits = result.logits[0]
        return out.copy_(logits if self._keeps_rows else logits.index_select(0, rows.logit_rows))


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
        window: int | None,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        place = self._pool_layer[layer]
        return self._attention.attend(place, queries, keys, values, window=window, scale=scale, softcap=softcap)


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
    model_type = config.get("model_type")
    values = {key: value for key, value in config.items() if key not in (*DROPPED_KEYS, "model_type")}
    try:
        parsed = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # unknown type, or any of the validation errors of configurations
        raise ModelError(
            f"transformers does not accept the configuration of model_type {model_type!r}: {error}"
        ) from error
    _refuse_growing_rope(parsed)
    if type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"transformers has no causal language model for model_type {model_type!r}")
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
