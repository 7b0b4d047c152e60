"""A constraint compiler whose answers come when a test says so."""

from collections import Counter
from collections.abc import Callable

from umbel.lang.protocol import ConstraintEngine, ConstraintSpec
from umbel.srt.constraints.compiler import Answer, compile_constraint


class PatientCompiler:
    """`work` compiles what has been asked for since the last time."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.asked: list[ConstraintSpec] = []
        self._waiting: list[tuple[ConstraintSpec, Callable[[Answer | None], None], Callable[[], bool]]] = []

    def compile(
        self,
        spec: ConstraintSpec,
        engine: ConstraintEngine,
        answer: Callable[[Answer | None], None],
        wanted: Callable[[], bool],
    ) -> None:
        self._waiting.append((spec, answer, wanted))

    def work(self, instead: Answer | None = None) -> None:
        """`instead`: the answer to all of it."""
        waiting, self._waiting = self._waiting, []
        for spec, answer, wanted in waiting:
            if not wanted():
                answer(None)
                continue
            self.asked.append(spec)
            answer(instead or compile_constraint(spec, "fsm"))
