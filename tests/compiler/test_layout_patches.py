"""Patches of random programs: the patched file says what was proposed, and nothing else of it changes."""

import ast
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.compiler.layout.linting import findings_of
from umbel.compiler.layout.loading import load
from umbel.compiler.layout.patches import Edit, edited, together, unified
from umbel.compiler.layout.reorder import apply, propose

from .layouts import CHARACTERS, prompt_of

HEAD = 'import umbel as ul\n\nRULES = "Be brief. Be kind.\\n"\n\n\n@ul.function\ndef program(s, x, y):\n'
STATEMENTS = (
    's += "Reply in Latin.\\n"',
    's += "Be kind to {braces}. " + "Use \\"quotes\\" and \\\\.\\n"',
    's += f"Topic: {x}\\n"',
    's += f"{x!r:>8} is {y.strip()}. Say why it is so.\\n"',
    's += RULES',
    's += "Text:\\n" + x + "\\n\\n" + RULES',
    's += ("Long lines of text are here. " "They go on and on, and end here.\\n"\n          f"{y}\\n")',
    '# A comment.\n    s += "Never say never, not even once.\\n"',
    's += ul.gen("a") + "\\nThen go on.\\n"',
    's["kept"] = "a value"',
    'with s.user():\n        s += x + "\\n"\n        s += "Reply in Greek, and in Greek only."',
    's += ul.user(f"Say {y}.\\nNo more than ten words are allowed." + RULES)',
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=6))
def test_a_patch_says_what_was_proposed(tmp_path: Path, statements: list[str]) -> None:
    source = HEAD + "".join(f"    {statement}\n" for statement in [*statements, 's += ul.gen("end")'])
    path = tmp_path / "program.py"
    path.write_text(source)
    (subject,), notes = load(path)
    assert notes == []
    assert subject.graph is not None
    for finding in findings_of(subject, CHARACTERS):
        if finding.patch is None or finding.proposal is None:
            continue
        path.write_text(edited(source, finding.patch))
        (patched,), _ = load(path)
        assert patched.graph is not None
        (wanted,) = [each for each in propose(subject.graph, CHARACTERS) if each.id == finding.proposal.id]
        assert prompt_of(patched.graph) == prompt_of(apply(subject.graph, [wanted]))
        assert path.read_text().count("#") == source.count("#")
        ast.parse(path.read_text())


def test_patches_that_touch_are_made_one_after_the_other() -> None:
    first, second, third = (Edit(0, 2, "a"),), (Edit(1, 3, "b"),), (Edit(5, 5, "c"),)
    assert together([first, second, third]) == [*first, *third]
    assert edited("0123456", [*first, *third]) == "a234c56"


def test_a_file_without_a_last_line_end_can_be_patched() -> None:
    diff = unified(Path("f.py"), "a\nb", [Edit(2, 3, "c")])
    assert diff.endswith("-b\n\\ No newline at end of file\n+c\n\\ No newline at end of file\n")
