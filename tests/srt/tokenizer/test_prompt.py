"""What is found again is what encoding the whole text would have given, for every kind of tokenizer."""

import re
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.prompt import Generated, Part, Private, Text
from umbel.srt.tokenizer.hf import HFTokenizer
from umbel.srt.tokenizer.prompt import (
    BLOCK,
    LEAST_PARTS,
    LONG,
    SMALL_BLOCK,
    Beginnings,
    PromptEncoder,
    TokenCache,
    any_of,
    text_of,
)
from umbel.srt.tokenizer.tokenizer import ByteTokenizer, Tokenizer

from ..toy_tokenizers import BUILDERS, CONTROL, CORPUS, byte_level, reread, wrap

BYTES = ByteTokenizer()
CUTTABLE = [name for name in BUILDERS if name != "Unigram"]
WORDS = "The umbel sings of cities and of the sea. "

_tokenizers: dict[str, HFTokenizer] = {}


def toy(kind: str) -> HFTokenizer:
    if kind not in _tokenizers:
        _tokenizers[kind] = wrap(BUILDERS[kind]())
    return _tokenizers[kind]


# Pieces at whose edges tokenizers behave in their own ways; texts are long enough to be cut many times.
pieces = st.sampled_from(
    [
        *(" ", "  ", "\n", "\n\n", " \n ", "\t", "\r\n", "\u00a0", "\u2028", "\u3000", "\u200b", "▁", " ▁", "_"),
        *("'s", "'ll ", "I'm", "don't", ".", "...", "?!", " (", ") ", "{'a': 1}", "//", "/\n", "->", "="),
        *("0", "12", " 1234", "3.14 ", "²", "½ ", "٣", "a", "the", " the", "The ", "capital", "of", "xq", "Z"),
        *("é", "e\u0301", " \u0301", "ñ ", "Å", "東京", "と ", "Привет", " мир", "🙂", "👩‍👩‍👧 ", "\U0010ffff"),
        *(*CONTROL, "<think>", " <think> ", "<tool call>", "<|im_", "start|>", "<0x20>", "Ġ", "Ċ"),
        *CORPUS[:5],
    ]
)
texts = st.lists(pieces, min_size=1, max_size=120).map("".join)


@pytest.mark.parametrize("kind", CUTTABLE)
def test_these_tokenizers_have_boundaries(kind: str) -> None:
    assert toy(kind).boundary is not None


@pytest.mark.parametrize("kind", sorted(BUILDERS))
@settings(max_examples=40, deadline=None)
@given(text=texts, first=st.booleans())
def test_a_text_cut_at_every_boundary_gives_the_tokens_of_the_whole(kind: str, text: str, first: bool) -> None:
    tokenizer = toy(kind)
    places = [found.start() for found in tokenizer.boundary.finditer(text)] if tokenizer.boundary else []
    ids: list[int] = []
    for start, end in zip([0, *places], [*places, len(text)], strict=True):
        ids += tokenizer.encode(text[start:end], first=first and start == 0)
    assert ids == tokenizer.encode(text, first=first)


@pytest.mark.parametrize("kind", ["bytes", *sorted(BUILDERS)])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_prompts_that_grow_and_branch_are_encoded_as_if_each_were_the_first(kind: str, data: st.DataObject) -> None:
    tokenizer: Tokenizer = BYTES if kind == "bytes" else toy(kind)
    reusing, plain = PromptEncoder(tokenizer), PromptEncoder(tokenizer, cache_bytes=0)
    prompts: list[tuple[Part, ...]] = [()]
    for _ in range(data.draw(st.integers(1, 6))):
        before = data.draw(st.sampled_from(prompts))
        part: Part = data.draw(
            st.one_of(
                st.builds(Text, texts),
                st.builds(Text, st.sampled_from(["<|im_start|>user\n", "\n<|im_end|>\n", "<s>"]), st.just(True)),
                st.builds(Generated, st.just("the"), st.just((ord("t"), ord("h"), ord("e")))),
            )
        )
        prompts.append((*before, part))
        assert reusing.encode(prompts[-1]) == plain.encode(prompts[-1])


@pytest.mark.parametrize("kind", ["bytes", *sorted(BUILDERS)])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_sessions_of_many_parts_are_encoded_as_if_each_prompt_were_the_first(kind: str, data: st.DataObject) -> None:
    """Parts up to the last generated text come from an earlier prompt; also where these are nothing but BOS so far."""
    tokenizer: Tokenizer = BYTES if kind == "bytes" else toy(kind)
    reusing, plain = PromptEncoder(tokenizer), PromptEncoder(tokenizer, cache_bytes=0)
    bos = tokenizer.bos_id
    generated = [(ord("t"),), (ord("t"), ord("h"), ord("e")), (), *([] if bos is None else [(bos,), (bos, ord("t"))])]
    part = st.one_of(
        st.builds(Text, st.one_of(pieces, st.just(""))),
        st.builds(Text, st.sampled_from(["<|im_start|>user\n", "\n<|im_end|>\n", "<s>", ""]), st.just(True)),
        st.builds(Generated, st.just("the"), st.sampled_from(generated)),
        st.builds(Private, st.sampled_from(["acme", "globex"])),
    )
    empty = st.sampled_from([Text(""), Text("", True), *(Generated("", ids) for ids in generated[-2:])])
    first = st.one_of(
        st.lists(part, min_size=LEAST_PARTS - 2, max_size=LEAST_PARTS + 2),
        st.lists(empty, min_size=LEAST_PARTS - 2, max_size=LEAST_PARTS + 2),
    )
    prompts = [tuple(data.draw(first))]
    for _ in range(data.draw(st.integers(1, 6))):
        prompts.append((*data.draw(st.sampled_from(prompts)), *data.draw(st.lists(part, min_size=1, max_size=3))))
        salt = data.draw(st.sampled_from(["", "a"]))
        prompt, endings = prompts[-1], ["", "n end"]
        assert reusing.salted(salt).encode(prompt) == plain.encode(prompt)
        assert reusing.salted(salt).encode_endings(prompt, endings) == plain.encode_endings(prompt, endings)
        assert reusing.counters["reused_characters"] >= 0


@pytest.mark.parametrize("kind", ["bytes", *sorted(BUILDERS)])
@settings(max_examples=25, deadline=None)
@given(
    prompt=st.lists(
        st.one_of(
            st.builds(Text, texts),
            st.builds(Text, st.sampled_from(["<|im_start|>user\n", "<s>", "\n<|im_end|>"]), st.just(True)),
            st.builds(Generated, st.just("t"), st.just((ord("t"),))),
        ),
        max_size=3,
    ),
    endings=st.lists(st.one_of(pieces, texts), max_size=3),
)
def test_a_prompt_with_endings_is_encoded_as_each_alone(kind: str, prompt: list[Part], endings: list[str]) -> None:
    tokenizer: Tokenizer = BYTES if kind == "bytes" else toy(kind)
    plain = PromptEncoder(tokenizer, cache_bytes=0)
    expected = plain.encode(prompt), [plain.encode([*prompt, Text(ending)]) for ending in endings]
    assert PromptEncoder(tokenizer).encode_endings(prompt, endings) == expected
    assert plain.encode_endings(prompt, endings) == expected


@pytest.mark.parametrize("kind", ["bytes", *sorted(BUILDERS)])
@settings(max_examples=20, deadline=None)
@given(prompt=st.lists(st.builds(Text, texts, st.booleans()), max_size=2), ending=texts)
def test_the_ids_of_a_prompt_are_a_prompt_with_one_bos(kind: str, prompt: list[Part], ending: str) -> None:
    tokenizer: Tokenizer = BYTES if kind == "bytes" else toy(kind)
    encoder = PromptEncoder(tokenizer)
    ids = encoder.encode(prompt)
    assert encoder.encode([Generated("", tuple(ids))]) == ids
    without = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    assert encoder.encode([Generated("", tuple(ids[len(without) :]))]) == ids
    assert encoder.encode([Generated("", tuple(without)), Text(ending)]) == encoder.encode([Text(ending)])


controls = st.builds(Text, st.sampled_from(["<|im_start|>user\n", "<s>", "\n<|im_end|>"]), st.just(True))
ids_of_a_model = st.builds(Generated, st.just("t"), st.just((ord("t"),)))
some_parts = st.lists(st.one_of(st.builds(Text, texts), controls, ids_of_a_model), max_size=3)


@pytest.mark.parametrize("kind", ["bytes", *sorted(BUILDERS)])
@settings(max_examples=40, deadline=None)
@given(before=some_parts, others=st.tuples(some_parts, some_parts), cached=st.booleans())
def test_the_tokens_before_a_mark_stay_the_same_whatever_follows(
    kind: str, before: list[Part], others: tuple[list[Part], list[Part]], cached: bool
) -> None:
    check_marks(BYTES if kind == "bytes" else toy(kind), before, others, cached=cached)


@pytest.mark.model
@settings(max_examples=20, deadline=None)
@given(before=some_parts, others=st.tuples(some_parts, some_parts))
def test_the_default_model_s_tokens_before_a_mark_stay_the_same(
    default_tokenizer: Tokenizer, before: list[Part], others: tuple[list[Part], list[Part]]
) -> None:
    check_marks(default_tokenizer, before, others)


def check_marks(
    tokenizer: Tokenizer, before: list[Part], others: tuple[list[Part], list[Part]], *, cached: bool = True
) -> None:
    """Two prompts that go on in their own ways share what marks cover, and so do the choices of a score after them."""
    plain = PromptEncoder(tokenizer, cache_bytes=0)
    encoder = PromptEncoder(tokenizer) if cached else plain
    places = range(len(before) + 1)
    (left, of_left), (right, of_right) = (encoder.encode_marked([*before, *other], places) for other in others)
    assert left == plain.encode([*before, *others[0]])
    assert of_left == sorted(of_left)
    for i, j in zip(of_left, of_right, strict=True):
        assert left[: min(i, j)] == right[: min(i, j)]
    assert of_left[:-1] == of_right[:-1], "only what comes directly after a place may count"
    alone, lengths = encoder.encode_marked(before, places)
    _, sequences = encoder.encode_endings(before, [text for other in others if (text := text_of(other))])
    assert all(sequence[: lengths[-1]] == alone[: lengths[-1]] for sequence in sequences)


@pytest.mark.parametrize("kind", ["bytes", *CUTTABLE])
def test_a_mark_covers_all_that_is_certain(kind: str) -> None:
    tokenizer: Tokenizer = BYTES if kind == "bytes" else toy(kind)
    encoder = PromptEncoder(tokenizer)
    system, end = Text("The umbel sings of " * 30 + "cit"), Text("<s>", control=True)
    ended, _ = encoder.encode_marked([system, end], [])
    whole, (inside,) = encoder.encode_marked([system, Text("ies and of the sea")], [1])
    alone, (open_end,) = encoder.encode_marked([system], [1])
    assert encoder.encode_marked([system, end], [0, 1, 2])[1] == [len(encoder.encode([])), len(ended) - 1, len(ended)]
    assert whole[:inside] == encoder.encode([Text("The umbel sings of " * 30)])[:inside]
    assert inside == open_end >= len(alone) - len("cit of  ")
    assert inside == len(encoder.encode([Text(("The umbel sings of " * 30).removesuffix(" "))]))


def test_a_mark_in_a_text_without_certain_places_covers_what_comes_before_the_text() -> None:
    encoder = PromptEncoder(toy("Unigram"))
    start = Text("<s>", control=True)
    assert encoder.encode_marked([start, Text("The umbel sings"), Text("!")], [2])[1] == [len(encoder.encode([start]))]


def test_a_bos_inside_of_a_prompt_stays() -> None:
    a, bos = ord("a"), 256
    assert PromptEncoder(BYTES).encode([Generated("", (bos, bos, a))]) == [bos, bos, a]
    assert PromptEncoder(BYTES).encode([Text("a"), Generated("", (bos, a))]) == [bos, a, bos, a]
    assert PromptEncoder(BYTES).encode_endings([Generated("", (bos,))], ["a"]) == ([bos], [[bos, a]])


@pytest.mark.model
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_the_default_model_cuts_its_texts_without_a_trace(default_tokenizer: Tokenizer, text: str) -> None:
    places = (
        [found.start() for found in default_tokenizer.boundary.finditer(text)] if default_tokenizer.boundary else []
    )
    ids: list[int] = []
    for start, end in zip([0, *places], [*places, len(text)], strict=True):
        ids += default_tokenizer.encode(text[start:end], first=start == 0)
    assert ids == default_tokenizer.encode(text, first=True)


@pytest.fixture(scope="module")
def default_tokenizer() -> Tokenizer:
    from umbel.lang.runtime_options import RuntimeOptions
    from umbel.srt.launch import open_tokenizer

    tokenizer = open_tokenizer(RuntimeOptions(model="default"))[1]
    assert tokenizer.boundary is not None
    return tokenizer


# ---------------------------------------------------------------------------------- control text

names = st.sets(st.text("<a|>.", min_size=1, max_size=5), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(names=names, text=st.text("<a|>.", max_size=40))
def test_the_longest_name_at_a_place_is_its_control_token(names: set[str], text: str) -> None:
    expected = re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")
    assert re.compile(f"({any_of(sorted(names))})").split(text) == expected.split(text)


def test_names_that_are_beginnings_of_each_other_need_no_deep_expression() -> None:
    names = ["a" * length for length in range(1, 200)]
    assert re.findall(any_of(names), "a" * 300) == ["a" * 199, "a" * 101]


def test_text_that_is_full_of_beginnings_of_names_is_split_at_once() -> None:
    """The default model has 6,000 such names, of which each is tried at every place in an alternation: 10 s."""

    class Named(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.special_ids = {f"<unused{number}>": number % 256 for number in range(6_000)}

    encoder = PromptEncoder(Named(), cache_bytes=0)
    text = "<unused" * 150_000
    begun = time.thread_time()
    (end,) = encoder.encode([Text(text + "<unused7>", control=True)])[-1:]
    assert time.thread_time() - begun < 2.0, "most of it is the tokenizer's"
    assert end == 7


# ---------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize("kind", ["bytes", *sorted(BUILDERS)])
@settings(max_examples=15, deadline=None)
@given(text=texts, control=st.booleans())
def test_a_prompt_has_no_fewer_tokens_than_its_bound(kind: str, text: str, control: bool) -> None:
    tokenizer: Tokenizer = BYTES if kind == "bytes" else toy(kind)
    encoder = PromptEncoder(tokenizer)
    long = text * (1 + LONG // len(text))
    parts = [Text(long, control), Generated("", (1, 2, 3))]
    assert encoder.least_tokens(parts) <= len(encoder.encode(parts))
    if kind == "bytes":
        assert encoder.least_tokens(parts) >= len(long) // 36, "12 characters of the longest name, 3 that NFC joins"


# ---------------------------------------------------------------------------------- what is saved


def test_a_prompt_that_grows_is_encoded_from_its_last_small_block_on() -> None:
    encoder = PromptEncoder(BYTES)
    text = WORDS * 200
    encoder.encode([Text(text)])
    before = encoder.counters["tokenized_characters"]
    encoder.encode([Text(text + "It ends.")])
    assert encoder.counters["tokenized_characters"] - before <= SMALL_BLOCK + 2 * len("It ends.") + len(" cities")


def session(turns: int) -> tuple[Part, ...]:
    answer = Generated("the", (ord("t"), ord("h"), ord("e")))
    return tuple(part for turn in range(turns) for part in (Text(f"question {turn}?"), answer))


def test_a_session_is_known_up_to_its_last_answer_but_one() -> None:
    encoder = PromptEncoder(BYTES)
    question = Text("and now?")
    for turns in range(1, 40):
        prompt = (*session(turns), question)
        fresh = (*session(turns), question)  # other objects, as they come over the wire
        known = encoder.known_parts(fresh)
        assert known == (2 * turns - 2 if 2 * turns - 2 >= LEAST_PARTS else 0)
        asked = encoder.counters
        assert encoder.encode(prompt) == PromptEncoder(BYTES, cache_bytes=0).encode(prompt)
        grown = sum(encoder.counters.values()) - sum(asked.values())
        assert grown == sum(len(part.text) for part in prompt if isinstance(part, Text)), "known text counts as reused"
    assert encoder.salted("a").known_parts(prompt) == 0, "another salt did not say it"


def test_beginnings_take_no_more_memory_than_they_may() -> None:
    most = 1 << 20
    beginnings = Beginnings(most)
    tracemalloc.start()
    for turns in range(20, 220):
        parts = tuple(Generated(f"text {part} of {turns}", (1_000 + turns, part)) for part in range(2 * turns))
        beginnings.put("", parts, list(range(1_000, 1_000 + 6 * turns)), 0)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 1.25 * most
    assert beginnings.find("", parts).token_ids.tolist() == list(range(1_000, 1_000 + 6 * 219))


def test_prompts_of_a_batch_have_their_common_head_encoded_once() -> None:
    encoder = PromptEncoder(BYTES)
    head = "".join(f"Example {number}: {WORDS}" for number in range(40))
    for number in range(50):
        encoder.encode([Text(f"{head}\nQuestion {number}?")])
    assert encoder.counters["tokenized_characters"] <= len(head) + 50 * (SMALL_BLOCK + len("\nQuestion 10? cities"))
    assert encoder.counters["reused_characters"] > 10 * encoder.counters["tokenized_characters"]


def test_without_memory_every_character_is_encoded_anew() -> None:
    encoder = PromptEncoder(BYTES, cache_bytes=0)
    encoder.encode([Text(WORDS * 9)])
    encoder.encode([Text(WORDS * 9)])
    assert encoder.counters == {"tokenized_characters": 18 * len(WORDS), "reused_characters": 0}


def test_texts_learned_ahead_are_not_encoded_again() -> None:
    encoder = PromptEncoder(BYTES)
    prompt = [Text(WORDS * 100)]
    new = encoder.new_texts(prompt)
    encoder.learn(new, encoder.encode_texts(new))
    learned = encoder.counters["tokenized_characters"]
    assert encoder.encode(prompt) == PromptEncoder(BYTES, cache_bytes=0).encode(prompt)
    assert encoder.counters["tokenized_characters"] == learned
    assert encoder.new_texts(prompt) == []


def test_what_one_salt_has_brought_is_new_to_another_and_known_to_itself() -> None:
    encoder = PromptEncoder(BYTES)
    prompt = [Text(WORDS * 50)]

    def new_characters(salt: str) -> int:
        before = encoder.counters["tokenized_characters"]
        assert encoder.salted(salt).encode(prompt) == PromptEncoder(BYTES, cache_bytes=0).encode(prompt)
        return encoder.counters["tokenized_characters"] - before

    length = len(WORDS * 50)
    # Also a pair that would be one if salt and text were joined, and the requests without a salt.
    assert [new_characters(salt) for salt in ("a", "ab", "", "a", "ab", "")] == [length, length, length, 0, 0, 0]
    assert encoder.salted("c").new_texts(prompt) != []
    assert encoder.salted("a").new_texts(prompt) == []


def test_a_small_memory_forgets_and_stays_right() -> None:
    small, plain = PromptEncoder(BYTES, cache_bytes=20_000), PromptEncoder(BYTES, cache_bytes=0)
    for number in range(20):
        prompt = [Text(f"{number} {WORDS * 60}")]
        assert small.encode(prompt) == plain.encode(prompt)
        assert small._memory is not None
        assert small._memory.bytes <= 20_000
    assert len(WORDS * 60) > 2 * BLOCK


def test_the_texts_of_ten_thousand_salts_take_no_more_memory_than_they_may() -> None:
    most = 1 << 20
    cache = TokenCache(most)
    tracemalloc.start()
    for number in range(10_000):
        cache.namespace(f"salt-{number}").put(f"a text {number}", [1_000 + number] * 3)
        cache.namespace(f"salt-{number}").put((f"another {number}",), [number, number + 1])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most / 2 < cache.bytes <= most
    assert taken < 1.25 * most
    assert cache.namespace("salt-9999").get("a text 9999") == [10_999] * 3


# ---------------------------------------------------------------------------------- who has no boundaries


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\S+ "}, "behavior": "Isolated", "invert": False}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
    ],
)
def test_what_might_look_across_a_cut_leaves_a_tokenizer_without_boundaries(changes: dict[str, object]) -> None:
    assert wrap(reread(byte_level(), **changes)).boundary is None


def test_a_character_that_a_token_joins_with_a_space_is_no_place_to_cut_behind() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["x y"])
    boundary = wrap(tokenizer).boundary
    assert boundary is not None
    assert [found.start() for found in boundary.finditer("ax y z")] == [4]
