"""Errors of calls say where in the program the call stands: they are raised where a variable is read."""

import inspect

import pytest
import umbel as ul
from umbel.interpreter import cli


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(test_the_line_of_the_call_is_noted_once)
    return first + next(number for number, line in enumerate(lines) if text in line)


def test_the_line_of_the_call_is_noted_once() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "Q:" + ul.gen("first")
        s += ul.gen("second")  # fails
        forks = s.fork(2)
        forks += ul.gen("third")
        forks.join()

    state = program.run(backend=ul.Echo(["one"]))
    for name in ("second", "second"):
        with pytest.raises(ul.RequestError, match="used up") as caught:
            state[name]
        (note,) = caught.value.__notes__
        assert note.startswith("in gen('second'), ")
        assert note.endswith(f"test_error_places.py:{line_of('# fails')}")


def test_the_command_line_prints_the_place(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "app.py"
    file.write_text(
        "import umbel as ul\n\n@ul.function\ndef p(s):\n    s += ul.select('mood', choices=['a', 'b'])\n\n"
        "p.run(backend=ul.Echo(faults=ul.FailCall(1, ul.OverloadedError('busy'))))['mood']\n"
    )
    assert cli.main(["run", str(file)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].strip().endswith("app.py:5")
