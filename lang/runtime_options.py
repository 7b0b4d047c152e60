"""Declares the options of a local runtime, once, and checks them.

The user's process makes `RuntimeOptions`, the gateway and the engine read them. They live here because both sides may
import `lang` and neither may import the other.

A new option is a line in `RuntimeOptions` and one in `KeywordOptions` (or its group), which editors and type checkers
read; `tests/lang/test_runtime_options.py` compares the two.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from os import PathLike
from types import NoneType
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from . import checks
from .errors import ParameterError, shown, unknown_option
from .protocol import ConstraintEngine, Facts
from .sampling import checked_adapter
from .transport.keys import Listen

DType = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["auto", "float32", "bf16", "int8", "int4"]
Kernels = Literal["auto", "native", "triton", "torch"]
KVDType = Literal["auto", "fp8"]
Policy = Literal["lpm", "fcfs"]
PlacementName = Literal["added-delay", "cache-aware", "round-robin", "random", "power-of-two", "consistent-hashing"]
Auto = Literal["auto"]
Overlap = bool | Literal["auto"]
LogLevel = Literal["debug", "info", "warning", "error"]

# Options of earlier versions → why they went, and what to write.
GONE = {
    "foresight": "requests are admitted by what they need next; leave it out",
    "protect_waiting": "the least recently used prefixes are evicted first; leave it out",
    "deadline_pressure": "deadlines end requests and do not reorder them; leave it out",
    "fairness": "it is part of policy='lpm'; leave it out",
    "critical_path": "it is part of policy='lpm'; leave it out",
    "fork_hints": "it is part of policy='lpm'; leave it out",
    "partial_match": "any cached prefix is found; leave it out, or write radix_cache=False for no cache",
    "check_every_step": "it is for tests; write debug={'check_every_step': True}",
    "step_delay": "it is for tests; write debug={'step_delay': 0.1}",
}

ORACLE = "oracle"  # the name of the model that checks the runtime: no weights, answers are a hash of the prompt
DEFAULT = "default"  # the embedded model
MAX_MODEL_LENGTH = 4096  # characters; no path is longer
MAX_ADAPTERS = 256  # each is in memory
_ADAPTERS = 'a dict such as {"sql": "path/of/its/folder"}'

Options = TypeVar("Options", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a number may have, both ends included. `unit`: for the message of an error."""

    low: float
    high: float
    unit: str = ""
    text: str = ""  # what to write, in place of the range

    def __str__(self) -> str:
        return self.text or f"{self.low} to {self.high}{self.unit}"


def _check_of(name: str, kind: Any) -> Callable[[Any], object] | None:
    """The check that an annotation stands for; None for one that the struct checks by itself."""
    if get_origin(kind) is Annotated:
        number, limits = get_args(kind)
        kinds = get_args(number) or (number,)
        return partial(
            _check_number,
            name,
            limits,
            check=checks.number if float in kinds else checks.integer,
            optional=NoneType in kinds,
            automatic=Auto in kinds,
        )
    if get_origin(kind) is Literal:
        return lambda value: checks.one_of(name, value, get_args(kind))
    return partial(checks.switch, name) if kind is bool else None


def _check_number(
    name: str, limits: Range, value: object, *, check: Callable[..., object], optional: bool, automatic: bool
) -> None:
    """Checks a number by its limits. optional, automatic: None, or "auto", stands for one that is chosen later."""
    if (optional and value is None) or (automatic and isinstance(value, str) and checks.plain(value) == "auto"):
        return
    check(name, value, limits.low, limits.high, f'{limits}, or "auto"' if automatic else str(limits))


@cache
def _checks_of(struct: type[msgspec.Struct]) -> dict[str, Callable[[Any], object]]:
    hints = get_type_hints(struct, include_extras=True)
    return {name: check for name, kind in hints.items() if (check := _check_of(name, kind)) is not None}


def _check_fields(options: msgspec.Struct) -> None:
    """Raises ParameterError for the first field that is out of its range or not of its type."""
    for name, check in _checks_of(type(options)).items():
        check(getattr(options, name))


class DebugOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Switches for tests.

    Attributes:
        check_every_step: check the integrity of pool and tree after every step (slow).
        step_delay: seconds the oracle sleeps in every step, for tests of slow engines.
        pretend_step: no weights are loaded; steps take so many seconds and choose tokens by a hash, to measure what
            surrounds a device; 0: the model computes. Its pool has pool_tokens; it takes no pictures, and embeds none.
        block_cache: caches prefixes in blocks of so many tokens, found by their hash, in place of the radix tree, to
            compare both; 0: the tree.
        recording: a file to which the engine writes the lengths of its calls and the times of its steps, for
            `umbel simulate`, and no text; "" writes none. A file of this name is replaced.
        torch_prompts: on CUDA devices, steps of long prompts alone attend by torch's kernel; off: by ours, as all
            others do.
        symmetric_sums: ranks of tensor_parallel on CUDA devices with NVLink add up small parts by reading each other's
            memory; off: with NCCL, as all other parts.
        trace: a file to which the engine writes when its device ran steps and what the host did meanwhile, to find
            what a device waits for; "" writes none. A file of this name is replaced.
        random_weights: weights are random numbers of the shapes that the model's files name, and no number of these
            files is read: to measure a model whose weights are not at hand.
    """

    check_every_step: bool = False
    step_delay: Annotated[float, Range(0.0, 60.0, " seconds")] = 0.0
    pretend_step: Annotated[float, Range(0.0, 60.0, " seconds")] = 0.0
    block_cache: Annotated[int, Range(0, 1024)] = 0
    recording: str = ""
    torch_prompts: bool = True
    symmetric_sums: bool = True
    trace: str = ""
    random_weights: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        for name in ("recording", "trace"):
            if (path := getattr(self, name)) != "":
                checks.text(f"debug.{name}", path, MAX_MODEL_LENGTH, "the path of a new file")


class RuntimeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Holds the options of a runtime: each one's name, type, range and default, for user, gateway and engine.

    Users write them as parameters of `umbel.Runtime`, one by one or in groups (`cache=`, `scheduling=`). The checks are
    derived from the annotations below.

    Attributes:
        model: "default", a folder of safetensors, a GGUF file, the name of a model (docs/models.md), or "oracle".
        adapters: name → folder of a LoRA adapter of this model, as PEFT writes it (`--adapters sql=PATH,law=PATH`);
            `gen(adapter="name")` uses it. Calls with different adapters, and without one, run in one batch. The oracle
            takes names, and reads no folder.
        dtype: of the KV cache and of what torch and the tiles of AMX compute; "auto" takes what this machine computes
            fastest: bfloat16, on a GPU before Ampere float16, for Gemma float32 there. "float32" rounds nothing but the
            weights, and inputs of products with packed ones.
        weights: how the model is kept: "float32"; "bf16"; "int8" (native CPU kernels: a scale for each output, half the
            memory of 16 bits, not exact); "int4" (a scale for each 32 weights, head in 8 bits, a quarter, less exact:
            `umbel weights` measures both); "auto" keeps what the checkpoint has: 16 bits, float32, GGUF blocks, or
            packed matrices.
        kv_dtype: of the KV cache: "fp8" rounds keys and values to float8 (e4m3, 3 bits of fraction), so that the same
            memory holds twice as many tokens as in 16 bits, and of the default model 7 of 100 most likely tokens
            change; "auto" takes dtype.
        kernels: "native" (C++ for the CPU, compiled once), "triton" (for CUDA devices), "torch", or "auto": those of
            the device where they run, torch elsewhere.
        cuda_graphs: steps of up to 256 rows on a CUDA device, up to 1,024 on a large one, run as captured graphs.
        device: "cpu"; "cuda", the first CUDA device, or "cuda:1", the one of that index; "auto" takes the first CUDA
            device that torch can use, else the CPU. docs/runtime.md says which card computes what.
        tensor_parallel: ranks that compute the model together, a process each, on a CUDA device each or on the CPU.
            Each holds a part of the weights and of the KV cache; with fewer key heads than ranks, several hold the same
            one. Torch computes on the CPU then.
        replicas: engines that compute independently, each with the whole model and a pool of its own (tensor_parallel
            ranks each). Calls go to the one where they cost least, and to another one when theirs is lost. CPU threads
            are divided among them; on CUDA devices each takes the next tensor_parallel ones, from that of `device` on.
        placement: how one of several replicas is chosen for a call: "added-delay" (where it delays all calls least,
            by what each has cached and has to do; fork groups stay together), "cache-aware" (as SGLang's router),
            "round-robin", "random", "power-of-two", or "consistent-hashing".
        context_length: most tokens of prompt and answer together; None takes the model's own.
        max_running: requests computed together in one step; "auto": 64 on the CPU, 64 to 256 on a GPU, by its class.
        chunk_size: most prompt tokens computed in one step; None computes prompts whole; "auto": 512 on the CPU, 1,024
            to 8,192 on a GPU, by its class.
        pool_tokens: tokens the KV pool holds; None derives it from pool_memory. Layers that see a window of tokens keep
            fewer, where that is enough for max_running requests.
        pool_memory: bytes for the KV pool, of each rank; None takes a share of what is free: in a container, of what
            its limit leaves.
        memory_share: part of a GPU's memory that weights, steps and KV pool together may take, on each one that is
            used, 0.001 to 1: two runtimes with 0.45 run on one GPU. None: all that is free. In place of pool_tokens and
            pool_memory. Not for the CPU.
        host_cache: bytes of host memory for pages of 64 tokens that were used twice or are pinned: prefixes come from
            there when the KV pool has evicted them. None: none. docs/tiers.md has this and the next three.
        disk_cache: folder for such pages. They outlive the engine, and other engines on this machine may share it.
        disk_cache_size: bytes that all processes together keep in that folder.
        shared_cache: a server of the Redis protocol for such pages, "redis://host:6379/0", which engines share.
        policy: order of waiting requests: "lpm" (longest cached prefix first) or "fcfs" (arrival).
        radix_cache: keep and reuse prefixes.
        in_step_sharing: requests of the same step share a new prefix too.
        pin_share: part of the KV pool that pinned prefixes together may hold, 0 to 1. Requests that find no other room
            take that of hints. Explicit caches never give way: they hold at most what the pool has more than one
            sequence of context_length needs.
        salt_share: part of the KV pool that one salt may hold, cached and running together. At its share a salt evicts
            what it has cached itself, and its requests wait for each other. One that is longer is refused. 1: all of
            it.
        tree_attention: attend once to what sequences of a step share.
        overlap: the next step is planned while one runs. "auto" does so where the runner does not wait for its steps (a
            CUDA device); True refuses to start anywhere else.
        screened_head: find the most likely token without computing every logit in full.
        incremental_tokenization: keep the tokens of earlier texts, and encode only what is new.
        jump_forward: text that a constraint leaves no choice about is appended without steps of its own.
        token_guesses: steps also run guesses of the next tokens where that is faster: what followed the same words in
            the prompt and in earlier texts of the same salt. Right ones save steps, and texts stay the same. Not for
            the oracle.
        draft_model: a smaller model of the same tokenizer, named as `model` is, that guesses what the model will say.
            token_guesses then runs its guesses too, while they save more time than they take. It computes on the same
            device, and pool_memory does not count its keys. docs/runtime.md says when it pays.
        constraint_engine: enforces constraints: "fsm" (umbel's automata), "llguidance", "outlines-core",
            "interegular", or "auto": umbel's, and llguidance for what those refuse.
        constraint_cache: compiled constraints that are kept; 0 compiles for every request.
        max_wait: seconds after which a waiting request goes before cache-aware order.
        max_queue: requests the gateway holds; more are refused with OverloadedError.
        request_timeout: seconds after which a request without an earlier deadline ends.
        seed: of the generator that draws seeds for requests without one; None draws it.
        threads: CPU threads of all engines and ranks together; None takes torch's choice, at most the cores that the
            control groups of a container leave.
        kv_events: address at which the cached blocks are published in vLLM's schema, for foreign routers
            (docs/kv_events.md): a port of this machine ("5557"), "tcp://HOST:PORT" or "ipc://PATH". Replays and
            snapshots are at the next port, or at PATH.replay. None publishes nothing.
        debug: switches for tests, a dict or `DebugOptions`.
        log_level: of gateway and engine, on standard error.
    """

    model: str = DEFAULT
    adapters: dict[str, str] = {}
    dtype: DType = "auto"
    weights: Weights = "auto"
    kv_dtype: KVDType = "auto"
    kernels: Kernels = "auto"
    cuda_graphs: bool = True
    device: str = "auto"
    tensor_parallel: Annotated[int, Range(1, 64)] = 1
    replicas: Annotated[int, Range(1, 64)] = 1
    placement: PlacementName = "added-delay"
    context_length: Annotated[int | None, Range(2, 1 << 24)] = None
    max_running: Annotated[int | Auto, Range(1, 1 << 14)] = "auto"
    chunk_size: Annotated[int | Auto | None, Range(1, 1 << 20)] = "auto"
    pool_tokens: Annotated[int | None, Range(2, 1 << 31)] = None
    pool_memory: Annotated[int | None, Range(1, 1 << 50)] = None
    memory_share: Annotated[float | None, Range(0.001, 1, text="a part of the GPU's memory, 0.001 to 1")] = None
    host_cache: Annotated[int | None, Range(1 << 20, 1 << 50, " bytes")] = None
    disk_cache: str | None = None
    disk_cache_size: Annotated[int, Range(1 << 20, 1 << 50, " bytes")] = 16 << 30
    shared_cache: str | None = None
    policy: Policy = "lpm"
    radix_cache: bool = True
    in_step_sharing: bool = True
    pin_share: Annotated[float, Range(0, 1, text="a part of the KV pool, 0 to 1")] = 0.5
    salt_share: Annotated[float, Range(0.001, 1, text="a part of the KV pool, 0.001 to 1")] = 1.0
    tree_attention: bool = True
    overlap: Overlap = "auto"
    screened_head: bool = True
    incremental_tokenization: bool = True
    jump_forward: bool = True
    token_guesses: bool = True
    draft_model: str | None = None
    constraint_engine: ConstraintEngine = "auto"
    constraint_cache: Annotated[int, Range(0, 1 << 20)] = 256
    max_wait: Annotated[float, Range(0.0, 3600.0, " seconds")] = 10.0
    max_queue: Annotated[int, Range(1, 1 << 20)] = 1024
    request_timeout: Annotated[float, Range(0.001, 86400.0, " seconds")] = 600.0
    seed: Annotated[int | None, Range(0, 2**63 - 1)] = None
    threads: Annotated[int | None, Range(1, 1024)] = None
    kv_events: str | None = None
    debug: DebugOptions = DebugOptions()
    log_level: LogLevel = "warning"

    def __post_init__(self) -> None:
        checks.text("model", self.model, MAX_MODEL_LENGTH, "a name or a path, or leave it out for the default model")
        _check_fields(self)
        if not isinstance(self.debug, DebugOptions):
            raise ParameterError(f"debug={shown(self.debug)} is no DebugOptions; write DebugOptions(...)")
        if self.pool_tokens is not None and self.pool_memory is not None:
            raise ParameterError("pool_tokens and pool_memory both say how large the KV pool is; give one of them")
        automatic = isinstance(self.overlap, str) and checks.plain(self.overlap) == "auto"
        if not isinstance(self.overlap, bool) and not automatic:
            raise ParameterError(f'overlap={shown(self.overlap)} is not known; write "auto", True or False')
        _check_device(self.device)
        _check_adapters(self.adapters)
        _check_kv_events(self.kv_events)
        ranks, oracle = checks.plain_value(self.tensor_parallel), checks.plain_value(self.model) == ORACLE
        if ranks > 1 and oracle:
            raise ParameterError(f"tensor_parallel={ranks}: the oracle has no weights; leave it out")
        if ranks > 1 and self.adapters:
            raise ParameterError(f"tensor_parallel={ranks}: adapters are not cut into ranks; leave one of them out")
        _check_memory_share(self, oracle=oracle)
        _check_tiers(self, ranks)
        _check_draft(self, ranks)
        delay = checks.plain_value(self.debug.step_delay)
        if delay and self.overlap is True:
            raise ParameterError(f"step_delay={delay} delays steps that wait; leave overlap=True out")
        for name in ("recording", "trace"):
            if getattr(self.debug, name) and self.replicas > 1:
                raise ParameterError(f"debug.{name} is of one engine; replicas={self.replicas}: leave one of them out")
        if delay and not oracle:
            raise ParameterError(f"step_delay slows the oracle model only; model={shown(self.model)} takes none")
        _check_pretended(self, ranks, oracle=oracle)
        _check_random(self, ranks, oracle=oracle)


TIER_OPTIONS = ("host_cache", "disk_cache", "shared_cache")  # fastest first
SAVE_SECONDS = 5.0  # that an engine has at an orderly end to save pages of its cache


def _check_tiers(options: "RuntimeOptions", ranks: int) -> None:
    """Checks the options of the tiers of the cache."""
    for name, example in (("disk_cache", '"~/umbel-pages"'), ("shared_cache", '"redis://127.0.0.1:6379/0"')):
        if getattr(options, name) is not None:
            checks.text(name, getattr(options, name), MAX_MODEL_LENGTH, f"{example}, or leave it out")
    given = [name for name in TIER_OPTIONS if getattr(options, name) is not None]
    if given and ranks > 1:
        raise ParameterError(
            f"tensor_parallel={ranks}: ranks do not save their parts of pages; leave {' and '.join(given)} out"
        )
    if given and options.debug.block_cache:
        raise ParameterError(f"block_cache={options.debug.block_cache} has no tiers; leave {' and '.join(given)} out")
    if given and not options.radix_cache:
        raise ParameterError(f"radix_cache=False keeps no prefixes; leave {' and '.join(given)} out")


def share_of_no_gpu(share: float) -> ParameterError:
    """Returns the error of a memory_share where the CPU computes, which shares its memory by need."""
    return ParameterError(f"memory_share={share} is a part of a GPU's memory, and the CPU computes; write pool_memory")


def _check_memory_share(options: "RuntimeOptions", *, oracle: bool) -> None:
    """Checks that a share of a GPU's memory fits the other options."""
    share = options.memory_share
    if share is None:
        return
    if oracle:
        raise ParameterError(f"memory_share={share}: the oracle has no weights; leave it out")
    if options.pool_tokens is not None or options.pool_memory is not None:
        name = "pool_tokens" if options.pool_memory is None else "pool_memory"
        raise ParameterError(
            f"memory_share={share} gives the KV pool what weights and steps leave, and {name} says its size; give one "
            "of them"
        )
    if options.draft_model is not None:
        raise ParameterError(f"memory_share={share} counts no draft; write pool_tokens or pool_memory in its place")
    if options.device == "cpu":
        raise share_of_no_gpu(share)


def _check_pretended(options: "RuntimeOptions", ranks: int, *, oracle: bool) -> None:
    """Checks that no option needs a model where steps compute nothing."""
    seconds = checks.plain_value(options.debug.pretend_step)
    if not seconds:
        return
    if oracle:
        raise ParameterError(f"pretend_step={seconds}: the oracle computes; name a model, whose tokenizer is taken")
    given = [name for name in ("draft_model", "adapters", "pool_memory", "memory_share") if getattr(options, name)]
    if ranks > 1:
        given.append("tensor_parallel")
    if given:
        raise ParameterError(f"pretend_step={seconds}: no model computes; leave {' and '.join(given)} out")


def _check_random(options: "RuntimeOptions", ranks: int, *, oracle: bool) -> None:
    """Checks that the weights of one model on one device are what is made of random numbers."""
    if not options.debug.random_weights:
        return
    given = [name for name in ("draft_model", "adapters") if getattr(options, name)]
    if ranks > 1:
        given.append("tensor_parallel")
    if oracle:
        raise ParameterError("debug.random_weights: the oracle has no weights; name a folder of safetensors")
    if given:
        raise ParameterError(f"debug.random_weights: one model on one device; leave {' and '.join(given)} out")


def _check_draft(options: "RuntimeOptions", ranks: int) -> None:
    """Checks that a draft can guess with the other options."""
    if options.draft_model is None:
        return
    name = checks.text("draft_model", options.draft_model, MAX_MODEL_LENGTH, "a name or a path, or leave it out")
    if checks.plain_value(options.model) == ORACLE or name == ORACLE:
        raise ParameterError("draft_model: the oracle has no tokenizer in common with a model; leave it out")
    if not options.token_guesses:
        raise ParameterError(f"draft_model={shown(name)} guesses, and token_guesses=False; leave one of them out")
    if options.overlap is True:
        raise ParameterError(f"draft_model={shown(name)} guesses what follows a finished step; leave overlap=True out")
    if ranks > 1:
        raise ParameterError(f"tensor_parallel={ranks}: a draft is not cut into ranks; leave draft_model out")


def _check_adapters(adapters: object) -> None:
    given = checks.entries("adapters", adapters, MAX_ADAPTERS, _ADAPTERS)
    for name, path in given.items():
        checked_adapter("a name in adapters", name)
        checks.text(f"adapters[{name!r}]", path, MAX_MODEL_LENGTH, "the path of its folder")


_DEVICES = ("auto", "cpu", "cuda", "cuda:1")
_CUDA_DEVICE = re.compile(r"cuda:(0|[1-9][0-9]?)")


def _check_device(device: object) -> None:
    named = checks.plain(device) if isinstance(device, str) else ""
    if named not in _DEVICES and _CUDA_DEVICE.fullmatch(named) is None:
        raise ParameterError(f"device={shown(device)} is not known; write one of {', '.join(map(repr, _DEVICES))}")


_PUBLISHED_AT = re.compile(r"(?:tcp://(?:\[[^\]\s]+\]|[^:\s]+):)?(\d{1,5})|ipc://\S+")


def _check_kv_events(address: object) -> None:
    if address is None:
        return
    instead = 'a port such as "5557", "tcp://127.0.0.1:5557" or "ipc:///path/of/a/file"'
    found = _PUBLISHED_AT.fullmatch(checks.text("kv_events", address, MAX_MODEL_LENGTH, instead))
    if found is None or (found[1] and not 1 <= int(found[1]) < 65_535):  # the next port is for replays
        raise ParameterError(f"kv_events={shown(address)} is no address; write {instead}")


def most_of_salt(share: float, slots: int) -> int:
    """Returns how many slots of a KV pool one salt may hold: at least two, for a prompt and a token."""
    return slots if share >= 1 else min(slots, max(2, int(share * slots)))


def plain_options(options: RuntimeOptions) -> RuntimeOptions:
    """The same with plain numbers and strings in the place of numpy's and of subclasses, which cross no process."""
    return _plain(msgspec.structs.replace(options, debug=_plain(options.debug)))


def _plain(options: Options) -> Options:
    given = {name: getattr(options, name) for name in options.__struct_fields__}
    if isinstance(options, RuntimeOptions):
        given["adapters"] = {checks.plain(name): checks.plain(path) for name, path in options.adapters.items()}
        options = msgspec.structs.replace(options, adapters=given["adapters"])
    changed = {name: plain for name, value in given.items() if (plain := checks.plain_value(value)) is not value}
    return msgspec.structs.replace(options, **changed)


def facts_of(options: RuntimeOptions) -> Facts:
    """Every option by its name, those of `debug` among them; of adapters their names."""
    facts = msgspec.structs.asdict(options)
    debug = facts.pop("debug")
    return {**facts, **msgspec.structs.asdict(debug), "adapters": list(options.adapters)}


# ------------------------------------------------------------------------------------ as parameters of a call


class CacheOptions(TypedDict, total=False):
    """Options of `cache=`: the KV pool, prefixes in it, and what else is kept."""

    radix_cache: bool
    in_step_sharing: bool
    pin_share: float
    salt_share: float
    pool_tokens: int | None
    pool_memory: int | None
    memory_share: float | None
    host_cache: int | None
    disk_cache: str | None
    disk_cache_size: int
    shared_cache: str | None
    kv_dtype: KVDType
    incremental_tokenization: bool
    constraint_cache: int


class SchedulingOptions(TypedDict, total=False):
    """Options of `scheduling=`: which requests run, when, and how many."""

    policy: Policy
    max_running: int | Auto
    chunk_size: int | Auto | None
    max_wait: float
    max_queue: int
    request_timeout: float
    overlap: Overlap


class KeywordOptions(CacheOptions, SchedulingOptions, total=False):
    """Every option but `model`, for `**options: Unpack[KeywordOptions]`; see `RuntimeOptions` for what each does."""

    adapters: Mapping[str, str | PathLike[str]]
    dtype: DType
    weights: Weights
    kernels: Kernels
    cuda_graphs: bool
    device: str
    tensor_parallel: int
    replicas: int
    placement: PlacementName
    context_length: int | None
    tree_attention: bool
    screened_head: bool
    jump_forward: bool
    token_guesses: bool
    draft_model: str | None
    constraint_engine: ConstraintEngine
    seed: int | None
    threads: int | None
    kv_events: str | None
    log_level: LogLevel
    cache: CacheOptions | Mapping[str, Any]  # Any: checked when the options are made
    scheduling: SchedulingOptions | Mapping[str, Any]
    debug: DebugOptions | Mapping[str, Any]


_GROUPS = {"cache": CacheOptions, "scheduling": SchedulingOptions}
OPTION_NAMES = frozenset(KeywordOptions.__annotations__)


def options_of(owner: str, model: str, given: Mapping[str, Any], others: tuple[str, ...] = ()) -> RuntimeOptions:
    """Makes options of the parameters of a call.

    Args:
        owner: the call, for messages: "Runtime()".
        given: options by name, and groups of them.
        others: parameters of the call that are no options, for messages.

    Raises:
        ParameterError: an unknown or removed option, with what to write; a wrong value; one option given twice.
    """
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if name in _GROUPS:
            members = _entries(name, value)
            _require_known(f"{name}=", members, frozenset(_GROUPS[name].__annotations__))
        else:
            members = {name: value}
            _require_known(owner, members, OPTION_NAMES | set(others))
        twice = sorted(flat.keys() & members)
        if twice:
            raise ParameterError(f"{owner} is given {twice[0]} twice, in a group and by itself; give one of them")
        flat |= members
    debug = flat.get("debug", DebugOptions())
    if not isinstance(debug, DebugOptions):
        members = _entries("debug", debug)
        _require_known("debug=", members, frozenset(DebugOptions.__struct_fields__))
        flat["debug"] = DebugOptions(**members)
    if "adapters" in flat:
        flat["adapters"] = {
            name: os.fspath(path) if isinstance(path, PathLike) else path
            for name, path in checks.entries("adapters", flat["adapters"], MAX_ADAPTERS, _ADAPTERS).items()
        }
    return RuntimeOptions(model=model, **flat)


def _entries(name: str, value: object) -> dict[str, Any]:
    return checks.entries(name, value, len(OPTION_NAMES), "a dict of options")


def _require_known(owner: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    for name in given:
        if name in known:
            continue
        if name in GONE:
            raise ParameterError(f"{owner} has no option {name!r} any more: {GONE[name]}")
        if name in OPTION_NAMES:
            raise ParameterError(f"{owner} has no option {name!r}; write it as a parameter of its own")
        raise unknown_option(owner, name, known)


def spell_out(function: Callable[..., None], options_at: str = "options") -> None:
    """Gives a function with `**options: Unpack[KeywordOptions]` the signature that `help()` shows: a parameter for each
    option, with its type and default."""
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != options_at]
    kinds = get_type_hints(RuntimeOptions)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in msgspec.structs.asdict(RuntimeOptions()).items()
        if name != "model"
    ]
    groups = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default={}) for name in _GROUPS]
    function.__signature__ = signature.replace(parameters=[*own, *options, *groups])  # type: ignore[attr-defined]


def described_options() -> str:
    """Returns lines for a docstring, indented by 8, about each option but `model`, the first one."""
    described = (RuntimeOptions.__doc__ or "").partition("Attributes:\n")[2]
    return described[described.find("\n        adapters:") :].strip()


# -------------------------------------------------------------------------------------- the gateway's first line


class GatewayStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line a gateway reads on its standard input, as JSON; the pipe then is its lifeline."""

    folder: str  # of the sockets, 0700; the gateway removes it when it ends
    parent: int  # process id
    options: RuntimeOptions
    startup_timeout: float  # seconds; no start of an engine may take longer
    program_host: str  # the module that runs shipped programs; see `lang.programs.ProgramHost`
    listen: Listen | None = None  # on a TCP port, too


CLIENTS_SOCKET = "clients"  # in the folder; the gateway's ROUTER
LOCK_FILE = "lock"  # held by the living; a folder whose lock is free is stale
