"""What tests of pictures in whole models share: sequences with pictures, and the engine of CUDA on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from umbel.srt.cache.kv_pool import PoolSize
from umbel.srt.core.batch import Batch, PictureRows, PictureStore, picture_spans
from umbel.srt.multimodal.sequence import SequencePictures
from umbel.srt.multimodal.store import VisionStore
from umbel.srt.runners.cuda.build import build_cuda_runner
from umbel.srt.runners.cuda.device import HostAccelerator, StepLimits
from umbel.srt.runners.cuda.runner import CudaRunner

from ..runners.cuda.reference import reference_parts
from .reference import Piece, Sequences


class Seeing(Sequences):
    """Sequences whose rows of pictures are named, as the scheduler plans them."""

    def __init__(self, token_ids: Sequence[Sequence[int]], num_slots: int, store: PictureStore) -> None:
        super().__init__(token_ids, num_slots)
        self.pictures = [
            SequencePictures(picture_spans(ids, store.tokens, store.grid), store.both_ways) for ids in self.token_ids
        ]

    def batch(self, pieces: Sequence[Piece]) -> Batch:
        rows: list[PictureRows] = []
        places: list[NDArray[np.int64]] = []
        spans = []
        first = 0
        for piece in pieces:
            pictures, end = self.pictures[piece.sequence], piece.start + piece.count
            rows += pictures.rows(piece.start, end, first)
            places.append(pictures.rope_positions(piece.start, end))
            spans.append(pictures.seen_whole(piece.start, end))
            first += piece.count
        return replace(
            super().batch(pieces),
            pictures=tuple(rows),
            spans=tuple(spans) if any(spans) else (),
            rope_positions=np.concatenate(places, axis=1) if any(p.on_axes for p in self.pictures) else None,
        )


# Any: as of config.json
def on_device(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], num_slots: int, store: VisionStore
) -> CudaRunner:
    """Makes the engine of CUDA, with the references of its kernels on the host."""
    return build_cuda_runner(
        config,
        tensors,
        accelerator=HostAccelerator(),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        size=lambda geometry: PoolSize(num_slots),
        limits=StepLimits(rows=32, sequences=8),
        pictures=store,
        parts=reference_parts(),
    )
