"""Prompts are persistent: appending and forking never change what others hold."""

from hypothesis import given
from hypothesis import strategies as st
from umbel.lang.prompt import EMPTY, Generated, Media, Text

PARTS = st.one_of(
    st.builds(Text, st.text(max_size=5), st.booleans()),
    st.builds(Generated, st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
)


@given(st.lists(PARTS, max_size=12), st.integers(0, 12))
def test_a_branch_leaves_its_trunk_as_it_was(parts: list[Text | Generated], at: int) -> None:
    trunk = EMPTY
    for part in parts[:at]:
        trunk = trunk.append(part)
    before = trunk.parts
    branch = trunk
    for part in parts[at:]:
        branch = branch.append(part)
    assert trunk.parts == before
    assert branch.text == "".join(part.text for part in parts)


@given(st.lists(PARTS, max_size=12))
def test_neighbouring_text_of_one_kind_is_one_part(parts: list[Text | Generated]) -> None:
    prompt = EMPTY
    for part in parts:
        prompt = prompt.append(part)
    for left, right in zip(prompt.parts, prompt.parts[1:], strict=False):
        assert not (isinstance(left, Text) and isinstance(right, Text) and left.control == right.control)
    assert all(part.text for part in prompt.parts if isinstance(part, Text))


def test_media_shows_as_its_kind() -> None:
    assert EMPTY.append(Text("a ")).append(Media("image", "00", b"x")).text == "a <image>"
