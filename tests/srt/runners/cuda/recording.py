"""Graphs on the host that know as little as CUDA's: operations and addresses, nothing of the Python around them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from umbel.srt.runners.cuda.build import Parts
from umbel.srt.runners.cuda.device import Graph, HostAccelerator

from .reference import ReferenceBackend, reference_parts


@dataclass(frozen=True)
class Operation:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def repeat(self) -> None:
        """Results come to where they came to when they were recorded."""
        again = self.function(*self.args, **self.kwargs)
        for before, now in zip(tree_leaves(self.result), tree_leaves(again), strict=True):
            if isinstance(before, torch.Tensor) and before.data_ptr() != now.data_ptr():
                before.copy_(now)


class Recorder(TorchDispatchMode):
    """Notes every operation of torch."""

    active: "Recorder | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.note(function, args, kwargs or {})

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        self.operations.append(Operation(function, args, kwargs, result))
        return result

    def alone(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Notes a call as one operation, and none of the operations that it makes."""
        with _disable_current_modes():
            return self.note(function, args, kwargs)


class RecordedGraph:
    def __init__(self, operations: list[Operation]) -> None:
        self._operations = operations

    def replay(self) -> None:
        with torch.inference_mode():
            for operation in self._operations:
                operation.repeat()


class RecordingAccelerator(HostAccelerator):
    """Replays what a call did, without calling it again. Attention has to be that of `recorded_parts`."""

    def capture(self, work: Callable[[], None]) -> Graph:
        recorder = Recorder.active = Recorder()
        try:
            with recorder:
                work()
        finally:
            Recorder.active = None
        return RecordedGraph(recorder.operations)


class RecordedAttention(ReferenceBackend):
    """One operation: how many calls of torch it makes depends on the plan, which a kernel reads from memory."""

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        recorder = Recorder.active
        if recorder is None:
            return super().attend(*args, **kwargs)
        result: torch.Tensor = recorder.alone(super().attend, *args, **kwargs)
        return result


def recorded_parts() -> Parts:
    parts = reference_parts()
    return Parts("recorded reference", parts.kernels, parts.chooser, RecordedAttention, anywhere=True)
