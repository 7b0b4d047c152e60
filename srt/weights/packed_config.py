"""Reads `quantization_config` of config.json: which packed format a folder has, and with which parameters.

    quant_method          what                                         refused
    awq                   4 bits, layout gemm                          gemv, marlin
    gptq                  4 or 8 bits, act-order, zero points v1, v2   2 and 3 bits
    auto-round            those of gptq and awq, by packing_format     its own
    compressed-tensors    pack-, int-, float- and naive-quantized      sparse, transforms, nvfp4
    fp8, fbgemm_fp8       e4m3, scales by tensor, output or block      e5m2
    bitsandbytes          NF4, FP4 (nested or not), int8
    mxfp4                 experts in blocks of 32

Which modules are packed is read from the file: a module with the tensors of the format is, one with a plain weight is
not, as the lists of exceptions in the configuration (modules_to_not_convert, ignore) say in words of each format.
Nothing here needs torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...lang.errors import ModelError, shown
from ..layers.config_values import Config, flag, section

Method = Literal["awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4"]

_INSTEAD = "use a checkpoint in another format, the unquantised safetensors, or a GGUF file"
_AUTO_ROUND: Mapping[str, Method] = {"auto_gptq": "gptq", "auto_awq": "awq"}
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The parameters of one kind of packed weights.

    Attributes:
        integer: codes are integers; False: float8.
        group: inputs that share a scale; None: the shape of the scales decides.
        block: outputs and inputs that share a scale, of float8; None: there are no blocks.
    """

    bits: int
    integer: bool = True
    group: int | None = None
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """The packed format of a folder.

    Attributes:
        schemes: one for formats that have one; compressed-tensors may have several, for different modules.
        zero_step: added to stored zero points (GPTQ v1 stores them minus one).
        act_order: GPTQ's groups may have any inputs; False: they must be in order.
    """

    method: Method
    schemes: tuple[WeightScheme, ...]
    zero_step: int = 0
    act_order: bool = False


def read_packed_config(config: Config) -> PackedConfig | None:
    """Returns the packed format that a config.json states; None: weights are floats.

    Raises:
        ModelError: a format or a parameter that is not implemented; the message says what to use instead.
    """
    stated = config.get("quantization_config")
    if stated is None:
        nested = config.get("text_config")
        stated = nested.get("quantization_config") if isinstance(nested, Mapping) else None
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise ModelError(f"quantization_config={shown(stated)} is no object; {_INSTEAD}")
    method = stated.get("quant_method")
    if method is None and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        method = "bitsandbytes"  # older versions state it so
    readers = {
        "awq": _awq,
        "gptq": _gptq,
        "auto-round": _auto_round,
        "auto_round": _auto_round,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "fbgemm_fp8": _fp8,
        "bitsandbytes": _bitsandbytes,
        "mxfp4": _mxfp4,
    }
    if not isinstance(method, str) or method not in readers:
        raise ModelError(
            f"the model is quantised with quant_method={shown(method)}, which umbel does not read; it reads "
            f"{', '.join(sorted(set(readers) - {'auto_round'}))}: {_INSTEAD}"
        )
    return readers[method](stated)


def _awq(stated: Config) -> PackedConfig:
    version = str(stated.get("version") or "gemm").lower()
    if version != "gemm":
        raise ModelError(f"AWQ: version={shown(version)}; umbel reads the layout 'gemm': {_INSTEAD}")
    return PackedConfig("awq", (WeightScheme(_bits(stated, "AWQ", (4,)), group=_group(stated, "AWQ")),))


def _gptq(stated: Config) -> PackedConfig:
    form = stated.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise ModelError(f"GPTQ: checkpoint_format={shown(form)}; umbel reads gptq and gptq_v2: {_INSTEAD}")
    if stated.get("dynamic"):
        raise ModelError(
            f"GPTQ: dynamic={shown(stated['dynamic'])}: modules of different bits are not read; {_INSTEAD}"
        )
    scheme = WeightScheme(_bits(stated, "GPTQ", (4, 8)), group=_group(stated, "GPTQ"))
    return PackedConfig(
        "gptq", (scheme,), zero_step=1 if form == "gptq" else 0, act_order=flag(stated, "desc_act", False)
    )


def _auto_round(stated: Config) -> PackedConfig:
    packing = str(stated.get("packing_format") or "")
    method = _AUTO_ROUND.get(packing.removeprefix("auto_round:"))
    if method is None:
        raise ModelError(
            f"auto-round: packing_format={shown(packing)}; umbel reads auto_round:auto_gptq and auto_round:auto_awq: "
            f"{_INSTEAD}"
        )
    if stated.get("extra_config"):
        raise ModelError(f"auto-round: extra_config: modules of different bits are not read; {_INSTEAD}")
    plain = {key: value for key, value in stated.items() if key not in ("version", "checkpoint_format")}
    return _awq(plain) if method == "awq" else _gptq(plain)


def _compressed_tensors(stated: Config) -> PackedConfig:
    form = stated.get("format") or "pack-quantized"
    if form not in _COMPRESSED:
        raise ModelError(f"compressed-tensors: format={shown(form)}; umbel reads {', '.join(_COMPRESSED)}: {_INSTEAD}")
    sparsity = section(stated, "sparsity_config").get("format") or "dense"
    if sparsity != "dense":
        raise ModelError(f"compressed-tensors: sparse weights ({shown(sparsity)}) are not read; {_INSTEAD}")
    if section(stated, "transform_config").get("config_groups"):
        raise ModelError(f"compressed-tensors: transform_config: rotated weights are not read; {_INSTEAD}")
    groups = section(stated, "config_groups")
    if not groups:
        raise ModelError(f"compressed-tensors: config_groups is empty; {_INSTEAD}")
    schemes = tuple(_compressed_scheme(name, group) for name, group in list(groups.items())[:64])
    return PackedConfig("compressed-tensors", schemes)


def _compressed_scheme(name: str, group: object) -> WeightScheme:
    where = f"compressed-tensors: {shown(name)}"
    weights = section(group, "weights") if isinstance(group, Mapping) else {}
    if not isinstance(group, Mapping) or not weights:
        raise ModelError(f"{where} states no weights; {_INSTEAD}")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise ModelError(
            f"{where}: weights of type {shown(kind)}, {shown(bits)} bits; umbel reads int 4, int 8 and float 8"
        )
    strategy = weights.get("strategy")
    size = weights.get("group_size")
    if strategy == "group" or (strategy is None and size not in (None, -1)):
        size = _group({"group_size": size}, where)
    else:
        size = None
    if (form := group.get("format")) and form not in _COMPRESSED:
        raise ModelError(f"{where}: format={shown(form)}; umbel reads {', '.join(_COMPRESSED)}: {_INSTEAD}")
    block = _block(weights.get("block_structure"), where) if strategy == "block" else None
    return WeightScheme(bits, integer=kind == "int", group=size, block=block)


def _fp8(stated: Config) -> PackedConfig:
    form = stated.get("fmt") or "e4m3"
    if form != "e4m3":
        raise ModelError(f"FP8: fmt={shown(form)}; umbel reads e4m3: {_INSTEAD}")
    stated_block = stated.get("weight_block_size")
    block = None if stated_block is None else _block(stated_block, "FP8")
    return PackedConfig("fp8", (WeightScheme(8, integer=False, block=block),))


def _bitsandbytes(stated: Config) -> PackedConfig:
    if stated.get("load_in_8bit") and not stated.get("load_in_4bit"):
        return PackedConfig("bitsandbytes", (WeightScheme(8),))
    kind = stated.get("bnb_4bit_quant_type") or "fp4"
    if kind not in ("nf4", "fp4"):
        raise ModelError(f"bitsandbytes: bnb_4bit_quant_type={shown(kind)}; umbel reads nf4 and fp4: {_INSTEAD}")
    return PackedConfig("bitsandbytes", (WeightScheme(4, integer=False),))


def _mxfp4(stated: Config) -> PackedConfig:
    return PackedConfig("mxfp4", (WeightScheme(4, integer=False, group=32),))


def _block(size: object, what: str) -> tuple[int, int]:
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 1 <= n <= 1 << 20 for n in size):
        raise ModelError(f"{what}: blocks of {shown(size)}; they should be two numbers, as [128, 128]")
    return size[0], size[1]


def _bits(stated: Config, what: str, known: tuple[int, ...]) -> int:
    bits = stated.get("bits", stated.get("w_bit"))
    if type(bits) is not int or bits not in known:
        raise ModelError(f"{what}: bits={shown(bits)}; umbel reads {' and '.join(map(str, known))}: {_INSTEAD}")
    return bits


def _group(stated: Config, what: str) -> int | None:
    """Returns the inputs of a group; None: all inputs are one group (−1)."""
    size = stated.get("group_size", stated.get("q_group_size", 128))
    if type(size) is not int or (size != -1 and not 1 <= size <= 1 << 20):
        raise ModelError(f"{what}: group_size={shown(size)}; it should be a positive number, or -1 for one group")
    return None if size == -1 else size
