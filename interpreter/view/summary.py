"""Describes a state in one line, and as compact HTML for notebooks. Neither waits, nor asks a backend."""

from typing import TYPE_CHECKING, Any

from ...lang import notebook
from ...lang.errors import shown
from ...lang.protocol import Usage
from .data import lines_of_stream

if TYPE_CHECKING:
    from ..run import Run
    from ..variables import VariableTable

_MOST_VARIABLES = 12
_MOST_PIECES = 2000
_MOST_RESULTS = 100  # of a batch
_COMING = "…"  # the value is not known yet


def values_of(table: "VariableTable") -> dict[str, str]:
    """Returns the values of variables as a person reads them, as far as they are known."""
    found: dict[str, str] = {}
    names = table.names()
    for name in names[:_MOST_VARIABLES]:
        binding = table.get(name)
        if binding is None or not binding.done:
            found[name] = _COMING
        elif binding.error is not None:
            found[name] = f"({type(binding.error).__name__})"
        else:
            found[name] = shown(binding.value())
    if len(names) > _MOST_VARIABLES:
        found[f"({len(names) - _MOST_VARIABLES} more)"] = _COMING
    return found


def spent(usage: Usage) -> str:
    """Returns the cost of a run in words."""
    calls = f"{usage.calls} call{'' if usage.calls == 1 else 's'}"
    return (
        f"{calls}, {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} generated"
    )


def html_of(run: "Run", table: "VariableTable", stream: int, error: BaseException | None) -> str:
    """Returns the variables of a stream and its own text, coloured by origin."""
    rows = [(f"<b>{notebook.escaped(name)}</b>", notebook.escaped(value)) for name, value in values_of(table).items()]
    if error is not None:
        rows.append(("<b>error</b>", notebook.escaped(f"{type(error).__name__}: {error}")))
    body = notebook.table(rows)
    if run.record is not None:
        texts = [piece for line in lines_of_stream(run, stream) for piece in line.get("text", ())]
        body += notebook.coloured([(piece[0], piece[1]) for piece in texts[-_MOST_PIECES:]])
    name = run.record.program if run.record is not None and run.record.program else "a program"
    return notebook.folded(f"state of {name}: {spent(run.ledger.cost.usage)}", body, is_open=True)


def html_of_results(results: list[Any]) -> str:
    """Returns the states and failures of a batch as a table: a row for each program, a column for each variable."""
    chosen = results[:_MOST_RESULTS]
    errors = [getattr(result, "error", None) for result in chosen]
    errors = [error if isinstance(error, BaseException) else None for error in errors]  # of a state it is a method
    values = [
        (result if error is None else result.state)._sink.described()
        for result, error in zip(chosen, errors, strict=True)
    ]
    names = list(dict.fromkeys(name for found in values for name in found))[:_MOST_VARIABLES]
    failed = any(errors)
    rows = []
    for index, (found, error) in enumerate(zip(values, errors, strict=True)):
        cells = [str(index), *(notebook.escaped(found.get(name, "")) for name in names)]
        if failed:
            cells.append(notebook.escaped(f"{type(error).__name__}: {error}") if error else "")
        rows.append(cells)
    left = len(results) - len(rows)
    more = f"<p>{left} more</p>" if left > 0 else ""
    head = ["", *names, *(["error"] if failed else [])]
    return notebook.folded(f"{len(results)} results", notebook.table(rows, head) + more, is_open=True)
