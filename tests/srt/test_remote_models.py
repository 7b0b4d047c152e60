"""A runtime whose model is on the hub: its gateway downloads it before the engine starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import umbel as ul
from umbel.lang.errors import ModelError

from ..fake_hub import FakeHub, serve_hub
from .weights.tiny import BY_NAME, write_folder

pytestmark = pytest.mark.processes


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    write_folder(tmp_path / "tiny", BY_NAME["qwen3"])
    files = {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()}
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with serve_hub(FakeHub(repositories={"org/tiny": files})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


def test_a_model_of_the_hub_is_downloaded_and_runs(
    hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ul.Runtime("org/tiny", pool_tokens=512, kernels="torch", progress=True) as runtime:
        assert runtime.final_of("the", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
        assert runtime.capabilities.name == "runtime org/tiny"
    (weights,) = (tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots").glob("*/model.safetensors")
    assert weights.stat().st_mode & 0o777 == 0o644  # as other programs write it
    shown = capfd.readouterr().err
    assert "umbel: downloading org/tiny" in shown
    assert shown.index("100 % of") < shown.index("umbel: loading org/tiny")


def test_a_download_that_fails_is_the_error_of_the_start(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="the hub has no model 'org/none', or it is private"):
        ul.Runtime("org/none").wait_ready()


def test_a_draft_of_the_hub_is_downloaded_for_a_model_on_disk(hub: FakeHub, tmp_path: Path) -> None:
    with ul.Runtime(str(tmp_path / "tiny"), draft_model="org/tiny", pool_tokens=512, kernels="torch") as runtime:
        assert runtime.final_of("the", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
    with pytest.raises(ModelError, match="the hub has no model 'org/none', or it is private"):
        ul.Runtime(str(tmp_path / "tiny"), draft_model="org/none").wait_ready()
