"""Places of the user's program, kept as instructions and read as lines."""

import umbel as ul
from umbel.lang.prompt import Source, SourceKind, calling_place


def test_a_place_is_the_line_that_called() -> None:
    place = calling_place()
    assert place is not None
    assert place.file == __file__
    assert place.function == "test_a_place_is_the_line_that_called"
    with open(__file__) as file:
        assert "place = calling_place()" in file.read().splitlines()[place.number - 1]


def test_a_statement_of_several_lines_is_where_it_begins() -> None:
    place = (
        calling_place(),  # the call's own line
    )[0]
    assert place is not None
    assert place.span[0] == place.number


def test_roles_and_forks_are_the_users_lines() -> None:
    numbers: list[int] = []

    @ul.function
    def program(s):
        with s.user():
            s += "a"
        s.assistant("b")
        forks = s.fork(2)
        forks += lambda index: f"{index}" + ul.gen("x")

    echo = ul.Echo()
    report = program.run(backend=echo, timeout=20).explain_cache()
    for call in report.calls:
        assert call.line is not None
        assert call.line.file == __file__
        assert call.line.function == "program"
        numbers.append(call.line.number)
    assert len(set(numbers)) == 1


def test_a_source_of_something_else_keeps_the_place() -> None:
    source = Source(SourceKind.TEXT, calling_place())
    written = source.of(SourceKind.SCAFFOLD, "user")
    assert (written.kind, written.name, written.place) == (SourceKind.SCAFFOLD, "user", source.place)
