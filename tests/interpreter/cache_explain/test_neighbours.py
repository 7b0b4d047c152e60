"""The nearest earlier prompts, found among many."""

from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter.cache_explain.history import COMPARED, EarlierCalls, History, Intent, Layout, common_length
from umbel.lang.prompt import EMPTY, Text


@settings(max_examples=60)
@given(
    st.text("ab", max_size=6), st.lists(st.tuples(st.text("ab", max_size=6), st.sampled_from(["", "s"])), max_size=60)
)
def test_nothing_is_nearer_than_the_nearest(text: str, earlier: list[tuple[str, str]]) -> None:
    history = History()
    for other, salt in (*earlier, (text, "")):
        prompt = EMPTY.append(Text(other))
        asked = history.record(Intent("gen", "x", prompt, None), prompt.parts, salt, own=True)
    found = EarlierCalls(history.calls).of(asked, Layout(text, ()))
    for salt, neighbours in (("", found.same_salt), ("s", found.other_salts)):
        near = sorted((common_length(text, other) for other, its in earlier if its == salt and other[:1] == text[:1]))
        near = [common for common in near if common]
        assert [neighbour.common for neighbour in neighbours] == near[::-1][:COMPARED]


def test_of_equally_near_prompts_the_latest_that_goes_on_is_first() -> None:
    history = History()
    for number, text in enumerate(("ab", "ab c", "ab d", "ab")):
        history.record(Intent("gen", str(number), EMPTY.append(Text(text)), None), (), "", own=True)
    asked = history.record(Intent("gen", "x", EMPTY, None), (), "", own=True)
    names = [
        neighbour.asked.intent.name for neighbour in EarlierCalls(history.calls).of(asked, Layout("ab", ())).same_salt
    ]
    assert names == ["2", "1", "3", "0"]
