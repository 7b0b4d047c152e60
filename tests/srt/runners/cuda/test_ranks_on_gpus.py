"""Two ranks on two GPUs: with graphs and without, with sums in symmetric memory and by NCCL, they write the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
import umbel as ul

from ...weights.tiny import BY_NAME, write_folder

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"dtype": "float32", "pool_tokens": 4000, "device": "cuda", "log_level": "error"}


@ul.function
def story(s: ul.State, about: str) -> None:
    s += "A story about " + about + ul.gen("text", max_tokens=24, temperature=0.0, ignore_eos=True)
    s += ul.gen("more", max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)


def told(folder: Path, **options: Any) -> tuple[list[str], dict[str, Any]]:
    """Returns the texts, and the status after them."""
    with ul.Runtime(str(folder), **OPTIONS, **options) as runtime:
        states = story.run_batch([{"about": about} for about in ("a fox", "two foxes", "the sea")], backend=runtime)
        return [state["text"] + state["more"] for state in states], dict(runtime.get_server_info())


def test_two_ranks_write_the_texts_of_one(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPUs, and two ranks need two")
    write_folder(tmp_path / "model", BY_NAME["qwen3"])
    expected, _ = told(tmp_path / "model")
    for options in (
        {"cuda_graphs": False},
        {"cuda_graphs": True},
        {"cuda_graphs": True, "overlap": False},
        {"cuda_graphs": True, "debug": {"symmetric_sums": False}},
    ):
        texts, status = told(tmp_path / "model", tensor_parallel=2, **options)
        assert texts == expected, options
        assert (status["graphs"] > 0) is options["cuda_graphs"], options
        assert status["ranks"] == 2
        if "debug" in options:
            assert status["sums"] == "nccl"
