"""Takes over the figures that an earlier call left in a folder: minutes on a device are dear, and a call may end.

    make gpu GPU="--part 2"     killed after 20 figures; the same again takes 20 over and goes on with the 21st

Figures go together if they are of one device, of the same sizes, and of one commit; `--resume` takes those of another
commit, too, and their notes say so.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .figures import Call, Figure, Record, Unit
from .hardware import UNKNOWN, Hardware, Limits


class Unreadable(Exception):
    """A record is of another version, or no record."""


def read(folder: Path) -> Record | None:
    """Returns what `Record.write` wrote; None where there is nothing.

    Raises:
        Unreadable: it was written by another version.
    """
    path = folder / "results.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        hardware = Hardware(**{**found["hardware"], "limits": Limits(**found["hardware"]["limits"])})
        return Record(
            hardware,
            found["dry"],
            sizes=found["sizes"],
            figures=[_figure(one) for one in found["figures"]],
            broken=found["broken"],
            left_out=found["left_out"],
            seconds=found["seconds"],
            more={name: (folder / name).read_text(encoding="utf-8") for name in found["more"]},
            calls=[Call(**one) for one in found["calls"]],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{path} is of another version: {type(error).__name__}: {error}") from error


def take_over(record: Record, folder: Path, *, any_commit: bool) -> list[str]:
    """Adds the figures of the folder to a new record; returns lines that say which, or why none."""
    try:
        earlier = read(folder)
    except Unreadable as error:
        return [f"nothing is taken over: {error}"]
    if earlier is None:
        return []
    reason = _difference(record, earlier, any_commit=any_commit)
    if reason is not None:
        return [f"nothing is taken over from {folder}: {reason}"]
    commit = earlier.hardware.commit
    other = "" if commit == record.hardware.commit else f"at commit {commit}"
    record.figures = [_noted(one, other) for one in earlier.figures]
    record.broken, record.left_out, record.seconds = earlier.broken, earlier.left_out, earlier.seconds
    record.more = earlier.more
    record.calls = [*(call for call in earlier.calls if call.figures), *record.calls]
    groups = Counter(figure.group for figure in record.figures)
    said = ", ".join(f"{group} {count}" for group, count in groups.items()) or "none"
    lines = [
        f"taken over from {folder}, {earlier.hardware.date}, commit {commit}: {len(record.figures)} figures: {said}"
    ]
    wrong = sum(figure.is_wrong for figure in record.figures)
    return [*lines, f"{wrong} of them are wrong, and taken again"] if wrong else lines


def _difference(record: Record, earlier: Record, *, any_commit: bool) -> str | None:
    """Says why the figures of two records do not go together."""
    ours, theirs = record.hardware, earlier.hardware
    if (ours.name, record.dry) != (theirs.name, earlier.dry):
        return f"its device is {theirs.name}, this one is {ours.name}"
    if record.sizes != earlier.sizes:
        return "its figures are of other sizes"
    if any_commit:
        return None
    if UNKNOWN in (ours.commit, theirs.commit):
        return "the commit is unknown; write --resume and the folder, if the code is the same"
    if ours.commit != theirs.commit:
        return f"its commit is {theirs.commit}, this one is {ours.commit}; write --resume and the folder to mix them"
    return None


def _noted(figure: Figure, other: str) -> Figure:
    if not other or "at commit " in figure.note:
        return figure
    return replace(figure, note=", ".join(filter(None, (figure.note, other))))


# Any: what json reads.
def _figure(found: Mapping[str, Any]) -> Figure:
    known = {name: found[name] for name in (field.name for field in fields(Figure))}
    measured = math.nan if found["measured"] is None else found["measured"]
    return Figure(**{**known, "unit": Unit(found["unit"]), "measured": measured})
