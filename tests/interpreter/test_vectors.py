"""`ul.embed` and `ul.rerank`: what they send, in which order answers come back, and what they refuse."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter import vectors
from umbel.lang.prompt import Text
from umbel.lang.protocol import Embedded, EmbedRequest, Ranked, RankRequest, Usage
from umbel.srt.in_process import LocalBackend

PAIRS = "{{ messages[0].content }}|query document|{{ messages[1].content }}<|im_end|>"


class Recorded(LocalBackend):
    """The oracle, which keeps what it is asked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.embeds: list[EmbedRequest] = []
        self.ranks: list[RankRequest] = []

    async def embed(self, request: EmbedRequest) -> Embedded:
        self.embeds.append(request)
        return await super().embed(request)

    async def rank(self, request: RankRequest) -> Ranked:
        self.ranks.append(request)
        return await super().rank(request)


@pytest.fixture
def oracle() -> Recorded:
    return Recorded()


def test_many_texts_travel_in_requests_of_a_few_and_come_back_in_order(
    oracle: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "TOGETHER", 4)
    monkeypatch.setattr(vectors, "CHARACTERS_TOGETHER", 30)
    texts = [f"text {number}" for number in range(9)] + ["a text with more than thirty characters", "x"]
    found = ul.embed(texts, backend=oracle)
    assert sorted((request.first, len(request.texts)) for request in oracle.embeds) == [
        (0, 4),
        (4, 4),
        (8, 1),
        (9, 1),
        (10, 1),
    ]
    alone = [ul.embed([text], backend=oracle)[0] for text in texts]
    assert found == alone
    assert len({tuple(vector) for vector in found}) == len(texts)


def test_async_calls_give_the_same(oracle: Recorded) -> None:
    async def both() -> tuple[list[list[float]], list[ul.RankedText]]:
        ranked = await ul.rerank_async("q", ["a", "b"], template="{query}{text}", backend=oracle)
        return await ul.embed_async(["a", "b"], dimensions=3, backend=oracle), ranked

    found, ranked = asyncio.run(both())
    assert found == ul.embed(["a", "b"], dimensions=3, backend=oracle)
    assert ranked == ul.rerank("q", ["a", "b"], template="{query}{text}", backend=oracle)


def test_the_most_relevant_text_comes_first_and_equal_ones_in_order(oracle: Recorded) -> None:
    texts = ["one", "two", "one", "three"]
    ranked = ul.rerank("which?", texts, template="{query} {text}:", backend=oracle)
    assert sorted(one.index for one in ranked) == [0, 1, 2, 3]
    assert [(-one.score, one.index) for one in ranked] == sorted((-one.score, one.index) for one in ranked)
    assert all(0 < one.score < 1 and one.text == texts[one.index] for one in ranked)
    assert ul.rerank("which?", iter(texts), template="{query} {text}:", top=2, backend=oracle) == ranked[:2]


def test_only_a_template_names_control_tokens(oracle: Recorded) -> None:
    ul.rerank("<s>", ["{query}"], template="<s>{query}: {text}</s>", backend=oracle)
    assert oracle.ranks[0].prompts == (
        (Text("<s>", True), Text("<s>"), Text(": ", True), Text("{query}"), Text("</s>", True)),
    )


def test_a_chat_template_with_both_roles_writes_the_pair() -> None:
    backend = Recorded(chat_template=PAIRS)
    ul.rerank("why", ["that", "this"], backend=backend)
    assert [prompt[0] for prompt in backend.ranks[0].prompts] == [Text("why")] * 2
    assert backend.ranks[0].prompts[1][2:] == (Text("this"), Text("<|im_end|>", True))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda b: ul.embed([], backend=b), "texts is empty"),
        (lambda b: ul.embed(["a", ""], backend=b), r"texts\[1\]=''"),
        (lambda b: ul.embed("a text", backend=b), r"write \[text\]"),
        (lambda b: ul.embed([b"a"], backend=b), r"texts\[0\]"),
        (lambda b: ul.embed(["a"], dimensions=0, backend=b), "dimensions=0"),
        (lambda b: ul.embed(["a"], dimensions=9, backend=b), "makes vectors of 8 numbers"),
        (lambda b: ul.embed(["a"], timeout=-1, backend=b), "timeout=-1"),
        (lambda b: ul.rerank("", ["a"], backend=b), "query=''"),
        (lambda b: ul.rerank("q", ["a"], top=0, backend=b), "top=0"),
        (lambda b: ul.rerank("q", ["a"], template="{text}", backend=b), "must hold {query} and {text}"),
        (lambda b: ul.rerank("q", ["a"], instruction="", template="{query}{text}", backend=b), "instruction=''"),
        (
            lambda b: ul.rerank("q", ["a"], instruction="i", template="{query}{text}", backend=b),
            "must hold {query} and {instruction} and {text}",
        ),
        (
            lambda b: ul.rerank("q", ["a"], template="{query}{text}{instruction}", backend=b),
            "must hold {query} and {text}, as the arguments are given",
        ),
        (lambda b: ul.embed(["\ud800"], backend=b), "no character"),
    ],
    ids=range(14),
)
def test_mistakes_are_named(oracle: Recorded, call: Callable[[LocalBackend], object], reason: str) -> None:
    with pytest.raises(ul.ParameterError, match=reason):
        call(oracle)


def test_a_text_that_is_too_long_is_named_by_its_place(oracle: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "TOGETHER", 2)
    with pytest.raises(ul.ContextLengthError, match="text 3 has"):
        ul.embed(["a", "b", "c", "long " * 2000], backend=oracle)


def test_an_instruction_stands_in_the_template_or_in_a_system_turn(oracle: Recorded) -> None:
    ul.rerank("q", ["a"], instruction="<s>", template="{instruction}|{query}{text}", backend=oracle)
    assert oracle.ranks[0].prompts == ((Text("<s>"), Text("|", True), Text("q"), Text("a")),)
    shown = "{% for m in messages %}{{ m.content }}|{% endfor %}{# system query document #}"
    told = Recorded(chat_template=shown)
    ul.rerank("why", ["that"], instruction="Be.", backend=told)
    assert told.ranks[0].prompts[0][0] == Text("Be.")
    with pytest.raises(ul.TemplateError, match="the roles system and query and document"):
        ul.rerank("why", ["that"], instruction="Be.", backend=Recorded(chat_template=PAIRS))


def test_a_ranker_without_template_asks_for_one(oracle: Recorded) -> None:
    with pytest.raises(ul.TemplateError, match=r"template='Query: \{query\}"):
        ul.rerank("q", ["a"], backend=oracle)


def test_a_backend_without_them_is_refused() -> None:
    with pytest.raises(ul.CapabilityError, match="Echo makes no embeddings"):
        ul.embed(["a"], backend=ul.Echo())
    with pytest.raises(ul.CapabilityError, match="Echo is no reranker"):
        ul.rerank("q", ["a"], backend=ul.Echo())


def test_few_requests_are_under_way_together_in_the_time_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "TOGETHER", 1)
    monkeypatch.setattr(vectors, "AT_ONCE", 3)
    under_way: list[int] = []
    left: list[float] = []
    seconds = itertools.count()

    class Counting(LocalBackend):
        running = 0

        async def embed(self, request: EmbedRequest) -> Embedded:
            self.running += 1
            under_way.append(self.running)
            left.append(request.origin.timeout or 0.0)
            await asyncio.sleep(0)
            self.running -= 1
            return Embedded(request.id, (bytes(8),), Usage())

    async def scenario() -> None:
        backend = Counting()
        await backend.start()
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: float(next(seconds)))  # a second for each look
        assert await ul.embed_async(["a"] * 7, timeout=100, backend=backend) == [[0.0, 0.0]] * 7

    asyncio.run(scenario())
    assert max(under_way) == 3
    assert left == sorted(left, reverse=True)
    assert left[:3] == [100, 100, 100]
    assert 50 < left[-1] < left[3] < 100


def test_a_failure_cancels_the_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "TOGETHER", 1)
    cancelled: list[str] = []

    class Failing(LocalBackend):
        async def embed(self, request: EmbedRequest) -> Embedded:
            if request.first:
                raise ul.EngineError("it broke")
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(request.id)
            return Embedded(request.id, (), Usage())

    with pytest.raises(ul.EngineError, match="it broke"):
        ul.embed(["a", "b"], backend=Failing())
    assert len(cancelled) == 1


def test_a_traced_program_calls_them_outside(oracle: Recorded) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        ul.embed(["a"], backend=oracle)
        s += "a" + ul.gen("b", max_tokens=1)

    with pytest.raises(ul.TraceError, match="outside of the program"):
        program.trace()
