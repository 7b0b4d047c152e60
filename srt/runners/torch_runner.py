"""Runs steps: a batch from the scheduler in, logits out. Owns the model, its KV pool and its attention backend."""

import ctypes
import logging
from typing import TYPE_CHECKING, Any

import torch

from ...fsm.tokens.trie_walk import Walk
from ...lang.errors import ModelError, ParameterError
from ...lang.runtime_options import Kernels, KVDType, Weights
from ..attention.backend import AttentionBackend, AttentionStep
from ..attention.torch_backend import TorchBackend
from ..cache.kv_pool import FLOAT8, KVGeometry, KVPool, slots_for_bytes
from ..core.batch import Batch, Logits
from ..core.image_token_ids import without_pictures
from ..distributed.communicator import ALONE, Team
from ..kernels.cpu.build import NoKernels
from ..kernels.cpu.library import load_library, load_walk
from ..kernels.cpu.trie_walk import CpuTrieWalk
from ..layers.checkpoint import Tensors
from ..layers.config_values import Config
from ..models.model import Model, Rows, attention_geometry
from ..models.registry import build_model
from ..models.sharding import CutTensors, share_config
from ..models.vision.registry import build_vision, sees, text_part
from ..multimodal.store import VisionStore
from .cuda.memory import StepLimits, measured_workspace, pool_slots, probe_slots
from .logits_buffer import LogitsBuffer

if TYPE_CHECKING:
    from .cpu_runner import CpuRunner
    from .cuda.runner import CudaRunner

_log = logging.getLogger(__name__)
_TORCH_WEIGHTS = {torch.float32: "float32", torch.bfloat16: "bf16"}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """A `batch.Runner` around a real model.

    Args:
        model: what to run.
        num_slots: size of the KV pool, the dummy slot included.
        backend: attention kernels; None takes torch.
        pictures: what prompts may show the model; None: it reads text only.
        kv_dtype: of the KV pool; None is that of the model.
    """

    chooser = None
    trie_walk = None

    def __init__(
        self,
        model: Model,
        *,
        num_slots: int,
        # Any: each backend prepares plans in its own form, and only the backend reads it.
        backend: AttentionBackend[Any] | None = None,
        pictures: VisionStore | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.pictures = pictures
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.num_slots = num_slots
        self.pool = KVPool(model.kv_geometry.rounded_to(kv_dtype), num_slots, model.device)
        self.backend: AttentionBackend[Any] = backend or TorchBackend(attention_geometry(model), model.device)
        self._logits = LogitsBuffer(self.vocab_size, model.device)

    def forward(self, batch: Batch) -> Logits:
        """One step, all logits of every logit row: a view of a buffer that the next step overwrites."""
        device = self.model.device
        out = self._logits.take(len(batch.logit_rows))  # outside inference mode: a sampler may write to it
        with torch.inference_mode():
            given = self.pictures.given(batch.pictures) if self.pictures is not None and batch.pictures else None
            token_ids = batch.token_ids if given is None else without_pictures(batch.token_ids)
            attention = AttentionStep(
                backend=self.backend,
                pool=self.pool,
                plans={window: self.backend.plan(batch, window) for window in self.model.windows},
                write_slots=torch.from_numpy(batch.write_slots).to(device),
            )
            rows = Rows(
                token_ids=torch.from_numpy(token_ids).to(device),
                positions=torch.from_numpy(batch.positions).to(device),
                logit_rows=torch.from_numpy(batch.logit_rows).to(device),
                given=given,
            )
            return Logits.complete(self.model.forward(rows, attention, out=out))

    def facts(self) -> dict[str, str | int | float]:
        return {
            "kernels": "torch",
            "weights": str(self.model.kv_geometry.dtype).removeprefix("torch."),
            "kv_dtype": str(self.pool.geometry.dtype).removeprefix("torch."),
            "keys_read": self.backend.counters.keys_read,
            "keys_saved": self.backend.counters.keys_saved,
            **(self.pictures.facts() if self.pictures is not None else {}),
        }

    def clear(self) -> None:
        self.pool.clear()


def build_runner(
    config: Config,
    tensors: Tensors,
    *,
    kv_bytes: int | None = None,
    num_slots: int | None = None,
    dtype: str = "auto",
    kv_dtype: KVDType = "auto",
    device: str = "cpu",
    kernels: Kernels = "auto",
    weights: Weights = "auto",
    tree_attention: bool = True,
    screened_head: bool = True,
    cuda_graphs: bool = True,
    limits: StepLimits | None = None,
    pack: bool | None = None,
    team: Team = ALONE,
) -> "ModelRunner | CpuRunner | CudaRunner":
    """Model, pool and kernels in one call. Give the pool's size as `kv_bytes` or as `num_slots`; on a CUDA device it
    may be left out, and is what the weights and the largest step leave.

    With kernels "auto", a model that the device's own kernels cannot run here, for whatever reason, runs in torch, and
    a warning says why. `pack` is torch's way to lay weights out. The tower of a model that sees runs in torch.

    With a `team` of several ranks each of them makes this call, with the same arguments but for its device, and builds
    its part; `kv_bytes` is each rank's. A tower is on every rank. The native kernels compute a step in one call, in
    which ranks cannot meet, so torch computes; steps do not run as captured graphs.

    Raises:
        ModelError: configuration or tensors that cannot be used.
        ParameterError: a pool too small, an unknown dtype or device, kernels or weights that cannot be had here.
    """
    target = resolve_device(device)
    left_out = kv_bytes is None and num_slots is None
    if (kv_bytes is not None and num_slots is not None) or (left_out and target.type == "cpu"):
        raise ParameterError(f"kv_bytes={kv_bytes}, num_slots={num_slots}: write exactly one of them")
    resolved = resolve_dtype(dtype, target)
    pool_dtype = FLOAT8 if kv_dtype == "fp8" else resolved
    limits = limits or StepLimits()
    pictures = None
    if sees(config):
        pictures = VisionStore(build_vision(config, tensors, dtype=resolved, device=target))
        config, tensors = text_part(config, tensors)
    if team.ranks > 1:
        config, tensors = share_config(config, team.ranks), CutTensors(tensors, config, team)
        cuda_graphs = False

    def slots(geometry: KVGeometry) -> int:
        if num_slots is not None:
            return num_slots
        assert kv_bytes is not None, "one of the two is given"
        return slots_for_bytes(geometry, kv_bytes)

    if kernels == "triton" or (kernels == "auto" and target.type == "cuda"):
        from .cuda.building import accelerator_for, build_cuda_runner
        from .cuda.building import obstacle as cuda_obstacle

        reason = cuda_obstacle(config, dtype=resolved, kv_dtype=pool_dtype, device=target)
        if reason is None:
            _require_weights_in(resolved, weights, "the Triton kernels compute")
            return build_cuda_runner(
                config,
                tensors,
                accelerator=accelerator_for(target),
                dtype=resolved,
                kv_dtype=pool_dtype,
                num_slots=None if left_out else slots,
                limits=limits,
                tree_attention=tree_attention,
                cuda_graphs=cuda_graphs,
                pictures=pictures,
                trie_walk=_host_walk(),
                team=team,
            )
        _torch_instead("triton", reason, asked=kernels)
    if kernels == "native" or (kernels == "auto" and target.type == "cpu"):
        from .cpu_runner import build_cpu_runner, obstacle

        reason = obstacle(config, dtype=pool_dtype, device=target)
        if team.ranks > 1:
            reason = f"they compute a step in one call, in which {team.ranks} ranks cannot meet"
        library = None if reason else _library()
        if isinstance(library, ctypes.CDLL):
            library.umbel_set_threads(torch.get_num_threads())
            return build_cpu_runner(
                config,
                tensors,
                library=library,
                num_slots=slots,
                dtype=resolved,
                weights=weights,
                tree_attention=tree_attention,
                screened_head=screened_head,
                pictures=pictures,
            )
        _torch_instead("native", reason or str(library), asked=kernels)
    _require_weights_in(resolved, weights, "torch computes")
    model = build_model(config, tensors, dtype=resolved, device=target, pack=pack, team=team)

    def runner(slots: int) -> ModelRunner:
        backend = TorchBackend(attention_geometry(model), model.device, tree_attention=tree_attention)
        return ModelRunner(model, num_slots=slots, backend=backend, pictures=pictures, kv_dtype=pool_dtype)

    geometry = model.kv_geometry.rounded_to(pool_dtype)
    if left_out:
        from .cuda.building import accelerator_for

        accelerator = accelerator_for(target)
        workspace = measured_workspace(runner(probe_slots(limits)), accelerator, limits, pictures)
        return runner(team.least(pool_slots(geometry, accelerator, workspace=workspace)))
    return runner(slots(geometry))


def _torch_instead(tried: Kernels, reason: str, *, asked: Kernels) -> None:
    """Says why. Raises ParameterError where nothing else than the kernels that were tried will do."""
    if asked == tried:
        raise ParameterError(f'kernels="{tried}": {reason}; leave it out, and torch computes')
    _log.warning("torch computes, not the %s kernels: %s", tried, reason)


def _require_weights_in(dtype: torch.dtype, weights: Weights, who: str) -> None:
    if weights not in ("auto", _TORCH_WEIGHTS.get(dtype)):
        raise ParameterError(
            f"weights={weights!r}: {who}, with weights of the dtype, {dtype}; leave weights out, or run on the native "
            "CPU kernels"
        )


def _host_walk() -> Walk | None:
    """Masks are made on the host, whatever device computes. None, with a warning, where nothing can be compiled for it:
    then numpy makes them, which takes many times as long."""
    try:
        return CpuTrieWalk(load_walk())
    except NoKernels as error:
        _log.warning("numpy walks through the vocabulary for masks: %s", error)
        return None


def _library() -> ctypes.CDLL | NoKernels:
    """The native kernels, or why there are none."""
    try:
        return load_library()
    except NoKernels as error:
        return error


def resolve_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ParameterError(f'device={name!r}; write "cpu", "cuda" or "cuda:0"') from None
    if device.type not in ("cpu", "cuda"):
        raise ParameterError(f'device={name!r}; write "cpu", "cuda" or "cuda:0"')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f'device={name!r}: torch sees no CUDA device here; write "cpu"')
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 where the hardware multiplies it, else float32."""
    if name == "auto":
        on_cuda = device.type == "cuda"
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if on_cuda else cpu_multiplies_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        raise ParameterError(f'dtype={name!r}; write "auto" or one of {", ".join(DTYPES)}')
    return DTYPES[name]


def cpu_multiplies_bfloat16() -> bool:
    """AVX512-BF16 or AMX. Elsewhere torch emulates bfloat16, several times slower than float32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
