"""Configuration and tensors → a runner: what can be built, in which order, and how large its pool gets.

weights that fit → read, tensor by tensor → the largest step, measured → the pool → graphs
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ....fsm.tokens.trie_walk import Walk
from ....lang.errors import ParameterError
from ...cache.kv_pool import FLOAT8, KVGeometry
from ...distributed.communicator import SINGLE_RANK, Communicator
from ...layers.checkpoint import Tensors
from ...layers.config_values import Config
from ...models.families import is_family, read_config
from ...multimodal.store import VisionStore
from .captured import graph_logits, graph_plans, graph_rows
from .decoder import CudaDecoder, attention_geometry
from .device import Accelerator, CudaAccelerator, HostAccelerator
from .memory import (
    StepLimits,
    measured_workspace,
    pool_slots,
    probe_slots,
    require_room_for_weights,
    shortage,
    weight_bytes,
)
from .parts import Parts, triton_parts
from .plans import GraphBackend
from .runner import CudaRunner
from .warming import SUMMARISED, warming_steps


def obstacle(config: Config, *, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the Triton kernels cannot run a model here, as a clause; None when they can."""
    if not is_family(config):
        return f"{config.get('model_type')!r} runs in transformers"
    try:
        parts = triton_parts()
    except ImportError as error:
        return str(error)
    if device.type != "cuda" and not parts.anywhere:
        seen = 'write device="cuda"' if torch.cuda.is_available() else "torch sees none here"
        return f"they run on CUDA devices, not on the {device.type}; {seen}"
    if device.type == "cuda" and (reason := _too_old(device, kv_dtype)) is not None:
        return reason
    geometry = attention_geometry(read_config(config))
    try:
        parts.attention(geometry, device, dtype=dtype, kv_dtype=kv_dtype, tree_attention=True)
    except ParameterError as error:
        return str(error)
    return None


def _too_old(device: torch.device, kv_dtype: torch.dtype) -> str | None:
    """Why Triton does not compile for the device, or for these numbers on it; None when it does."""
    major, minor = torch.cuda.get_device_capability(device)
    here = f"this device has {major}.{minor}"
    if (major, minor) < (8, 0):
        return f"Triton compiles for devices of compute capability 8.0 and more, {here}"
    if kv_dtype is FLOAT8 and (major, minor) < (8, 9):
        return f'keys in float8 need a device of compute capability 8.9, {here}; write kv_dtype="auto"'
    return None


def accelerator_for(device: torch.device) -> Accelerator:
    """Raises ModelError for a device that torch cannot use."""
    return CudaAccelerator(device) if device.type == "cuda" else HostAccelerator()


def build_cuda_runner(
    config: Config,
    tensors: Tensors,
    *,
    accelerator: Accelerator,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_slots: Callable[[KVGeometry], int] | None = None,
    limits: StepLimits,
    tree_attention: bool = True,
    cuda_graphs: bool = True,
    pictures: VisionStore | None = None,
    trie_walk: Walk | None = None,
    parts: Parts | None = None,
    communicator: Communicator = SINGLE_RANK,
) -> CudaRunner:
    """Loads the weights, measures, makes the pool, captures the graphs and warms up.

    Args:
        num_slots: of the pool, given what one token costs; None takes what memory there is.
        limits: the largest step that there will be.
        pictures, trie_walk: as `CudaRunner` takes them.
        parts: kernels; None takes those in Triton.
        communicator: of the ranks of which this one builds its part, with `config` and `tensors` of that part; all get
            equally large pools.

    Raises:
        ModelError: configuration or tensors that cannot be used.
        ParameterError: too little memory; a model that the kernels do not take.
    """
    parts = parts or triton_parts()
    decoder = read_config(config)
    require_room_for_weights(tensors, dtype, accelerator)
    try:
        model = CudaDecoder(
            decoder,
            tensors,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=accelerator.device,
            kernels=parts.kernels,
            communicator=communicator,
        )
    except torch.OutOfMemoryError as error:
        raise shortage(weight_bytes(tensors, dtype), accelerator.free_memory(), dtype, accelerator) from error
    chooser = parts.chooser()

    def attention() -> GraphBackend[Any]:  # Any: only the backend reads the plans that it makes
        return parts.attention(
            attention_geometry(decoder),
            accelerator.device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            tree_attention=tree_attention,
        )

    def runner(slots: int, *, graphs: bool) -> CudaRunner:
        return CudaRunner(
            model,
            accelerator,
            name=parts.name,
            num_slots=slots,
            backend=attention(),
            chooser=chooser,
            limits=limits,
            cuda_graphs=graphs,
            pictures=pictures,
            trie_walk=trie_walk,
            communicator=communicator,
        )

    if num_slots is not None:
        slots = num_slots(model.kv_geometry)
    else:
        workspace = measured_workspace(runner(probe_slots(limits), graphs=False), accelerator, limits, pictures)
        if cuda_graphs:
            # Graphs have memory of their own, as much as the largest of them works in.
            workspace += workspace * graph_rows(limits) // limits.rows
            workspace += graph_bytes(model, attention(), accelerator, limits)
        slots = communicator.minimum(pool_slots(model.kv_geometry, accelerator, workspace=workspace))
    built = runner(slots, graphs=cuda_graphs)
    if accelerator.device.type == "cuda":  # elsewhere nothing is compiled, and a graph saves nothing
        built.capture_graphs()
        warm_up(built, limits)
    return built


def graph_bytes(
    model: CudaDecoder,
    backend: GraphBackend[Any],  # Any: as above
    accelerator: Accelerator,
    limits: StepLimits,
) -> int:
    """Bytes that all graphs read and write together: their logits, and the plans of attention."""
    plans = accelerator.peak_memory(lambda: graph_plans(backend, model.windows, limits, model.context_length))
    return plans + graph_logits(limits) * model.vocab_size * 4


def warm_up(runner: CudaRunner, limits: StepLimits) -> None:
    """Compiles what the first requests will need. Nobody reads what these steps say."""
    for step in warming_steps(limits, context_length=runner.context_length, vocab_size=runner.vocab_size):
        runner.launch(step)
    logits = torch.zeros((1, runner.vocab_size), device=runner.model.device)
    for top in SUMMARISED:
        runner.chooser.summarise(logits, np.zeros(1, dtype=np.int64), top)
