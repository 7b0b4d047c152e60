"""Frames that are made to cost: refused before they are read, without objects, and without harm to other peers."""

import ast
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import umbel
import zmq
from msgspec import inspect
from umbel.lang.prompt import MAX_PARTS, Text
from umbel.lang.protocol import (
    MAX_DETOKENIZED,
    Abort,
    Completion,
    Detokenize,
    Failure,
    Final,
    FinishReason,
    ScoreRequest,
    Usage,
)
from umbel.lang.transport.inlet import prepare
from umbel.lang.transport.link import MOST_MESSAGES, Codec, FrameError, Inbound, Outbound, Ping, ToGateway
from umbel.srt.core.config import MAX_ENGINE_FRAME
from umbel.srt.core.messages import too_large_for_client, too_large_for_gateway
from umbel.srt.gateway import validation

from ..gateway_harness import Harness

PACKAGE = Path(umbel.__file__).parent
pack = msgspec.msgpack.encode


def listed(count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count)


def message(before: dict[str, Any], field: str, value: bytes) -> bytes:
    """A frame with one message, whose last field has this value."""
    return b"\x91" + bytes([0x80 | len(before) + 1]) + pack(before)[1:] + pack(field) + value


def sampled(field: str, value: bytes) -> bytes:
    return message({"type": "GenRequest", "id": "x", "prompt": []}, "sampling", b"\x81" + pack(field) + value)


def hostile(size: int) -> dict[str, bytes]:
    """Frames of about `size` bytes of which naive readers make objects of many times that size."""
    biases = b"".join(b"\xce" + struct.pack(">I", token + (1 << 17)) + b"\x01" for token in range(size // 6))
    ids = pack(["g", "a"])[1:] + listed(size) + b"\x01" * size
    parts = pack(["t", "a"]) * (size // 5)
    call = {"type": "GenRequest", "id": "x"}
    return {
        "maps": listed(size) + b"\x80" * size,
        "maps in a message": b"\x91" + listed(size) + b"\x80" * size,
        "maps in a field": message(call, "nothing", listed(size) + b"\x80" * size),
        "maps in a field of many": listed(MOST_MESSAGES) + message(call, "nothing", b"\x90")[1:] * MOST_MESSAGES,
        "pings": listed(size // 11) + pack({"type": "Ping"}) * (size // 11),
        "nested": b"\x91" * size,
        "nested maps": b"\x81\xa1a" * (size // 3),
        "nested in a message": message(call, "prompt", b"\x91" * size),
        "parts": message(call, "prompt", listed(size // 5) + parts),
        "token ids": message(call, "prompt", b"\x91\x93" + ids),
        "biases": sampled("logit_bias", b"\xdf" + struct.pack(">I", size // 6) + biases),
        "stops": sampled("stop", listed(size // 2) + b"\xa1a" * (size // 2)),
        "stop ids": sampled("stop_token_ids", listed(size) + b"\x01" * size),
        "ids to detokenize": message({"type": "Detokenize", "id": "x"}, "token_ids", listed(size) + b"\x01" * size),
        "parts to tokenize": message({"type": "Tokenize", "id": "x"}, "prompt", listed(size // 5) + parts),
        "choices": message({"type": "ScoreRequest", "id": "x", "prompt": []}, "choices", listed(size) + b"\xa0" * size),
        "a length that lies": b"\xdd\xff\xff\xff\xff",
        "an inner length that lies": message(call, "prompt", b"\xdd\xff\xff\xff\xff"),
        "text that lies": message(call, "id", b"\xdb\xff\xff\xff\xff"),
    }


_MEASURE = """
import resource, sys, time
from umbel.lang.transport.link import FrameError
from umbel.srt.core.messages import to_gateway_codec
from tests.srt.gateway.test_hostile_frames import hostile
frame = hostile(31 << 20)[sys.argv[1]]
codec, before, begun = to_gateway_codec(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    codec.decode(frame)
    labels = None
except FrameError as error:
    assert len(str(error)) < 2_000
    labels = error.labels
spent = time.process_time() - begun
print(spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, labels)
"""


_ALWAYS = ("maps in a field of many", "token ids")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in _ALWAYS else [pytest.mark.nightly])
        for name in hostile(64)
        if "lies" not in name
    ],
)
def test_a_hostile_frame_costs_no_more_than_its_size(name: str) -> None:
    """In a process of its own, for its memory: a frame of 31 MB may take as much again and half a second of CPU."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, name], cwd=root, check=True, capture_output=True, text=True, timeout=300
    )
    seconds, kibibytes, labels = done.stdout.split(maxsplit=2)
    assert float(seconds) < 0.5
    assert int(kibibytes) < 48 << 10
    assert labels.strip() != "None", "it is refused"


@pytest.mark.parametrize("name", [name for name in hostile(64) if "lies" in name])
def test_a_length_that_is_not_there_is_refused(name: str) -> None:
    codec: Codec[ToGateway] = Codec(ToGateway)
    with pytest.raises(FrameError):
        codec.decode(hostile(64)[name])


_BOUNDED = (inspect.VarTupleType, inspect.ListType, inspect.SetType, inspect.FrozenSetType, inspect.DictType)


def unbounded(kind: inspect.Type, where: str, seen: set[type]) -> list[str]:
    """Collections in a type, without a bound on their length."""
    match kind:
        case inspect.StructType():
            if kind.cls in seen:
                return []
            seen.add(kind.cls)
            return [found for field in kind.fields for found in unbounded(field.type, f"{where}.{field.name}", seen)]
        case inspect.UnionType():
            return [found for each in kind.types for found in unbounded(each, where, seen)]
        case inspect.Metadata():
            return unbounded(kind.type, where, seen)
        case inspect.AnyType() | inspect.RawType():
            return [where]
        case inspect.DictType():
            inner = unbounded(kind.key_type, where, seen) + unbounded(kind.value_type, where, seen)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            inner = unbounded(kind.item_type, where + "[]", seen)
        case _:
            return []
    assert isinstance(kind, _BOUNDED)
    return inner if kind.max_length is not None else [where, *inner]


def test_every_list_that_a_client_can_send_has_a_greatest_length() -> None:
    assert unbounded(inspect.type_info(ToGateway), "", set()) == []  # type: ignore[arg-type]  # a union is no type
    assert unbounded(inspect.type_info(list[int]), "x", set()) == ["x"], "the walk sees what it looks for"


def test_labels_are_found_around_what_cannot_be_read() -> None:
    codec: Codec[ToGateway] = Codec(ToGateway)
    good, long_label = {"type": "Abort", "id": "good"}, {"type": "Abort", "id": "x" * 257}
    wrong = [{"id": "first", "x": [{}] * 1000}, 7, [], {"id": 5}, {"id": "last"}, {"x": {"id": "inner"}}, long_label]
    with pytest.raises(FrameError) as caught:
        codec.decode(pack([good, *wrong]))
    assert caught.value.labels == ("good", "first", "last")


def test_a_frame_of_more_messages_than_one_may_have_is_refused() -> None:
    codec: Codec[ToGateway] = Codec(ToGateway)
    assert len(codec.decode(codec.encode([Ping()] * MOST_MESSAGES))) == MOST_MESSAGES
    with pytest.raises(FrameError, match=f"a frame of {MOST_MESSAGES + 1} messages"):
        codec.decode(codec.encode([Ping()] * (MOST_MESSAGES + 1)))
    inbound: Inbound[ToGateway] = Inbound(codec, Counter())
    frames = list(Outbound(codec).write_all([Ping()] * (3 * MOST_MESSAGES)))
    assert sum(len(inbound.read(pair)) for pair in frames) == 3 * MOST_MESSAGES


def test_a_prompt_of_too_many_parts_is_refused_by_its_length() -> None:
    codec: Codec[ToGateway] = Codec(ToGateway)
    request = ScoreRequest("s", (Text("x"),) * (MAX_PARTS + 1), ("a",))
    with pytest.raises(FrameError, match=rf"length <= {MAX_PARTS}") as caught:
        codec.decode(codec.encode([request]))
    assert caught.value.labels == ("s",)


def test_a_list_of_too_many_ids_is_refused_by_its_length() -> None:
    codec: Codec[ToGateway] = Codec(ToGateway)
    with pytest.raises(FrameError, match=rf"length <= {MAX_DETOKENIZED}") as caught:
        codec.decode(codec.encode([Detokenize("d", (1,) * (MAX_DETOKENIZED + 1))]))
    assert caught.value.labels == ("d",)


# ------------------------------------------------------------------------------------------ sockets


def socket_calls() -> list[tuple[str, bool]]:
    """Every place that makes a ZeroMQ socket, and whether it is prepared there."""
    found = []
    parts = ("lang", "interpreter", "srt", "compiler", "fsm")
    for path in sorted(path for part in parts for path in (PACKAGE / part).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "zmq" not in text:
            continue
        tree = ast.parse(text)
        prepared = {
            id(argument)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "prepare"
            for argument in call.args
        }
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "socket"):
                continue
            kind = call.args[0] if call.args else None
            if isinstance(kind, ast.Attribute) and isinstance(kind.value, ast.Name) and kind.value.id == "zmq":
                found.append((f"{path.relative_to(PACKAGE)}:{kind.attr}", id(call) in prepared))
    return found


def test_every_socket_has_a_largest_frame() -> None:
    calls = dict(socket_calls())
    assert calls.keys() == {
        "interpreter/backends/runtime_link.py:DEALER",
        "interpreter/backends/runtime_remote.py:DEALER",
        "srt/gateway/clients.py:ROUTER",
        "srt/gateway/engine_client.py:PAIR",
        "srt/gateway/engine_client.py:PULL",
        "srt/gateway/kv_events.py:PUB",
        "srt/gateway/kv_events.py:ROUTER",
        "srt/gateway/remote.py:ROUTER",
        "srt/engine/process.py:PAIR",
        "srt/engine/process.py:PUSH",
    }
    assert all(calls.values()), calls


def test_a_frame_above_the_limit_is_never_received(tmp_path: Path) -> None:
    """What comes before it is, and what another peer sends afterwards."""
    address, largest = f"ipc://{tmp_path}/s", 1 << 20
    with zmq.Context() as context, prepare(context.socket(zmq.ROUTER), largest) as reader:
        reader.setsockopt(zmq.RCVTIMEO, 60_000)
        reader.bind(address)
        with context.socket(zmq.DEALER) as writer:
            writer.setsockopt(zmq.LINGER, 0)
            writer.connect(address)
            for payload in (b"before", bytes(largest), bytes(largest + 1)):
                writer.send(payload)
            assert [len(reader.recv_multipart()[-1]) for _ in range(2)] == [6, largest]
            with context.socket(zmq.DEALER) as other:
                other.setsockopt(zmq.LINGER, 0)
                other.connect(address)
                other.send(b"after")
                assert reader.recv_multipart()[-1] == b"after"


def test_an_answer_that_no_frame_holds_is_an_error_for_its_request() -> None:
    codec: Codec[Any] = Codec(Final | Failure | Abort, max_bytes=400)
    outbound = Outbound(codec, too_large_for_client)
    long = Final("long", (Completion("x" * 1000, (), 1, "", FinishReason.STOP, None, ()),), Usage())
    read = [
        message for frames in outbound.write_all([Abort("a"), long, Abort("b")]) for message in codec.decode(frames[1])
    ]
    assert [message.id for message in read] == ["a", "long", "b"]
    assert isinstance(read[1], Failure)
    assert read[1].kind == "RequestError"
    assert "ask for fewer tokens" in read[1].message
    assert str(MAX_ENGINE_FRAME) in too_large_for_gateway(msgspec.Raw(b""), 7).message  # type: ignore[union-attr]


def test_a_select_that_would_repeat_its_prompt_too_often_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MOST_SCORED", 100)
    harness = Harness()
    harness.send(ScoreRequest("s", (Text("x" * 50),), ("yes", "no")))
    (answer,) = harness.answers()
    assert isinstance(answer, Failure)
    assert "ask for fewer choices" in answer.message
