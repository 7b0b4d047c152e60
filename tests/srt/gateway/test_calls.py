"""What a table of calls remembers, and for how long."""

import weakref

from umbel.srt.gateway.calls import CallIndex, GenCall

from ..gateway_harness import FakeFrontEnd

CLIENT = FakeFrontEnd().client()


def call(deadline: float) -> GenCall:
    return GenCall(CLIENT, "a", (), deadline, False, lambda _: b"", None)


class Held(GenCall):
    """A call that can be referred to weakly."""

    __slots__ = ("__weakref__",)


def test_ended_calls_are_not_held_until_their_deadlines() -> None:
    table = CallIndex()
    living = call(500.0)
    table.add(living)
    held = []
    for _ in range(5000):
        ended = Held(CLIENT, "a", (), 600.0, False, lambda _: b"", None)
        table.add(ended)
        table.remove(ended)
        held.append(weakref.ref(ended))
    del ended
    assert not any(reference() is not None for reference in held)
    assert len(table._deadlines) < 2_000
    assert list(table.due(500.0)) == [living]


def test_nothing_is_due_before_the_nearest_deadline() -> None:
    table = CallIndex()
    assert table.next_due == float("inf")
    late, early = call(20.0), call(10.0)
    table.add(late)
    table.add(early)
    assert table.next_due == 10.0
    assert list(table.due(table.next_due)) == [early]
    assert table.next_due == 20.0
