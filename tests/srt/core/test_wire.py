"""Frames: what is written is read, and whatever else comes is counted and harms nothing."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from umbel.lang.programs import (
    OWN_STREAM,
    GraphWanted,
    ProgramBudget,
    ProgramEnded,
    ProgramPiece,
    ProgramValue,
    RunProgram,
    Trouble,
    pack_values,
)
from umbel.lang.prompt import Generated, Media, Text
from umbel.lang.protocol import (
    Abort,
    Chunk,
    Completion,
    Control,
    Detokenize,
    Detokenized,
    Done,
    Failure,
    Final,
    FinishReason,
    Hint,
    Origin,
    ReadStatus,
    Release,
    RequestTimes,
    Scored,
    ScoredChoice,
    ScoreRequest,
    StatusRead,
    Survey,
    Surveyed,
    Tokenize,
    Tokenized,
    TokenLogprob,
    Usage,
    VocabularyInfo,
)
from umbel.lang.sampling import SamplingParams
from umbel.lang.status import EngineState, PoolGauges, RuntimeStatus, TreeNode, TreeSurvey
from umbel.lang.transport.link import (
    Bye,
    Codec,
    FrameError,
    Hello,
    Inbound,
    Outbound,
    Ping,
    Pong,
    StartFailed,
    ToGateway,
    Welcome,
    encode_sequence,
)
from umbel.srt.core.messages import (
    CacheCleared,
    CacheEvents,
    ChooseEnded,
    ControlEnded,
    EngineAbort,
    EngineChoose,
    EngineControl,
    EngineFailed,
    EnginePhase,
    EnginePrefill,
    EngineReady,
    EngineRelease,
    EngineScore,
    EngineSnapshot,
    EngineStartFailed,
    EngineSurvey,
    EngineSurveyed,
    Heartbeat,
    NodeAdded,
    NodeExtended,
    NodeRemoved,
    NodeSplit,
    NodeTookUp,
    ScoreEnded,
    TierRooms,
    Tokens,
    from_engine_codec,
    from_gateway_codec,
    to_engine_codec,
    to_gateway_codec,
)

from ..gateway_harness import Harness, ended, generate

LOGPROB = TokenLogprob(1, "a", -0.5, ((2, "\ufffd", -1.0),), b"a", (b"\xc3",))
SURVEY = TreeSurvey((TreeNode(1, None, 2, 0, 1, 2, 3, 4, "é"),), 9, PoolGauges(9, 5))
TO_GATEWAY = [
    generate(stop=("x",), seed=3, logit_bias={1: 2.0}, n=2),
    ScoreRequest(
        "s", (Text("x", True), Generated("y", (1, 2)), Media("image", "00", b"\x00")), ("a",), True, Origin("p")
    ),
    ScoreRequest("s", (Text("x"),), ("a",), probability="exact"),
    Hint("h", (Text("x"),), Origin("p", ahead=7)),
    Hint("h", (Text("x"),), pin=60.0),
    Release("h"),
    Abort("a"),
    RunProgram("p", "00", 3, b"graph", pack_values({"x": (1,)}), b"", True, Origin("p"), ProgramBudget(5)),
    Control("c", "info"),
    Tokenize("t", (Text("x", True),), Origin("p")),
    Detokenize("t", (1, 2), control=True),
    ReadStatus("r"),
    Survey("s", 5, 7),
    Hello(),
    Ping(),
    Bye(),
]
FROM_GATEWAY = [
    Chunk("a", 0, "é", (1, 2), (LOGPROB,)),
    Final("a", (Completion("x", (1,), 1, "", FinishReason.STOP, 257, (LOGPROB,)),), Usage(1, 2, 3, 4)),
    Final("a", (), Usage(), (), RequestTimes(0.5, 1.0, 2.0)),
    Scored("s", (ScoredChoice((1,), (-1.0,), (-2.0,)),), Usage()),
    Scored("s", (ScoredChoice((1,), (-1.0,), (), -1.0, -0.5),), Usage(), 7),
    Done("c", {"a": 1, "b": "x", "c": 1.5, "d": None, "e": True, "f": [1, "x"]}),
    StatusRead("r", RuntimeStatus("m", "00", EngineState.READY, pool=PoolGauges(9), counters={"steps": 1.0})),
    Surveyed("s", SURVEY),
    Failure("a", "EngineError", "no"),
    GraphWanted("p"),
    ProgramPiece("p", OWN_STREAM, "", "é"),
    ProgramValue("p", 2, "x", ("a", "b"), pack_values([{}, {}]), None, Usage(1, 2, 3, 4)),
    ProgramValue("p", 3, "y", error=Trouble("KeyError", "z")),
    ProgramEnded("p", (Text("x", True), Generated("y", (1, 2))), (("user", "x"), ("assistant", None)), True, Usage(1)),
    Tokenized("t", (256, 97)),
    Detokenized("t", "é"),
    Welcome("m", 1, VocabularyInfo(2, 0, (1,), {"<s>": 0}), 3, 4, 5.0, None, {"bos_token": "<s>"}, 6),
    StartFailed("ModelError", "no"),
    Pong(EngineState.STARTING),
    Pong(EngineState.READY, 0.5),
]
TO_ENGINE = [
    EngineScore(1, [[1, 2], [1, 3]], 1),
    EngineChoose(1, [1, 2], [[3], [4, 5]], 2, True, True),
    EnginePrefill(2, [1]),
    EnginePrefill(3, [1], pin=60.0),
    EngineRelease(3),
    EngineSnapshot(),
    EngineAbort(1),
    EngineControl(3, "info"),
    EngineSurvey(4, 5, 7),
]
FROM_ENGINE = [
    Tokens(1, [1, 2]),
    ended(1, [1]),
    ScoreEnded(1, [[-1.0]], 1, 0),
    ChooseEnded(1, [-1.0, float("-inf")], [-0.5, 0.0], [[-1.0], [-2.0]], 3, 4, 5),
    ControlEnded(1, {"a": 1}),
    EngineSurveyed(1, SURVEY, [[1, 2]]),
    EngineFailed(1, "EngineError", "no"),
    Heartbeat(1, 2, 3, {"steps": 1.0}, PoolGauges(9, 5, 3, 2, 1)),
    CacheEvents(
        [
            NodeAdded(1, 0, "s", b"\1\0\0\0"),
            NodeAdded(2, 0, "s/a", b"\1\0\0\0", root="s"),
            NodeExtended(1, b"\2\0\0\0\3\0\0\0"),
            NodeSplit(1, 3, 2),
            NodeTookUp(3, 1, 1),
            NodeRemoved(2),
            CacheCleared(),
        ]
    ),
    EnginePhase("x"),
    EngineReady(1, 2, 3, TierRooms(4, 5, 6)),
    EngineStartFailed("ModelError", "no"),
]
DIRECTIONS = [
    (to_gateway_codec, TO_GATEWAY),
    (from_gateway_codec, FROM_GATEWAY),
    (to_engine_codec, TO_ENGINE),
    (from_engine_codec, FROM_ENGINE),
]


@pytest.mark.parametrize(("codec", "messages"), DIRECTIONS)
def test_every_message_is_read_as_it_was_written(codec: type[Codec[object]], messages: list[object]) -> None:
    subject = codec()
    assert subject.decode(subject.encode(messages)) == messages


@pytest.mark.parametrize(("codec", "messages"), DIRECTIONS)
def test_fifty_thousand_damaged_frames_raise_frame_error_and_nothing_else(
    codec: type[Codec[object]], messages: list[object]
) -> None:
    """Damaged and cut messages of all four directions."""
    random_ = random.Random(1)
    subject = codec()
    whole = [subject.encode([message]) for message in messages] + [subject.encode(messages)]
    refused = 0
    for _ in range(12_500):
        frame = bytearray(random_.choice(whole))
        for _ in range(random_.randint(1, 4)):
            match random_.randrange(4):
                case 0 if frame:
                    frame[random_.randrange(len(frame))] = random_.randrange(256)
                case 1 if frame:
                    del frame[random_.randrange(len(frame)) :]
                case 2:
                    frame += random_.randbytes(random_.randint(1, 8))
                case _:
                    at = random_.randint(0, len(frame))
                    frame[at:at] = random_.randbytes(2)
        try:
            subject.decode(bytes(frame))
        except FrameError:
            refused += 1
    assert refused > 10_000


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for codec, _ in DIRECTIONS:
        labels: tuple[str, ...] = ()
        try:
            codec().decode(data)
        except FrameError as error:
            labels = error.labels
        assert all(isinstance(label, str) for label in labels)


def test_a_frame_above_the_limit_is_refused_before_it_is_decoded() -> None:
    codec: Codec[ToGateway] = Codec(ToGateway, max_bytes=100)
    with pytest.raises(FrameError, match="101 bytes"):
        codec.decode(bytes(101))


def test_deep_nesting_and_unknown_fields_are_refused() -> None:
    codec = to_gateway_codec()
    for frame in (b"\x91" * 100_000, msgspec.msgpack.encode([{"type": "Abort", "id": "a", "force": True}])):
        with pytest.raises(FrameError):
            codec.decode(frame)


def test_a_wrong_value_names_its_request_and_the_range() -> None:
    codec = to_gateway_codec()
    frame = msgspec.msgpack.encode([{"type": "GenRequest", "id": "mine", "prompt": [], "sampling": {"max_tokens": -5}}])
    with pytest.raises(FrameError, match="max_tokens=-5") as caught:
        codec.decode(frame)
    assert caught.value.labels == ("mine",)


def test_repeated_frames_are_dropped_and_lost_ones_counted() -> None:
    counters: Counter[str] = Counter()
    outbound, inbound = Outbound(to_gateway_codec()), Inbound(to_gateway_codec(), counters)
    frames = [outbound.write([Abort(str(index))]) for index in range(6)]
    read = [inbound.read(frames[index]) for index in (0, 1, 1, 0, 4, 3, 5)]
    assert read == [[Abort("0")], [Abort("1")], [], [], [Abort("4")], [], [Abort("5")]]
    assert counters == {"repeated": 3, "lost": 2}


@pytest.mark.parametrize("frames", [[], [b"x"], [b"1234567", b""], [encode_sequence(0), b"\xc1"], [b"", b"", b""]])
def test_a_message_of_the_wrong_shape_is_counted_and_the_next_one_is_read(frames: list[bytes]) -> None:
    counters: Counter[str] = Counter()
    inbound = Inbound(to_gateway_codec(), counters)
    with pytest.raises(FrameError):
        inbound.read(frames)
    assert counters == {"malformed": 1}
    assert inbound.read(Outbound(to_gateway_codec()).write([Ping()])) == [Ping()]


def test_requests_between_damaged_frames_are_served() -> None:
    harness = Harness()
    codec = to_gateway_codec()
    random_ = random.Random(2)
    for index in range(200):
        for _ in range(5):
            try:
                messages = codec.decode(random_.randbytes(20))
            except FrameError:
                messages = []
            assert messages == []
        (message,) = codec.decode(codec.encode([generate(str(index), max_tokens=1)]))
        assert not isinstance(message, Hello | Ping | Bye)
        harness.send(message)
        harness.gateway.engine_event(ended(harness.generates()[-1].id, [97]))
    assert [message.id for message in harness.answers()] == [str(index) for index in range(200)]


def test_sampling_parameters_are_checked_again_when_they_are_decoded() -> None:
    data = msgspec.msgpack.encode({"top_p": float("nan")})
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        msgspec.msgpack.decode(data, type=SamplingParams)


@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=30))
def test_messages_that_are_too_much_for_one_frame_travel_in_several(sizes: list[int]) -> None:
    codec: Codec[ToGateway] = Codec(ToGateway, max_bytes=120)
    messages: list[ToGateway] = [Abort("x" * size) for size in sizes]
    inbound: Inbound[ToGateway] = Inbound(codec, Counter())
    received: list[ToGateway] = []
    for frames in Outbound(codec).write_all(messages):
        assert len(frames[1]) <= 120
        received += inbound.read(frames)
    assert received == messages
    assert inbound.counters == Counter(lost=0)
