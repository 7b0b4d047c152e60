"""Every tensor of a checkpoint is accounted for, by name."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from umbel.lang.errors import ModelError
from umbel.srt.models.decoder import build_model

from .reference import reference_model, tensors_of

REFERENCE = reference_model("llama")
CONFIG = REFERENCE.config.to_dict()


class LazyTensors(Mapping[str, torch.Tensor]):
    """Counts what is read, as a file would have to."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.reads: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def test_each_tensor_of_a_lazy_mapping_is_read_once() -> None:
    tensors = LazyTensors(tensors_of(REFERENCE))
    build_model(CONFIG, tensors, dtype=torch.float32)
    assert sorted(tensors.reads) == sorted(tensors)


def test_missing_tensors_are_named_before_anything_is_read() -> None:
    tensors = tensors_of(REFERENCE)
    del tensors["model.layers.0.mlp.down_proj.weight"], tensors["lm_head.weight"]
    lazy = LazyTensors(tensors)
    with pytest.raises(ModelError, match=r"lacks 2 tensors: lm_head\.weight, model\.layers\.0\.mlp\.down_proj"):
        build_model(CONFIG, lazy, dtype=torch.float32)
    assert lazy.reads == []


def test_left_over_tensors_are_named() -> None:
    tensors = {**tensors_of(REFERENCE), "model.layers.0.self_attn.q_proj.bias": torch.ones(48)}
    with pytest.raises(
        ModelError, match=r"1 tensors this model does not use: model\.layers\.0\.self_attn\.q_proj\.bias"
    ):
        build_model(CONFIG, tensors, dtype=torch.float32)


def test_a_wrong_shape_is_told_with_both_shapes() -> None:
    tensors = {**tensors_of(REFERENCE), "model.layers.2.self_attn.k_proj.weight": torch.zeros(48, 24)}
    with pytest.raises(ModelError, match=r"k_proj\.weight has shape \[48, 24\], the configuration says \[24, 48\]"):
        build_model(CONFIG, tensors, dtype=torch.float32)


def test_frequencies_stored_by_old_checkpoints_and_a_copy_of_a_tied_embedding_are_passed_over() -> None:
    reference = reference_model("llama", tie_word_embeddings=True)
    tensors = tensors_of(reference)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = build_model(reference.config.to_dict(), tensors, dtype=torch.float32)
    assert model.vocab_size == 97
