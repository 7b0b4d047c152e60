"""Pictures on their way through the gateway: who waits, what the engine is sent, and how calls end meanwhile."""

import msgspec
import pytest
from umbel.lang.prompt import Generated, Media, Part, Text
from umbel.lang.protocol import (
    Abort,
    Failure,
    Final,
    GenRequest,
    Hint,
    Locate,
    Located,
    Origin,
    Release,
    Scored,
    ScoreRequest,
)
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import PICTURE_BASE
from umbel.srt.core.config import GatewayLimits, PictureLimits
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import (
    EngineAbort,
    EngineFailed,
    EngineForget,
    EngineGenerate,
    EnginePicture,
    EnginePrefill,
    EngineRelease,
    EngineScore,
    ScoreEnded,
    ToEngine,
)
from umbel.srt.gateway.gateway import Gateway
from umbel.srt.multimodal.cache import InlineDigests, PictureCache
from umbel.srt.multimodal.format import PictureFormat
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..gateway_harness import CLIENT, FakeFrontEnd, ended
from ..multimodal.patient_decoder import PatientDecoder
from ..multimodal.samples import FORM, clip, media, noise, saved

CAT, DOG = (media(saved(noise(20, 20, index))) for index in range(2))


class Scene:
    """A gateway of a model that sees, with a decoder and an engine that the test plays."""

    def __init__(self, *, ready: bool = True, form: PictureFormat = FORM, **limits: int) -> None:
        self.clock = VirtualClock()
        self.decoder = PatientDecoder()
        self.to_engine: list[ToEngine] = []
        self.front_end = FakeFrontEnd()
        self.cache = PictureCache(form, self.decoder, InlineDigests(), PictureLimits(**limits))
        self.gateway = Gateway(
            ByteTokenizer(),
            model="toy",
            to_engines=[self.to_engine.append],
            clock=self.clock,
            limits=GatewayLimits(max_queue=8, request_timeout=60.0),
            seed=7,
            pictures=self.cache,
        )
        if ready:
            self.gateway.engine_ready(1000)

    @property
    def answers(self) -> list[object]:
        return [message for _, message in self.front_end.delivered]

    def send(self, message: object, client: bytes = CLIENT) -> None:
        self.gateway.receive(self.front_end.client(client), message)  # type: ignore[arg-type]  # messages of several kinds

    def kinds(self) -> list[str]:
        return [type(message).__name__.removeprefix("Engine") for message in self.to_engine]

    def failure(self) -> Failure:
        (answer,) = self.answers
        assert isinstance(answer, Failure)
        return answer

    def close_call(self, index: int = -1) -> None:
        """The engine ends its last generation."""
        asked = [message for message in self.to_engine if isinstance(message, EngineGenerate)][index]
        self.gateway.engine_event(ended(asked.id, [97]))


def gen(label: str, *parts: Part, salt: str = "", timeout: float | None = None, **options: object) -> GenRequest:
    sampling = SamplingParams(max_tokens=4, **options)  # type: ignore[arg-type]  # validated by it
    return GenRequest(label, parts, sampling, origin=Origin(salt=salt, timeout=timeout))


def numbers(message: ToEngine) -> list[int]:
    assert isinstance(message, EngineGenerate | EnginePrefill)
    return [token - PICTURE_BASE for token in message.token_ids if token >= PICTURE_BASE]


# ------------------------------------------------------------------------------------------ to the engine


def test_a_picture_goes_to_the_engine_before_the_message_that_holds_it() -> None:
    scene = Scene()
    scene.send(gen("a", Text("See "), CAT, Text("!")))
    assert scene.to_engine == []
    scene.decoder.work()
    assert scene.kinds() == ["Picture", "Generate"]
    picture, asked = scene.to_engine
    assert isinstance(picture, EnginePicture)
    assert isinstance(asked, EngineGenerate)
    see = ByteTokenizer().encode("See ", first=True)
    assert asked.token_ids == [256, *see, *[PICTURE_BASE + picture.number] * 4, ord("!")]
    assert asked.schedule.timeout == pytest.approx(60.0)


def test_the_same_picture_is_sent_once_and_has_one_number() -> None:
    scene = Scene()
    for label in "ab":
        scene.send(gen(label, CAT, CAT))
    scene.decoder.work()
    scene.send(gen("c", CAT))
    assert scene.kinds() == ["Picture", "Generate", "Generate", "Generate"]
    assert {number for message in scene.to_engine[1:] for number in numbers(message)} == {0}
    assert len(scene.decoder.asked) == 1


def test_text_around_pictures_is_scaffolding_that_joins_the_text_beside_it() -> None:
    form = msgspec.structs.replace(FORM, before="\n\n<|im_start|>", after="<|im_end|>\n\n")
    scene = Scene(form=form)
    scene.send(gen("a", Text("x<|im_end|>"), CAT, Text("y")))
    scene.decoder.work()
    asked = scene.to_engine[1]
    assert isinstance(asked, EngineGenerate)
    encode = ByteTokenizer().encode
    before, after = encode("x<|im_end|>\n\n", first=True), encode("\n\ny", first=False)
    assert asked.token_ids == [256, *before, 258, *[PICTURE_BASE] * 4, 259, *after]


def test_a_clip_is_its_frames_in_order() -> None:
    pytest.importorskip("av", reason="clips need PyAV (the video extra)")
    scene = Scene()
    scene.send(gen("a", media(clip(9), 3)))
    scene.decoder.work()
    assert scene.kinds() == ["Picture"] * 3 + ["Generate"]
    assert numbers(scene.to_engine[3]) == [0] * 4 + [1] * 4 + [2] * 4


def test_salts_are_told_apart() -> None:
    scene = Scene()
    for salt in ("", "a"):
        scene.send(gen(f"of-{salt}", CAT, salt=salt))
    scene.decoder.work()
    assert numbers(scene.to_engine[1]) != numbers(scene.to_engine[3])


def test_other_calls_do_not_wait_for_a_picture() -> None:
    scene = Scene()
    scene.send(gen("slow", CAT))
    scene.send(gen("quick", Text("x")))
    assert scene.kinds() == ["Generate"]


def test_scores_hints_and_pins_hold_pictures() -> None:
    scene = Scene()
    scene.send(Hint("h", (Text("x"), CAT), pin=5.0))
    scene.send(ScoreRequest("s", (Text("x"), CAT), ("yes", "no")))
    assert scene.to_engine == []
    scene.decoder.work()
    assert scene.kinds() == ["Picture", "Prefill", "Score"]
    score = scene.to_engine[2]
    assert isinstance(score, EngineScore)
    assert score.start == 6  # BOS, x, the picture
    scene.gateway.engine_event(ScoreEnded(score.id, [[-1.0] * 2, [-2.0] * 2], 16, 0))  # "y", "es" and "n", "o"
    assert isinstance(scene.answers[0], Scored)
    scene.send(Release("h"))
    assert isinstance(scene.to_engine[-1], EngineRelease)


def test_a_release_ends_a_hint_that_waits() -> None:
    scene = Scene()
    scene.send(Hint("h", (CAT,), pin=5.0))
    scene.send(Release("h"))
    scene.decoder.work()
    assert scene.to_engine == []
    assert scene.decoder.asked == []
    assert scene.gateway.in_flight == 0


def test_a_constraint_is_compiled_and_the_prompt_computed_with_its_picture() -> None:
    from umbel.lang.protocol import ConstraintSpec

    scene = Scene()
    asked = msgspec.structs.replace(gen("a", CAT, Text("?")), constraint=ConstraintSpec("regex", "yes|no"))
    scene.send(asked)
    scene.decoder.work()
    assert scene.kinds() == ["Picture", "Generate"]
    assert scene.to_engine[1].heal is True  # type: ignore[union-attr]  # a Generate
    scene.send(msgspec.structs.replace(asked, id="b", prompt=(Text("?"), CAT)))
    assert scene.to_engine[2].heal is False  # type: ignore[union-attr]  # behind a picture there is nothing to heal


# ------------------------------------------------------------------------------------------ what is forgotten


def test_a_picture_that_falls_off_is_forgotten_when_no_call_holds_it() -> None:
    scene = Scene(cache_bytes=16 * 16 * 3)
    scene.send(gen("a", CAT))
    scene.decoder.work()
    scene.send(gen("b", DOG))
    scene.decoder.work()
    assert "Forget" not in scene.kinds()
    scene.close_call(0)
    assert scene.to_engine[-1] == EngineForget(0)
    assert isinstance(scene.answers[-1], Final)


def test_another_engine_is_brought_the_pictures_again() -> None:
    scene = Scene()
    scene.send(gen("a", CAT))
    scene.decoder.work()
    scene.gateway.engine_lost("killed")
    scene.send(gen("b", CAT))  # held, as the first one is again
    scene.to_engine.clear()
    scene.gateway.engine_ready(1000)
    assert scene.kinds() == ["Picture", "Generate", "Generate"]
    assert scene.answers == []


def test_calls_that_came_while_the_engine_started_bring_their_pictures_then() -> None:
    scene = Scene(ready=False)
    scene.send(gen("a", CAT))
    scene.decoder.work()
    assert scene.to_engine == []
    scene.gateway.engine_ready(1000)
    assert scene.kinds() == ["Picture", "Generate"]


def test_an_engine_that_did_not_get_a_picture_is_sent_it_again() -> None:
    scene = Scene()
    scene.send(gen("a", CAT))
    scene.decoder.work()
    asked = scene.to_engine[1]
    assert isinstance(asked, EngineGenerate)
    scene.gateway.engine_event(EngineFailed(asked.id, "RequestError", "picture 0 is unknown"))
    scene.send(gen("b", CAT))
    assert scene.kinds() == ["Picture", "Generate", "Picture", "Generate"]


# ------------------------------------------------------------------------------------------ how calls end


def test_an_abort_ends_a_call_that_waits_and_nobody_decodes_for_it() -> None:
    scene = Scene()
    scene.send(gen("a", CAT))
    scene.send(Abort("a"))
    assert scene.failure().kind == "CancelledError"
    scene.decoder.work()
    assert (scene.decoder.asked, scene.to_engine, scene.gateway.in_flight) == ([], [], 0)


def test_a_deadline_ends_a_call_that_waits_and_the_time_it_waited_counts() -> None:
    scene = Scene()
    scene.send(gen("a", CAT, timeout=1.0))
    scene.send(gen("b", CAT, timeout=9.0))
    scene.clock.advance(2.0)
    scene.gateway.tick()
    assert "waiting for its pictures to be decoded" in scene.failure().message
    scene.decoder.work()
    asked = scene.to_engine[1]
    assert isinstance(asked, EngineGenerate)
    assert asked.schedule.timeout == pytest.approx(7.0)


def test_what_waits_of_a_peer_that_is_gone_is_forgotten() -> None:
    scene = Scene()
    scene.send(gen("a", CAT))
    scene.send(Hint("h", (DOG,)))
    scene.gateway.client_lost(scene.front_end.client())
    scene.decoder.work()
    assert (scene.decoder.asked, scene.answers, scene.gateway.in_flight) == ([], [], 0)
    assert scene.gateway.counters["hints_unused"] == 1


def test_an_engine_that_is_given_up_ends_what_waits() -> None:
    scene = Scene()
    scene.send(gen("a", CAT))
    scene.gateway.engine_given_up("no memory")
    assert "no memory" in scene.failure().message


def test_a_picture_that_cannot_be_decoded_fails_its_calls_only() -> None:
    scene = Scene()
    scene.send(gen("a", CAT, media(b"no picture")))
    scene.send(gen("b", CAT))
    scene.send(Hint("h", (media(b"no picture"),)))
    scene.decoder.work()
    assert "is no PNG" in scene.failure().message
    assert scene.kinds() == ["Picture", "Generate"]
    scene.close_call()
    assert scene.gateway.in_flight == 0
    assert scene.cache._held_bytes == 0
    assert {name: scene.gateway.counters[name] for name in ("requests", "failed", "finished", "hints_unused")} == {
        "requests": 2,
        "failed": 1,
        "finished": 1,
        "hints_unused": 1,
    }


def test_the_queue_counts_what_waits() -> None:
    scene = Scene()
    for label in range(8):
        scene.send(gen(str(label), media(saved(noise(20, 20, label)))))
    scene.send(gen("late", CAT))
    assert scene.failure().kind == "OverloadedError"
    scene.decoder.work()
    assert scene.kinds().count("Generate") == 8


@pytest.mark.parametrize(
    ("request_", "kind", "says"),
    [
        (gen("a", *[CAT] * 9), "RequestError", "at most 8"),
        (gen("a", Media("image", "00", b"x")), "ParameterError", "send the SHA-256"),
        (gen("a", Media("sound", "00", b"x")), "ParameterError", "'sound'"),
        (gen("a", CAT, salt="a b"), "ParameterError", "salt 'a b'"),
        (gen("a", CAT, timeout=-1.0), "ParameterError", "timeout=-1"),
        (gen("a", Text("x" * 998), CAT), "ContextLengthError", "1003 tokens"),
        (gen("a", Generated("", (PICTURE_BASE,))), "ParameterError", "outside the vocabulary"),
        (gen("a", Text("x"), CAT, Text("y"), prompt_logprobs_from=1), "RequestError", "write 6 or more"),
    ],
)
def test_a_wrong_request_is_answered_by_what_to_write(request_: GenRequest, kind: str, says: str) -> None:
    scene = Scene()
    scene.send(request_)
    scene.decoder.work()
    assert scene.failure().kind == kind
    assert says in scene.failure().message
    assert scene.gateway.in_flight == 0
    assert [message for message in scene.to_engine if isinstance(message, EngineGenerate | EngineAbort)] == []


def test_log_probabilities_of_the_text_behind_a_picture_are_had() -> None:
    scene = Scene()
    scene.send(gen("a", Text("x"), CAT, Text("y"), prompt_logprobs_from=6))
    scene.decoder.work()
    assert scene.kinds() == ["Picture", "Generate"]


def test_places_of_tokens_are_told_with_pictures() -> None:
    scene = Scene()
    scene.send(Locate("l", (Text("ab"), CAT, Text("c")), (0, 1, 3, 6, 7, 8), ((Text("ab"), DOG), (Text("ab"), CAT))))
    scene.decoder.work()
    assert scene.answers == [Located("l", (0, 0, 2, 18, 18, 19), 8, (3, 7))]


def test_counters_say_what_was_done() -> None:
    scene = Scene()
    for label in "ab":
        scene.send(gen(label, CAT))
        scene.decoder.work()
    facts = scene.gateway.info()
    assert facts["gateway_pictures_decoded"] == 1
    assert facts["gateway_picture_hits"] == 1
    assert facts["gateway_pictures_sent"] == 1
    assert facts["gateway_requests"] == 2
