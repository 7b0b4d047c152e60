"""One program, every backend: the examples give the same variables on Echo and on every hosted provider.

The hosted providers are real HTTP servers on loopback that are driven by the same model of texts. On the runtime the
examples run in `tests/test_examples.py`.
"""

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter import loop
from umbel.lang.protocol import Backend
from umbel.testing import (
    LLAMA_CPP,
    OPENROUTER,
    VLLM,
    AnthropicFeatures,
    FakeAnthropic,
    FakeGemini,
    FakeOllama,
    FakeOpenAI,
    FakeSGLang,
)

from ... import conformance
from ...test_examples import NAMES, load
from .storyteller import Story, Storyteller, StorytellingEcho, StorytellingSGLang

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning", "ignore::DeprecationWarning")

IGNORED = ("seed", "frequency_penalty")  # what examples give and no Claude model takes


@contextmanager
def echo(story: Story) -> Iterator[Backend]:
    yield StorytellingEcho(story)


@contextmanager
def openai_chat(story: Story) -> Iterator[Backend]:
    with FakeOpenAI(Storyteller(story)) as server:
        yield ul.OpenAI("gpt-4o-mini", base_url=server.base_url, api_key=server.api_key, profile="openai")


@contextmanager
def openai_completion(story: Story) -> Iterator[Backend]:
    with FakeOpenAI(Storyteller(story)) as server:
        yield ul.OpenAI("gpt-3.5-turbo-instruct", base_url=server.base_url, api_key=server.api_key, profile="openai")


@contextmanager
def vllm_chat(story: Story) -> Iterator[Backend]:
    """An open server: it goes on with an answer that has begun, and enforces expressions."""
    with FakeOpenAI(Storyteller(story), features=VLLM) as server:
        yield ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key, profile="vllm", mode="chat")


@contextmanager
def llama_cpp(story: Story) -> Iterator[Backend]:
    """One continuation a request, and grammars for choices."""
    with FakeOpenAI(Storyteller(story), features=LLAMA_CPP) as server:
        yield ul.OpenAI(
            "gpt-4o", base_url=server.base_url, api_key=server.api_key, profile="llama.cpp", mode="completion"
        )


@contextmanager
def openrouter(story: Story) -> Iterator[Backend]:
    """Many providers at one address, with a list that says what each model takes."""
    with FakeOpenAI(Storyteller(story), features=OPENROUTER) as server:
        yield ul.OpenRouter("gpt-4o", base_url=server.base_url, api_key=server.api_key)


@contextmanager
def claude(story: Story) -> Iterator[Backend]:
    """With prefill and structured outputs."""
    with FakeAnthropic(Storyteller(story)) as server:
        yield ul.Anthropic(
            "claude-haiku-4-5", base_url=server.base_url, api_key=server.api_key, may_ignore=IGNORED
        )  # fmt: skip


@contextmanager
def newer_claude(story: Story) -> Iterator[Backend]:
    """Without prefill, and without a word on how tokens are chosen."""
    features = AnthropicFeatures(prefill=False, sampling="none", thinks=True)
    with FakeAnthropic(Storyteller(story), models=["claude-opus-5"], features=features) as server:
        yield ul.Anthropic(
            "claude-opus-5", base_url=server.base_url, api_key=server.api_key, may_ignore=("temperature", *IGNORED)
        )  # fmt: skip


@contextmanager
def older_claude(story: Story) -> Iterator[Backend]:
    """Without structured outputs: every constraint is validated."""
    features = AnthropicFeatures(structured_outputs=False, sampling="all")
    with FakeAnthropic(Storyteller(story), models=["claude-3-haiku-20240307"], features=features) as server:
        yield ul.Anthropic(
            "claude-3-haiku-20240307", base_url=server.base_url, api_key=server.api_key, may_ignore=IGNORED
        )  # fmt: skip


@contextmanager
def sglang(story: Story) -> Iterator[Backend]:
    """An SGLang server by its own API."""
    with StorytellingSGLang(story) as server:
        yield ul.RuntimeEndpoint(server.address, api_key=server.api_key)


@contextmanager
def any_endpoint(story: Story) -> Iterator[Backend]:
    """A server of the OpenAI dialect by its address alone."""
    with StorytellingSGLang(story, native=False, features=VLLM) as server:
        yield ul.RuntimeEndpoint(server.address, api_key=server.api_key)


@contextmanager
def gemini(story: Story) -> Iterator[Backend]:
    """By Google's own client, with schemas in Google's keywords."""
    with FakeGemini(Storyteller(story)) as server:
        yield ul.Gemini("gemini-2.5-flash", base_url=server.base_url, api_key=server.api_key)


@contextmanager
def ollama(story: Story) -> Iterator[Backend]:
    """By Ollama's own API."""
    with FakeOllama(Storyteller(story)) as server:
        yield ul.Ollama("llama3.2", base_url=server.base_url)


HOSTED = (
    sglang,
    any_endpoint,
    openai_chat,
    openai_completion,
    vllm_chat,
    llama_cpp,
    openrouter,
    claude,
    newer_claude,
    older_claude,
    gemini,
    ollama,
)


@dataclass(frozen=True)
class Example:
    """A program of the examples, what its model says, and what is looked at.

    Attributes:
        observe: runs it on the default backend → its variables.
        expected: some of them, as they should be.
    """

    story: Story
    observe: Callable[[ModuleType], Any]
    expected: Any = field(default=None)


def of(state: ul.State, *names: str) -> dict[str, Any]:
    return {name: state[name] for name in names}


def streamed(module: ModuleType) -> Any:
    state = module.story.run(hero="fox", stream=True)
    return "".join(state.text_iter()), of(state, "beginning", "ending")


def reviewed(module: ModuleType) -> Any:
    arguments = [{"review": review} for review in [*module.REVIEWS, ""]]
    states = module.classify.run_batch(arguments, on_error="return")
    return [repr(s.error) if isinstance(s, ul.Failure) else s["sentiment"] for s in states]


HAMLET = '{"title": "Hamlet", "author": "William Shakespeare", "year": 1603, "kind": "play", "translated": false}'
CARD = "Species: Grey heron\nLength: 95 cm\nDiet: fish\nNocturnal: no"

EXAMPLES = {
    "quickstart": Example(
        {
            "capital of France?\nA:": " Paris\nTopic: geography\n\nQ: Who?",
            "France?\nA: Paris\nTopic:": " geography",
            "Don Quixote?\nA:": " Miguel de Cervantes\nTopic: literature",
            "Quixote?\nA: Miguel de Cervantes\nTopic:": " literature",
        },
        lambda m: [
            of(m.answer.run(question=q), "answer", "topic")
            for q in ("What is the capital of France?", "Who wrote Don Quixote?")
        ],
        [
            {"answer": " Paris", "topic": " geography"},
            {"answer": " Miguel de Cervantes", "topic": " literature"},
        ],
    ),
    "async_program": Example(
        {
            "please\nFrench:": " s'il vous plait\nEnglish: no",
            "yes\nFrench:": " oui\n",
            "good night\nFrench:": " bonne nuit\n",
        },
        lambda m: asyncio.run(m.translate_all(["please", "yes", "good night"])),
        ["s'il vous plait", "oui", "bonne nuit"],
    ),
    "batch": Example(
        {
            "I ever had.\nSentiment:": " positive",
            "after a week.\nSentiment:": " negative",
            "room was clean.\nSentiment:": " positive",
            "waste of money.\nSentiment:": " negative",
            "again at once.\nSentiment:": " positive",
            "for an hour.\nSentiment:": " negative",
        },
        reviewed,
        [*([" positive", " negative"] * 3), "ValueError('an empty review')"],
    ),
    "evaluate": Example(
        {"Norway lies in": " Europe", "Nepal lies in": " Asia"},
        lambda m: [p.run(country=c)["answer"] for c in ("Norway", "Nepal") for p in (m.bare, m.with_examples)],
        [" Europe", " Europe", " Asia", " Asia"],
    ),
    "journal": Example(
        {"is Paris. It is known for": " the tower.\nThe", "is Rome. It is known for": " ruins.\nThe"},
        lambda m: [m.describe.run(city=city)["fame"] for city in ("Paris", "Rome")],
        [" the tower.", " ruins."],
    ),
    "document_qa": Example(
        {"age of John Doe is": " 29.\nQuestion", "age of Zack Blue is": " 30."},
        lambda m: [m.ask.run(name=name)["age"] for name in ("John Doe", "Zack Blue")],
        [" 29", " 30"],
    ),
    "extract": Example(
        {
            "in the attic.\nRecord: ": HAMLET,
            "more or less.\nRecord: ": '{"title": "Walden", "author": "Thoreau", "year": 1854, "kind": "essays", '
            '"translated": false}',
            "from the Russian.\nRecord: ": '{"title": "War and Peace", "author": "Leo Tolstoy", "year": 1869, '
            '"kind": "novel", "translated": true}',
        },
        lambda m: [repr(m.read.run(note=note).ret_value) for note in m.NOTES],
    ),
    "field_card": Example(
        {"at a trout.\n": CARD, "Nocturnal: no\nSeen: ": "2\n", "Seen: 2\nMood: ": "calm"},
        lambda m: of(m.fill_in.run(sighting=m.SIGHTING), "card", "seen", "mood"),
        {"card": CARD, "seen": "2", "mood": "calm"},
    ),
    "judge": Example(
        {
            "has to wait.\nIs the essay about a city?": " yes",
            "wait.\nIs the essay about a city? yes\nFacts:": " Begun in 2007.\nTone:",
            "wait.\nIs the essay about a city? yes\nTone:": " Patient.\n",
            "wait.\nIs the essay about a city? yes\nWeakness:": " No names.\n",
            "\nVerdict:": " A patient note.\nGrade: B\n",
            "A patient note.\nGrade:": " B",
        },
        lambda m: of(m.judge.run(essay=m.ESSAY), "related", "verdict", "grade"),
        {"related": " yes", "verdict": " A patient note.", "grade": " B"},
    ),
    "served_judge": Example(
        {
            "seconds early.\nFacts:": " It apologised in 2017.\nTone:",
            "seconds early.\nTone:": " Dry.\n",
            "seconds early.\nWeakness:": " Two facts.\n",
            "\nVerdict:": " A dry note.\nGrade: B\n",
            "A dry note.\nGrade:": " B",
        },
        lambda m: of(m.judge.run(essay=m.ESSAY), "verdict", "grade"),
        {"verdict": " A dry note.", "grade": " B"},
    ),
    "multi_turn": Example(
        {
            "capital of Japan?\nAssistant:": " It is Tokyo.\nUser:",
            "ocean is the biggest?\nAssistant:": " The Pacific.\n",
            "was Isaac Newton?\nAssistant:": " A physicist.\n",
        },
        lambda m: [
            (question, answer)
            for question, answer, _, _ in m.chat.run(
                questions=["What is the capital of Japan?", "Which ocean is the biggest?", "Who was Isaac Newton?"]
            ).ret_value
        ],
    ),
    "react_agent": Example(
        {
            "live in Iceland?\nThought:": " I look it up.\nAction: population[Iceland]\n",
            "I look it up.\nAction: ": "population",
            "Action: population[": "Iceland]\nObservation: many",
            "390000\nThought:": " I know the answer.\n",
            "390000\nThought: I know the answer.\nAction: ": "finish",
            "answer.\nAction: finish[": "390000]",
        },
        lambda m: (
            (state := m.agent.run(question="How many people live in Iceland?")).ret_value
            and (state.ret_value, state.text()[-120:])
        ),
    ),
    "early_vote": Example(
        {"How many are left?\nA:": " She gave 2. 7 - 2 = 5. The answer is 5.", "The answer is ": "5."},
        lambda m: m.solve.run(question="Mia had 7 pens. How many are left?", samples=8, agree=3)["answer"],
        "5",
    ),
    "self_consistency": Example(
        {"How many are left?\nA:": " Mia had 7 pens. She gave 2. 7 - 2 = 5. The answer is 5.\n\nQ:"},
        lambda m: m.solve.run(question="Mia had 7 pens and gave 2 to her brother. How many are left?", samples=8)[
            "chain"
        ],
        [" Mia had 7 pens. She gave 2. 7 - 2 = 5. The answer is 5."] * 8,
    ),
    "skeleton_of_thought": Example(
        {
            "sleep better\nPoints:": " dark room; no coffee\nAbout",
            "no coffee\nAbout dark room:": " Light keeps one awake.\n",
            "no coffee\nAbout no coffee:": " Coffee lasts for hours.\n",
        },
        lambda m: of(m.write.run(topic="How to sleep better"), "points", "paragraph"),
        {"points": " dark room; no coffee", "paragraph": [" Light keeps one awake.", " Coffee lasts for hours."]},
    ),
    "streaming": Example(
        {"One morning": " he found a key.\nIt was", " In the end,": " the door stayed shut. He"},
        streamed,
    ),
    "tree_of_thought": Example(
        {
            "gave away 2. How many are left?\nStep:": " She had 7 pens. Useful? yes",
            "left?\nStep: She had 7 pens. Useful?": " yes",
            "pens. Useful? yes\nStep:": " 7 - 2 = 5. Useful? yes",
            "7 - 2 = 5. Useful?": " yes",
            "5. Useful? yes\nAnswer:": " 5\n",
        },
        lambda m: (state := m.think.run(question=m.QUESTION)).ret_value and (state.ret_value, state["answer"]),
        (["Step: She had 7 pens.", "Step: 7 - 2 = 5."], " 5"),
    ),
}


def observed(name: str, backend: Backend) -> Any:
    with ul.default_backend(backend):
        return EXAMPLES[name].observe(load(name))


def test_every_example_that_takes_a_backend_is_looked_at():
    seeing = {"multi_dimensional_judge", "picture_questions"}  # in test_pictures.py
    calling = {"tool_agent"}  # in tests/interpreter/agents: answers with calls differ from provider to provider
    assert set(NAMES) - set(EXAMPLES) - seeing - calling == {"radix_replay", "semantic_search"}  # which have no program


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_variables_are_the_same_everywhere(name: str, capsys: pytest.CaptureFixture[str]):
    example = EXAMPLES[name]
    with echo(example.story) as backend:
        expected = observed(name, backend)
    assert example.expected in (None, expected)
    for hosted in HOSTED:
        with hosted(example.story) as backend:
            assert observed(name, backend) == expected, hosted.__name__


@pytest.mark.parametrize("hosted", HOSTED)
@pytest.mark.sampled(4)
def test_a_chat_gives_the_same_variables(hosted: Callable[[Story], Any]):
    """Roles, an answer with several parts, and a fork. Completion models are given roles as the template has them."""

    @ul.function
    def interview(s):
        s += ul.system("You are brief.") + ul.user("Who are you?")
        s += ul.assistant("Name: " + ul.gen("name", stop=",", max_tokens=8) + ", job: " + ul.gen("job", stop="\n"))
        s += ul.user("And your colours?")
        branches = s.fork(2)
        for colour, branch in zip(("light", "dark"), branches, strict=True):
            branch += ul.assistant(f"The {colour} one is" + ul.gen("colour", stop="."))
        branches.join()

    story = {
        "Name: ": "Ada, job: engineer\nBorn",
        "Ada, job: ": "engineer\nBorn",
        "The light one is": " white.",
        "The dark one is": " black.",
    }
    expected = {"name": "Ada", "job": "engineer", "colour": [" white", " black"]}
    with echo(story) as backend:
        assert of(interview.run(backend=backend), "name", "job", "colour") == expected
    with hosted(story) as backend:
        assert of(interview.run(backend=backend), "name", "job", "colour") == expected


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Callable[[], Backend]]]:
    """Constructors of every hosted backend, whose providers say the prompt's own words again."""

    def words(text: str) -> str:
        return " ".join(text.split()[-12:]) + " and so on it goes, as it always has"

    with (
        FakeOpenAI(words) as openai,
        FakeAnthropic(words) as anthropic,
        FakeSGLang(words) as sglang,
        FakeGemini(words) as google,
        FakeOllama(words) as ollama,
    ):
        yield {
            "gemini": lambda: ul.Gemini("gemini-2.5-flash", base_url=google.base_url, api_key=google.api_key),
            "ollama": lambda: ul.Ollama("llama3.2", base_url=ollama.base_url),
            "sglang": lambda: ul.RuntimeEndpoint(sglang.address, api_key=sglang.api_key),
            "endpoint": lambda: ul.RuntimeEndpoint(openai.address, api_key=openai.api_key, model="gpt-4o"),
            "chat": lambda: ul.OpenAI(
                "gpt-4o-mini", base_url=openai.base_url, api_key=openai.api_key, profile="openai"
            ),
            "completion": lambda: ul.OpenAI(
                "gpt-3.5-turbo-instruct", base_url=openai.base_url, api_key=openai.api_key, profile="openai"
            ),
            "claude": lambda: ul.Anthropic("claude-haiku-4-5", base_url=anthropic.base_url, api_key=anthropic.api_key),
        }


MADE = ("sglang", "endpoint", "chat", "completion", "claude", "gemini", "ollama")


@pytest.mark.parametrize("name", MADE)
@pytest.mark.sampled(4)
def test_a_backend_that_is_dropped_ends_its_own_connections_alone(name: str, made: dict[str, Callable[[], Backend]]):
    """Those that connect right after it get its descriptors: they are heard on."""

    async def used() -> weakref.ref[Backend]:
        """Without a run, which timers that were cancelled keep for a while."""
        backend = made[name]()
        await backend.start()
        await conformance.generate(backend, conformance.request())
        return weakref.ref(backend)

    gone = loop.streams.run(used())

    async def lost() -> int:
        gc.collect()
        followers = [socket.socket() for _ in range(50)]
        here = asyncio.get_running_loop()
        for follower in followers:
            here.add_reader(follower, lambda: None)
        for _ in range(100):  # turns of the loop, in which what was collected ends
            await asyncio.sleep(0)
        heard = sum(here.remove_reader(follower) for follower in followers)
        for follower in followers:
            follower.close()
        return len(followers) - heard

    assert loop.streams.run(lost()) == 0
    assert gone() is None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("case", conformance.CASES, ids=conformance.name_of)
def test_conforms(case: conformance.Case, name: str, made: dict[str, Callable[[], Backend]]):
    conformance.check(case, made[name])
