"""Deterministic automata with fewer states: those that lead nowhere go, those that act alike become one.

An automaton is `accepting` [states] and `rows` [states]: symbol → next state; state 0 starts.
"""

from collections import deque

Rows = list[dict[int, int]]


def trimmed(accepting: list[bool], rows: Rows) -> tuple[list[bool], Rows] | None:
    """Only the states that reach an accepting one, all reached from the start; None when the start is not one."""
    sources: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for target in row.values():
            sources[target].append(state)
    live = [False] * len(rows)
    pending = [state for state, accepts in enumerate(accepting) if accepts]
    for state in pending:
        live[state] = True
    while pending:
        for source in sources[pending.pop()]:
            if not live[source]:
                live[source] = True
                pending.append(source)
    if not live[0]:
        return None
    numbers = {state: number for number, state in enumerate(state for state in range(len(rows)) if live[state])}
    kept = [{symbol: numbers[target] for symbol, target in rows[state].items() if live[target]} for state in numbers]
    return [accepting[state] for state in numbers], kept


def minimal(accepting: list[bool], rows: Rows) -> tuple[list[bool], Rows]:
    """The one automaton with the fewest states (Hopcroft, 1971, for partial transition functions).

    A block of states that has not told others apart yet waits; of two halves of a block that has, the smaller waits.
    """
    sources: list[dict[int, list[int]]] = [{} for _ in rows]  # [states]: symbol → states that lead here
    for state, row in enumerate(rows):
        for symbol, target in row.items():
            sources[target].setdefault(symbol, []).append(state)
    halves = [{state for state, accepts in enumerate(accepting) if accepts is wanted} for wanted in (False, True)]
    blocks = [half for half in halves if half]
    block_of = [0] * len(rows)
    for number, block in enumerate(blocks):
        for state in block:
            block_of[state] = number
    waiting = deque(range(len(blocks)))
    is_waiting = [True] * len(blocks)
    while waiting:
        splitter = waiting.popleft()
        is_waiting[splitter] = False
        leading: dict[int, list[int]] = {}
        for state in blocks[splitter]:
            for symbol, states in sources[state].items():
                leading.setdefault(symbol, []).extend(states)
        for states in leading.values():
            touched: dict[int, set[int]] = {}
            for state in states:
                touched.setdefault(block_of[state], set()).add(state)
            for number, part in touched.items():
                if len(part) == len(blocks[number]):
                    continue
                blocks[number] -= part
                blocks.append(part)
                for state in part:
                    block_of[state] = len(blocks) - 1
                is_waiting.append(False)
                new = number if not is_waiting[number] and len(blocks[number]) <= len(part) else len(blocks) - 1
                waiting.append(new)
                is_waiting[new] = True
    order: dict[int, int] = {}  # block → number, the start's first
    for state in range(len(rows)):
        order.setdefault(block_of[state], len(order))
    firsts = {number: min(blocks[block]) for block, number in order.items()}
    merged = [{symbol: order[block_of[to]] for symbol, to in rows[firsts[number]].items()} for number in firsts]
    return [accepting[firsts[number]] for number in firsts], merged
