"""How a local runtime is to be started: one validated description that crosses the process boundary.

The user's process makes it, the gateway and the engine read it. It lives here because both sides may
import `lang` and neither may import the other.
"""

from typing import Literal, get_args

import msgspec

from . import checks
from .errors import ParameterError, shown
from .protocol import ConstraintEngine

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Weights = Literal["auto", "float32", "bf16", "int8"]
Kernels = Literal["auto", "native", "triton", "torch"]
KVDType = Literal["auto", "fp8"]
Policy = Literal["lpm", "fcfs"]
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
}

ORACLE = "oracle"  # the name of the model that checks the runtime: no weights, answers are a hash of the prompt
DEFAULT = "default"  # the embedded model


class RuntimeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything gateway and engine are told when they start.

    Attributes:
        model: "default", a name in the cache, a folder of safetensors, a GGUF file, or "oracle".
        dtype: of the KV cache and of what torch and the tiles of AMX compute; "auto" takes what this machine computes
            fastest. "float32" rounds nothing but the weights, if those are asked to be smaller.
        weights: how the native CPU kernels keep the model: "float32", "bf16", or "int8" (a scale for each output, half
            the memory, not exact); "auto" takes "bf16" for a checkpoint in 16 bits, else "float32".
        kv_dtype: of the KV cache: "fp8" rounds keys and values to float8 (e4m3, 3 bits of fraction), so that the same
            memory holds twice as many tokens as in 16 bits, and of the default model 7 of 100 most likely tokens
            change; "auto" takes dtype.
        kernels: "native" (C++ for the CPU, compiled once), "triton" (for CUDA devices), "torch", or "auto": those of
            the device where they run, torch elsewhere.
        cuda_graphs: steps of up to 1,024 rows on a CUDA device run as captured graphs.
        device: "auto" takes a GPU when there is one.
        tensor_parallel: ranks that compute the model together, a process each, on a CUDA device each or on the CPU.
            Each holds a part of the weights and of the KV cache; with fewer key heads than ranks, several hold the same
            one. Torch computes on the CPU then, and no graphs are captured on CUDA devices.
        context_length: most tokens of prompt and answer together; None takes the model's own.
        max_running: requests computed together in one step.
        chunk_size: most prompt tokens computed in one step; None computes prompts whole.
        pool_tokens: tokens the KV pool holds; None derives it from pool_memory.
        pool_memory: bytes for the KV pool, of each rank; None takes a share of what is free.
        policy: order of waiting requests: "lpm" (longest cached prefix first) or "fcfs" (arrival).
        radix_cache: keep and reuse prefixes.
        in_step_sharing: requests of the same step share a new prefix too.
        pin_share: part of the KV pool that pinned prefixes together may hold, 0 to 1; requests that find no room beside
            them take theirs.
        tree_attention: attend once to what sequences of a step share.
        overlap: the next step is planned while one runs. "auto" does so where the runner does not wait for its steps (a
            CUDA device); True refuses to start anywhere else.
        screened_head: find the most likely token without computing every logit in full.
        incremental_tokenization: keep the tokens of earlier texts, and encode only what is new.
        jump_forward: text that a constraint leaves no choice about is appended without steps of its own.
        constraint_engine: who enforces constraints: "fsm" (umbel's automata), "llguidance", "outlines-core",
            "interegular", or "auto": umbel's, and llguidance for what those refuse.
        constraint_cache: compiled constraints that are kept; 0 compiles for every request.
        max_wait: seconds after which a waiting request goes before cache-aware order.
        max_queue: requests the gateway holds; more are refused with OverloadedError.
        request_timeout: seconds after which a request without an earlier deadline ends.
        seed: of the generator that draws seeds for requests without one; None draws it.
        threads: CPU threads of the engine, of all ranks together; None takes torch's choice.
        check_every_step: check the integrity of pool and tree after every step (slow; for tests).
        step_delay: seconds the oracle sleeps in every step, for tests of slow engines.
        log_level: of gateway and engine, on standard error.
    """

    model: str = DEFAULT
    dtype: DType = "auto"
    weights: Weights = "auto"
    kv_dtype: KVDType = "auto"
    kernels: Kernels = "auto"
    cuda_graphs: bool = True
    device: Device = "auto"
    tensor_parallel: int = 1
    context_length: int | None = None
    max_running: int = 64
    chunk_size: int | None = 512
    pool_tokens: int | None = None
    pool_memory: int | None = None
    policy: Policy = "lpm"
    radix_cache: bool = True
    in_step_sharing: bool = True
    pin_share: float = 0.5
    tree_attention: bool = True
    overlap: bool | Literal["auto"] = "auto"
    screened_head: bool = True
    incremental_tokenization: bool = True
    jump_forward: bool = True
    constraint_engine: ConstraintEngine = "auto"
    constraint_cache: int = 256
    max_wait: float = 10.0
    max_queue: int = 1024
    request_timeout: float = 600.0
    seed: int | None = None
    threads: int | None = None
    check_every_step: bool = False
    step_delay: float = 0.0
    log_level: LogLevel = "warning"

    def __post_init__(self) -> None:
        checks.text("model", self.model, MAX_MODEL_LENGTH, "a name or a path, or leave it out for the default model")
        for name, known in _CHOICES.items():
            checks.one_of(name, getattr(self, name), known)
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                checks.integer(name, value, low, high, f"{low} to {high}")
        if self.pool_tokens is not None and self.pool_memory is not None:
            raise ParameterError("pool_tokens and pool_memory both say how large the KV pool is; give one of them")
        for name, (least, most) in _SECONDS.items():
            checks.number(name, getattr(self, name), least, most, f"{least} to {most} seconds")
        checks.number("pin_share", self.pin_share, 0, 1, "a part of the KV pool, 0 to 1")
        for name in _SWITCHES:
            checks.switch(name, getattr(self, name))
        if not isinstance(self.overlap, bool) and checks.plain_value(self.overlap) != "auto":
            raise ParameterError(f'overlap={shown(self.overlap)} is not known; write "auto", True or False')
        if self.step_delay and self.overlap is True:
            raise ParameterError(f"step_delay={self.step_delay} delays steps that wait; leave overlap=True out")
        if self.tensor_parallel > 1 and self.model == ORACLE:
            raise ParameterError(f"tensor_parallel={self.tensor_parallel}: the oracle has no weights; leave it out")
        if self.step_delay and self.model != ORACLE:
            raise ParameterError(f"step_delay slows the oracle model only; model={shown(self.model)} takes none")


MAX_MODEL_LENGTH = 4096  # characters; no path is longer

_SWITCHES = tuple(name for name, kind in RuntimeOptions.__annotations__.items() if kind is bool)
_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": get_args(DType),
    "weights": get_args(Weights),
    "kv_dtype": get_args(KVDType),
    "kernels": get_args(Kernels),
    "device": get_args(Device),
    "policy": get_args(Policy),
    "constraint_engine": get_args(ConstraintEngine),
    "log_level": get_args(LogLevel),
}
_INTEGERS = {
    "tensor_parallel": (1, 64),
    "context_length": (2, 1 << 24),
    "max_running": (1, 1 << 14),
    "chunk_size": (1, 1 << 20),
    "pool_tokens": (2, 1 << 31),
    "pool_memory": (1, 1 << 50),
    "max_queue": (1, 1 << 20),
    "constraint_cache": (0, 1 << 20),
    "seed": (0, 2**63 - 1),
    "threads": (1, 1024),
}
_OPTIONAL = ("context_length", "chunk_size", "pool_tokens", "pool_memory", "seed", "threads")
_SECONDS = {"max_wait": (0.0, 3600.0), "request_timeout": (0.001, 86400.0), "step_delay": (0.0, 60.0)}


def plain_options(options: RuntimeOptions) -> RuntimeOptions:
    """The same with plain numbers and strings in the place of numpy's and of subclasses, which cross no process."""
    given = msgspec.structs.asdict(options)
    changed = {name: plain for name, value in given.items() if (plain := checks.plain_value(value)) is not value}
    return msgspec.structs.replace(options, **changed)


class GatewayStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line a gateway reads on its standard input, as JSON; the pipe then is its lifeline."""

    folder: str  # of the sockets, 0700; the gateway removes it when it ends
    parent: int  # process id
    options: RuntimeOptions
    startup_timeout: float  # seconds; no start of an engine may take longer
    program_host: str  # the module that runs shipped programs; see `lang.programs.ProgramHost`


CLIENTS_SOCKET = "clients"  # in the folder; the gateway's ROUTER
LOCK_FILE = "lock"  # held by the living; a folder whose lock is free is stale
