"""Results of batches in files: written as they come, never lost, resumed; and as frames."""

import dataclasses
import datetime
import decimal
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow
import pytest
import umbel as ul
from pyarrow import parquet

ITEMS = [{"x": number, "id": f"n{number}"} for number in range(5)]


@dataclasses.dataclass
class Found:
    age: int
    names: list[str]


@ul.function
def check(s: ul.State, x: int) -> None:
    s += f"<{x}>" + ul.gen("y")
    s["y"]
    if x == 3:
        raise ValueError("three")


def lines(path: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda line: line["row"])


def test_results_and_failures_are_written_and_inputs_carried(tmp_path: Path) -> None:
    done = check.run_batch(iter(ITEMS), backend=ul.Echo(), output=tmp_path / "out.jsonl")
    expected = [{"row": n, "x": n, "id": f"n{n}", "y": f"<{n}>"} for n in (0, 1, 2, 4)]
    assert lines(tmp_path / "out.jsonl") == expected
    (failure,) = done.failures()
    assert failure["error"] == "ValueError"
    assert failure["message"] == "three"
    assert failure["input"] == {"x": 3, "id": "n3"}
    assert failure["row"] == 3
    assert (done.done, done.failed, done.resumed, done.cost.usage.calls) == (4, 1, 0, 5)
    assert done.failed_path == str(tmp_path / "out.failed.jsonl")
    assert sorted(done.rows(), key=lambda row: row["row"]) == expected
    assert list(done.to_pandas()["y"]) == ["<0>", "<1>", "<2>", "<4>"]
    assert "4 done, 1 failed" in done._repr_html_()
    assert str(done).startswith(f"{done.path}: 4 done · 1 failed, in {done.failed_path} · ")


def test_a_program_and_its_graph_write_the_same(tmp_path: Path) -> None:
    @ul.function
    async def later(s: Any, x: int) -> None:
        s += f"<{x}>" + ul.gen("y")

    @ul.function
    def now(s: ul.State, x: int) -> None:
        s += f"<{x}>" + ul.gen("y")

    found = []
    for number, program in enumerate((later, now, now.compile())):
        program.run_batch(ITEMS, backend=ul.Echo(), output=tmp_path / f"{number}.jsonl")
        found.append(lines(tmp_path / f"{number}.jsonl"))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 5


def test_the_generator_writes_and_gives(tmp_path: Path) -> None:
    results = list(check.run_batch(ITEMS, backend=ul.Echo(), output=tmp_path / "out.jsonl", generator_style=True))
    assert [isinstance(result, ul.Failure) for result in results] == [False, False, False, True, False]
    assert len(lines(tmp_path / "out.jsonl")) == 4


def test_an_output_that_exists_is_refused_resumed_or_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    check.run_batch(ITEMS[:2], backend=ul.Echo(), output=path)
    with pytest.raises(ul.ParameterError, match="exists; write if_exists='resume'"):
        check.run_batch(ITEMS, backend=ul.Echo(), output=path)
    path.write_bytes(path.read_bytes() + b'{"row": 2, "x"')  # torn
    echo = ul.Echo()
    done = check.run_batch(iter(ITEMS), backend=echo, output=path, if_exists="resume")
    assert (done.resumed, done.done, done.failed, echo.calls) == (2, 4, 1, 3)
    assert [line["row"] for line in lines(path)] == [0, 1, 2, 4]
    done = check.run_batch(ITEMS[:1], backend=echo, output=path, if_exists="overwrite")
    assert (done.done, done.failed_path) == (1, None)
    assert not (tmp_path / "out.failed.jsonl").exists()


def test_a_file_of_something_else_or_of_other_inputs_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    check.run_batch(ITEMS[:2], backend=ul.Echo(), output=path)
    with pytest.raises(ul.ParameterError, match="has row 0 with x=0, and the input now has 9"):
        check.run_batch([{"x": 9, "id": "n0"}], backend=ul.Echo(), output=path, if_exists="resume")
    path.write_text('{"a": 1}\n')
    with pytest.raises(ul.ParameterError, match=r"out.jsonl, line 1 is no result of a batch"):
        check.run_batch(ITEMS, backend=ul.Echo(), output=path, if_exists="resume")
    assert path.read_text() == '{"a": 1}\n'


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("out.txt", "ends in .jsonl or .parquet"),
        ("none/out.jsonl", "output 'none/out.jsonl': none is no folder"),
        ("none/out.parquet", "output 'none/out.parquet': none is no folder"),
        (7, "output=7"),
    ],
)
def test_outputs_that_cannot_be_are_refused(
    output: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ul.ParameterError, match=problem):
        check.run_batch(ITEMS, backend=ul.Echo(), output=output)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_was_finished_survives_an_iterable_that_raises(suffix: str, tmp_path: Path) -> None:
    def items() -> Any:
        yield from ITEMS[:3]
        raise LookupError("the database is gone")

    path = tmp_path / f"out.{suffix}"
    with pytest.raises(LookupError):
        check.run_batch(items(), backend=ul.Echo(), output=path)
    assert len(lines(tmp_path / ("out.jsonl" if suffix == "jsonl" else "out.partial.jsonl"))) == 3
    echo = ul.Echo()
    done = check.run_batch(ITEMS, backend=echo, output=path, if_exists="resume")
    assert (done.resumed, done.done, echo.calls) == (3, 4, 2)
    with pytest.raises(LookupError) as raised:
        check.run_batch(({"x": each["x"]} for each in items()), backend=ul.Echo())
    assert sorted(raised.value.batch_results) == [0, 1, 2]


def test_an_error_that_is_raised_leaves_what_was_finished(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="three"):
        check.run_batch(ITEMS, backend=ul.Echo(), output=tmp_path / "out.jsonl", on_error="raise", num_threads=1)
    assert len(lines(tmp_path / "out.jsonl")) == 3
    assert len(lines(tmp_path / "out.failed.jsonl")) == 1


KILLED = """
import os, signal, umbel as ul

@ul.function
def check(s, x):
    s += f"<{x}>" + ul.gen("y") + "and" + ul.gen("z")
    s["y"]
    if x == 3 and os.path.exists("kill"):
        os.kill(os.getpid(), signal.SIGKILL)

done = check.run_batch([{"x": n} for n in range(5)], backend=ul.Echo(), output="out.jsonl", journal="run.journal",
                       num_threads=1, if_exists="resume")
print(done.resumed, done.cost.usage.calls, done.cost.read.calls)
"""


def test_a_killed_batch_goes_on_with_its_journal(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(KILLED)
    (tmp_path / "kill").touch()
    killed = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [line["row"] for line in lines(tmp_path / "out.jsonl")] == [0, 1, 2]
    (tmp_path / "kill").unlink()
    going_on = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    resumed, made, read = map(int, going_on.stdout.split())
    assert (resumed, made + read) == (3, 4), going_on.stderr
    assert read >= 1  # its second call may have ended before the process did
    assert [line["row"] for line in lines(tmp_path / "out.jsonl")] == [0, 1, 2, 3, 4]


def test_a_batch_says_what_its_journal_has_answered(tmp_path: Path) -> None:
    given: dict[str, Any] = {"journal": tmp_path / "run.journal", "if_exists": "overwrite"}
    output = tmp_path / "out.jsonl"
    check.run_batch(ITEMS[:2], backend=ul.Echo(), output=output, **given)
    seen: list[ul.BatchProgress] = []
    done = check.run_batch(ITEMS[:2], backend=ul.Echo(), output=output, progress=seen.append, **given)
    assert str(done) == f"{output}: 2 done · no call made · {done.cost.read.calls} calls read from the journal"
    assert seen[-1].read == done.cost.read
    assert seen[-1].lines()[1:] == ("no call made", f"{done.cost.read.calls} calls read from the journal")
    assert "calls read from the journal" in done._repr_html_()
    more = check.run_batch(ITEMS[:3], backend=ul.Echo(), output=output, **given)
    assert "tokens in, " in str(more)
    assert str(more).endswith(f" out · {done.cost.read.calls} calls read from the journal")


def test_a_journal_and_an_output_pay_each_call_once(tmp_path: Path) -> None:
    @ul.function
    def two(s: ul.State, x: int) -> None:
        s += f"<{x}>" + ul.gen("y")
        s["y"]
        if x == 1 and (tmp_path / "bad").exists():
            raise ValueError("later")
        s += "and" + ul.gen("z")

    given: dict[str, Any] = {"output": tmp_path / "out.jsonl", "journal": tmp_path / "run.journal"}
    (tmp_path / "bad").touch()
    two.run_batch(ITEMS, backend=ul.Echo(), if_exists="resume", **given)
    (tmp_path / "bad").unlink()
    echo = ul.Echo()
    done = two.run_batch(ITEMS, backend=echo, if_exists="resume", **given)
    assert (done.resumed, done.done, done.failed, echo.calls) == (4, 5, 0, 1)
    assert done.cost.read.calls == 1


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = check.run_batch(ITEMS, backend=ul.Echo(), output=path, generator_style=True)
    next(first)
    with pytest.raises(ul.ParameterError, match="written by another run"):
        check.run_batch(ITEMS, backend=ul.Echo(), output=path, if_exists="resume")
    assert len(list(first)) == 4


def test_a_full_disk_stops_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from umbel.interpreter.data import output

    def full(file: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output, "_write", full)
    echo = ul.Echo()
    with pytest.raises(OSError, match="No space left"):
        check.run_batch([(n,) for n in range(1000)], backend=echo, output=tmp_path / "out.jsonl", num_threads=4)
    assert echo.calls < 100


# -------------------------------------------------------------------------------- files that are none of the batch's


def test_a_file_of_one_line_that_is_no_result_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"important": 1}')
    with pytest.raises(ul.ParameterError, match="line 1 is no result of a batch"):
        check.run_batch(ITEMS, backend=ul.Echo(), output=path, if_exists="resume")
    assert path.read_text() == '{"important": 1}'


@pytest.mark.parametrize("kept", [0, 3, 7, 12])
def test_a_first_line_that_is_torn_is_taken_off(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"row": 0, "x": 0'[:kept])
    done = check.run_batch(ITEMS[:1], backend=ul.Echo(), output=path, if_exists="resume")
    assert (done.resumed, lines(path)) == (0, [{"row": 0, "x": 0, "id": "n0", "y": "<0>"}])


def test_a_line_that_lacks_its_end_alone_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    check.run_batch(ITEMS[:2], backend=ul.Echo(), output=path, num_threads=1)
    path.write_bytes(path.read_bytes()[:-1])
    echo = ul.Echo()
    done = check.run_batch(ITEMS[:3], backend=echo, output=path, if_exists="resume")
    assert (done.resumed, echo.calls, [line["row"] for line in lines(path)]) == (2, 1, [0, 1, 2])


@pytest.mark.parametrize("existing", ["error", "resume", "overwrite"])
@pytest.mark.parametrize("output", ["data.jsonl", "./data.jsonl", "link.jsonl", "first.jsonl", "both.parquet"])
def test_the_input_is_never_written_over(
    output: str, existing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = {"first.jsonl": "first.failed.jsonl", "both.parquet": "both.partial.jsonl"}.get(output, "data.jsonl")
    Path(source).write_text('{"x": 1}\n')
    Path("link.jsonl").symlink_to("data.jsonl")
    with pytest.raises(ul.ParameterError, match="which the input is read from; write another output="):
        check.run_batch(source, backend=ul.Echo(), output=output, if_exists=existing)
    assert Path(source).read_text() == '{"x": 1}\n'


def test_the_failures_of_another_run_are_not_removed(tmp_path: Path) -> None:
    failures = tmp_path / "out.failed.jsonl"
    failures.write_text("{}\n")
    with pytest.raises(ul.ParameterError, match=r"out.failed.jsonl exists"):
        check.run_batch(ITEMS, backend=ul.Echo(), output=tmp_path / "out.parquet")
    assert failures.read_text() == "{}\n"


@pytest.mark.parametrize(("one", "other"), [("output", "view"), ("output", "journal"), ("view", "journal")])
def test_two_options_do_not_name_one_file(one: str, other: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {one: tmp_path / "out.jsonl", other: str(tmp_path / "out.jsonl")}
    with pytest.raises(ul.ParameterError, match=rf"{one}= and {other}= name one file"):
        check.run_batch([{"x": 1}], backend=ul.Echo(), **given)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_is_the_input_of_the_next_step(tmp_path: Path) -> None:
    @ul.function
    def second(s: ul.State, y: str) -> None:
        s += y + "!" + ul.gen("z")

    check.run_batch(ITEMS[:2], backend=ul.Echo(), output=tmp_path / "one.jsonl", num_threads=1)
    for _ in range(2):
        done = second.run_batch(
            tmp_path / "one.jsonl", backend=ul.Echo(), output=tmp_path / "two.jsonl", if_exists="resume"
        )
    assert done.resumed == 2
    assert lines(tmp_path / "two.jsonl")[1] == {"row": 1, "row_in": 1, "x": 1, "id": "n1", "y": "<1>", "z": "<1>!"}
    frame = second.run_batch(pandas.DataFrame({"y": ["a", "b"], "row": [1, 0]}), backend=ul.Echo()).to_pandas()
    assert [list(frame[name]) for name in ("row", "row_in", "y")] == [[0, 1], [1, 0], ["a", "b"]]


# -------------------------------------------------------------------------------- types

TYPED = '{"age": 3, "names": ["a", "b"]}'


def test_typed_values_are_columns_of_parquet(tmp_path: Path) -> None:
    @ul.function
    def read(s: ul.State, text: str) -> None:
        s += text + ul.gen("found", dtype=Found, max_tokens=99) + ul.gen("n", dtype=int) + ul.select("s", ["a", "b"])

    when = datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC)
    table = pyarrow.table({"text": ["one", "two"], "when": [when, None], "raw": [b"\xff", b""], "n": [1.5, None]})
    done = read.run_batch(table, backend=ul.Echo([TYPED, "12"] * 2), output=tmp_path / "out.parquet", num_threads=1)
    found = parquet.read_table(tmp_path / "out.parquet")
    assert found.column_names == ["row", "text", "when", "raw", "n", "found", "n_out", "s"]
    assert [found.schema.field(name).type for name in ("when", "raw", "n")] == [
        table.schema.field(name).type for name in ("when", "raw", "n")
    ]
    assert found.column("found").to_pylist()[0] == {"age": 3, "names": ["a", "b"]}
    assert found.column("when").to_pylist() == [when, None]
    assert found.column("raw").to_pylist() == [b"\xff", b""]
    assert found.schema.field("n_out").type == pyarrow.int64()
    assert not (tmp_path / "out.partial.jsonl").exists()
    again = read.run_batch(table, backend=ul.Echo(), output=tmp_path / "out.parquet", if_exists="resume")
    assert (again.resumed, again.done) == (2, 2)
    assert parquet.read_table(tmp_path / "out.parquet").equals(found)
    assert isinstance(done.to_polars(), polars.DataFrame)


def test_a_text_that_is_not_the_type_fails_its_row(tmp_path: Path) -> None:
    @ul.function
    def read(s: ul.State, text: str) -> None:
        s += text + ul.gen("found", dtype=Found, max_tokens=2)

    done = read.run_batch([("one",)], backend=ul.Echo([TYPED]), output=tmp_path / "out.jsonl")
    (failure,) = done.failures()
    assert failure["error"] == "ResultError"


def test_columns_of_mixed_types_become_json(tmp_path: Path) -> None:
    @ul.function
    def mixed(s: ul.State, x: Any) -> Any:
        return x

    values = [1, "one", {"a": 1}, 2**70, float("nan"), "\ud800", None]
    done = mixed.run_batch([(x,) for x in values], backend=ul.Echo(), output=tmp_path / "out.parquet")
    found = done.to_arrow().column("ret_value").to_pylist()
    assert found[:4] == ["1", "one", '{"a": 1}', str(2**70)]
    assert (done.done, done.failed) == (7, 0)


WHEN = datetime.datetime(2026, 1, 2, 3, 4, 5)
CARRIED = {
    "time": pyarrow.array([datetime.time(1, 2), None]),
    "date": pyarrow.array([datetime.date(2026, 1, 2), None]),
    "duration": pyarrow.array([datetime.timedelta(seconds=90), None]),
    "times": pyarrow.array([[WHEN], None]),
    "struct": pyarrow.array([{"at": WHEN, "raw": b"hi"}, None]),
    "binaries": pyarrow.array([[b"hi", b"\xff"], []]),
    "fixed": pyarrow.array([b"abcd", None], type=pyarrow.binary(4)),
    "map": pyarrow.array([[("a", b"\x00")], None], type=pyarrow.map_(pyarrow.string(), pyarrow.binary())),
    "pair": pyarrow.array([[1, 2], None], type=pyarrow.list_(pyarrow.int64(), 2)),
    "decimal": pyarrow.array([decimal.Decimal("7.00"), None]),
    "named": pyarrow.array(["a", None]).dictionary_encode(),
    "fine": pyarrow.array([1, None], type=pyarrow.timestamp("ns", "UTC")),
}


@pytest.mark.parametrize("name", CARRIED)
def test_an_input_column_of_parquet_keeps_its_type_and_its_values(name: str, tmp_path: Path) -> None:
    table = pyarrow.table({"x": [1, 2], name: CARRIED[name]})
    for existing in ("error", "resume"):
        done = check.run_batch(table, backend=ul.Echo(), output=tmp_path / "out.parquet", if_exists=existing)
        found = parquet.read_table(tmp_path / "out.parquet").sort_by("row").column(name)
        assert found.type == table.schema.field(name).type
        assert found.to_pylist() == table.column(name).to_pylist()
    assert done.resumed == 2


def test_what_parquet_cannot_hold_becomes_text(tmp_path: Path) -> None:
    @ul.function
    def tagged(s: ul.State, x: int) -> Any:
        s["tags"] = {}
        return [{"inner": {}}]

    table = pyarrow.table({"x": [1], "none": pyarrow.array([{}], type=pyarrow.struct([]))})
    tagged.run_batch(table, backend=ul.Echo(), output=tmp_path / "out.parquet")
    row = parquet.read_table(tmp_path / "out.parquet").to_pylist()[0]
    assert row == {"row": 0, "x": 1, "none": "{}", "tags": "{}", "ret_value": '[{"inner": {}}]'}


@pytest.mark.parametrize("values", [[1, "s"], [{"k": 1}, {"j": 2}], [[1], "a"], [[{"k": 1}, {"j": [2]}]]])
def test_values_that_parquet_has_in_another_form_are_the_input_all_the_same(values: list[Any], tmp_path: Path) -> None:
    @ul.function
    def keep(s: ul.State, x: Any) -> None:
        s += "a" + ul.gen("y")

    for existing in ("error", "resume"):
        items = [{"x": value} for value in values]
        done = keep.run_batch(items, backend=ul.Echo(), output=tmp_path / "out.parquet", if_exists=existing)
    assert (done.resumed, done.done) == (len(values), len(values))


SET = """
import umbel as ul

class Thing: pass

@ul.function
def keep(s, x, thing):
    s += "a" + ul.gen("y")

items = [{"x": {"a", "b", "c", "d"}, "thing": Thing()}]
print(keep.run_batch(items, backend=ul.Echo(), output="out.jsonl", if_exists="resume").resumed)
"""


def test_sets_and_objects_are_the_same_in_another_process(tmp_path: Path) -> None:
    for seed, resumed in (("1", "0\n"), ("2", "1\n")):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", SET], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.stdout == resumed, done.stderr


def test_a_value_of_any_kind_ends_no_batch(tmp_path: Path) -> None:
    @ul.function
    def odd(s: ul.State, x: int) -> None:
        itself: list[Any] = []
        itself.append(itself)
        s["found"] = [{(1, 2): 3, 4: 5, None: 6, "a": {7}}, itself][x % 2]

    done = odd.run_batch([{"x": n} for n in range(10)], backend=ul.Echo(), output=tmp_path / "out.jsonl")
    assert (done.done, done.failed) == (10, 0)
    assert lines(tmp_path / "out.jsonl")[0]["found"] == {"(1, 2)": 3, "4": 5, "None": 6, "a": [7]}


def test_a_text_that_was_cut_off_leaves_the_frame_of_the_others() -> None:
    @ul.function
    def read(s: ul.State, text: str) -> None:
        s += text + ul.gen("found", dtype=Found, max_tokens=99 if text == "one" else 2)

    results = read.run_batch([("one",), ("two",)], backend=ul.Echo([TYPED] * 2), on_error="return", num_threads=1)
    frame = results.to_pandas()
    assert frame["found"][0] == {"age": 3, "names": ["a", "b"]}
    assert list(frame["error"].notna()) == [False, True]
    assert frame["error"][1].startswith("ResultError: ")


def test_a_list_of_results_becomes_a_frame() -> None:
    results = check.run_batch([{"x": n} for n in range(4)], backend=ul.Echo(), on_error="return")
    frame = results.to_pandas()
    assert list(frame.columns) == ["row", "x", "y", "error"]
    assert list(frame["error"].dropna()) == ["ValueError: three"]
    assert results.to_polars().height == 4
    assert isinstance(frame, pandas.DataFrame)


def test_a_list_that_was_changed_makes_no_frame() -> None:
    results = check.run_batch([{"x": n} for n in range(3)], backend=ul.Echo())
    results.pop(0)
    with pytest.raises(ul.ParameterError, match="the list of results was changed"):
        results.to_pandas()


def test_importing_umbel_loads_no_library_of_frames() -> None:
    code = textwrap.dedent(
        """
        import sys, umbel as ul
        @ul.function
        def p(s, x): s += x
        p.run_batch([("a",)], backend=ul.Echo())
        print([m for m in ("pandas", "polars", "pyarrow", "numpy") if m in sys.modules])
        """
    )
    environment = {**os.environ}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "[]\n"
