"""What the programs of workloads say, for tokenizers that are made of it; and the same programs, made short."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from umbel.srt.simulator.workload import Fork, Gen, Op, Ops, Program, Select, Text, Workload


def texts_of(workloads: Sequence[Workload]) -> Iterator[str]:
    """All that programs say, all that they may choose, and the constraints, of which answers are made."""

    def visit(ops: Ops) -> Iterator[str]:
        for op in ops:
            match op:
                case Text(text):
                    yield text
                case Select(choices=choices):
                    yield from choices
                case Gen(regex=regex, json_schema=schema):
                    if regex is not None:
                        yield regex.replace("\\", "")
                    if schema is not None:
                        yield json.dumps(schema, indent=2)
                case Fork(branches=branches):
                    for inner in branches:
                        yield from visit(inner)

    for file in workloads:
        for program in file.programs:
            yield from visit(program.ops)


def shortened(file: Workload, *, characters: int, tokens: int) -> Workload:
    """The same programs with the ends of their texts, and answers of few tokens."""

    def short(op: Op) -> Op:
        match op:
            case Text(text):
                return Text(text[-characters:])
            case Gen():
                return replace(op, max_tokens=min(op.max_tokens, tokens))
            case Fork():
                return replace(op, branches=tuple(tuple(map(short, inner)) for inner in op.branches))
            case _:
                return op

    relaxed = file.relaxed()  # a constraint may need more tokens
    return replace(relaxed, programs=tuple(Program(p.id, tuple(map(short, p.ops))) for p in relaxed.programs))
