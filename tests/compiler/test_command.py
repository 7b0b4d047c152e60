"""The command `umbel compile`: what it prints and writes, and what it says of files that have no such program."""

import json
from xml.etree import ElementTree

import pytest
from umbel.compiler.command import main
from umbel.compiler.files import serialise
from umbel.interpreter import cli

ONE = """
from umbel import function, gen

@function
def tips(s, topic, count=2):
    s += "Tips about " + topic
    for branch in s.fork(count):
        branch += gen("tip", max_tokens=9)

if __name__ == "__main__":
    raise SystemExit("the program ran")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tips.py").write_text(ONE)
    return tmp_path


def test_a_program_is_listed_with_what_the_passes_did(here, capsys):
    assert main(["tips.py:tips", "--static", "count=3"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("tips(topic)\n  tips.py\n")
    assert "Fork 3 -> streams 1, 2, 3" in printed.out
    assert "passes\n  fold " in printed.out
    assert printed.err == ""


def test_the_only_program_of_a_file_needs_no_name(here, capsys):
    assert main(["tips.py", "--static", "count=1", "--passes", "none"]) == 0
    assert capsys.readouterr().out.endswith("passes\n  no passes\n")


def test_the_command_is_part_of_umbel(here, capsys):
    assert cli.main(["compile", "tips.py:tips", "--static", "count=1"]) == 0
    assert "stream 1: branch 0 of 1" in capsys.readouterr().out


def test_a_graph_is_kept_drawn_and_printed(here, capsys):
    arguments = ["tips.py:tips", "--static", "count=2", "-o", "tips.umbel.json", "--svg", "tips.svg"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "umbel compile: wrote tips.umbel.json\numbel compile: wrote tips.svg\n"
    graph = serialise.read("tips.umbel.json")
    assert ElementTree.parse("tips.svg").getroot().get("class") == "umbel-graph"
    assert main([*arguments[:3], "--json"]) == 0
    assert serialise.digest(serialise.decode(capsys.readouterr().out.encode(), source="out")) == serialise.digest(graph)
    assert main(["tips.umbel.json", "--dot"]) == 0
    assert capsys.readouterr().out == graph.dot()


def test_a_json_dump_is_the_file(here, capsys):
    assert main(["tips.py:tips", "--static", "count=2", "--json"]) == 0
    assert "tips.py" in json.loads(capsys.readouterr().out)["files"]


def test_passes_are_chosen(here, capsys):
    with open("tips.py", "a") as file:
        file.write("\n@function\ndef two(s):\n    s += 'a' + gen('x')\n    s += 'b' + gen('y') + gen('z')\n")
    arguments = ["tips.py:two", "--passes", "default,drop_unused", "--keep", "x"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Gen x" in printed
    assert "Gen z" not in printed
    assert "drop_unused" in printed


def test_what_a_program_does_beside_is_said(here, capsys):
    (here / "loud.py").write_text(
        "import time\nfrom umbel import function\n@function\ndef loud(s):\n    print('!')\n    s += str(time.time())\n"
    )
    assert main(["loud.py"]) == 0
    said = capsys.readouterr().err
    assert "loud.py:5: print() has run now, and never does when the graph runs" in said
    assert "loud.py:6: time.time() gives another answer each time, and the graph keeps this one" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.py:tips"], "'none.py' is not a file; write the path of a Python file with programs"),
        (["tips.py:tip"], "tips.py has no program 'tip'; write tips.py:tips"),
        (["empty.py"], "empty.py has no programs; write one, with @function"),
        (["two.py"], "two.py has 2 programs; write two.py:one or two.py:other"),
        (["syntax.py:x"], "syntax.py:2: SyntaxError: "),
        (["fails.py:x"], "fails.py:3: ZeroDivisionError: division by zero"),
        (["exits.py:x"], "exits.py:2: SystemExit: 3"),
        (["wrong.py:x"], "temperature=-1 is out of range; write 0.0 to 100.0\n  raised at wrong.py:2"),
        (["tips.py:tips"], "tips.py:7: "),
        (["tips.py:tips"], "on the command line it is --static NAME=JSON"),
        (["tips.py:tips", "--static", "size=2"], "size"),
        (["tips.py:tips", "--static", "count=1", "--passes", "fodl"], "there is no pass 'fodl'; did you mean 'fold'?"),
        (["tips.py:tips", "--static", "count=1", "-o", "no/such/f.umbel.json"], "no/such is no folder; make it"),
        (
            ["tips.py:tips", "--static", "count=1", "--svg", "."],
            "--svg '.' is a folder; write the path of a file in it",
        ),
        (["none.umbel.json"], "No such file or directory: 'none.umbel.json'"),
        (["bad.umbel.json"], "bad.umbel.json: it is no JSON: line 1, column 1"),
        (["bad.umbel.json", "--static", "n=1"], "--static is for programs"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_what_has_no_graph_is_said_with_its_line(here, capsys, arguments, says):
    (here / "empty.py").write_text("")
    (here / "two.py").write_text("from umbel import function\none = function(lambda s: None)\nother = one.bind()\n")
    (here / "syntax.py").write_text("x = 1\ndef\n")
    (here / "fails.py").write_text("def f():\n    pass\nx = 1 / 0\n")
    (here / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (here / "wrong.py").write_text("from umbel import gen\nx = gen('x', temperature=-1)\n")
    (here / "bad.umbel.json").write_text("?")
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("umbel compile: ")
    assert says in printed.err


def test_an_option_that_is_no_json_says_what_to_write(here, capsys):
    with pytest.raises(SystemExit):
        main(["tips.py:tips", "--static", "count"])
    assert "'count' is no NAME=JSON; write --static n=3" in capsys.readouterr().err


LOOKS = """
from umbel import function, gen, select

@function
def judge(s, essay):
    s += essay + "About a city?" + select("related", choices=[" yes", " no"])
    if s["related"] == " no":
        return
    s += "Why?" + gen("why", dtype=int)
    if s.value("why") > 3:
        s += gen("more")
    s += s["why"].strip()
"""


def test_a_program_that_looks_at_an_answer_can_be_drawn_for_one(here, capsys):
    (here / "judge.py").write_text(LOOKS)
    assert main(["judge.py:judge"]) == 1
    error = capsys.readouterr().err
    assert "== looks at variable 'related'" in error
    assert "umbel compile FILE.py:judge --given 'related=\" yes\"'" in error
    assert main(["judge.py:judge", "--given", 'related=" yes"']) == 1
    assert "--given 'why=\"...\"'" in capsys.readouterr().err
    chosen = ["judge.py:judge", "--given", 'related=" yes"', "--given", "why=7"]
    assert main(["judge.py:judge", "--given", 'related=" no"']) == 0
    printed = capsys.readouterr()
    assert "why" not in printed.out
    assert printed.err == "umbel compile: the graph is what the program says for related=' no' alone\n"
    assert main([*chosen, "--svg", "judge.svg"]) == 0
    assert ElementTree.parse("judge.svg").getroot().get("class") == "umbel-graph"
    capsys.readouterr()
    assert main(chosen) == 0
    assert "Gen more" in capsys.readouterr().out


def test_an_error_of_the_program_is_shown_with_its_line(here, capsys):
    (here / "judge.py").write_text(LOOKS.replace(".strip()", ".length"))
    assert main(["judge.py:judge", "--given", 'related=" yes"', "--given", "why=7"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("umbel compile: AttributeError: 'str' object has no attribute 'length'\n  judge.py:12, ")


def test_given_values_that_were_not_read_are_named_with_the_error(here, capsys):
    (here / "judge.py").write_text(LOOKS)
    assert main(["judge.py:judge", "--given", 'relatd=" yes"', "--given", "why=7"]) == 1
    error = capsys.readouterr().err
    assert "== looks at variable 'related'" in error
    assert "\n  not read until then, of what is given: 'relatd', 'why'\n" in error
    assert main(["judge.py:judge", "--given", 'related=" yes"']) == 1
    assert "not read" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--given", "--static"])
def test_a_name_that_is_given_twice_is_refused(here, capsys, option):
    (here / "judge.py").write_text(LOOKS)
    for command in ("compile", "lint") if option == "--static" else ("compile",):
        expected = 2 if command == "lint" else 1
        assert cli.main([command, "judge.py:judge", option, 'related=" no"', option, 'related=" yes"']) == expected
        assert f"{option} 'related' is given twice, as ' no' and ' yes'; leave one out" in capsys.readouterr().err


def test_a_graph_for_one_answer_is_not_kept(here, capsys):
    (here / "judge.py").write_text(LOOKS)
    chosen = ["judge.py:judge", "--given", 'related=" no"']
    for kept in (["-o", "judge.umbel.json"], ["--json"]):
        assert main([*chosen, *kept]) == 1
        assert "which is wrong for other answers" in capsys.readouterr().err
    assert not (here / "judge.umbel.json").exists()
    assert main([*chosen, "--given", "other=1"]) == 1
    assert "reads no variable 'other'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["judge.py:judge", "--given", "related= yes"])
    assert "is no NAME=JSON; write --given 'answer=\"yes\"'" in capsys.readouterr().err
