"""`umbel replay run.jsonl file.py:program`: runs a program against its journal, and says which prompts have changed.

No model is asked. Each program of the batch runs with its recorded arguments and is answered as it was then, also where
its prompt has changed: so one difference does not hide those after it.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from ...lang.errors import JournalError, UmbelError
from ..terminal.run_file import is_program, named_in_file
from .file import JournalFile, JournalProgram
from .offline import offline
from .use import JournalMode, JournalUse

_ABOUT = (
    "Runs a program against a journal, without a model, and says where its prompts differ from those recorded. "
    "The exit code is 1 if one does. The file runs as an import of it would, without what stands under "
    'if __name__ == "__main__".'
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(prog="umbel replay", description=_ABOUT)
    made.add_argument("journal", help="the file that a run wrote: program.run(..., journal=FILE)")
    made.add_argument("program", help="FILE.py:NAME of the program")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code: 0, or 1 where a prompt differs.

    Raises:
        JournalError, ParameterError: the journal or the program cannot be used.
    """
    options = parser().parse_args(arguments)
    file = JournalFile(options.journal, writes=False)
    try:
        program = named_in_file(options.program, "program", is_program, "replay", {})
        items = [file.program(number) for item, (_, number) in file.programs.items() if ">" not in item]
        found = [difference for line in items for difference in _replayed(file, line, program)]
        for difference in found:
            print(difference)
        calls = sum(len(lines) for places in file.calls.values() for lines in places.values())
        counted = f"{_number(len(items), 'program')} and {_number(calls, 'call')}"
        print(f"{counted} in {options.journal}: {_number(len(found), 'difference') if found else 'no differences'}")
        return 1 if found else 0
    finally:
        file.release()


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _replayed(file: JournalFile, line: JournalProgram, program: Any) -> list[str]:
    """Runs one program of the journal. Returns its differences."""
    if line.given is None:
        raise JournalError(
            f"item {line.item} has arguments that no file can hold; replay it in a test, with the fixture umbel_journal"
        )
    if "sampling" in line.given:
        raise JournalError(f"{line.program} has a parameter called sampling; replay it in a test, with umbel_journal")
    use = JournalUse(file.path, JournalMode.COMPARE, file=file, item=line.item, backend=offline(file, line.item))
    speculation: dict[str, Any] = {}
    if line.speculate is not None:
        speculation["speculate" if line.speculate == "auto" else "num_api_spec_tokens"] = line.speculate
    try:
        state = program.run(*line.positions, **line.given, sampling={**line.sampling, **speculation, "journal": use})
        state.sync()
    except UmbelError as error:
        if not (isinstance(error, JournalError) and use.differences):  # it is the last of them
            use.differences.append(f"item {line.item}: {type(error).__name__}: {error}")
    except Exception as error:  # of the program's own code
        if line.item in file.finished:
            use.differences.append(f"item {line.item}: {type(error).__name__}: {error}; it had ended without an error")
    return [*use.differences, *(missing for run in use.begun for missing in run.unasked())]
