"""Random languages for tests of the automaton: small alphabets, so that random texts have a chance."""

from hypothesis import strategies as st
from umbel.fsm.algebra import any_order
from umbel.fsm.language import (
    NOTHING,
    AnyOrder,
    Call,
    Chars,
    Concat,
    Dfa,
    Grammar,
    Language,
    Literal,
    Repeat,
    Spelled,
    Union,
)

CHARACTERS = 'ab"\\\né€😀'
ANY = ((0, 0x10FFFF),)


def one_of(characters: str) -> Chars:
    """A set of characters with ranges that ascend and do not touch."""
    ranges: list[tuple[int, int]] = []
    for code in sorted({ord(character) for character in characters}):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    return Chars(tuple(ranges))


LITERALS = st.text(alphabet=CHARACTERS, max_size=3).map(lambda text: Literal(text.encode()))
SETS = st.one_of(
    st.text(alphabet=CHARACTERS, min_size=1, max_size=4).map(one_of),
    st.sampled_from([Chars(ANY), Chars(((0x20, 0x7E),)), Chars(((0x80, 0x10FFFF),))]),
)


@st.composite
def dfas(draw: st.DrawFn) -> Dfa:
    """A character automaton in which every state reaches an accepting one: the last, which each state leads to."""
    count = draw(st.integers(1, 3))
    accepting = (*[draw(st.booleans()) for _ in range(count - 1)], True)
    edges = []
    for state in range(count):
        letters = draw(st.permutations("abé")) if state < count - 1 else "b"
        targets = [draw(st.integers(0, count - 1)) for _ in letters]
        if state < count - 1:
            targets[0] = count - 1
        edges.append(tuple((one_of(letter).ranges, target) for letter, target in zip(letters, targets, strict=True)))
    return Dfa(accepting, tuple(edges))


def _above(inner: st.SearchStrategy[Language]) -> st.SearchStrategy[Language]:
    lists = st.lists(inner, min_size=1, max_size=4).map(tuple)
    counts = st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(0, 4)))
    return st.one_of(
        lists.map(Concat),
        lists.map(Union),
        st.builds(
            lambda body, count: Repeat(body, count[0], None if count[1] is None else count[0] + count[1]), inner, counts
        ),
    )


LEAVES = st.one_of(LITERALS, SETS, dfas())
UNSPELLED = st.recursive(LEAVES, _above, max_leaves=5)
LANGUAGES = st.recursive(st.one_of(LEAVES, UNSPELLED.map(Spelled)), _above, max_leaves=8)
FEW_LETTERS = st.recursive(
    st.one_of(st.text(alphabet="ab", max_size=3).map(lambda text: Literal(text.encode())), st.just(one_of("ab"))),
    _above,
    max_leaves=8,
)


@st.composite
def any_orders(draw: st.DrawFn, inner: st.SearchStrategy[Language] = FEW_LETTERS) -> Language:
    """Parts that begin alike, of which some are required, some ordered; with counts now and then."""

    def part() -> Language:
        return Concat((Literal(draw(st.sampled_from([b"a", b"ab", b"b", b"c", b"("]))), draw(inner)))

    parts = tuple(part() for _ in range(draw(st.integers(0, 4))))
    required = tuple(index for index in range(len(parts)) if draw(st.booleans()))
    order = AnyOrder(
        parts,
        Literal(draw(st.sampled_from([b",", b", ", b""]))),
        part() if draw(st.booleans()) else None,
        required,
        draw(st.sampled_from([0, *(index + 1 for index in required)])),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([None, None, 1, 2, 3])),
        draw(st.sampled_from([0, 0, 1])),
    )
    found = any_order(order)
    return Concat((Literal(draw(st.sampled_from([b"", b"c"]))), found)) if found != NOTHING else Literal(b"a")


@st.composite
def recursive_grammars(draw: st.DrawFn) -> Grammar:
    """Rules that call themselves and each other, each call behind at least one byte."""
    simple = st.recursive(LEAVES, _above, max_leaves=3)

    def guarded(rule: str) -> Language:
        opening = draw(st.sampled_from([b"(", b"[", b"a"]))
        closing = draw(st.sampled_from([b")", b"]", b"a", b""]))
        body: Language = Concat((Literal(opening), Call(rule), Literal(closing)))
        most = draw(st.sampled_from([None, 1, 2]))
        return draw(st.sampled_from([body, Repeat(body, 0, most)]))

    rules: dict[str, Language] = {}
    for name in ("one", "two"):
        rules[name] = Union((draw(simple), *(guarded(draw(st.sampled_from(["one", "two"]))) for _ in range(2))))
    return Grammar(Concat((Call("one"), draw(simple))), rules)
