"""One evaluated row: what went in, what came out, its figures, its error; as a line of an output and back.

{"row": 7, "question": "...", "label": "B", "answer": " B", "exact_match": true, "evaluation": {...}}
           the input                        variables       figures              what else a report needs
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...lang.errors import CapabilityError, VariableError, shortened, shown
from ...lang.protocol import Cost
from ...lang.state import State
from ..data.frames import joined
from ..data.output import plain
from ..data.rows import Row
from ..stream import Stream

_COLUMN = "evaluation"
_LONGEST_VALUE = 44  # characters of a value in a list of rows
_MOST_VALUES = 6  # of a row in such a list: variables, the right value, columns


class EvaluatedRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row of an evaluation.

    Attributes:
        row: its number in the data, from 0.
        inputs: the row, by column, as JSON has it.
        variables: of the program that ran on it, as JSON has them; of a failed one what it had set.
        figures: by name; empty where the program or the metric failed.
        error: the class of the program's error; "" if it ended well.
        message: of the error, of the program or of the metric.
        metric_error: the class of the error that the metric raised; "" if it gave its figures.
        seconds: from the start of the program to the end of its last operation, without the start of the model; None
            where the run kept no record.
        cost: of the program.
        probabilities: of the choices of each select that has them: variable → choice → 0 to 1.
    """

    row: int
    inputs: dict[str, Any]
    variables: dict[str, Any] = {}
    figures: dict[str, bool | float] = {}
    error: str = ""
    message: str = ""
    metric_error: str = ""
    seconds: float | None = None
    cost: Cost = Cost()
    probabilities: dict[str, dict[str, float]] = {}

    def described(self, label: str = "") -> str:
        """Returns the row in one line: its number, its error, the variables, the right value, other columns. What
        is left out is "…".

        Args:
            label: the column with the right value; "" for none.
        """
        error = self.error or self.metric_error
        facts = [f"{error}: {shortened(self.message, 160)}"] if error else []
        variables = list(self.variables.items())
        for name, value in variables[:_MOST_VALUES]:
            certain = self.probabilities.get(name, {}).get(value if isinstance(value, str) else "")
            facts.append(f"{name}={short(value)}" + ("" if certain is None else f" ({certain:.0%})"))
        facts += ["…"] if len(variables) > _MOST_VALUES else []
        return f"row {self.row}: " + ", ".join([*facts, *self.described_inputs(label)])

    def described_inputs(self, label: str) -> list[str]:
        """Returns the right value, if there is a column of it, then the other columns, shortened."""
        facts = [f"right is {short(self.inputs[label])}"] if label in self.inputs else []
        others = [f"{name}={short(value)}" for name, value in self.inputs.items() if name != label]
        room = max(0, _MOST_VALUES - len(self.variables) - len(facts))
        return [*facts, *others[:room], *(["…"] if len(others) > room else [])]

    def flat(self) -> dict[str, Any]:
        """Returns the row as a dict of columns: `row`, the input, the variables, the figures, `error`, `seconds` and
        the tokens."""
        usage = self.cost.usage
        more = {
            "error": f"{self.error or self.metric_error}: {self.message}" if self.error or self.metric_error else None,
            "seconds": self.seconds,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        }
        found = joined(self.row, self.inputs, self.variables)
        for values in (self.figures, more):
            found = joined(self.row, {name: v for name, v in found.items() if name != "row"}, values)
        return found


def short(value: Any) -> str:
    """Returns a value for a list of rows."""
    return shortened(shown(value), _LONGEST_VALUE)


def simple(value: Any) -> Any:
    """Returns a value as a saved report gives it back: of JSON's types, with None for numbers that JSON lacks."""
    return _finite(plain(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


# -------------------------------------------------------------------------------- lines of an output


def values_of_line(row: EvaluatedRow, measure: Mapping[str, Any]) -> Row:
    """Returns what a line of an output has after the input. `measure`: what decides its figures."""
    told = {
        "measure": measure,
        "figures": row.figures,
        "variables": list(row.variables),
        "seconds": row.seconds,
        "cost": row.cost,
        "probabilities": row.probabilities,
    }
    columns = _columns(row.inputs, [*row.variables, *row.figures])
    values = [*row.variables.values(), *row.figures.values()]
    return {**dict(zip(columns, values, strict=True)), _COLUMN: told}


def _columns(inputs: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Returns the columns of variables and figures. One with a name that is taken is called `NAME_out`."""
    taken, columns = {_COLUMN, *joined(0, inputs, {})}, []
    for name in names:
        while name in taken:
            name += "_out"
        taken.add(name)
        columns.append(name)
    return columns


def row_of_line(line: Mapping[str, Any], inputs: Row) -> EvaluatedRow | None:
    """Returns the row that `values_of_line` has written, or None for the line of another kind of output."""
    told = line.get(_COLUMN)
    if not isinstance(told, dict) or not isinstance(told.get("variables"), list):
        return None
    names = told["variables"]
    try:
        variables = {name: line[column] for name, column in zip(names, _columns(inputs, names), strict=True)}
        fields = {**told, "row": line["row"], "inputs": simple(inputs), "variables": variables}
        return msgspec.convert(fields, EvaluatedRow)
    except (KeyError, msgspec.ValidationError):
        return None


def measure_of_line(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the `measure` of a line that `values_of_line` has written. Lines of earlier versions have none."""
    told = line.get(_COLUMN)
    found = told.get("measure") if isinstance(told, dict) else None
    return found if isinstance(found, dict) else {}


# -------------------------------------------------------------------------------- facts of a state


def stream_of(state: State) -> Stream:
    """Returns the stream of a state that a batch has given out."""
    stream = state._sink
    assert isinstance(stream, Stream), "states of a batch belong to runs"
    return stream


def seconds_of(state: State) -> float | None:
    """Returns the seconds from the start of the run to the end of its last operation, without those for which it waited
    until the model had started; None where the run kept no record."""
    record = stream_of(state).run.record
    if record is None or not record.operations:
        return None
    ended = max(operation.ended for operation in record.operations)
    return max(0.0, ended - record.began - (record.start_seconds or 0.0))


def start_seconds_of(state: State) -> float:
    """Returns the seconds for which the run waited until the model had started."""
    record = stream_of(state).run.record
    return (0.0 if record is None else record.start_seconds) or 0.0


def probabilities_of(state: State) -> dict[str, dict[str, float]]:
    """Returns the probabilities of the choices of each select whose model has scored them."""
    found = {}
    for name in state.variables():
        try:
            facts = state.get_meta_info(name)
            probabilities = facts.get("probabilities") if isinstance(facts, dict) else None
        except (CapabilityError, VariableError):  # generated, not scored; set by the program itself
            continue
        if probabilities:
            found[name] = {choice: float(share) for choice, share in probabilities.items()}
    return found
