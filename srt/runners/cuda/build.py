"""Builds the CUDA runner: checks the model, loads, measures, sizes the pool, captures graphs and warms up.

weights that fit → read, tensor by tensor → the largest step, measured → the pool → graphs

A model of transformers is loaded before. Whether its steps can be graphs is tried out, on a few rows.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ....fsm.tokens.masks import Walk
from ....lang.errors import ParameterError
from ...attention.backend import AttentionGeometry
from ...attention.long_prompts import scratch_bytes
from ...attention.plan import Window
from ...cache.kv_pool import FLOAT8, KVGeometry, PoolSize
from ...cache.state_slots import NO_STATE
from ...core.batch import DUMMY_SLOT, Allowed, Batch, RowNeed, RowRequests, StateRun
from ...core.cards import sees_cuda
from ...distributed.communicator import SINGLE_RANK, Communicator
from ...kernels.triton.launcher import missing_for_launcher
from ...layers.checkpoint import Tensors
from ...layers.config_values import Config
from ...layers.low_rank import Adapter
from ...layers.quantized import QuantizedMethod
from ...models.families import is_family, read_config
from ...multimodal.store import VisionStore
from .decoder import CudaDecoder, DeviceModel, TransformersDecoder
from .device import (
    Accelerator,
    CaptureFailed,
    StepLimits,
    measured_workspace,
    pool_size,
    probe_size,
    room_for_weights,
)
from .graphs import GraphBackend, graph_logits, graph_plans, graph_rows
from .kernels import FusedKernels, QuantizedKernelMethod
from .runner import CudaRunner, DeviceChooser
from .slot_table import SlotTable, table_bytes

if TYPE_CHECKING:  # it imports transformers: seconds
    from ...models.transformers_model import TransformersModel

_log = logging.getLogger(__name__)


class MakeAttention(Protocol):
    """Makes an attention backend. Raises ParameterError for a geometry or dtype that the kernels do not support."""

    def __call__(
        self,
        geometry: AttentionGeometry,
        device: torch.device,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        tree_attention: bool,
        torch_prompts: bool = True,
        windows: Mapping[Window, AttentionGeometry],
    ) -> GraphBackend[Any]: ...  # Any: each backend has its own plans, and only the backend reads them


@dataclass(frozen=True, slots=True)
class Parts:
    """The kernels of a runner: those in Triton, or in tests their references in torch.

    Triton is imported only when used: that takes a second, and not every system has it.
    """

    name: str  # in the runner's facts
    kernels: FusedKernels
    chooser: Callable[[], DeviceChooser]
    attention: MakeAttention
    anywhere: bool  # they take CPU tensors, too


def triton_parts() -> Parts:
    """Returns the kernels in Triton. With TRITON_INTERPRET=1 they run in its interpreter, on the CPU.

    Raises:
        MissingExtraError: Triton is not installed.
    """
    from ...kernels.triton.attention_backend import TritonBackend  # says which extra is missing
    from ...kernels.triton.sampling import TritonSampling
    from . import triton_kernels

    return Parts("triton", triton_kernels, TritonSampling, TritonBackend, anywhere=triton_kernels.INTERPRETED)


def obstacle(config: Config, *, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns why the Triton kernels cannot run a model here, as a clause; None when they can.

    The heads of a model of transformers are known when it is loaded: see `heads_obstacle`.
    """
    try:
        parts = triton_parts()
    except ImportError as error:
        return str(error)
    if device.type != "cuda" and not parts.anywhere:
        seen = 'write device="cuda"' if sees_cuda() else "torch sees none here"
        return f"they run on CUDA devices, not on the {device.type}; {seen}"
    if device.type == "cuda" and (reason := _too_old(device, kv_dtype)) is not None:
        return reason
    if device.type == "cuda" and (missing := missing_for_launcher()) is not None:
        return "; ".join(missing)
    if not is_family(config):
        return None
    model = read_config(config)
    if model.both_ways:
        return "their rows see those before them only"
    geometry = model.attention_geometry
    try:
        parts.attention(
            geometry, device, dtype=dtype, kv_dtype=kv_dtype, tree_attention=True, windows=model.geometry_by_window
        )
    except ParameterError as error:
        return str(error)
    return None


def heads_obstacle(model: "TransformersModel", *, kv_dtype: torch.dtype) -> str | None:
    """Returns why the Triton kernels cannot attend in a model of transformers, as a clause; None when they can."""
    attention = triton_parts().attention
    for layer in dict.fromkeys(model.kv_geometry.layers):
        if layer.value_dim > layer.head_dim:
            return f"they take no values ({layer.value_dim} numbers) that are larger than their keys ({layer.head_dim})"
        geometry = AttentionGeometry.covering(model.heads, [layer])
        try:
            attention(geometry, model.device, dtype=model.dtype, kv_dtype=kv_dtype, tree_attention=True, windows={})
        except ParameterError as error:
            return str(error)
    return None


def _too_old(device: torch.device, kv_dtype: torch.dtype) -> str | None:
    """Returns why Triton does not compile for the device or for the KV dtype on it; None when it does."""
    major, minor = torch.cuda.get_device_capability(device)
    here = f"this device has {major}.{minor}"
    if (major, minor) < (8, 0):
        return f"Triton compiles for devices of compute capability 8.0 and more, {here}"
    if kv_dtype is FLOAT8 and (major, minor) < (8, 9):
        return f'keys in float8 need a device of compute capability 8.9, {here}; write kv_dtype="auto"'
    return None


def build_cuda_runner(
    config: Config,
    tensors: Tensors,
    *,
    accelerator: Accelerator,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    size: Callable[[KVGeometry], PoolSize] | None = None,
    num_states: Callable[[DeviceModel, int], int] | None = None,
    limits: StepLimits,
    tree_attention: bool = True,
    torch_prompts: bool = True,
    cuda_graphs: bool = True,
    pictures: VisionStore | None = None,
    trie_walk: Walk | None = None,
    parts: Parts | None = None,
    communicator: Communicator = SINGLE_RANK,
    method: QuantizedMethod | None = None,
    adapters: Sequence[Adapter] = (),
    borrowed: "TransformersModel | None" = None,
) -> CudaRunner:
    """Loads the weights, measures, makes the pool, captures the graphs and warms up.

    Args:
        size: computes the size of the pool from the geometry of one token; None: all memory that is left.
        num_states: computes the size of the pool of recurrent states, which has as many bytes as that of keys, from the
            model and the slots of that; None: the model has no such states.
        limits: the size of the largest step.
        pictures, trie_walk: see `CudaRunner`.
        parts: kernels; None: those in Triton.
        communicator: connects the ranks. Each builds its part, from `config` and `tensors` of that part; all pools have
            one size.
        method: loads weights in fewer bits; None: all weights are floats of the dtype.
        adapters: read for this model.
        borrowed: the model, loaded by transformers; None: it is of a family, and loaded here.

    Raises:
        ModelError: configuration or tensors that cannot be used.
        ParameterError: too little memory; a model that the kernels do not support.
    """
    parts = parts or triton_parts()
    model: DeviceModel
    if borrowed is not None:
        model = TransformersDecoder(borrowed, kv_dtype=kv_dtype)
    else:
        with room_for_weights(tensors, dtype, accelerator):
            model = CudaDecoder(
                read_config(config),
                tensors,
                dtype=dtype,
                kv_dtype=kv_dtype,
                device=accelerator.device,
                kernels=parts.kernels,
                communicator=communicator,
                method=None if method is None else QuantizedKernelMethod(method, parts.kernels),
                adapters=adapters,
            )
    attention = partial(
        parts.attention,
        model.attention_geometry,
        accelerator.device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tree_attention=tree_attention,
        torch_prompts=torch_prompts,
        windows=model.geometry_by_window,
    )
    make = partial(
        CudaRunner,
        model,
        accelerator,
        name=parts.name if borrowed is None else f"torch, {parts.name} attention",
        chooser=parts.chooser(),
        pictures=pictures,
        trie_walk=trie_walk,
        communicator=communicator,
    )

    def runner(pool: PoolSize, *, graphs: bool, limits: StepLimits = limits) -> CudaRunner:
        states = 0 if num_states is None else num_states(model, pool.slots)
        return make(size=pool, num_states=states, backend=attention(), limits=limits, cuda_graphs=graphs)

    if borrowed is not None and cuda_graphs and (reason := graph_obstacle(runner, accelerator)) is not None:
        _log.warning("steps of %s are launched kernel by kernel, not as graphs: %s", borrowed.name, reason)
        cuda_graphs = False
    if size is not None:
        pool = size(model.kv_geometry)
    else:
        scratch = scratch_bytes(model.kv_geometry, dtype, model.context_length) if torch_prompts else 0
        pool = _measured_pool(
            *(model, runner, attention, accelerator, limits, pictures, communicator),
            graphs=cuda_graphs,
            scratch=scratch,
        )
    built = runner(pool, graphs=cuda_graphs)
    if accelerator.device.type == "cuda":  # elsewhere nothing is compiled, and a graph saves nothing
        built.capture_graphs()
        warm_up(built, limits)
    return built


class MakeRunner(Protocol):
    """Makes a runner of one model. limits: the size of its largest step; those of the model's runner by default."""

    def __call__(self, pool: PoolSize, *, graphs: bool, limits: StepLimits = ...) -> CudaRunner: ...


def _measured_pool(
    model: DeviceModel,
    runner: MakeRunner,
    attention: Callable[[], GraphBackend[Any]],  # Any: as above
    accelerator: Accelerator,
    limits: StepLimits,
    pictures: VisionStore | None,
    communicator: Communicator,
    *,
    graphs: bool,
    scratch: int,
) -> PoolSize:
    """Returns the size of a pool that takes all memory which steps and graphs leave.

    scratch: bytes of a step that the measured one, whose prompts have no prefix, may not take.
    """
    workspace = measured_workspace(runner(probe_size(limits), graphs=False), accelerator, limits, pictures)
    windowed = any(window is not None for window in model.windows)
    workspace += table_bytes(limits.sequences, model.context_length, windows=windowed)
    if graphs:
        # Graphs have memory of their own, as much as the largest of them needs.
        workspace += workspace * graph_rows(limits) // limits.rows
        workspace += graph_bytes(model, attention(), accelerator, limits)
    workspace += scratch
    free = pool_size(model.kv_geometry, accelerator, workspace=workspace, limits=limits)
    slots = communicator.minimum(free.slots) // (1 if model.state_geometry is None else 2)  # half: of states
    return PoolSize(slots, communicator.minimum(free.window_slots))


TRIED = StepLimits(rows=2, sequences=2, logits=2)
CLOSE = 0.01  # of the largest logit: graphs and steps by themselves cut the keys in other parts


def graph_obstacle(runner: MakeRunner, accelerator: Accelerator) -> str | None:
    """Returns why steps of a model cannot be replayed as graphs, as a clause; None: they can.

    Our decoders are written for graphs. A model of transformers may read on the host what its rows have chosen, or send
    numbers in a step; a graph would repeat those of its capture. So three steps run as one graph, and as themselves.
    """
    steps = [_pair(position) for position in range(3)]
    pool = PoolSize(2 * len(steps) + 1)
    plain = runner(pool, graphs=False, limits=TRIED)
    expected = [plain.forward(step).values for step in steps]
    try:
        graphs = runner(pool, graphs=True, limits=TRIED)
        if (reason := accelerator.waits(lambda: plain.launch(steps[0]))) is not None:
            return reason
        for step, values in zip(steps, expected, strict=True):
            actual = graphs.forward(step).values
            if not float((actual - values).abs().max()) <= CLOSE * float(values.abs().max()):  # NaN fails as well
                return "a replayed step does not give the logits of the step"
    except CaptureFailed as error:
        return str(error)
    except Exception as error:  # a foreign model may fail in any way
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def _pair(position: int) -> Batch:
    """Builds a step of one row of each of two sequences."""
    slots = [np.arange(first, first + 2 * position + 1, 2, dtype=np.int32) for first in (1, 2)]
    return Batch(
        token_ids=np.array([position, 2 * position + 1], dtype=np.int64),
        positions=np.full(2, position, dtype=np.int64),
        write_slots=np.array([own[-1] for own in slots], dtype=np.int64),
        query_lengths=np.ones(2, dtype=np.int32),
        prefix_lengths=np.full(2, position, dtype=np.int32),
        slots=tuple(slots),
        logit_rows=np.arange(2),
    )


def graph_bytes(
    model: DeviceModel,
    backend: GraphBackend[Any],  # Any: as above
    accelerator: Accelerator,
    limits: StepLimits,
) -> int:
    """Returns the bytes of the buffers that all graphs share: logits, and the plans of attention."""
    backend.use_table(SlotTable(accelerator, 1, windows=False))
    plans = accelerator.peak_memory(lambda: graph_plans(backend, model.windows, limits))
    return plans + graph_logits(limits) * model.vocab_size * 4


def warm_up(runner: CudaRunner, limits: StepLimits) -> None:
    """Runs steps so that the kernels for the first requests are compiled. Their results are not read."""
    for step in warming_steps(limits, context_length=runner.context_length, vocab_size=runner.vocab_size):
        runner.launch(step)
    logits = torch.zeros((1, runner.vocab_size), device=runner.model.device)
    for top in SUMMARISED:
        runner.chooser.summarise(logits, np.zeros(1, dtype=np.int64), top)


ROWS = (1, 7, 16, 100)  # of a prompt: one, few, a multiple of 16, more than few
UNIT = 16  # a kernel is compiled once for multiples of it, and once for other numbers
SUMMARISED = (0, 1, 5)  # number of largest logits in a summary: none for scores, one, several


def warming_steps(limits: StepLimits, *, context_length: int, vocab_size: int) -> list[Batch]:
    """Builds prompts of several lengths, the longest last. Each chooses a token: from all, with limits, under a mask.

    Steps with more rows than the largest graph are launched kernel by kernel. After their last attention only rows with
    logits continue. Their products of few rows are compiled here, for one, some and 16 rows.
    """
    above = (graph_rows(limits) // UNIT + 1) * UNIT
    lengths = [min(rows, limits.rows, context_length) for rows in (*ROWS, above, above + 1, limits.rows)]
    logits = [min(count, rows) for rows, count in zip(lengths, (1, 1, 1, 1, UNIT, 7, 1), strict=True)]
    steps = list(map(_prompt, lengths, logits))
    kinds = (
        RowNeed.ARGMAX,
        RowNeed.SAMPLE,
        RowNeed.SAMPLE,
        RowNeed.SAMPLE,
        RowNeed.ARGMAX,
        RowNeed.ARGMAX,
        RowNeed.ARGMAX,
    )
    mask = Allowed(None, np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32))
    row_requests = [
        _row_requests(kind, count, limited=number in (2, 3), allowed=mask if number in (3, 4) else None)
        for number, (kind, count) in enumerate(zip(kinds, logits, strict=True))
    ]
    return [replace(step, row_requests=asked) for step, asked in zip(steps, row_requests, strict=True)]


def _prompt(rows: int, logits: int) -> Batch:
    """Builds a prompt of `rows` rows. logits: the number of its last rows that need logits."""
    return Batch(
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=np.arange(rows, dtype=np.int64),
        write_slots=np.full(rows, DUMMY_SLOT, dtype=np.int64),
        query_lengths=np.array([rows], dtype=np.int32),
        prefix_lengths=np.zeros(1, dtype=np.int32),
        slots=(np.full(rows, DUMMY_SLOT, dtype=np.int32),),
        states=(StateRun(rows, NO_STATE, NO_STATE + 1),),
        logit_rows=np.arange(rows - logits, rows),
    )


def _row_requests(kind: RowNeed, count: int, *, limited: bool, allowed: Allowed | None) -> RowRequests:
    """Builds row requests of one kind. limited: with top_k, top_p and min_p."""
    return RowRequests(
        kinds=np.full(count, kind, dtype=np.uint8),
        inverse_temperatures=np.ones(count),
        keys=np.zeros(count, dtype=np.uint64),
        top_k=np.full(count, 50 if limited else 0, dtype=np.int32),
        min_p=np.full(count, 0.01 if limited else 0.0),
        allowed={} if allowed is None else dict.fromkeys(range(count), allowed),
        top_p=np.full(count, 0.9 if limited else 1.0),
    )
