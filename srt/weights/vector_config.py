"""Reads from a checkpoint how it makes a vector of a text.

`modules.json` of sentence-transformers says it, and the folders that it names; a GGUF file states its pooling. A
checkpoint without either is read as Qwen3-Embedding is: the last token's hidden state, normalised. What is not
implemented is refused by its name when a vector is asked for, so that such a checkpoint still generates.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ...lang.errors import ModelError
from ..core.vectors import DenseMap, VectorConfig
from ..layers.config_values import Config
from .documents import Documents

MODULES = "modules.json"
CLASSIFIER = "score.weight"
CLASSIFIES = "ForSequenceClassification"  # the end of an architecture's name
MOST_DIMENSIONS = 1 << 16
MOST_LABELS = 1 << 12
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LAST, _MEAN = "lasttoken", "mean"
_POOLINGS = {
    "pooling_mode_lasttoken": _LAST,
    "pooling_mode_mean_tokens": _MEAN,
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
ACTIVATIONS = {"torch.nn.modules.linear.Identity": "", "torch.nn.modules.activation.Tanh": "tanh"}


class _Module(msgspec.Struct, frozen=True):
    type: str
    path: str = ""


def read_vectors(config: Config, text: Config, documents: Documents, names: Collection[str]) -> VectorConfig:
    """Reads how a model makes vectors.

    Args:
        config: config.json.
        text: the part of it that describes the decoder.
        names: of its tensors.
    """
    hidden = text.get("hidden_size")
    hidden = hidden if isinstance(hidden, int) else 0
    architectures = config.get("architectures")
    named = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if CLASSIFIER in names and any(name.endswith(CLASSIFIES) for name in named):
        labels = _labels(config)
        return VectorConfig(labels, normalized=False, labels=labels, yes_first=_yes_first(config), generates=False)
    headless = text.get("tie_word_embeddings") is False and not any(name.endswith("lm_head.weight") for name in names)
    both_ways = text.get("use_bidirectional_attention") is True
    vectors = VectorConfig(hidden, both_ways=both_ways, generates=not (both_ways or (headless and names)))
    try:
        return _with_modules(vectors, documents)
    except ModelError as error:
        return replace(vectors, refused=str(error))


def _labels(config: Config) -> int:
    named = config.get("id2label")
    stated = len(named) if isinstance(named, Mapping) else config.get("num_labels", 2)  # transformers' default
    return stated if isinstance(stated, int) and 0 < stated <= MOST_LABELS else 0


def _yes_first(config: Config) -> bool:
    named = config.get("id2label")
    return isinstance(named, Mapping) and (named.get("0"), named.get("1")) == ("yes", "no")


def _with_modules(vectors: VectorConfig, documents: Documents) -> VectorConfig:
    """Applies modules.json. Raises ModelError, as a clause, for what is not implemented."""
    modules = _modules(documents)
    if any(kind == "Pooling" for kind, _ in modules):
        vectors = replace(vectors, normalized=False)  # unless a module says so
    for kind, folder in modules:
        match kind:
            case "Transformer":
                if folder:
                    raise ModelError(f"its {MODULES} keeps the model in the folder {folder!r}")
            case "Pooling":
                vectors = replace(vectors, every_row=_pooling(documents.read(f"{folder}/config.json")) == _MEAN)
            case "Dense":
                dense = _dense(folder, documents.read(f"{folder}/config.json"), vectors.dimensions)
                vectors = replace(vectors, maps=(*vectors.maps, dense), dimensions=dense.outputs)
            case "Normalize":
                vectors = replace(vectors, normalized=True)
            case "LogitScore":
                vectors = replace(vectors, answers=_answers(documents.read(f"{folder}/config.json")))
            case _:
                raise ModelError(f"its {MODULES} has a {kind}, which umbel does not compute")
    return vectors


def _modules(documents: Documents) -> list[tuple[str, str]]:
    """Returns kind and folder of each module; [] without a file."""
    content = documents.text(MODULES)
    if content is None:
        return []
    try:
        modules = msgspec.json.decode(content, type=list[_Module])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"its {MODULES} cannot be read ({error})") from error
    for module in modules:
        if module.path and not _FOLDER.fullmatch(module.path):
            raise ModelError(f"its {MODULES} names {module.path[:80]!r}, which is no folder next to it")
    return [(module.type.rpartition(".")[2], module.path) for module in modules]


def _pooling(config: Mapping[str, Any]) -> str:  # Any: JSON
    stated = config.get("pooling_mode")
    modes = [stated] if isinstance(stated, str) else [name for key, name in _POOLINGS.items() if config.get(key)]
    if len(modes) != 1 or modes[0] not in (_LAST, _MEAN):
        raise ModelError(f"it pools by {' and '.join(map(str, modes)) or 'nothing'}, not by the last token or the mean")
    return modes[0]


def _dense(folder: str, config: Mapping[str, Any], inputs: int) -> DenseMap:  # Any: JSON
    outputs, activation = config.get("out_features"), config.get("activation_function")
    if config.get("in_features") != inputs or not isinstance(outputs, int) or not 0 < outputs <= MOST_DIMENSIONS:
        raise ModelError(f"{folder}/config.json maps {config.get('in_features')} to {outputs} numbers after {inputs}")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ModelError(f"{folder}/config.json has the activation {activation!r}")
    return DenseMap(folder, inputs, outputs, config.get("bias", True) is True, ACTIVATIONS[activation])


def _answers(config: Mapping[str, Any]) -> tuple[int, int]:  # Any: JSON
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(yes, int) or not isinstance(no, int) or min(yes, no) < 0:
        raise ModelError(f"it ranks by the tokens {yes} and {no}, where umbel compares two")
    return yes, no
