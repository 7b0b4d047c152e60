"""Tiny random models of transformers as oracles, and sequences run through our runner in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from umbel.srt.core.batch import Batch, StateRun
from umbel.srt.runners.torch_runner import TorchRunner

# Small, but with every dimension of its own, so that a swapped one is a shape error.
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def reference_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """A random float32 model with eager attention; weights are large enough that mistakes show."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**TINY, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:  # norm weights and biases: not all ones and zeros, or a missing one would not show
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "e_score_correction_bias")):  # buffers that checkpoints store
                buffer.normal_(1.0 if name.endswith("scalar") else 0.0, 0.2)
    return model


def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab] of one sequence, computed at once."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: tied tensors once."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
        tensors.pop("embed_out.weight", None)
    return tensors


def random_tokens(count: int, seed: int, vocab_size: int = 97) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


@dataclass(frozen=True)
class Piece:
    """`count` rows of sequence `sequence`, after `start` tokens that are in the pool."""

    sequence: int
    start: int
    count: int


class Sequences:
    """Sequences with slots scattered over the pool, so that a wrong slot never looks right."""

    def __init__(self, token_ids: Sequence[Sequence[int]], num_slots: int) -> None:
        self.token_ids = [np.array(ids, dtype=np.int64) for ids in token_ids]
        order = np.random.default_rng(7).permutation(np.arange(1, num_slots))
        ends = np.cumsum([len(ids) for ids in token_ids])
        self.slots = [order[end - len(ids) : end].astype(np.int32) for ids, end in zip(token_ids, ends, strict=True)]

    def batch(self, pieces: Sequence[Piece]) -> Batch:
        """All rows want their logits."""
        rows = [(self.token_ids[p.sequence], self.slots[p.sequence], p) for p in pieces]
        count = sum(p.count for p in pieces)
        return Batch(
            token_ids=np.concatenate([ids[p.start : p.start + p.count] for ids, _, p in rows]),
            positions=np.concatenate([np.arange(p.start, p.start + p.count) for p in pieces]).astype(np.int64),
            write_slots=np.concatenate([slots[p.start : p.start + p.count] for _, slots, p in rows]).astype(np.int64),
            query_lengths=np.array([p.count for p in pieces], dtype=np.int32),
            prefix_lengths=np.array([p.start for p in pieces], dtype=np.int32),
            slots=tuple(slots[: p.start + p.count] for _, slots, p in rows),
            logit_rows=np.arange(count, dtype=np.int64),
            states=tuple(run for p in pieces for run in self._runs(p)),
        )

    def _runs(self, piece: Piece) -> list[StateRun]:
        """The runs of recurrent states, the longer ones in two parts, with a snapshot between them."""
        own, snapshot = 1 + piece.sequence, 1 + len(self.token_ids) + piece.sequence
        before = own if piece.start else 0
        if piece.count < 4:
            return [StateRun(piece.count, before, own)]
        cut = piece.count // 3
        return [StateRun(cut, before, snapshot), StateRun(piece.count - cut, snapshot, own)]


def run_steps(runner: TorchRunner, sequences: Sequences, steps: Sequence[Sequence[Piece]]) -> list[torch.Tensor]:
    """Logits of every token of every sequence, whatever step computed it: [tokens, vocab] each."""
    collected: list[list[torch.Tensor]] = [[] for _ in sequences.token_ids]
    for pieces in steps:
        logits = runner.forward(sequences.batch(pieces)).values.clone()
        for piece, part in zip(pieces, logits.split([p.count for p in pieces]), strict=True):
            collected[piece.sequence].append(part)
    return [torch.cat(parts) for parts in collected]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())
