"""Schemas as automata for tests: what is admitted, and texts that are."""

import json
import random
from collections.abc import Mapping
from typing import Any

from umbel.fsm.automaton.automaton import Automaton
from umbel.fsm.schema import SchemaOptions, resolved_schema

SPACED = SchemaOptions()
LITERAL = SchemaOptions(infer_types=False)  # a schema without a type admits every type, as for validators


def automaton(schema: str | Mapping[str, Any] | bool, options: SchemaOptions = SPACED) -> Automaton:
    return Automaton(resolved_schema(schema, options).grammar)


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
