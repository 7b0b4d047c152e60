"""What the linter finds in files, and what it leaves alone."""

from pathlib import Path

import pytest
from umbel.compiler.layout.findings import Finding
from umbel.compiler.layout.patches import unified

from .layouts import lint, patched

HEAD = "import datetime\nimport json\nimport random\nimport time\nimport uuid\n\nimport umbel as ul\n\n"
HOUSE = "You answer for a library. Be polite and cite the shelf."


def program(body: str, parameters: str = "s, question", before: str = "") -> str:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f"{HEAD}{before}\n@ul.function\ndef program({parameters}):\n{lines}"


def found(tmp_path: Path, body: str, parameters: str = "s, question", before: str = "") -> list[Finding]:
    return lint(tmp_path / "program.py", program(body, parameters, before))


def rules(findings: list[Finding]) -> list[str]:
    return [finding.rule for finding in findings]


def after_patch(tmp_path: Path, finding: Finding) -> str:
    path = tmp_path / "program.py"
    assert finding.patch is not None
    return patched(path, unified(Path(path.name), path.read_text(), finding.patch))


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
    assert finding.gain.first == len(HOUSE) + len(" You talk to ") - len("You talk to ")
    assert f'f"{HOUSE} You talk to {{name}}."' in after_patch(tmp_path, finding)


def test_a_name_in_the_system_turn_spoils_what_stands_behind_the_turn(tmp_path: Path) -> None:
    body = 's += ul.system("Name: " + name)\n' + f's += ul.user("{HOUSE}\\n" + question) + ul.assistant(ul.gen("a"))'
    (finding,) = found(tmp_path, body, "s, name, question")
    assert (finding.rule, finding.patch) == ("instance-in-system", None)
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
    assert after_patch(tmp_path, finding).index(HOUSE) < after_patch_index(tmp_path, "Run {")


def after_patch_index(tmp_path: Path, words: str) -> int:
    return (tmp_path / "program.py").read_text().index(words)


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
    text = after_patch(tmp_path, finding)
    assert text.index(HOUSE) < text.index("Step {step} of {total}.") < text.index("+ question")


def test_branches_that_part_too_early(tmp_path: Path) -> None:
    body = f'forks = s.fork(3)\nforks += lambda i: f"Tip {{i}}. {HOUSE}\\n" + ul.gen("tip")'
    (finding,) = found(tmp_path, body, "s")
    assert finding.rule == "counter-early"
    assert "3 branches" in finding.what
    assert finding.gain.total == 2 * (len("You answer for a library.") + len("Be polite and cite the shelf."))


@pytest.mark.parametrize(
    ("body", "patched_line"),
    [
        ("s += ul.user(question + ul.image(path))", "s += ul.user(ul.image(path) + question)"),
        ("s += question\ns += ul.image(path)", "s += ul.image(path)\n    s += question"),
    ],
)
def test_an_image_behind_a_question(tmp_path: Path, body: str, patched_line: str) -> None:
    (finding,) = found(tmp_path, body + '\ns += ul.assistant(ul.gen("a"))', "s, path, question")
    assert finding.rule == "image-late"
    assert patched_line in after_patch(tmp_path, finding)


@pytest.mark.parametrize(
    ("expression", "better"),
    [
        ("json.dumps(options)", "json.dumps(options, sort_keys=True)"),
        ('", ".join({"a", "b"})', "join(sorted({'a', 'b'}))"),
        ('" ".join(list(set(options)))', "list(sorted(set(options)))"),
    ],
)
def test_order_that_changes(tmp_path: Path, expression: str, better: str) -> None:
    (finding,) = found(tmp_path, f's += "Options: " + {expression} + ul.gen("a")', "s, options")
    assert finding.rule == "unstable-order"
    assert better in after_patch(tmp_path, finding)


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
    [("reversed(history)", "history"), ("history[::-1]", "history"), ("history[-5:]", None)],
)
def test_a_history_that_is_not_appended_to(tmp_path: Path, iterated: str, better: str | None) -> None:
    body = f'for turn in {iterated}:\n    s += turn\ns += ul.gen("a")'
    (finding,) = found(tmp_path, body, "s, history")
    assert finding.rule == "history-rewritten"
    if better is None:
        assert finding.patch is None
    else:
        assert f"for turn in {better}:" in after_patch(tmp_path, finding)


def test_a_shared_argument_belongs_in_front_of_the_others(tmp_path: Path) -> None:
    body = f's += f"{HOUSE}\\nQuestion: {{question}}\\nDocument: {{document}}\\n" + ul.gen("a")'
    source = program(body, "s, document, question")
    assert rules(lint(tmp_path / "program.py", source)) == []
    (finding,) = lint(tmp_path / "program.py", source, shared=["document"])
    assert finding.rule == "shared-late"
    text = after_patch(tmp_path, finding)
    assert text.index("Document:") < text.index("Question:")
    assert lint(tmp_path / "program.py", text, shared=["document"]) == []


def test_a_document_whose_place_is_in_another_turn_is_named_without_a_patch(tmp_path: Path) -> None:
    body = 's += ul.system("Name: " + name)\ns += ul.user(document) + ul.assistant(ul.gen("a"))'
    source = program(body, "s, name, document")
    (finding,) = lint(tmp_path / "program.py", source, shared=["document"])
    assert (finding.rule, finding.patch) == ("shared-late", None)


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
    text = after_patch(tmp_path, finding)
    assert text.index(HOUSE) < text.index("Question:")


def test_what_depends_is_not_guessed(tmp_path: Path) -> None:
    body = f'if question:\n    s += question\nelse:\n    s += "Nothing. "\ns += "{HOUSE}\\n" + ul.gen("a")'
    assert found(tmp_path, body) == []


# --------------------------------------------------------------------------------- patches


def test_named_constants_stay_names(tmp_path: Path) -> None:
    body = 's += f"Question: {question}\\n" + HOUSE + "\\n"\ns += ul.gen("a")'
    (finding,) = found(tmp_path, body, before=f'HOUSE = "{HOUSE}"\n')
    text = after_patch(tmp_path, finding)
    assert text.count(HOUSE) == 1
    assert "HOUSE" in text.partition("def program")[2]


def test_lines_move_with_their_comments(tmp_path: Path) -> None:
    body = f's += f"Question: {{question}}\\n"\n# Our voice.\ns += "{HOUSE}\\n"\ns += ul.gen("a")'
    (finding,) = found(tmp_path, body)
    assert f'# Our voice.\n    s += "{HOUSE}\\n"\n    s += f"Question' in after_patch(tmp_path, finding)


def test_there_is_no_patch_across_a_loop(tmp_path: Path) -> None:
    body = f'for i in range(2):\n    s += f"Question: {{question}}\\n"\ns += "{HOUSE}\\n"\ns += ul.gen("a")'
    (finding,) = found(tmp_path, body)
    assert (finding.rule, finding.patch) == ("constants-late", None)


@pytest.mark.parametrize(
    ("comment", "silent"),
    [("umbel: noqa", True), ("umbel: noqa[counter-early, constants-late]", True), ("umbel: noqa[image-late]", False)],
)
def test_a_comment_silences_a_rule(tmp_path: Path, comment: str, silent: bool) -> None:
    body = f's += f"Question: {{question}}\\n{HOUSE}\\n"  # {comment}\ns += ul.gen("a")'
    assert (found(tmp_path, body) == []) is silent
