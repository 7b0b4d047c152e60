"""Checks in the program's thread which operations may follow which: operations → steps.

Roles do not nest, a scope ends where it began, a file exists: a mistake raises at the line that makes
it, before anything of that line is queued.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..lang import ops
from ..lang.errors import ParameterError, ProgramError
from ..lang.sampling import SamplingParams
from ..lang.source import Source
from . import media
from .steps import ReasoningTags, Step
from .variables import Binding

Merge = Callable[[Mapping[str, Any]], SamplingParams]

REASONING_SUFFIX = "_reasoning_content"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The role and scopes open at this place of the program text. Immutable: a branch shares its parent's."""

    open_role: str | None = None
    open_scopes: tuple[str, ...] = ()

    def read(self, op: ops.Op, merge: Merge, source: Source | None = None) -> tuple["Grammar", list[Step]]:
        """Checks `op` here. Returns the grammar after it and its steps. `source`: its place in the program.

        Raises:
            ProgramError: a role or scope that does not fit.
            ParameterError: sampling parameters that do not fit together, an image that does not exist.
        """
        steps: list[Step] = []
        return self._read(op, merge, source, None, steps), steps

    def _read(
        self,
        op: ops.Op,
        merge: Merge,
        source: Source | None,
        tags: ReasoningTags | None,
        steps: list[Step],
    ) -> "Grammar":
        grammar = self
        match op:
            case ops.Sequence(members):
                for member in members:
                    grammar = grammar._read(member, merge, source, tags, steps)
            case ops.SeparateReasoning(inner, open_tag, close_tag):
                grammar = grammar._read(inner, merge, source, ReasoningTags(open_tag, close_tag), steps)
            case ops.Gen(name, options, result=result):
                thinking = Binding(name + REASONING_SUFFIX if name else "") if tags is not None else None
                sampling = merge(options)
                _check_logprobs(op, sampling)
                steps.append(Step(op, Binding(name or "", result), sampling, thinking, tags, source))
            case ops.Select(name, temperature=temperature):
                steps.append(Step(op, Binding(name or ""), merge({}) if temperature else None, source=source))
            case ops.RoleBegin(role):
                grammar = self._open_role(role)
                steps.append(Step(op, source=source))
            case ops.RoleEnd(role):
                grammar = self._close_role(role)
                steps.append(Step(op, source=source))
            case ops.VarScopeBegin(name):
                grammar = replace(self, open_scopes=(*self.open_scopes, name))
                steps.append(Step(op, source=source))
            case ops.VarScopeEnd(name):
                grammar = self._close_scope(name)
                steps.append(Step(op, Binding(name), source=source))
            case ops.Image() | ops.Video():
                media.check(op)
                steps.append(Step(op, source=source))
            case _:
                steps.append(Step(op, source=source))
        return grammar

    def _open_role(self, role: str) -> "Grammar":
        if self.open_role is not None:
            raise ProgramError(
                f"a {role} turn cannot begin inside an open {self.open_role} turn; end that one first "
                f"({self.open_role}_end(), or leave its with block)"
            )
        return replace(self, open_role=role)

    def _close_role(self, role: str) -> "Grammar":
        if self.open_role != role:
            found = f"the open turn is {self.open_role}" if self.open_role else "no turn is open"
            raise ProgramError(f"{role}_end() without {role}_begin(): {found}")
        return replace(self, open_role=None)

    def _close_scope(self, name: str) -> "Grammar":
        if not self.open_scopes or self.open_scopes[-1] != name:
            found = f"the innermost open one is {self.open_scopes[-1]!r}" if self.open_scopes else "none is open"
            raise ProgramError(f"the end of var_scope({name!r}) does not match its beginning: {found}")
        return replace(self, open_scopes=self.open_scopes[:-1])

    def check_same_turn(self, parent: "Grammar", branch: int) -> None:
        """Raises ProgramError when a branch whose text is to be appended is inside another turn than its parent."""
        if self.open_role != parent.open_role:
            raise ProgramError(
                f"branch {branch} is inside {self.open_role or 'no'} turn and its parent inside "
                f"{parent.open_role or 'no'} turn; close the branch's turn before join('concate_and_append')"
            )


def _check_logprobs(gen: ops.Gen, sampling: SamplingParams) -> None:
    """Raises ParameterError where texts of log-probabilities are left out that are not asked for."""
    asked = sampling.logprobs or sampling.top_logprobs or sampling.prompt_logprobs_from is not None
    if not (gen.text_in_logprobs or asked):
        raise ParameterError(
            "return_text_in_logprobs=False does nothing without log-probabilities; remove it, or write "
            "return_logprob=True"
        )
