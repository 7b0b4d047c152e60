"""Long texts are tokenized next to the loop, and nothing overtakes anything of its own request."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

from umbel.lang.prompt import Media, Text
from umbel.lang.protocol import (
    Abort,
    Failure,
    GenRequest,
    Hint,
    Locate,
    ReadStatus,
    ScoreRequest,
    StatusRead,
    ToBackend,
    Tokenize,
    Tokenized,
)
from umbel.srt.gateway.clients import LongPrompts
from umbel.srt.gateway.validation import MOST_TOKENIZED
from umbel.srt.tokenizer.prompt import LONG
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..gateway_harness import CLIENT, Harness, generate

OTHER = b"other"
LONG_TEXT = "umbel of a thousand words " * (LONG // 20)


class WatchedTokenizer(ByteTokenizer):
    """Says on which thread it works, and waits there until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.go_on = threading.Event()
        self.go_on.set()

    def encode(self, text: str, *, first: bool) -> list[int]:
        self.threads.add(threading.get_ident())
        assert self.go_on.wait(10), "nobody let the tokenizer go on"
        return super().encode(text, first=first)


class Scene:
    def __init__(self) -> None:
        self.tokenizer = WatchedTokenizer()
        self.harness = Harness(tokenizer=self.tokenizer)
        self.harness.gateway.engine_ready(10 * LONG)
        self.flushed = 0
        self.long_prompts = LongPrompts(self.harness.gateway, self._flush)

    def receive(self, client: bytes, message: ToBackend) -> None:
        self.long_prompts.receive(self.harness.front_end.client(client), message)

    def _flush(self) -> None:
        self.flushed += 1

    def prompts(self) -> list[int]:
        """Lengths of the prompts the engine was sent, in order."""
        return [len(message.token_ids) for message in self.harness.generates()]


def play(story: Callable[[Scene], Awaitable[None]]) -> Scene:
    scene = Scene()

    async def told() -> None:
        async with asyncio.timeout(10):
            await story(scene)

    asyncio.run(told())
    return scene


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_long_text_is_tokenized_on_another_thread_and_gives_the_same_tokens() -> None:
    async def story(scene: Scene) -> None:
        scene.receive(CLIENT, generate("a", LONG_TEXT))
        await until(lambda: bool(scene.harness.generates()))

    scene = play(story)
    assert threading.get_ident() not in scene.tokenizer.threads
    plain = Harness()
    plain.gateway.engine_ready(10 * LONG)
    plain.send(generate("a", LONG_TEXT))
    assert scene.harness.generates()[0].token_ids == plain.generates()[0].token_ids
    assert scene.flushed == 1
    assert scene.long_prompts.counters["tokenized_in_a_thread"] == 1


def test_a_short_text_goes_straight_in() -> None:
    async def story(scene: Scene) -> None:
        scene.receive(CLIENT, generate("a", "hello"))
        assert len(scene.harness.generates()) == 1

    play(story)


def test_messages_of_a_long_request_wait_and_those_of_other_requests_do_not() -> None:
    async def story(scene: Scene) -> None:
        scene.receive(CLIENT, generate("known", "x"))  # its tokens are kept
        scene.tokenizer.go_on.clear()
        scene.receive(CLIENT, generate("long", LONG_TEXT))
        scene.receive(CLIENT, generate("short", "x"))
        scene.receive(CLIENT, Abort("long"))
        assert scene.prompts() == [2, 2]
        scene.tokenizer.go_on.set()
        await until(lambda: len(scene.harness.generates()) == 3)

    scene = play(story)
    assert scene.harness.aborts() == [scene.harness.generates()[2].id]


def test_requests_with_one_long_text_have_it_tokenized_once() -> None:
    async def story(scene: Scene) -> None:
        for name in "abcde":
            scene.receive(CLIENT, generate(name, LONG_TEXT))
        await until(lambda: len(scene.harness.generates()) == 5)
        assert scene.long_prompts._waiting == {}

    scene = play(story)
    assert scene.long_prompts.counters["tokenized_in_a_thread"] == 1


def test_a_text_that_no_context_holds_is_refused_without_a_look_at_its_tokens() -> None:
    async def story(scene: Scene) -> None:
        scene.harness.gateway.engine_ready(100)
        parts = (Text(LONG_TEXT),)
        for message in (
            generate("a", LONG_TEXT),
            ScoreRequest("b", parts, ("x",)),
            Locate("c", parts, ()),
            Tokenize("d", (Text("x" * (MOST_TOKENIZED + 1)),)),
        ):
            scene.receive(CLIENT, message)
        scene.receive(CLIENT, Hint("h", parts))
        assert scene.long_prompts.counters["tokenized_in_a_thread"] == 0

    scene = play(story)
    assert scene.tokenizer.threads == set()
    assert scene.harness.to_engine == []
    answers = scene.harness.answers()
    kinds = {answer.id: getattr(answer, "kind", "") for answer in answers}
    assert kinds == dict.fromkeys("abc", "ContextLengthError") | {"d": "RequestError"}
    assert f"at least {len(LONG_TEXT) // len('<|im_start|>')} tokens" in answers[0].message  # type: ignore[union-attr]


def test_the_status_is_read_while_a_long_text_of_the_same_client_is_tokenized() -> None:
    async def story(scene: Scene) -> None:
        scene.tokenizer.go_on.clear()
        scene.receive(CLIENT, generate("long", LONG_TEXT))
        scene.receive(CLIENT, ReadStatus("r"))
        (read,) = scene.harness.answers()
        assert isinstance(read, StatusRead)
        assert scene.harness.generates() == []
        scene.tokenizer.go_on.set()
        await until(lambda: bool(scene.harness.generates()))

    play(story)


def test_another_client_is_served_while_a_long_text_is_tokenized() -> None:
    async def story(scene: Scene) -> None:
        known = generate("known", "hello")
        scene.receive(OTHER, known)  # its tokens are kept
        scene.tokenizer.go_on.clear()
        scene.receive(CLIENT, generate("long", LONG_TEXT))
        await asyncio.sleep(0)
        scene.receive(OTHER, generate("again", "hello"))
        assert scene.prompts() == [6, 6]
        scene.tokenizer.go_on.set()
        await until(lambda: len(scene.prompts()) == 3)

    play(story)


def test_what_waits_of_a_client_that_is_gone_is_never_received() -> None:
    async def story(scene: Scene) -> None:
        scene.tokenizer.go_on.clear()
        scene.receive(CLIENT, generate("long", LONG_TEXT))
        scene.receive(CLIENT, Abort("long"))
        scene.long_prompts.client_lost(scene.harness.front_end.client())
        scene.tokenizer.go_on.set()
        while scene.long_prompts._tasks:
            await asyncio.sleep(0)

    scene = play(story)
    assert scene.prompts() == []
    assert scene.harness.front_end.delivered == []


def test_a_long_request_that_is_wrong_is_answered_like_a_short_one() -> None:
    async def story(scene: Scene) -> None:
        scene.receive(CLIENT, generate("surrogate", LONG_TEXT + "\ud800"))
        scene.receive(CLIENT, GenRequest("media", (Text(LONG_TEXT), Media("image", "00", b""))))
        scene.receive(CLIENT, ScoreRequest("choices", (Text(LONG_TEXT),), ()))
        await until(lambda: len(scene.harness.answers()) == 3)

    answers = play(story).harness.answers()
    assert {(answer.id, type(answer)) for answer in answers} == {
        ("surrogate", Failure),
        ("media", Failure),
        ("choices", Failure),
    }


def test_a_long_text_whose_tokens_are_known_is_not_long() -> None:
    async def story(scene: Scene) -> None:
        scene.receive(CLIENT, generate("a", LONG_TEXT))
        await until(lambda: bool(scene.harness.generates()))
        scene.receive(CLIENT, generate("b", LONG_TEXT + "and more"))
        assert len(scene.harness.generates()) == 2

    play(story)


def test_a_long_text_to_tokenize_is_tokenized_on_another_thread() -> None:
    async def story(scene: Scene) -> None:
        scene.receive(CLIENT, Tokenize("t", (Text(LONG_TEXT),)))
        await until(lambda: bool(scene.harness.answers()))

    scene = play(story)
    assert threading.get_ident() not in scene.tokenizer.threads
    assert scene.harness.answers() == [Tokenized("t", (256, *ByteTokenizer().encode(LONG_TEXT, first=True)))]
