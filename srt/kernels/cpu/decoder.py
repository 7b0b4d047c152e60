"""Runs a whole decoder step as one native call. The torch reference is `models.decoder.TorchDecoder`."""

import ctypes
from collections.abc import Sequence

from ....lang.errors import EngineError

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
_FLOAT = ctypes.c_float


class DecoderShape(ctypes.Structure):
    """`DecoderShape` of decoder.h."""

    _fields_ = [
        *((name, _LONG) for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "layers")),
        *((name, _FLOAT) for name in ("epsilon", "attention_scale", "embedding_scale")),
        ("activation", ctypes.c_int),
        ("embedding", _POINTER),
        ("embedding_is_bf16", ctypes.c_int),
        ("final_norm", _POINTER),
    ]


class DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of decoder.h. Fields that are left out are null: the layer does not have them."""

    _fields_ = [
        *((name, _POINTER) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")),
        *((name, _POINTER) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, _POINTER) for name in ("query_norm", "key_norm")),
        ("rope", _LONG),
        ("plan", _LONG),
    ]


class DecoderStep(ctypes.Structure):
    """`DecoderStep` of decoder.h."""

    _fields_ = [
        ("rows", _LONG),
        ("outputs", _LONG),
        *((name, _POINTER) for name in ("token_ids", "positions", "write_slots", "output_rows")),
        *((name, _POINTER) for name in ("plans", "pools", "angles", "hidden")),
        ("given", _LONG),
        *((name, _POINTER) for name in ("given_rows", "given_values")),
    ]


class DecoderKernel:
    """The native decoder. The caller owns the memory that its structures point to and keeps it alive."""

    def __init__(self, library: ctypes.CDLL, shape: DecoderShape, layers: Sequence[DecoderLayer]) -> None:
        library.umbel_decoder_create.argtypes = [_POINTER]
        library.umbel_decoder_create.restype = _POINTER
        library.umbel_decoder_free.argtypes = [_POINTER]
        library.umbel_decoder_free.restype = None
        library.umbel_decoder_set_layer.argtypes = [_POINTER, _LONG, _POINTER]
        library.umbel_decoder_set_layer.restype = None
        library.umbel_decoder_forward.argtypes = [_POINTER, _POINTER]
        library.umbel_decoder_forward.restype = ctypes.c_int
        self._library = library
        self._handle = library.umbel_decoder_create(ctypes.byref(shape))
        for index, layer in enumerate(layers):
            library.umbel_decoder_set_layer(self._handle, index, ctypes.byref(layer))

    def forward(self, step: DecoderStep) -> None:
        """Runs one step. Raises EngineError when there is no memory for its buffers."""
        if not self._library.umbel_decoder_forward(self._handle, ctypes.byref(step)):
            raise EngineError(
                f"there is no memory for the buffers of a step of {step.rows} rows; write a smaller chunk_size or pool"
            )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.umbel_decoder_free(self._handle)
