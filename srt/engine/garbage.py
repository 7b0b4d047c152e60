"""Python's garbage collector in a process that steps: it runs between steps, and through everything when nobody waits.

Left to itself it runs wherever enough objects have been made: in the middle of a mask, as a rule, since states of
automata are objects. Looking through all that lives takes tens of milliseconds beside a few large constraints, and
every request waits for it.

    young    what was made since the last time; a fraction of a millisecond
    all      only here does what has been alive for longer and refers to itself go: constraints that were forgotten
"""

import gc

YOUNG = 20_000  # objects made and still alive, before those are looked through
DUE = 200_000  # before all are, as soon as nobody waits
OVERDUE = 4_000_000  # before all are, though somebody waits; some 400 MB


class StepCollector:
    """Collects when it is told that a step is over. Of the whole process: there can be one."""

    def __init__(self) -> None:
        self._made = 0  # since all was looked through

    def begin(self) -> None:
        """What is loaded by now stays for good and is never looked through; the collector no longer runs by itself."""
        gc.disable()
        gc.freeze()

    def after_step(self, *, idle: bool) -> None:
        """idle: nobody waits for the next step."""
        young = gc.get_count()[0]
        if young < YOUNG and not (idle and self._made >= DUE):
            return
        self._made += young
        if self._made >= (DUE if idle else OVERDUE):
            gc.collect()
            self._made = 0
        else:
            gc.collect(1)
