"""What the linter finds in files, and what it leaves alone."""

from pathlib import Path

import pytest
from umbel.compiler.lint.rules import Finding

from .programs import lint

HEAD = "import datetime\nimport json\nimport random\nimport time\nimport uuid\n\nimport umbel as ul\n\n"
HOUSE = "You answer for a library. Be polite and cite the shelf."


def program(body: str, parameters: str = "s, question", before: str = "") -> str:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f"{HEAD}{before}\n@ul.function\ndef program({parameters}):\n{lines}"


def found(tmp_path: Path, body: str, parameters: str = "s, question", before: str = "") -> list[Finding]:
    return lint(tmp_path / "program.py", program(body, parameters, before))


def rules(findings: list[Finding]) -> list[str]:
    return [finding.rule for finding in findings]


# --------------------------------------------------------------------------------- good layouts


@pytest.mark.parametrize(
    "body",
    [
        f's += "{HOUSE}\\n\\n" + f"Question: {{question}}\\nAnswer:" + ul.gen("a")',
        f's += ul.system("{HOUSE}") + ul.user(question) + ul.assistant(ul.gen("a"))',
        f's += "{HOUSE}"\ns += ul.image("map.png")\ns += question + ul.gen("a")',
        f's += "{HOUSE}"\ns += question\ns += ul.gen("a")\ns += "{HOUSE}" + ul.gen("b")',  # nothing is shared there
        's += json.dumps({"kind": "library", "open": True}) + question + ul.gen("a")',  # keys of the source
        's += ", ".join(sorted({"b", "a"})) + question + ul.gen("a")',
        's += "In 2021-03-04T05:06:07 it happened.\\n" + "Say what it was, in one sentence. " + question + ul.gen("a")',
        f'started = time.time()\ns += "{HOUSE}" + question + ul.gen("a")\ns["seconds"] = str(started)',
        f's += "{HOUSE}\\n" + question + "\\n"\ns += f"Asked at {{datetime.datetime.now()}}.\\n" + ul.gen("a")',
        f's += "{HOUSE}\\n"\nfor turn in question:\n    s += ul.user(turn) + ul.assistant(ul.gen("a"))',  # appended
        f's += f"{{time.strftime(\'%Y\', time.gmtime(0))}}: {HOUSE}" + question + ul.gen("a")',
    ],
)
def test_a_good_layout_gets_no_finding(tmp_path: Path, body: str) -> None:
    assert rules(found(tmp_path, body)) == []


# --------------------------------------------------------------------------------- bad ones


@pytest.mark.parametrize(
    "first",
    [
        "User {user}, session {session}.",  # identifiers in front of what everybody is told
        "Dear {user}!",
        "Input: {question}\\nThe client is {session}.",  # the input in front of the shots
    ],
)
def test_what_is_ones_own_in_front_of_what_everybody_is_told(tmp_path: Path, first: str) -> None:
    shots = "Input: a cat\\nKind: animal\\nInput: an oak\\nKind: plant\\n"
    body = f's += f"{first}\\n"\ns += "{HOUSE}\\n{shots}"\ns += "Input: " + question + "\\nKind:" + ul.gen("a")'
    (finding,) = found(tmp_path, body, "s, user, session, question")
    assert finding.rule == "constants-late"
    assert finding.gain.first >= len(HOUSE)


def test_a_name_in_front_of_the_system_prompt(tmp_path: Path) -> None:
    body = f's += ul.system(f"You talk to {{name}}. {HOUSE}")\ns += ul.user(question) + ul.assistant(ul.gen("a"))'
    (finding,) = found(tmp_path, body, "s, name, question")
    assert finding.rule == "instance-in-system"
    assert finding.gain.first == len(HOUSE.replace(". ", "."))
    assert "user's turn" in finding.what


def test_a_name_in_the_system_turn_spoils_what_stands_behind_the_turn(tmp_path: Path) -> None:
    body = 's += ul.system("Name: " + name)\n' + f's += ul.user("{HOUSE}\\n" + question) + ul.assistant(ul.gen("a"))'
    (finding,) = found(tmp_path, body, "s, name, question")
    assert finding.rule == "instance-in-system"
    assert "user's turn" in finding.what


@pytest.mark.parametrize(
    "value",
    [
        "datetime.datetime.now()",
        "uuid.uuid4()",
        "random.randint(1, 6)",
        "time.strftime('%H:%M:%S')",
        "stamp()",
        "STARTED",
        "now",
    ],
)
def test_what_is_another_text_each_time(tmp_path: Path, value: str) -> None:
    before = "STARTED = datetime.datetime.now().isoformat()\ndef stamp():\n    return str(time.time())\n"
    body = f'now = uuid.uuid1()\ns += f"Run {{{value}}}.\\n"\ns += "{HOUSE}\\n"\ns += question + ul.gen("a")'
    (finding,) = found(tmp_path, body, before=before)
    assert finding.rule == "volatile-early"


def test_a_constant_that_is_no_literal_next_to_a_time(tmp_path: Path) -> None:
    before = f'LONG = "{HOUSE} " * 3\nclass Texts:\n    house = "{HOUSE}\\n" * 3\n'
    for constant in ("LONG", "Texts.house"):
        body = f's += f"{{datetime.datetime.now()}} " + {constant} + question + ul.gen("a")'
        (finding,) = found(tmp_path, body, before=before)
        assert finding.rule == "volatile-early"


def test_a_time_in_a_constant_that_the_source_does_not_spell(tmp_path: Path) -> None:
    """Made by a module that the linter does not read."""
    (tmp_path / "clock.py").write_text("import datetime\n\ndef header():\n    return f'{datetime.datetime.now()}: '\n")
    body = f's += clock.header() + "{HOUSE} Be brief.\\n" + question + ul.gen("a")'
    (finding,) = found(tmp_path, body, before="import clock\n")
    assert finding.rule == "volatile-early"


def test_a_counter(tmp_path: Path) -> None:
    body = f's += f"Step {{step}} of {{total}}. {HOUSE}\\n" + question + ul.gen("a")'
    (finding,) = found(tmp_path, body, "s, step, total, question")
    assert finding.rule == "counter-early"


def test_branches_that_part_too_early(tmp_path: Path) -> None:
    body = f'forks = s.fork(3)\nforks += lambda i: f"Tip {{i}}. {HOUSE}\\n" + ul.gen("tip")'
    (finding,) = found(tmp_path, body, "s")
    assert finding.rule == "counter-early"
    assert "3 branches" in finding.what
    assert finding.gain.total == 2 * (len("You answer for a library.") + len("Be polite and cite the shelf."))


@pytest.mark.parametrize("body", ["s += ul.user(question + ul.image(path))", "s += question\ns += ul.image(path)"])
def test_an_image_behind_a_question(tmp_path: Path, body: str) -> None:
    (finding,) = found(tmp_path, body + '\ns += ul.assistant(ul.gen("a"))', "s, path, question")
    assert finding.rule == "image-late"
    assert finding.what == "the image path stands behind question; put it in front"


@pytest.mark.parametrize(
    ("expression", "better"),
    [
        ("json.dumps(options)", "sort_keys=True"),
        ('", ".join({"a", "b"})', "sorted({'a', 'b'})"),
        ('" ".join(list(set(options)))', "sorted(set(options))"),
    ],
)
def test_order_that_changes(tmp_path: Path, expression: str, better: str) -> None:
    (finding,) = found(tmp_path, f's += "Options: " + {expression} + ul.gen("a")', "s, options")
    assert finding.rule == "unstable-order"
    assert f"write {better}" in finding.what


def test_a_mapping_that_is_put_together_for_the_prompt(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path, 's += f"Options: {({**DEFAULTS, **options})}" + ul.gen("a")', "s, options", "DEFAULTS = {}\n"
    )
    assert finding.rule == "unstable-order"


def test_a_loop_over_a_set(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, 'for word in {"a", "b"}:\n    s += word\ns += ul.gen("a")', "s")
    assert finding.rule == "unstable-order"


@pytest.mark.parametrize(
    ("iterated", "better"),
    [
        ("reversed(history)", "print history in its order"),
        ("history[::-1]", "print history in its order"),
        ("history[-5:]", "keep all of history"),
    ],
)
def test_a_history_that_is_not_appended_to(tmp_path: Path, iterated: str, better: str) -> None:
    body = f'for turn in {iterated}:\n    s += turn\ns += ul.gen("a")'
    (finding,) = found(tmp_path, body, "s, history")
    assert finding.rule == "history-rewritten"
    assert better in finding.what


def test_a_shared_argument_belongs_in_front_of_the_others(tmp_path: Path) -> None:
    body = f's += f"{HOUSE}\\nQuestion: {{question}}\\nDocument: {{document}}\\n" + ul.gen("a")'
    source = program(body, "s, document, question")
    assert rules(lint(tmp_path / "program.py", source)) == []
    (finding,) = lint(tmp_path / "program.py", source, shared=["document"])
    assert finding.rule == "shared-late"
    assert "put document first" in finding.what


def test_a_document_in_another_turn_is_named(tmp_path: Path) -> None:
    body = 's += ul.system("Name: " + name)\ns += ul.user(document) + ul.assistant(ul.gen("a"))'
    source = program(body, "s, name, document")
    (finding,) = lint(tmp_path / "program.py", source, shared=["document"])
    assert finding.rule == "shared-late"


# --------------------------------------------------------------------------------- programs without a trace


@pytest.mark.parametrize(
    "rest",
    [
        's += ul.gen("a")\nif s["a"] == "yes":\n    s += ul.gen("b")',
        'for turn in question:\n    s += turn + ul.gen("a")',
        'with s.fork(int(question)) as forks:\n    forks += ul.gen("a")',
        'n = int(question)\ns += ul.gen("a", max_tokens=n)',
    ],
)
def test_what_no_trace_can_follow_is_looked_at_up_to_where_it_depends(tmp_path: Path, rest: str) -> None:
    body = f's += f"Question: {{question}}\\n"\ns += "{HOUSE}\\n"\n{rest}'
    (finding,) = found(tmp_path, body)
    assert finding.rule == "constants-late"


def test_what_depends_is_not_guessed(tmp_path: Path) -> None:
    body = f'if question:\n    s += question\nelse:\n    s += "Nothing. "\ns += "{HOUSE}\\n" + ul.gen("a")'
    assert found(tmp_path, body) == []


# --------------------------------------------------------------------------------- comments


@pytest.mark.parametrize(
    ("comment", "silent"),
    [("umbel: noqa", True), ("umbel: noqa[counter-early, constants-late]", True), ("umbel: noqa[image-late]", False)],
)
def test_a_comment_silences_a_rule(tmp_path: Path, comment: str, silent: bool) -> None:
    body = f's += f"Question: {{question}}\\n{HOUSE}\\n"  # {comment}\ns += ul.gen("a")'
    assert (found(tmp_path, body) == []) is silent
