"""Schemas as automata for tests: what is admitted, and texts that are."""

import json
import random
from collections.abc import Mapping, Set
from typing import Any

from umbel.fsm.automaton.automaton import Automaton
from umbel.fsm.boolean.resolution import resolve
from umbel.fsm.limits import Limits
from umbel.fsm.schema import SchemaOptions, compile_schema

SPACED = SchemaOptions()
LITERAL = SchemaOptions(infer_types=False)  # a schema without a type admits every type, as for validators


def automaton(schema: str | Mapping[str, Any] | bool, options: SchemaOptions = SPACED) -> Automaton:
    limits = Limits()
    return Automaton(resolve(compile_schema(schema, options, limits).grammar, limits))


def written(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def takes(admitted: Automaton, text: bytes) -> bool:
    state = admitted.run(admitted.start, text)
    return state >= 0 and admitted.accepting(state)


def admits(schema: str | Mapping[str, Any] | bool, *values: object, options: SchemaOptions = SPACED) -> list[bool]:
    """Which of the values the schema admits, as json.dumps writes them."""
    admitted = automaton(schema, options)
    return [takes(admitted, written(value)) for value in values]


def sample(admitted: Automaton, choose: random.Random, steps: int = 60) -> str:
    """A text of the language: live bytes at random for some steps (printable ones first), then the shortest end."""
    state, text = admitted.start, b""
    for _ in range(steps):
        if admitted.accepting(state) and choose.random() < 0.3:
            return text.decode("utf-8")
        live = [byte for byte in range(256) if admitted.step(state, byte) >= 0]
        if not live:
            break
        plain = [byte for byte in live if 0x20 <= byte < 0x7F]
        byte = choose.choice(plain if plain and choose.random() < 0.9 else live)
        state, text = admitted.step(state, byte), text + bytes([byte])
    return (text + admitted.close(state)).decode("utf-8")


def in_schema_order(admitted: Automaton, value: object) -> bytes | None:
    """The value with the members of its objects in an order that the automaton takes, found member by member.

    A member comes next when those that could have come instead still can; None when no order is found so.
    """
    text, state = _ordered(admitted, admitted.start, value)
    return text if state >= 0 and admitted.accepting(state) else None


def _ordered(admitted: Automaton, state: int, value: object) -> tuple[bytes, int]:
    if isinstance(value, dict) and value:
        text, state, left = b"{", admitted.run(state, b"{"), set(value)
        while left and state >= 0:
            found = _next(admitted, state, value, left)
            if found is None:
                return text, -1
            name, member, state = found
            text, left = text + member, left - {name}
        return text + b"}", admitted.run(state, b"}") if state >= 0 else -1
    if isinstance(value, list) and value:
        text, state = b"[", admitted.run(state, b"[")
        for position, item in enumerate(value):
            lead = b", " if position else b""
            inner, state = _ordered(admitted, admitted.run(state, lead), item) if state >= 0 else (b"", -1)
            text += lead + inner
        return text + b"]", admitted.run(state, b"]") if state >= 0 else -1
    return written(value), admitted.run(state, written(value)) if state >= 0 else -1


def _next(
    admitted: Automaton, state: int, value: Mapping[str, object], left: Set[str]
) -> tuple[str, bytes, int] | None:
    """The member that comes next: its name, its text with the comma before it, the state after it."""
    lead = b", " if len(left) < len(value) else b""
    inside = {each: admitted.run(state, lead + written(each) + b": ") for each in value if each in left}
    offered = [each for each in inside if inside[each] >= 0]
    for name in offered:
        text, after = _ordered(admitted, inside[name], value[name])
        lost = (admitted.run(after, b", " + written(each) + b": ") < 0 for each in offered if each != name)
        if after >= 0 and not any(lost):
            return name, lead + written(name) + b": " + text, after
    return None
