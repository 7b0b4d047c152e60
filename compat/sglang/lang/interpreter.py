"""`sglang.lang.interpreter`: what a program writes to and reads from."""

from typing import Any, Self

from ....lang.errors import ParameterError
from ....lang.protocol import Backend
from ....lang.state import State, StateGroup

ProgramStateGroup = StateGroup  # the branches of a fork


class StreamExecutor:
    """The view of a state that programs have. All reads wait for what the program has said."""

    def __init__(self, state: "ProgramState") -> None:
        self._state = state

    @property
    def text_(self) -> str:
        return self._state.text()

    @property
    def messages_(self) -> list[dict[str, str]]:
        return self._state.messages()

    @property
    def variables(self) -> dict[str, Any]:  # Any: texts, lists of them, and what the program assigned
        return {name: self._state[name] for name in self._state.variables}

    @property
    def meta_info(self) -> dict[str, dict[str, Any]]:
        return {name: self._state.get_meta_info(name) for name in self._state.variables}

    @property
    def backend(self) -> Backend:
        backend: Backend = self._state._sink.run.backend  # type: ignore[attr-defined]  # of the interpreter's sink
        return backend

    def get_var(self, name: str) -> Any:
        return self._state.get_var(name)

    def set_var(self, name: str, value: Any) -> None:
        self._state.set_var(name, value)

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Any]:
        return self._state.get_meta_info(name, timeout)

    def text(self) -> str:
        return self._state.text()

    def messages(self) -> list[dict[str, str]]:
        return self._state.messages()

    def sync(self) -> None:
        self._state.sync()

    def error(self) -> BaseException | None:
        return self._state.error()

    def end(self) -> None:
        """Waits for what was said: a run ends by itself."""
        self._state.sync()


class ProgramState(State):
    """A state under SGLang's name."""

    __slots__ = ()

    @property
    def stream_executor(self) -> StreamExecutor:
        return StreamExecutor(self)

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> StateGroup[Self]:
        """Forks the state, as `State.fork` does.

        Raises:
            ParameterError: offsets, which have no effect in SGLang either.
        """
        if position_ids_offset is not None:
            raise ParameterError(
                "fork() takes no position_ids_offset: a branch goes on where its parent stands; leave it out"
            )
        return super().fork(size)

    def __str__(self) -> str:
        """Returns all of the text; waits for it."""
        return f"ProgramState({self.text()})"
