"""Metrics: functions of a finished state and its row that give a bool, a number, or several by name.

    exact_match("answer", "label")     the variable is the label
    contains_match("answer", "label")  the label stands in the variable's text
    lambda state, row: ...             anything else

A metric that raises, or gives anything else, leaves its row without a figure; the row keeps the reason.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ...lang import checks
from ...lang.errors import ParameterError, VariableError, shown
from ...lang.ops import MAX_NAME_LENGTH
from ...lang.state import State
from ..data.rows import Row, listed

Metric = Callable[[State, Row], Any]  # Any: bool, a number, or a dict of these by name
Figures = dict[str, bool | float]


@dataclass(frozen=True, slots=True)
class Matching:
    """Compares a variable with the column of its right value: made by `exact_match` and `contains_match`."""

    variable: str
    label: str
    ignore_case: bool
    is_exact: bool

    @property
    def __name__(self) -> str:
        return "exact_match" if self.is_exact else "contains_match"

    def check(self, columns: tuple[str, ...], data: str) -> None:
        """Raises ParameterError where the data has no column of labels."""
        if self.label not in columns:
            raise ParameterError(
                f"{self.__name__}({self.variable!r}, {self.label!r}): {data} has no column {self.label!r}; it has "
                f"{listed(columns)}. Write {self.__name__}({self.variable!r}, COLUMN) with the column of right values"
            )

    def __call__(self, state: State, row: Row) -> bool:
        if self.label not in row:
            raise ParameterError(f"the row has no {self.label!r}; it has {listed(row)}")
        if self.variable not in state:
            raise VariableError(
                f"the program has set no variable {self.variable!r}; it has set "
                f"{', '.join(map(repr, state.variables())) or 'none'}"
            )
        value, label = state.value(self.variable), row[self.label]
        labels = label if isinstance(label, list | tuple | set) and not isinstance(value, list | tuple) else [label]
        return any(self._matches(value, each) for each in labels)

    def _matches(self, value: Any, label: Any) -> bool:
        if self.is_exact:
            return agrees(value, label, ignore_case=self.ignore_case)
        text, part = str(value), str(label).strip()
        return part.casefold() in text.casefold() if self.ignore_case else part in text


def exact_match(variable: str, label: str, *, ignore_case: bool = False) -> Matching:
    """Makes a metric: whether a variable has the value of a column.

    Texts are compared without the space around them, so the choice " yes" is the label "yes". A number and a text are
    equal if the text spells the number, a bool and a text if it says true or false. Where the column has a list, one of
    its members has to be equal.

    Args:
        variable: the name of the program's variable.
        label: the name of the column with the right value.
        ignore_case: "Yes" is "yes", too; default: False.

    Returns:
        A metric for `evaluate`; called with a state and a row it returns True or False.

    Raises:
        ParameterError: a name that is no text.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += f"The capital of {country} is" + ul.gen("city", max_tokens=4)
        >>> metric = ul.exact_match("city", "label")
        >>> state = capital.run("France", backend=ul.Echo([" Paris"]))
        >>> metric(state, {"label": "Paris"}), metric(state, {"label": ["Lyon", "Nice"]})
        (True, False)
    """
    return _matching(variable, label, ignore_case, is_exact=True)


def contains_match(variable: str, label: str, *, ignore_case: bool = False) -> Matching:
    """Makes a metric: whether the text of a variable contains the text of a column, or one of a list of texts.

    Args:
        variable: the name of the program's variable.
        label: the name of the column with the text.
        ignore_case: "Paris" is in "PARIS", too; default: False.

    Returns:
        A metric for `evaluate`; called with a state and a row it returns True or False.

    Raises:
        ParameterError: a name that is no text.

    Examples:
        >>> @ul.function
        ... def ask(s, question):
        ...     s += question + ul.gen("answer", max_tokens=16)
        >>> rows = [{"question": "Where is the Louvre?", "city": "Paris"}]
        >>> model = ul.Echo([" It is in PARIS, of course."])
        >>> metric = ul.contains_match("answer", "city", ignore_case=True)
        >>> ul.evaluate(ask, rows, metric, backend=model).accuracy
        1.0
    """
    return _matching(variable, label, ignore_case, is_exact=False)


def _matching(variable: str, label: str, ignore_case: bool, *, is_exact: bool) -> Matching:
    name = "exact_match" if is_exact else "contains_match"
    advice = f'a name, as in {name}("answer", "label")'
    names = [
        checks.text(f"{name}({parameter})", given, MAX_NAME_LENGTH, advice)
        for parameter, given in (("variable", variable), ("label", label))
    ]
    return Matching(names[0], names[1], checks.switch("ignore_case", ignore_case), is_exact)


def agrees(value: Any, label: Any, *, ignore_case: bool = False) -> bool:
    """Returns whether a value is the label; see `exact_match`."""
    if isinstance(value, str) and isinstance(label, str):
        one, other = value.strip(), label.strip()
        return one.casefold() == other.casefold() if ignore_case else one == other
    if isinstance(value, str) or isinstance(label, str):
        text, other = (value, label) if isinstance(value, str) else (label, value)
        if other is None:
            return False
        if isinstance(other, bool):
            return bool(text.strip().casefold() == str(other).casefold())
        if isinstance(other, int | float):
            try:
                return float(text) == other
            except ValueError:
                return False
        return bool(text.strip() == str(other))
    return bool(value == label)


# -------------------------------------------------------------------------------- what a metric gives


def checked_metric(metric: object) -> None:
    """Raises ParameterError for what cannot be called with a state and a row, before anything is paid for."""
    called = "metric(state, row)"
    if hasattr(metric, "run_batch"):
        raise ParameterError(
            f"metric={shown(metric)} is a program; write a function that runs it and returns a bool or a number: "
            "def metric(state, row): return judge.run(state['answer'])['verdict'] == ' yes'"
        )
    if not callable(metric) or isinstance(metric, type):
        raise ParameterError(
            f"metric={shown(metric)}; write a function {called}, or umbel.exact_match('answer', 'label')"
        )
    if inspect.iscoroutinefunction(metric):
        raise ParameterError(f"metric={shown(metric)} is a coroutine function; write a plain function: def {called}")
    try:
        inspect.signature(metric).bind(None, None)
    except TypeError:
        raise ParameterError(
            f"metric={shown(metric)} takes other arguments than {called}: the finished state and its row, a dict"
        ) from None
    except ValueError:  # a built-in function without a signature
        return


def name_of(metric: Metric) -> str:
    """Returns the name of the figure that a metric gives, where it gives one."""
    name = getattr(metric, "__name__", "")
    return name if isinstance(name, str) and name.isidentifier() else "score"


def figures_of(metric: Metric, state: State, row: Row) -> Figures:
    """Calls a metric and returns its figures by name.

    Raises:
        ParameterError: it gave something else; a bool or a finite number has to come.
        Whatever the metric raises.
    """
    try:
        given = metric(state, row)
    except KeyError as error:
        if error.args and isinstance(error.args[0], str) and error.args[0] not in row:
            error.add_note(f"the row has {listed(row)}")
        raise
    if isinstance(given, Mapping):
        if not given:
            raise ParameterError("the metric returned an empty dict; return at least one figure")
        return {_figure_name(name): _number(value, f"for {name!r} ") for name, value in given.items()}
    return {name_of(metric): _number(given, "")}


def _figure_name(name: object) -> str:
    return checks.text("name of a figure", name, MAX_NAME_LENGTH)


def _number(given: Any, place: str) -> bool | float:
    if hasattr(type(given), "dtype") and hasattr(given, "item"):
        given = given.item()  # of numpy or torch
    if isinstance(given, bool):
        return given
    if isinstance(given, numbers.Real | Decimal) and math.isfinite(given):
        return float(given)
    raise ParameterError(f"the metric returned {place}{shown(given)}; return True, False or a finite number")
