"""Metrics: functions of a finished state and its row that give a bool, a number, or several by name.

    exact_match("answer", "label")     the variable is the label
    contains_match("answer", "label")  the label stands in the variable's text
    lambda state, row: ...             anything else

A metric that raises, or gives anything else, leaves its row without a figure; the row keeps the reason.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
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
        if self.is_exact:
            return agrees(value, label, ignore_case=self.ignore_case)
        found = [self._is_in(str(value), each) for each in _right_values(_plain(value), _plain(label))]
        return any(found)  # all are compared: an empty member raises also after one that matches

    def _is_in(self, text: str, label: Any) -> bool:
        part = "" if label is None or label != label else str(label).strip()  # NaN is no text, too: frames have it
        if not part:
            raise ParameterError(
                f"the row has {self.label}={shown(label)}, and an empty text stands in every text; write a text, or "
                "leave the row out"
            )
        return part.casefold() in text.casefold() if self.ignore_case else part in text


def exact_match(variable: str, label: str, *, ignore_case: bool = False) -> Matching:
    """Makes a metric: whether a variable has the value of a column.

    Texts are compared without the space around them, so the choice " yes" is the label "yes". A number and a text are
    equal if the text spells the number, a bool and a text if it says true or false. Numbers are compared exactly, by
    their digits: 7 is "7.00", and neither "7_0" nor NaN is a number. Where the column has a list or an array, one of
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

    A row whose column is empty is not measured, as any text contains an empty one.

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
    """Returns whether a value is the label, or one of several; see `exact_match`."""
    plain = _plain(value)
    return any(_is_equal(plain, each, ignore_case) for each in _right_values(plain, _plain(label)))


def _right_values(value: Any, label: Any) -> Collection[Any]:
    """Returns the right values that a label lists. One that lists them for a list is one right value."""
    is_list = isinstance(label, list | tuple | set) and not isinstance(value, list | tuple)
    return label if is_list else [label]


def _plain(value: Any) -> Any:
    """Returns a value with lists in place of arrays. Numbers stay: of np.float32(0.1) tolist() has other digits."""
    if isinstance(value, numbers.Real):
        return value
    if hasattr(type(value), "tolist"):
        value = list(value) if getattr(value, "ndim", 0) else value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _is_equal(value: Any, label: Any, ignore_case: bool) -> bool:
    if isinstance(value, str) and isinstance(label, str):
        one, other = value.strip(), label.strip()
        return one.casefold() == other.casefold() if ignore_case else one == other
    first, second = _spelled(value), _spelled(label)
    if first is not None and second is not None:
        return first == second or (first.is_nan() and second.is_nan())
    if isinstance(value, str) or isinstance(label, str):
        text, thing = (value, label) if isinstance(value, str) else (label, value)
        if isinstance(thing, bool):
            return bool(text.strip().casefold() == str(thing).casefold())
        return thing is not None and _spelled(thing) is None and bool(text.strip() == str(thing))
    return bool(value == label)


def _spelled(value: Any) -> Decimal | None:
    """Returns the number that a value is or that a text spells, or None. A float has the digits that it prints."""
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real | Decimal):
        return None
    if isinstance(value, numbers.Integral):
        return Decimal(int(value))
    text = repr(float(value)) if isinstance(value, float) else str(value)
    try:
        found = Decimal(text)
    except InvalidOperation:
        return None
    return None if "_" in text or found.is_snan() else found


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
    if metric is exact_match or metric is contains_match:
        name = name_of(metric)
        raise ParameterError(
            f"metric={name} makes a metric; write the call: umbel.{name}('answer', 'label'), a variable and the column "
            "of its right values"
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
