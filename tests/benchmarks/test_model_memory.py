"""The table of memory: it stands in the documentation as it is computed, and files of known sizes agree with it."""

from pathlib import Path

import pytest
from umbel.srt.models.families import read_config

from benchmarks.model_memory import MODELS, bytes_of_weights, q4_k_m, table

INSTALL = Path(__file__).resolve().parents[2] / "docs" / "install.md"
FILES = {"Llama 3.1 8B": 4.921, "Llama 3.2 1B": 0.808, "Qwen3-8B": 5.028}  # GB of published files in Q4_K_M


def test_the_documentation_has_the_table() -> None:
    assert "\n".join(table()) in INSTALL.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FILES)
def test_published_files_have_the_size_that_is_computed(name: str) -> None:
    """They have a tokenizer and norms, too, of up to 10 MB."""
    (model,) = (model for model in MODELS if model.name == name)
    config = read_config(model.config)
    assert 0 < FILES[name] - bytes_of_weights(config, q4_k_m(config)) / 1e9 < 0.01
