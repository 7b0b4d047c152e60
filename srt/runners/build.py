"""Builds a runner from a configuration and its tensors: chooses device, dtype and kernels, sizes the pool."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...fsm.tokens.masks import Walk
from ...lang.errors import ParameterError
from ...lang.runtime_options import Kernels, KVDType, Weights, share_of_no_gpu
from ..attention.backend import TorchBackend
from ..cache.kv_pool import FLOAT8, KVGeometry, PoolSize, size_for_bytes, size_for_slots
from ..cache.state_pool import LEAST_STATES, MOST_STATES, states_for_bytes
from ..core.cards import resolve_device
from ..distributed.communicator import SINGLE_RANK, Communicator
from ..kernels.cpu.library import NoKernels, load_host_library, load_library
from ..kernels.cpu.trie_walk import CpuTrieWalk
from ..layers.checkpoint import Tensors
from ..layers.config_values import Config
from ..layers.low_rank import Adapter
from ..layers.quantized import QuantizedMethod, is_quantized, is_stacked
from ..models.decoder import Model, attention_geometry, build_model
from ..models.families import is_family, our_names, read_config
from ..models.read_fields import CONTEXT_LENGTH
from ..models.sharding import ShardedTensors, shard_config
from ..models.vision.config import reads_text_only, sees
from ..models.vision.parts import Renamed, build_vision, text_part, wrapped_text
from ..multimodal.store import VisionStore
from ..weights.packed_tensors import dense_view
from ..weights.quantization import Int4Method, require_dense
from .cuda.device import (
    Accelerator,
    StepLimits,
    accelerator_for,
    least_windows,
    measured_workspace,
    pool_size,
    probe_size,
    room_for_weights,
)
from .torch_runner import TorchRunner

if TYPE_CHECKING:
    from ..models.cpu_decoder import CpuDecoder
    from ..models.transformers_model import TransformersModel
    from .cpu_runner import CpuRunner
    from .cuda.decoder import DeviceModel
    from .cuda.runner import CudaRunner

_log = logging.getLogger(__name__)

BFLOAT16_SINCE = (8, 0)  # compute capability: Ampere
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_runner(
    config: Config,
    tensors: Tensors,
    *,
    kv_bytes: int | None = None,
    num_slots: int | None = None,
    window_slots: int | None = None,
    memory_share: float | None = None,
    dtype: str = "auto",
    kv_dtype: KVDType = "auto",
    device: str = "cpu",
    kernels: Kernels = "auto",
    weights: Weights = "auto",
    tree_attention: bool = True,
    torch_prompts: bool = True,
    screened_head: bool = True,
    cuda_graphs: bool = True,
    limits: StepLimits | None = None,
    pack: bool | None = None,
    context_length: int | None = None,
    communicator: Communicator = SINGLE_RANK,
    adapters: Sequence[Adapter] = (),
) -> "TorchRunner | CpuRunner | CudaRunner":
    """Builds model, pool and kernels. Give the pool's size as `kv_bytes` or as `num_slots`. On a CUDA device it may be
    left out: the pool then takes the memory that the weights and the largest step leave, of all that is free, or of
    `memory_share` of the device's. `window_slots` of the pool are for layers with a window; None: as many as are
    useful; 0: these layers have the slots of the others.

    With kernels "auto", a model that the device's own kernels cannot run runs in torch, and a warning says why. `pack`
    chooses torch's layout of the weights. The tower of a vision model runs in torch. No sequence will be longer than
    `context_length`; None: than the model's own. LongRoPE (Phi) rotates by the longest sequence that may come.

    `torch_prompts`: on the Triton kernels, long prompts attend by torch's kernel (attention/long_prompts.py).

    With a `communicator` of several ranks, each rank makes this call, with the same arguments except for its device,
    and builds its part; `kv_bytes` is per rank. Every rank has the whole tower. The native kernels compute a step in
    one call, in which ranks cannot communicate, so on the CPU torch computes.

    `adapters` were read for this model; rows of a step name them by their place. Ranks have none.

    Raises:
        ModelError: configuration or tensors that cannot be used.
        ParameterError: the pool is too small, the dtype or device unknown, or kernels or weights not available here.
    """
    target = resolve_device(device)
    if memory_share is not None and target.type == "cpu":
        raise share_of_no_gpu(memory_share)
    accelerator = accelerator_for(target, memory_share)  # a device that cannot be used is refused first
    sizes = [size for size in (kv_bytes, num_slots) if size is not None]
    if len(sizes) > 1 or (not sizes and target.type == "cpu"):
        raise ParameterError(f"kv_bytes={kv_bytes}, num_slots={num_slots}: write exactly one of them")
    resolved = resolve_dtype(dtype, target, config)
    if dtype == "auto" and target.type == "cuda" and resolved is torch.float32 and communicator.rank == 0:
        kind = config.get("model_type")
        _log.warning("%s computes in float32: its activations exceed float16, and this GPU has no bfloat16", kind)
    config, tensors = dense_view(config, tensors)
    pictures = None
    if sees(config):
        pictures = VisionStore(build_vision(config, tensors, dtype=resolved, device=target))
        config, tensors = text_part(config, tensors)
    elif reads_text_only(config):
        _log.warning("pictures are not read: umbel has no tower of a %s; its text part runs", config["model_type"])
        config, tensors = wrapped_text(config, tensors)
    if context_length is not None:
        config = {**config, CONTEXT_LENGTH: context_length}
    if (names := our_names(config, tensors)) is not None:
        tensors = Renamed(tensors, names)
    if communicator.ranks > 1:
        config, tensors = shard_config(config, communicator.ranks), ShardedTensors(tensors, config, communicator)
    build = _Build(
        config=config,
        tensors=tensors,
        accelerator=accelerator,
        device=target,
        dtype=resolved,
        kv_dtype=FLOAT8 if kv_dtype == "fp8" else resolved,
        kv_bytes=kv_bytes,
        num_slots=num_slots,
        window_slots=window_slots,
        weights=weights,
        tree_attention=tree_attention,
        torch_prompts=torch_prompts,
        limits=limits or StepLimits(),
        pictures=pictures,
        communicator=communicator,
        adapters=adapters,
    )
    instead: list[str] = []  # why torch computes; said once it does
    if kernels == "triton" or (kernels == "auto" and target.type == "cuda"):
        if not is_family(config) and build.triton_obstacle() is None:
            build = build.in_transformers()
        on_cuda = build.on_triton(cuda_graphs=cuda_graphs)
        if not isinstance(on_cuda, str):
            return on_cuda
        instead.append(_torch_instead("triton", on_cuda, asked=kernels))
    if kernels == "native" or (kernels == "auto" and target.type == "cpu"):
        on_cpu = build.on_native(screened_head=screened_head)
        if not isinstance(on_cpu, str):
            return on_cpu
        instead.append(_torch_instead("native", on_cpu, asked=kernels))
    runner = build.on_torch(pack=pack)
    for reason in instead:
        _log.warning(reason)
    return runner


@dataclass(frozen=True, slots=True, kw_only=True)
class _Build:
    """The arguments of `build_runner`, checked, for one kind of kernels after the other."""

    config: Config  # of the decoder, and of this rank's part, as the tensors
    tensors: Tensors
    accelerator: Accelerator
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_bytes: int | None
    num_slots: int | None
    window_slots: int | None
    weights: Weights
    tree_attention: bool
    torch_prompts: bool
    limits: StepLimits
    pictures: VisionStore | None
    communicator: Communicator
    adapters: Sequence[Adapter]
    borrowed: "TransformersModel | None" = None  # the model, loaded by transformers

    def triton_obstacle(self) -> str | None:
        """Returns why the Triton kernels cannot run this model here, before it is loaded; None: they can."""
        from .cuda.build import obstacle

        return obstacle(self.config, dtype=self.dtype, kv_dtype=self.kv_dtype, device=self.device)

    def in_transformers(self) -> "_Build":
        """Returns the same for the model as transformers has loaded it."""
        from ..models.transformers_model import TransformersModel

        with room_for_weights(self.tensors, self.dtype, self.accelerator):
            model = self._torch_model(pack=None)
        assert isinstance(model, TransformersModel), "it is of no family"
        return replace(self, borrowed=model)

    def on_triton(self, *, cuda_graphs: bool) -> "CudaRunner | str":
        """Returns a runner on the Triton kernels, or why they cannot run this model."""
        from .cuda.build import build_cuda_runner, heads_obstacle

        added = 0 if self.pictures is None else self.pictures.added_layers
        if added and added >= len(read_config(self.config).layers):
            return f"they add features of pictures after layers but the last, and this model does after all {added}"
        reason = self.triton_obstacle()
        if reason is None and self.borrowed is not None:
            reason = heads_obstacle(self.borrowed, kv_dtype=self.kv_dtype)
        if reason is not None:
            return reason
        require_dense(self.weights, self.dtype, "the Triton kernels compute")
        return build_cuda_runner(
            self.config,
            self.tensors,
            accelerator=self.accelerator,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            size=partial(self._size, halved=self._recurrent) if self._sized else None,
            num_states=self._states,
            limits=self.limits,
            tree_attention=self.tree_attention,
            torch_prompts=self.torch_prompts,
            cuda_graphs=cuda_graphs,
            pictures=self.pictures,
            trie_walk=host_walk(),
            communicator=self.communicator,
            method=self._quantized,
            adapters=self.adapters,
            borrowed=self.borrowed,
        )

    def on_native(self, *, screened_head: bool) -> "CpuRunner | str":
        """Returns a runner on the native CPU kernels, or why they cannot run this model."""
        from .cpu_runner import build_cpu_runner, obstacle

        if self.communicator.ranks > 1:
            return f"they compute a step in one call, in which {self.communicator.ranks} ranks cannot meet"
        reason = obstacle(self.config, dtype=self.kv_dtype, device=self.device)
        if reason is not None:
            return reason
        try:
            library = load_library()
        except NoKernels as error:
            return str(error)
        library.umbel_set_threads(torch.get_num_threads())
        return build_cpu_runner(
            self.config,
            self.tensors,
            library=library,
            size=partial(self._size, halved=self._recurrent),
            num_states=self._states,
            dtype=self.dtype,
            weights=self.weights,
            tree_attention=self.tree_attention,
            screened_head=screened_head,
            pictures=self.pictures,
            adapters=self.adapters,
        )

    def on_torch(self, *, pack: bool | None) -> TorchRunner:
        """Returns a runner in torch, which runs every model on every device."""
        model = self.borrowed or self._torch_model(pack=pack)

        def runner(size: PoolSize) -> TorchRunner:
            backend = TorchBackend(attention_geometry(model), model.device, tree_attention=self.tree_attention)
            return TorchRunner(
                model,
                num_slots=size.slots,
                window_slots=size.window_slots,
                num_states=self._states(model, size.slots),
                backend=backend,
                pictures=self.pictures,
                kv_dtype=self.kv_dtype,
                weights=None if self._quantized is None else self._quantized.name,
            )

        geometry = model.kv_geometry.rounded_to(self.kv_dtype)
        if self._sized:
            return runner(self._size(geometry, halved=model.state_geometry is not None))
        workspace = measured_workspace(runner(probe_size(self.limits)), self.accelerator, self.limits, self.pictures)
        one_pool = self.window_slots == 0
        free = pool_size(geometry, self.accelerator, workspace=workspace, limits=self.limits, one_pool=one_pool)
        slots = self.communicator.minimum(free.slots)
        if model.state_geometry is not None:
            return runner(PoolSize(slots // 2))
        return runner(PoolSize(slots, self.communicator.minimum(free.window_slots)))

    def _torch_model(self, *, pack: bool | None) -> Model:
        """Loads the model for torch: the decoder of its family, or that of transformers."""
        require_dense(self.weights, self.dtype, "torch computes")
        if self.weights == "int4" and not is_family(self.config):
            raise ParameterError(
                f"weights='int4': {self.config.get('model_type')!r} runs in transformers, with weights of the dtype; "
                "leave weights out"
            )
        return build_model(
            self.config,
            self.tensors,
            dtype=self.dtype,
            device=self.device,
            pack=pack,
            communicator=self.communicator,
            adapters=self.adapters,
            method=self._quantized,
        )

    @property
    def _quantized(self) -> QuantizedMethod | None:
        """Returns the method of torch and Triton for weights in fewer bits; None: weights are floats of the dtype."""
        if not is_family(self.config):
            return None
        if self.weights == "int4":
            return Int4Method()
        packed = is_quantized(self.tensors) or is_stacked(self.tensors)
        return QuantizedMethod() if self.weights == "auto" and packed else None

    @property
    def _recurrent(self) -> bool:
        """Returns whether the model has recurrent states."""
        return is_family(self.config) and read_config(self.config).state_geometry(self.dtype) is not None

    @property
    def _sized(self) -> bool:
        """Returns whether the pool's size is given; otherwise it takes all memory that is left."""
        return self.kv_bytes is not None or self.num_slots is not None

    def _size(self, geometry: KVGeometry, *, halved: bool = False) -> PoolSize:
        """Returns the size of the pool. halved: the other half of its bytes is that of recurrent states."""
        limits, given = self.limits, self.window_slots
        if self.num_slots is not None and given is not None:
            return PoolSize(self.num_slots, given)
        if self.num_slots is not None:
            return size_for_slots(geometry, self.num_slots, least_windows=limits.rows, sequences=limits.sequences)
        assert self.kv_bytes is not None, "one of the two is given"
        budget = self.kv_bytes // 2 if halved else self.kv_bytes
        least = least_windows(geometry, limits)
        return size_for_bytes(geometry, budget, least_windows=least, one_pool=given == 0)

    def _states(self, model: "Model | CpuDecoder | DeviceModel", slots: int) -> int:
        """Returns the size of the pool of states, which has as many bytes as the KV pool of `slots`; 0: no states."""
        if model.state_geometry is None:
            return 0
        if self.kv_bytes is not None:
            return states_for_bytes(model.state_geometry, self.kv_bytes // 2)
        fitting = slots * model.kv_geometry.bytes_per_slot // model.state_geometry.bytes_per_slot
        return min(max(fitting, LEAST_STATES), MOST_STATES)


def _torch_instead(tried: Kernels, reason: str, *, asked: Kernels) -> str:
    """Says why torch computes. Raises ParameterError if the caller requested the kernels that were tried."""
    if asked == tried:
        raise ParameterError(f'kernels="{tried}": {reason}; leave it out, and torch computes')
    return f"torch computes, not the {tried} kernels: {reason}"


def host_walk() -> Walk | None:
    """Loads the native trie walk that makes masks on the host, for any device.

    None, with a warning, where it cannot be compiled: then numpy makes the masks, which takes many times as long.
    """
    try:
        return CpuTrieWalk(load_host_library())
    except NoKernels as error:
        _log.warning("numpy walks through the vocabulary for masks: %s", error)
        return None


def resolve_dtype(name: str, device: torch.device, config: Config) -> torch.dtype:
    """Returns the dtype of that name; "auto" is the fastest one that the device multiplies and the model fits.

    A GPU before Ampere has float16 and no bfloat16. Models that leave its range compute in float32 there.
    """
    if name != "auto" and name not in DTYPES:
        raise ParameterError(f'dtype={name!r}; write "auto" or one of {", ".join(DTYPES)}')
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32
    if torch.cuda.get_device_capability(device) >= BFLOAT16_SINCE:
        return torch.bfloat16
    return torch.float32 if leaves_float16(config) else torch.float16


def leaves_float16(config: Config) -> bool:
    """Returns whether activations of a model exceed 65,504, the largest float16.

    Gemma was trained in bfloat16, with embeddings times sqrt(hidden_size); its residual grows beyond that.
    """
    inner = config.get("text_config")
    kinds = [config.get("model_type"), inner.get("model_type") if isinstance(inner, Mapping) else None]
    return any(isinstance(kind, str) and "gemma" in kind for kind in kinds)


def cpu_multiplies_bfloat16() -> bool:
    """Returns whether the CPU has AVX512-BF16 or AMX. Else torch's bfloat16 is several times slower than float32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
