"""The gateway's cache of compiled constraints: concurrent requests for equal ones share one compilation.

find ──▶ kept            answered at once
     ──▶ being compiled  answered with the first request
     ──▶ new             handed to the compiler
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ...lang.protocol import ConstraintEngine, ConstraintSpec
from .compiler import Answer, Compiled, ConstraintCompiler, Refused

_Key = tuple[ConstraintSpec, str]


@dataclass(slots=True, eq=False)
class CompileInquiry:
    """A wait for a constraint. `forget` ends it without an answer."""

    tell: Callable[[Answer], None]
    wanted: bool = True

    def forget(self) -> None:
        self.wanted = False


@dataclass(slots=True, eq=False)
class _CompileWork:
    inquiries: list[CompileInquiry] = field(default_factory=list)

    def wanted(self) -> bool:
        return any(inquiry.wanted for inquiry in self.inquiries)


class CompiledCache:
    """Keeps compiled constraints and refusals; evicts the least recently used. Used from one thread.

    Args:
        compiler: compiles the missing ones.
        engine: used for requests that name none.
        entries: kept answers, refusals among them; 0 compiles for every request, even for concurrent equal ones.
        most_bytes: size of the kept answers.
    """

    def __init__(
        self, compiler: ConstraintCompiler, engine: ConstraintEngine, *, entries: int, most_bytes: int
    ) -> None:
        self._compiler = compiler
        self._engine = engine
        self._entries = entries
        self._most_bytes = most_bytes
        self._kept: OrderedDict[_Key, Compiled | Refused] = OrderedDict()
        self._bytes = 0
        self._works: dict[_Key, _CompileWork] = {}
        self._counters: Counter[str] = Counter(
            {"constraint_compiles": 0, "constraint_cache_hits": 0, "constraint_refusals": 0, "constraint_failures": 0}
        )

    @property
    def counters(self) -> dict[str, int]:
        return {**self._counters, **self._compiler.counters}

    def find(self, spec: ConstraintSpec, salt: str, tell: Callable[[Answer], None]) -> CompileInquiry:
        """Finds or compiles a constraint; calls `tell` once, now or later, unless the inquiry is forgotten before.

        Raises:
            OverloadedError: too many constraints wait to be compiled.
        """
        inquiry = CompileInquiry(tell)
        key = (spec, salt)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            self._counters["constraint_cache_hits"] += 1
            tell(kept)
            return inquiry
        work = self._works.get(key) if self._entries else None
        if work is not None and work.wanted():
            self._counters["constraint_cache_hits"] += 1
            work.inquiries.append(inquiry)
            return inquiry
        work = _CompileWork([inquiry])
        if self._entries:
            self._works[key] = work
        self._counters["constraint_compiles"] += 1
        try:
            self._compiler.compile(spec, self._engine, lambda answer: self._learn(key, work, answer), work.wanted)
        except BaseException:
            self._forget(key, work)
            raise
        return inquiry

    def _learn(self, key: _Key, work: _CompileWork, answer: Answer | None) -> None:
        self._forget(key, work)
        match answer:
            case None:  # no request waited any more
                return
            case Compiled():
                self._keep(key, answer)
            case Refused():
                if answer.lasting:
                    self._keep(key, answer)
                self._counters["constraint_refusals"] += 1
            case _:
                self._counters["constraint_failures"] += 1
        for inquiry in work.inquiries:
            if inquiry.wanted:
                inquiry.tell(answer)

    def _forget(self, key: _Key, work: _CompileWork) -> None:
        if self._works.get(key) is work:
            del self._works[key]

    def _keep(self, key: _Key, answer: Compiled | Refused) -> None:
        size = _size(key, answer)
        if not self._entries or size > self._most_bytes:
            return
        old = self._kept.pop(key, None)
        self._bytes += size - (_size(key, old) if old is not None else 0)
        self._kept[key] = answer
        while len(self._kept) > self._entries or self._bytes > self._most_bytes:
            self._bytes -= _size(*self._kept.popitem(last=False))


def _size(key: _Key, answer: Compiled | Refused) -> int:
    return len(key[0].source) + (answer.nbytes if isinstance(answer, Compiled) else len(answer.message))
