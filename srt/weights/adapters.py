"""Reads LoRA adapters from the folders that PEFT writes: adapter_config.json and adapter_model.safetensors.

The tensors say which maps are changed and with which rank; the configuration must agree with them, because it also says
the scale. A feature that would compute something else than W x + scale · B (A x) is refused by its name. All shapes are
compared with those of the model before a tensor is read, and nothing of the folder is executed.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...fsm.boolean.character_automata import determinised
from ...fsm.errors import ConstraintRefused, Limits
from ...fsm.language import Dfa
from ...fsm.regex.parser import plain_regex
from ...lang.errors import MissingExtraError, ModelError, shown
from ..layers.checkpoint import LinearTensors, listing
from ..layers.config_values import Config, flag, positive_int, positive_number, section
from ..layers.low_rank import Adapter, LowRank
from ..models.decoder_config import linear_maps
from ..models.families import FAMILIES, is_family
from ..models.families import read_config as read_family
from ..models.vision.config import decoder_config
from .catalog.mistaken_files import beginning_of, mistaken_for
from .safetensors_folder import tensor_headers

if TYPE_CHECKING:
    import torch

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
MOST_CONFIG_BYTES = 1 << 20
MOST_PATTERNS = 4096  # of ranks or scales; a model has fewer maps
_PATTERN_STATES = 2_000

# Keys that change nothing of what is computed here, or that the tensors say again.
_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_class", "base_model_name_or_path", "corda_config", "ensure_weight_tying"),
        *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern"),
        *("layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "parent_library"),
        *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules"),
    }
)
_READ = frozenset(
    {
        *("alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "task_type"),
        *("use_dora", "use_rslora", "modules_to_save"),
    }
)
# Ways of initialising that also change the weights of the model itself.
_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SIDES = {"lora_A": 0, "lora_B": 1}


@dataclass(frozen=True, slots=True)
class _Map:
    """The shape of a linear map of the model."""

    outputs: int
    inputs: int


def read_adapters(paths: Mapping[str, str], config: Config, model: str) -> tuple[Adapter, ...]:
    """Reads the adapters of a model, in the order in which they are given.

    Args:
        paths: name → folder.
        config: config.json of the model.
        model: its name, for messages.

    Raises:
        ModelError: an adapter that is no LoRA adapter of this model, or whose files cannot be used; the message names
            it and says what to do.
    """
    if not paths:
        return ()
    text = decoder_config(config)
    if not is_family(text):
        raise ModelError(
            f"adapters={sorted(paths)}: {model} ({text.get('model_type')!r}) runs in transformers, whose layers "
            f"take no adapters; merge the adapter into the model, or take one of {', '.join(FAMILIES)}"
        )
    maps = _maps_of(linear_maps(read_family(text)))
    return tuple(_read_adapter(name, Path(path).expanduser(), maps, model) for name, path in paths.items())


def _maps_of(products: Iterable[LinearTensors]) -> dict[str, _Map]:
    return {
        name: _Map(width, product.inputs)
        for product in products
        for name, width in zip(product.names, product.widths, strict=True)
    }


def _read_adapter(name: str, folder: Path, maps: Mapping[str, _Map], model: str) -> Adapter:
    try:
        _check_files(folder)
        config = _read_json(folder)
        scales = _Scales(config)
        pairs = _paired(folder / TENSORS, maps, model)
        _check_targets(config, pairs)
        return Adapter(name, _changes(folder / TENSORS, pairs, scales, maps))
    except ModelError as error:
        place = "" if str(folder) in str(error) else f"{folder}: "
        raise ModelError(f"adapter {name!r}: {place}{error}") from error


def _check_files(folder: Path) -> None:
    """Checks that both files of an adapter are there. Raises ModelError, which says what is there instead."""
    instead = "give the folder that PEFT's save_pretrained wrote"
    if not folder.is_dir():
        repo = f"; download one of the hub first: hf download {folder}" if _HUB_NAME.fullmatch(str(folder)) else ""
        raise ModelError(f"{folder} is {'a file' if folder.exists() else 'no folder'}; {instead}{repo}")
    if not (folder / CONFIG).is_file():
        whole = ", which holds a whole model," if (folder / "config.json").is_file() else ""
        raise ModelError(f"{folder}{whole} has no {CONFIG}; {instead}")
    if not (folder / TENSORS).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise ModelError(
                f"{folder} holds {pickles[0]}, which can run code when loaded; umbel reads {TENSORS} only: save it "
                "again with a current PEFT, which writes that"
            )
        raise ModelError(f"{folder} has no {TENSORS}; {instead}")


def _read_json(folder: Path) -> Config:
    path = folder / CONFIG
    try:
        if path.is_file() and path.stat().st_size > MOST_CONFIG_BYTES:
            raise ModelError(f"{path} has more than {MOST_CONFIG_BYTES} bytes, which no configuration has")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); give the folder that PEFT's save_pretrained wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        what = mistaken_for(beginning_of(path)) or f"no JSON ({error}); download it again"
        raise ModelError(f"{path} is {what}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a JSON object; download it again")
    _check_config(content)
    return content


def _check_config(config: Config) -> None:
    """Raises ModelError, by name, for what is not implemented."""
    instead = "merge the adapter into the model with PEFT (merge_and_unload), and load the merged model"
    if config.get("peft_type") != "LORA":
        raise ModelError(f"peft_type={shown(config.get('peft_type'))}: only LORA is implemented; {instead}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise ModelError(f"task_type={shown(config['task_type'])}: only adapters of CAUSAL_LM are implemented")
    if config.get("bias", "none") != "none":
        raise ModelError(f'bias={shown(config["bias"])}: only bias="none" is implemented; {instead}')
    if flag(config, "use_dora", False):
        raise ModelError(f"use_dora=true: DoRA is not implemented; {instead}")
    if config.get("modules_to_save"):
        raise ModelError(f"modules_to_save={shown(config['modules_to_save'])} is not implemented; {instead}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGING):
        raise ModelError(
            f"init_lora_weights={shown(start)}: it changes the model's own weights, which the folder does not hold; "
            "convert the adapter with PEFT (path_initial_model_for_weight_conversion), or load the merged model"
        )
    for key, value in config.items():
        if key not in _READ | _HARMLESS and value not in (None, False, "", [], {}):
            raise ModelError(f"{shown(key)}={shown(value)} is not implemented; {instead}")


class _Scales:
    """The rank and the scale of each map, by the configuration.

    Patterns are matched as PEFT matches them, `(.*\\.)?(PATTERN)$`, by automata that take time in proportion to the
    name: a hostile expression costs no more than another.
    """

    def __init__(self, config: Config) -> None:
        self._rank = positive_int(config, "r", 8)
        self._alpha = positive_number(config, "lora_alpha", 8.0)
        self._stabilised = flag(config, "use_rslora", False)
        self._ranks = _patterns(config, "rank_pattern")
        self._alphas = _patterns(config, "alpha_pattern")

    def rank(self, module: str) -> int:
        found = _first(self._ranks, module)
        return self._rank if found is None else int(found)

    def scale(self, module: str) -> float:
        found, rank = _first(self._alphas, module), self.rank(module)
        alpha = self._alpha if found is None else found
        return alpha / (math.sqrt(rank) if self._stabilised else rank)


def _patterns(config: Config, key: str) -> list[tuple[Dfa, float]]:
    entries = section(config, key)
    if len(entries) > MOST_PATTERNS:
        raise ModelError(f"{key} has {len(entries)} entries; a model has fewer maps than {MOST_PATTERNS}")
    whole = key == "rank_pattern"
    values = {name: (positive_int if whole else positive_number)(entries, name) for name in entries}
    return [(_compiled(key, pattern), float(value)) for pattern, value in values.items()]


def _compiled(key: str, pattern: str) -> Dfa:
    written = pattern.removeprefix("^").removesuffix("$")
    try:
        automaton = determinised(plain_regex(rf"(?:.*\.)?(?:{written})"), Limits(dfa_states=_PATTERN_STATES))
    except ConstraintRefused as error:
        raise ModelError(f"{key}: {shown(pattern)} cannot be read ({error}); write the name of a module") from None
    if not isinstance(automaton, Dfa):
        raise ModelError(f"{key}: {shown(pattern)} matches no name; write the name of a module")
    return automaton


def _first(patterns: Iterable[tuple[Dfa, float]], module: str) -> float | None:
    return next((value for automaton, value in patterns if _matches(automaton, module)), None)


def _matches(automaton: Dfa, text: str) -> bool:
    state = 0
    for character in map(ord, text):
        following = (
            to for ranges, to in automaton.edges[state] if any(low <= character <= high for low, high in ranges)
        )
        found = next(following, None)
        if found is None:
            return False
        state = found
    return automaton.accepting[state]


@dataclass(slots=True)
class _Pair:
    """The two tensors of a module, by their names in the file. `module`: its name in the file, for patterns."""

    module: str
    names: list[str]
    shapes: list[tuple[int, ...]]
    targets: tuple[str, ...]  # maps of the model, one after the other along the outputs of B


def _paired(path: Path, maps: Mapping[str, _Map], model: str) -> list[_Pair]:
    """Lists the modules of the file, each known to the model and whole.

    Raises:
        ModelError: the file cannot be read, or has tensors that the model has no place for.
    """
    headers = tensor_headers(path)
    found: dict[str, _Pair] = {}
    unknown = []
    for name, shape in headers.items():
        stem, _, leaf = name.removesuffix(".weight").rpartition(".")
        targets = _targets(stem, maps) if leaf in _SIDES and name.endswith(".weight") else ()
        if not targets:
            unknown.append(name)
            continue
        pair = found.setdefault(stem, _Pair(_module(stem), ["", ""], [(), ()], targets))
        pair.names[_SIDES[leaf]], pair.shapes[_SIDES[leaf]] = name, shape
    if unknown:
        kinds = sorted({name.rpartition(".layers.")[2].partition(".")[2] or name for name in maps})
        raise ModelError(
            f"{path} has {len(unknown)} tensors that {model} has no place for: {listing(unknown)}; adapters change "
            f"{', '.join(kinds)} of its layers: check that it was trained for this model"
        )
    if not found:
        raise ModelError(f"{path} holds no lora_A and lora_B; give the folder that PEFT's save_pretrained wrote")
    for stem, pair in found.items():
        if not all(pair.names):
            missing = next(side for side, place in _SIDES.items() if not pair.names[place])
            raise ModelError(f"{path} lacks {stem}.{missing}.weight; download it again")
    return list(found.values())


def _module(stem: str) -> str:
    return stem.removeprefix("base_model.model.")


def _targets(stem: str, maps: Mapping[str, _Map]) -> tuple[str, ...]:
    """Returns the maps of the model that a module of the file stands for; () if there are none."""
    name = _module(stem)
    if "language_model." in name:  # of a model that also sees
        inner = name.partition("language_model.")[2]
        name = inner if inner.startswith("model.") else f"model.{inner}"
    if name in maps:
        return (name,)
    owner, _, leaf = name.rpartition(".")
    parts = tuple(f"{owner}.{part}" for part in _FUSED.get(leaf, ()))
    return parts if all(part in maps for part in parts) else ()


def _check_targets(config: Config, pairs: Iterable[_Pair]) -> None:
    """Checks that every module that a list names is in the file.

    A text is an expression, or "all-linear". It is not read: the file has the modules that it has matched.
    """
    targets = config.get("target_modules")
    if targets is None or isinstance(targets, str):
        return
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ModelError(f"target_modules={shown(targets)}; write a list of names, or an expression")
    modules = [pair.module for pair in pairs]
    for target in targets:
        if not any(module == target or module.endswith(f".{target}") for module in modules):
            raise ModelError(
                f"target_modules names {shown(target)}, and {TENSORS} has no tensors of such a module; download both "
                "files again"
            )


def _changes(path: Path, pairs: Iterable[_Pair], scales: _Scales, maps: Mapping[str, _Map]) -> dict[str, LowRank]:
    changes: dict[str, LowRank] = {}
    checked = []
    for pair in pairs:
        outputs = sum(maps[target].outputs for target in pair.targets)
        inputs = maps[pair.targets[0]].inputs
        rank = scales.rank(pair.module)
        for name, shape, expected in zip(pair.names, pair.shapes, ((rank, inputs), (outputs, rank)), strict=True):
            if shape != expected:
                raise ModelError(
                    f"{path}: tensor {name} has shape {list(shape)}, and {list(expected)} is that of rank {rank} for "
                    "this model; check that the adapter was trained for it, and that both files belong together"
                )
        checked.append((pair, scales.scale(pair.module)))
    read = _reader(path)
    for pair, scale in checked:
        down, up = (_finite(path, name, read(name)) for name in pair.names)
        first = 0
        for target in pair.targets:
            if target in changes:
                raise ModelError(f"{path} changes {target} twice, by itself and as part of {pair.module}; keep one")
            changes[target] = LowRank(down, up[first : first + maps[target].outputs], scale)
            first += maps[target].outputs
    return changes


def _reader(path: Path) -> Any:  # Any: a function of safetensors, which is untyped
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise MissingExtraError("safetensors", "runtime") from error
    return safe_open(path, framework="pt").get_tensor


def _finite(path: Path, name: str, tensor: "torch.Tensor") -> "torch.Tensor":
    if not bool(tensor.isfinite().all()):
        raise ModelError(f"{path}: tensor {name} holds numbers that are not finite; train or download it again")
    return tensor
