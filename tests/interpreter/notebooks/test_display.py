"""The bar of a batch in a notebook, with an IPython that is played."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.data.progress import Bar, BatchProgress, bar_for
from umbel.interpreter.notebooks.display import NotebookBar, displayed


class PlayedIPython:
    """Keeps what is displayed, and what replaces it."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.display = SimpleNamespace(display=self._display)

    def get_ipython(self) -> Any:
        return SimpleNamespace(kernel=object())

    def _display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> "PlayedIPython":
        assert raw
        assert display_id
        return self.update(bundle, raw=raw)

    def update(self, bundle: dict[str, str], *, raw: bool) -> "PlayedIPython":
        self.shown.append(bundle)
        return self


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedIPython:
    played = PlayedIPython()
    monkeypatch.setitem(sys.modules, "IPython", played)  # type: ignore[arg-type]
    return played


def numbers(done: int) -> BatchProgress:
    return BatchProgress(4, done, 0, 0, 1.0, ul.Usage(), 0.0)


def test_a_bar_is_replaced_ten_times_a_second_and_once_more_at_the_end(played: PlayedIPython) -> None:
    clock = iter([0.0, 0.05, 0.11, 0.11, 0.15, 9.0])
    with NotebookBar(4, lambda: next(clock)) as bar:
        bar.show(numbers(1))  # too early
        bar.show(numbers(2))
        bar.show(numbers(4))  # too early, and the last
    assert [bundle["text/plain"].split("  ")[0] for bundle in played.shown] == [
        "programs 0/4",
        "programs 2/4",
        "programs 4/4",
    ]
    assert 'value="4" max="4"' in played.shown[-1]["text/html"]


def test_a_bar_without_a_total_does_not_say_how_far_it_is(played: PlayedIPython) -> None:
    with NotebookBar(None):
        pass
    assert "value=" not in played.shown[0]["text/html"]
    assert played.shown[0]["text/plain"] == "programs 0"


def test_the_bar_is_that_of_the_place(played: PlayedIPython, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(bar_for(1), NotebookBar)
    monkeypatch.delitem(sys.modules, "IPython")
    assert isinstance(bar_for(1), Bar)
    assert displayed("<b>", "b") is None


def test_a_shell_without_a_kernel_is_no_notebook(played: PlayedIPython, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played, "get_ipython", lambda: SimpleNamespace())
    assert isinstance(bar_for(1), Bar)
