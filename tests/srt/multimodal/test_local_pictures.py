"""Programs with pictures on the whole runtime: in process on the oracle, whose keys cannot lie, and in processes."""

import asyncio
import io
from collections.abc import Iterator

import pytest
import umbel as ul
from PIL import Image
from umbel.interpreter.backends.runtime import Runtime
from umbel.interpreter.loop import streams
from umbel.lang.cache_report import CacheCause
from umbel.lang.errors import ParameterError, RequestError, UmbelError
from umbel.lang.prompt import Media, Part, Text
from umbel.lang.protocol import Final, GenRequest, Hint, Locate, Origin, ScoreRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.in_process import LocalBackend

from ...own_processes import own_processes
from ..test_processes import PATIENCE, wait_until
from .samples import bomb, clip, media, noise, saved

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
CAT = saved(noise(20, 20))


@pytest.fixture
def local() -> LocalBackend:
    return LocalBackend()


async def final(backend: LocalBackend | Runtime, label: str, *parts: Part, salt: str = "") -> Final:
    async for event in backend.generate(GenRequest(label, parts, GREEDY, origin=Origin(salt=salt))):
        if isinstance(event, Final):
            return event
    raise AssertionError("no ending")


def cached(backend: LocalBackend, *prompts: tuple[Part, ...], salts: tuple[str, ...] = ()) -> list[int]:
    """Cached tokens of prompts that come one after the other."""

    async def run() -> list[int]:
        found = []
        for index, parts in enumerate(prompts):
            salt = salts[index] if salts else ""
            found.append((await final(backend, str(index), *parts, salt=salt)).usage.cached_tokens)
        await backend.close()
        return found

    return asyncio.run(run())


def asks(picture: Media, question: str = "?") -> tuple[Part, ...]:
    return (Text("Look: "), picture, Text(question))


HEAD = 7  # tokens before the picture: BOS and "Look: "
PICTURE = 4


def test_a_second_question_about_a_picture_finds_it_cached(local: LocalBackend) -> None:
    assert cached(local, asks(media(CAT), "colour?"), asks(media(CAT), "shape?")) == [0, HEAD + PICTURE]


def test_another_file_of_the_same_pixels_finds_it_cached(local: LocalBackend) -> None:
    other = saved(Image.open(io.BytesIO(CAT)), "BMP")
    assert cached(local, asks(media(CAT)), asks(media(other), "!")) == [0, HEAD + PICTURE]


def test_pictures_that_differ_in_one_pixel_share_nothing(local: LocalBackend) -> None:
    image = noise(20, 20)
    image.putpixel((19, 19), (0, 0, 0))
    assert cached(local, asks(media(CAT)), asks(media(saved(image)))) == [0, HEAD]


def test_equal_bytes_in_two_shapes_share_nothing(local: LocalBackend) -> None:
    content = noise(30, 100).tobytes()
    tall, wide = (media(saved(Image.frombytes("RGB", size, content))) for size in ((30, 100), (100, 30)))
    assert cached(local, asks(tall), asks(wide)) == [0, HEAD]


def test_salts_share_nothing(local: LocalBackend) -> None:
    prompt = asks(media(CAT))
    assert cached(local, prompt, prompt, prompt, salts=("a", "b", "a"))[:2] == [0, 0]


def test_clips_that_begin_alike_share_their_beginning(local: LocalBackend) -> None:
    pytest.importorskip("av", reason="clips need PyAV (the video extra)")
    left, right = media(clip(9), 3), media(clip(9) + b"\0\0\0\x08free", 3)
    longer = media(clip(17), 5)  # frames 0, 4, 8, 12, 16
    assert cached(local, asks(left), asks(right, "!"), asks(longer)) == [0, HEAD + 3 * PICTURE, HEAD + 3 * PICTURE]


def test_choices_hints_and_places_know_pictures(local: LocalBackend) -> None:
    async def run() -> None:
        await local.start()
        local.hint(Hint("h", asks(media(CAT), "")))
        scored = await local.score(ScoreRequest("s", asks(media(CAT)), ("yes", "no")))
        assert scored.usage.cached_tokens == 0, "the hint computed it for this call"
        scored = await local.score(ScoreRequest("t", asks(media(CAT)), ("yes", "no")))
        assert scored.usage.cached_tokens == HEAD + PICTURE
        exact = await local.score(ScoreRequest("e", asks(media(CAT)), ("yes", "no"), probability="exact"))
        assert all(choice.lower is not None for choice in exact.choices)
        located = await local.locate(Locate("l", asks(media(CAT)), (HEAD, HEAD + PICTURE)))
        assert located.characters == (6, 22)
        await local.close()

    asyncio.run(run())


def test_another_picture_is_named_as_the_cause_of_a_miss(local: LocalBackend) -> None:
    @ul.function
    def look(s: ul.State, picture: bytes) -> None:
        s += "Look: " + ul.image(picture) + "?" + ul.gen("a", max_tokens=2)

    look.run(picture=CAT, backend=local).text()
    report = look.run(picture=saved(noise(20, 20, 1)), backend=local).explain_cache()
    assert "Look: <image │" in str(report)


def test_misses_of_prompts_with_many_pictures_are_explained(local: LocalBackend) -> None:
    """Earlier prompts go along with the question; each may show what a prompt may show, and large ones stay behind."""
    cats = [saved(noise(20, 20, index)) for index in range(3)]

    @ul.function
    def look(s: ul.State, pictures: list[bytes]) -> None:
        s += "Look: "
        for picture in pictures:
            s += ul.image(picture)
        s += "?" + ul.gen("a", max_tokens=2)

    for pictures in (cats, [noise_of_bytes(5 << 20)]):
        for _ in range(3):
            look.run(pictures=pictures, backend=local).sync()
        streams.run(local.control("flush_cache"))
        report = look.run(pictures=pictures, backend=local).explain_cache()
        assert report["a"].cause is CacheCause.EVICTED


def noise_of_bytes(size: int) -> bytes:
    """A picture with so many bytes behind it, which nobody reads."""
    return CAT + bytes(size)


@ul.function
def judge(s: ul.State, picture: bytes) -> None:
    s += "What is this? " + ul.image(picture)
    forks = s.fork(3)
    for index, fork in enumerate(forks):
        fork += f"View {index}: " + ul.gen("view", max_tokens=4)
    s += ul.gen("answer", max_tokens=4)


def test_a_program_with_a_picture_runs_on_the_oracle(local: LocalBackend) -> None:
    state = judge.run(picture=CAT, backend=local)
    assert state["answer"]
    assert state.usage.cached_tokens > 0


def test_a_picture_is_charged_at_most_what_a_budget_was_told(local: LocalBackend) -> None:
    async def run() -> None:
        await local.start()
        prompt = asks(media(CAT))
        bound = local.tokens_at_most(prompt)
        used = (await final(local, "a", *prompt)).usage.prompt_tokens
        assert used == bound == 1 + len("Look: ?") + PICTURE
        assert local.capabilities.images
        await local.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "kind", "says"),
    [
        (bomb(), RequestError, "at most 16,800,000"),
        (b"<svg/>", ParameterError, "is no PNG"),
        (CAT[:200], ParameterError, "damaged"),
    ],
)
def test_what_cannot_be_shown_fails_the_program_that_shows_it(
    local: LocalBackend, data: bytes, kind: type[UmbelError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        judge.run(picture=data, backend=local)["answer"]
    assert judge.run(picture=CAT, backend=local)["answer"]


# ------------------------------------------------------------------------------------------ over the processes


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    backend = Runtime("oracle", progress=False)
    yield backend
    backend.shutdown()


async def facts(runtime: Runtime) -> dict[str, int]:
    """Counters of the gateway's pictures."""
    result = (await runtime.control("info")).result
    return {name: value for name, value in result.items() if "_picture" in name and isinstance(value, int)}


DECODER = "umbel.srt.multimodal.decode_worker"


@pytest.mark.processes
def test_pictures_go_through_the_processes(runtime: Runtime) -> None:
    async def scenario() -> None:
        first = await final(runtime, "a", *asks(media(CAT), "colour?"))
        again = await final(runtime, "b", *asks(media(CAT), "shape?"))
        assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, HEAD + PICTURE)
        with pytest.raises(RequestError, match="16,800,000"):
            await final(runtime, "bomb", *asks(media(bomb())))
        assert runtime.capabilities.images
        assert runtime.tokens_at_most(asks(media(CAT))) == 12

    asyncio.run(scenario())


@pytest.mark.processes
def test_a_decoder_that_dies_costs_no_request(runtime: Runtime) -> None:
    async def scenario() -> None:
        await final(runtime, "first", *asks(media(saved(noise(8, 8)))))
        before = await facts(runtime)
        (decoder,) = own_processes(DECODER)
        decoder.suspend()
        stuck = asyncio.create_task(final(runtime, "stuck", *asks(media(saved(noise(9, 9))))))
        free = await asyncio.wait_for(final(runtime, "free", Text("no picture")), PATIENCE)
        known = await asyncio.wait_for(final(runtime, "known", *asks(media(saved(noise(8, 8))))), PATIENCE)
        assert free.completions
        assert known.completions
        assert not stuck.done()
        decoder.kill()
        assert (await asyncio.wait_for(stuck, PATIENCE)).completions  # the next decoder was given it
        after = await asyncio.wait_for(final(runtime, "after", *asks(media(saved(noise(10, 10))))), PATIENCE)
        assert after.completions
        now = await facts(runtime)
        assert now["gateway_picture_kills"] - before["gateway_picture_kills"] == 1
        assert now["gateway_picture_processes"] - before["gateway_picture_processes"] == 1

    asyncio.run(scenario())


@pytest.mark.processes
def test_an_engine_that_was_started_again_gets_the_pictures_again(runtime: Runtime) -> None:
    async def scenario() -> None:
        await final(runtime, "first", *asks(media(CAT)))
        before = await facts(runtime)
        (engine,) = own_processes("umbel.srt.engine.process")
        engine.kill()
        while True:
            try:
                again = await asyncio.wait_for(final(runtime, "again", *asks(media(CAT))), PATIENCE)
                break
            except UmbelError:  # the gateway had not seen it die
                continue
        assert again.completions
        now = await facts(runtime)
        assert now["gateway_pictures_decoded"] == before["gateway_pictures_decoded"]
        assert now["gateway_pictures_sent"] > before["gateway_pictures_sent"]

    asyncio.run(scenario())


@pytest.mark.processes
def test_shipped_programs_show_pictures(runtime: Runtime) -> None:
    state = judge.compile().run(picture=CAT, backend=runtime)
    assert state["answer"]


@pytest.mark.processes
def test_the_decoder_goes_with_its_runtime(runtime: Runtime) -> None:
    asyncio.run(final(runtime, "first", *asks(media(CAT))))
    assert own_processes(DECODER)
    runtime.shutdown()
    wait_until(lambda: not own_processes(DECODER), "the decoder outlived its runtime")
