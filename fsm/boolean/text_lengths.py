"""How long the texts of a language are, in characters, without looking at the texts."""

from ..language import AnyOrder, Both, Call, Chars, Concat, Dfa, Language, Literal, Repeat, Spelled, Union, Without

Lengths = tuple[int, int | None]  # least and most; None: without end


def lengths(node: Language) -> Lengths | None:
    """Bounds that no text leaves; None where no text exists. Tight but for intersections and differences.

    Of a language without calls.
    """
    match node:
        case Literal(data):
            count = len(data.decode("utf-8", "replace"))
            return count, count
        case Chars():
            return 1, 1
        case Concat(parts):
            return _added([lengths(part) for part in parts])
        case Union(options):
            return _spanned([lengths(option) for option in options])
        case Repeat(body, least, most):
            return _multiplied(lengths(body), least, most)
        case Dfa():
            return _of_automaton(node)
        case Spelled(body):
            inner = lengths(body)
            return inner and (inner[0], None if inner[1] is None else 6 * inner[1])
        case Both(left, right):
            return _shared(lengths(left), lengths(right))
        case Without(left):
            return lengths(left)
        case Call() | AnyOrder():
            raise AssertionError("the texts of a call have a length in their grammar only")


def _added(parts: list[Lengths | None]) -> Lengths | None:
    least, most = 0, 0
    endless = False
    for part in parts:
        if part is None:
            return None
        least += part[0]
        endless |= part[1] is None
        most += part[1] or 0
    return least, None if endless else most


def _spanned(options: list[Lengths | None]) -> Lengths | None:
    some = [option for option in options if option is not None]
    if not some:
        return None
    mosts = [most for _, most in some]
    return min(least for least, _ in some), None if None in mosts else max(most for most in mosts if most is not None)


def _multiplied(body: Lengths | None, least: int, most: int | None) -> Lengths | None:
    if most is not None and most < least:
        return None
    if body is None:
        return None if least else (0, 0)
    if body[1] == 0:
        return 0, 0
    return least * body[0], None if most is None or body[1] is None else most * body[1]


def _shared(left: Lengths | None, right: Lengths | None) -> Lengths | None:
    if left is None or right is None:
        return None
    mosts = [most for most in (left[1], right[1]) if most is not None]
    least, most = max(left[0], right[0]), min(mosts, default=None)
    return None if most is not None and most < least else (least, most)


def _of_automaton(node: Dfa) -> Lengths:
    """Breadth first for the least; the longest path where no cycle is, and every state reaches the end."""
    level, seen, least, depth = [0], {0}, None, 0
    while level and least is None:
        if any(node.accepting[state] for state in level):
            least = depth
        level = [target for state in level for _, target in node.edges[state] if target not in seen]
        level = list(dict.fromkeys(level))
        seen.update(level)
        depth += 1
    assert least is not None, "every state of a Dfa reaches an accepting one"
    return least, _longest(node)


def _longest(node: Dfa) -> int | None:
    """Kahn's order of the states; None where a cycle is left over."""
    incoming = [0] * len(node.accepting)
    for edges in node.edges:
        for _, target in edges:
            incoming[target] += 1
    longest = [0] * len(incoming)
    ready = [state for state, count in enumerate(incoming) if not count]
    passed = 0
    while ready:
        state = ready.pop()
        passed += 1
        for _, target in node.edges[state]:
            longest[target] = max(longest[target], longest[state] + 1)
            incoming[target] -= 1
            if not incoming[target]:
                ready.append(target)
    if passed < len(longest):
        return None
    return max(length for length, accepting in zip(longest, node.accepting, strict=True) if accepting)
