"""The words of `state.call_tools`: what is asked for, and what comes of it. `interpreter/agents/` runs it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .. import checks
from ..errors import ParameterError, shown
from ..generation import gen
from ..ops import Gen, checked_name
from ..tool_calls import MOST_TOOLS, ToolChoice
from .tool_functions import ToolFunction

MOST_STEPS = 1_000
MOST_RESULT_BYTES = 1 << 24
_MODES = ("auto", "required", "none")


@dataclass(frozen=True, slots=True)
class ToolRun:
    """Describes one call of a tool by a model; see `AgentResult`.

    Attributes:
        name: of the tool.
        arguments: as the model gave them; a text where they are no JSON object.
        result: text that the model was given.
        failed: True where the tool raised, ran out of time, or was given wrong arguments; `result` says which.
        step: number of the answer with the call, from 1 on.
        cut: True where the result was longer than allowed, and its rest is left out.

    Examples:
        >>> @ul.tool
        ... def divide(one: float, other: float) -> float:
        ...     "Divides one number by another."
        ...     return one / other
        >>> @ul.function
        ... def answer(s, question):
        ...     s += ul.user(question)
        ...     return s.call_tools([divide], "answer")
        >>> model = ul.Echo([divide.spelled(one=1, other=0), "It has no value."])
        >>> result = answer.run("1 / 0?", backend=model).ret_value
        >>> for run in result.calls:
        ...     print(run.step, run.name, run.arguments, run.failed, run.result)
        1 divide {'one': 1, 'other': 0} True error: ZeroDivisionError: float division by zero
    """

    name: str
    arguments: Any
    result: str
    failed: bool = False
    step: int = 1
    cut: bool = False


@dataclass(frozen=True, slots=True)
class AgentResult:
    """Holds the answer and the calls of one `state.call_tools`.

    Attributes:
        answer: the text of the last answer; None where the steps were used up before one came.
        calls: all calls of tools, in the order in which the model made them.
        steps: number of answers of the model, those with calls included.
        cut: True where the answer is longer than max_tokens allows, and only its beginning is here.
        guarantee: of the calls: "enforced" where the model could write no wrong ones, "validated" where they were
            looked at when they had come.

    Examples:
        >>> @ul.tool
        ... def population(country: str) -> int:
        ...     "Looks up how many people live in a country."
        ...     return {"Iceland": 383726}[country]
        >>> @ul.function
        ... def answer(s, question):
        ...     s += ul.user(question)
        ...     return s.call_tools([population], "answer", max_tokens=64)
        >>> model = ul.Echo([population.spelled(country="Iceland"), "About 384,000."])
        >>> result = answer.run("How many people live in Iceland?", backend=model).ret_value
        >>> result.answer, result.ended, result.steps, result.calls[0].result
        ('About 384,000.', 'answer', 2, '383726')
    """

    answer: str | None
    calls: tuple[ToolRun, ...]
    steps: int
    cut: bool = False
    guarantee: Literal["enforced", "validated"] = "validated"

    @property
    def ended(self) -> Literal["answer", "max_tokens", "max_steps"]:
        """Why the loop ended: with an answer, one that "max_tokens" cut off, or none within "max_steps"."""
        if self.answer is None:
            return "max_steps"
        return "max_tokens" if self.cut else "answer"


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """Checked arguments of `state.call_tools`.

    Attributes:
        gen: with the sampling parameters of each answer.
        choice: of the first answer; later ones are free.
        timeout: seconds for each call of a tool.
        max_result_bytes: of each result, in UTF-8.
    """

    tools: tuple[ToolFunction[..., Any], ...]
    gen: Gen
    name: str | None
    choice: ToolChoice
    max_steps: int
    timeout: float
    max_result_bytes: int
    on_error: Literal["tell", "raise"]
    by_name: Mapping[str, ToolFunction[..., Any]] = field(default_factory=dict)


def agent_plan(
    tools: Iterable[object],
    name: str | None,
    max_steps: int,
    tool_choice: str,
    parallel: bool,
    timeout: float,
    max_result_bytes: int,
    on_error: str,
    sampling: Mapping[str, Any],
) -> AgentPlan:
    """Checks the arguments of `state.call_tools`.

    Raises:
        ParameterError: what is no tool, a choice that names none, or a value out of its range.
    """
    wanted = "a list of tools, such as [search, add] of functions with @ul.tool"
    known: list[ToolFunction[..., Any]] = []
    for each in checks.members("call_tools: tools", tools, MOST_TOOLS, wanted):
        if not isinstance(each, ToolFunction):
            raise ParameterError(f"call_tools: {shown(each)} is no tool; write @ul.tool on the function")
        known.append(each)
    if not known:
        raise ParameterError(f"call_tools: tools is empty; write {wanted}")
    asked = gen(name, **sampling)
    if not isinstance(asked, Gen) or asked.constraint is not None or "n" in asked.options:
        raise ParameterError("call_tools: its answers are free texts or calls; leave constraints, choices and n out")
    choice = _choice(tool_choice, [each.name for each in known], parallel)
    choice.among([each.definition for each in known])
    seconds = checks.seconds("call_tools: timeout", timeout)
    steps = checks.integer("call_tools: max_steps", max_steps, 1, MOST_STEPS)
    most = checks.integer("call_tools: max_result_bytes", max_result_bytes, 1, MOST_RESULT_BYTES)
    checks.one_of("call_tools: on_error", on_error, ("tell", "raise"))
    return AgentPlan(
        tuple(known),
        asked,
        None if name is None else checked_name(name),
        choice,
        steps,
        seconds,
        most,
        "raise" if on_error == "raise" else "tell",
        {each.name: each for each in known},
    )


def _choice(given: str, names: list[str], parallel: bool) -> ToolChoice:
    checks.switch("call_tools: parallel", parallel)
    known = checks.one_of("call_tools: tool_choice", given, (*_MODES, *names))
    if known in names:
        return ToolChoice.only(known)
    return ToolChoice("required" if known == "required" else "none" if known == "none" else "auto", parallel=parallel)
