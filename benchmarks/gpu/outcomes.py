"""Keeps in `tests.json`, next to the figures, which tests passed on a device: a later call goes on where one ended.

passed, skipped     at this commit: not run again
failed, waiting     run first, as those that no call has met
passed before       at another commit: run last
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .figures import Figure, Unit, write_whole
from .hardware import UNKNOWN

GROUP = "tests"
FILE = "tests.json"
PASSED, FAILED, SKIPPED, WAITING = "passed", "failed", "skipped", "waiting"
DONE = (PASSED, SKIPPED)


@dataclass(slots=True)
class Outcomes:
    """Of tests on one device.

    Attributes:
        commit: at which the tests of `now` ran.
        folder: where the file is kept; None: nowhere.
        now: id → outcome; of a file that cannot be imported: its path.
        before: ids that passed at other commits.
        collected: the tests that were asked for when all of them were last met; empty: they never were.
        taken: ids that an earlier call is done with.
    """

    device: str
    commit: str
    folder: Path | None = None
    now: dict[str, str] = field(default_factory=dict)
    before: set[str] = field(default_factory=set)
    collected: list[str] = field(default_factory=list)
    taken: frozenset[str] = frozenset()

    def read(self, folder: Path, *, trusted: bool = False) -> None:
        """Takes over what an earlier call left in the folder, if it was on the same device.

        trusted: a commit that is unknown is this one; of one that is known to be another, tests run again in any case.
        """
        try:
            found = json.loads((folder / FILE).read_text(encoding="utf-8"))
            device, commit, now = found["device"], found["commit"], dict(found["now"])
            before, collected = set(found["before"]), list(found["collected"])
        except (OSError, ValueError, KeyError, TypeError):  # none, or of another version
            return
        if device != self.device:
            return
        self.before = before
        unknown = UNKNOWN in (commit, self.commit)
        if trusted if unknown else commit == self.commit:
            self.now, self.collected = now, collected
            self.taken = frozenset(self.done)
        else:
            self.before |= {name for name, outcome in now.items() if outcome == PASSED}

    def save(self) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            record = {
                "device": self.device,
                "commit": self.commit,
                "collected": self.collected,
                "now": self.now,
                "before": sorted(self.before - self.now.keys()),
            }
            write_whole(self.folder / FILE, json.dumps(record, indent=1) + "\n")

    @property
    def done(self) -> list[str]:
        """Ids that need not run again."""
        return [name for name, outcome in self.now.items() if outcome in DONE]

    def is_complete(self, chosen: Sequence[str]) -> bool:
        """All of the chosen tests are known and done."""
        return self.collected == list(chosen) and len(self.done) == len(self.now)

    def meet(self, names: Sequence[str]) -> None:
        """Tests were collected; those that no call has run wait."""
        for name in names:
            self.now.setdefault(name, WAITING)

    def forget_others(self, names: set[str]) -> None:
        """Tests that are no longer there: an earlier call was at another commit."""
        self.now = {name: outcome for name, outcome in self.now.items() if name in names}

    def figures(self) -> list[Figure]:
        """Counts for each file how many of its tests passed, of how many that ran, in this call and earlier ones."""
        files: dict[str, Counter[str]] = {}
        taken: Counter[str] = Counter()
        first: dict[str, str] = {}
        for name, outcome in self.now.items():
            path, _, test = name.partition("::")
            files.setdefault(path, Counter())[outcome] += 1
            taken[path] += name in self.taken and outcome == PASSED
            if outcome == FAILED:
                first.setdefault(path, test.split("::")[-1] or "it cannot be imported")
        figures = []
        for path, counts in sorted(files.items()):
            passed, ran = counts[PASSED], counts[PASSED] + counts[FAILED]
            notes = [f"first: {first[path]}"] if path in first else []
            notes += [f"{taken[path]} in earlier calls"] if taken[path] else []
            if ran:
                figures.append(Figure(GROUP, path, Unit.PASSED, passed, limit=ran, must=ran, note=", ".join(notes)))
        return figures

    def left_out(self) -> list[str]:
        """Says how many tests did not run, and why."""
        counts = Counter(self.now.values())
        lines = [] if self.now else ["no test was collected; call again, or write a larger --minutes"]
        lines += [f"{counts[WAITING]} tests: their time was up; call again"] if counts[WAITING] else []
        return lines + ([f"{counts[SKIPPED]} tests that skip themselves here"] if counts[SKIPPED] else [])


def order(
    names: Sequence[str], *, paths: Sequence[str] = (), done: frozenset[str] = frozenset(), later: frozenset[str]
) -> list[str]:
    """Sorts tests that are not done: those that passed at another commit last, then by the first of the paths that they
    lie in, then by name."""

    def key(name: str) -> tuple[bool, int, str]:
        place = next((place for place, path in enumerate(paths) if name.startswith(path)), len(paths))
        return name in later, place, name

    return sorted((name for name in names if name not in done), key=key)
