"""The linter's rules, its findings, and what the source alone shows: unstable order, histories that are rewritten, what
is volatile.

What is found here needs no trace, so it works for programs that cannot be traced, too.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .pieces import Counter, Kind, Marked, Piece, Shareable, free_tokens
from .source import Run, Scope, SourceProgram, volatile_call, walk_here

# Rule → why what it finds costs something.
RULES = {
    "constants-late": "Runs share the beginning of their prompts. Text that is the same in every run is computed for "
    "each of them when it stands after an argument.",
    "shared-late": "Runs that have an argument in common, a document for instance, share it only where nothing of "
    "their own stands in front of it.",
    "instance-in-system": "A system turn stands in front of everything. With an argument in it, no two runs share it, "
    "nor anything after it.",
    "counter-early": "A number that changes from call to call ends what these calls share; what stands after it is "
    "computed for each of them.",
    "volatile-early": "The time, an identifier or a random choice is another text at every run, even of the same "
    "question: nothing after it is ever found in the cache.",
    "unstable-order": "The same values can be printed in another order, which is another prompt.",
    "image-late": "Questions about one image share it when the image stands in front of them. After a question, it is "
    "encoded and computed for each.",
    "history-rewritten": "A history that grows at its end keeps its beginning, which is in the cache. Printed newest "
    "first, or cut at its beginning, it is another text at every turn.",
}
_NOQA = re.compile(r"#\s*umbel:\s*noqa(?:\[([^\]]*)\])?")
NO_GAIN = Shareable(0, 0)
LEAST_AFTER = 16  # tokens of constant text; a cue and a closing tag are less
_Found = tuple[ast.AST, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """Attributes:
    rule: of `RULES`.
    line, end_line: of the statement.
    program: its name.
    what: was found, and what to write instead.
    gain: tokens more that runs share at most; zero where that depends on the values.
    """

    rule: str
    line: int
    end_line: int
    program: str
    what: str
    gain: Shareable

    @property
    def why(self) -> str:
        return RULES[self.rule]


def audible(findings: Iterable[Finding], lines: Sequence[str]) -> list[Finding]:
    """Removes findings silenced by a comment on a line of their statement; keeps one for each rule and line."""
    kept: dict[tuple[str, int], Finding] = {}
    for finding in findings:
        statement = lines[finding.line - 1 : finding.end_line]
        if not any(_silences(line, finding.rule) for line in statement):
            kept.setdefault((finding.rule, finding.line), finding)
    return sorted(kept.values(), key=lambda finding: (finding.line, finding.rule))


def _silences(line: str, rule: str) -> bool:
    """Returns whether a line silences a rule: `# umbel: noqa` all rules, `# umbel: noqa[rule, rule]` these."""
    match = _NOQA.search(line)
    return match is not None and (match[1] is None or rule in [name.strip() for name in match[1].split(",")])


def source_findings(program: SourceProgram, counter: Counter) -> Iterator[Finding]:
    for expression, statement in _printed(program):
        for node, what in _unstable(expression, program.scope):
            yield _finding("unstable-order", program, statement, node, what)
        for node, what in _rewritten(expression, program):
            yield _finding("history-rewritten", program, statement, node, what)
    yield from _volatile(program, counter)


def _finding(rule: str, program: SourceProgram, statement: ast.stmt, node: ast.AST, what: str) -> Finding:
    """Makes a finding at the expression, which may stand in another statement than the one that appends it."""
    line = getattr(node, "lineno", statement.lineno)
    inside = statement.lineno <= line <= (statement.end_lineno or line)
    first, last = (statement.lineno, statement.end_lineno or line) if inside else (line, line)
    return Finding(rule, first, last, program.function.name, what, NO_GAIN)


def _printed(program: SourceProgram) -> Iterator[tuple[ast.expr, ast.stmt]]:
    """Yields every expression that is appended, or decides in which order things are; with its statement."""
    for run in program.runs:
        for source in run.sources:
            if source.text is None:
                yield source.expression, source.statement
    for node in walk_here(program.function.body):
        if isinstance(node, ast.For | ast.AsyncFor):
            yield ast.copy_location(ast.GeneratorExp(ast.Name("_"), [_clause(node)]), node.iter), node


def _clause(loop: ast.For | ast.AsyncFor) -> ast.comprehension:
    return ast.comprehension(loop.target, loop.iter, [], 0)


# --------------------------------------------------------------------------------- order


def _unstable(expression: ast.expr, scope: Scope) -> Iterator[_Found]:
    if _is_set(expression, scope):
        yield expression, _sorted(expression)
    for node, inner in scope.flowing(expression):
        match node:
            case ast.Call(function, [value, *_], keywords) if scope.full_name(function) == "json.dumps":
                given = {keyword.arg for keyword in keywords}
                if not given & {"sort_keys", None} and not _is_ordered(value, inner):
                    yield node, f"{ast.unparse(node)} keeps the order of the mapping's keys; write sort_keys=True"
            case ast.Call(ast.Attribute(_, "join"), [value]) if _is_set(value, inner):
                yield value, _sorted(value)
            case ast.Call(ast.Name("list" | "tuple" | "str" | "repr" | "enumerate"), [value, *_]) if _is_set(
                value, inner
            ):
                yield value, _sorted(value)
            case ast.comprehension(_, value) if _is_set(value, inner):
                yield value, _sorted(value)
            case ast.FormattedValue(value) if _is_set(value, inner):
                yield value, _sorted(value)
            case ast.Dict(keys) if None in keys and not _is_sorted(expression, node, scope):
                what = f"{ast.unparse(node)} has its keys in the order of its parts; print it with sort_keys=True"
                yield node, what


def _is_sorted(expression: ast.expr, inner: ast.AST, scope: Scope) -> bool:
    """Returns whether what an expression prints of `inner` is put in order, or is reported where it is printed."""
    for node, _ in scope.flowing(expression):
        if isinstance(node, ast.Call) and scope.full_name(node.func) in ("json.dumps", "sorted"):
            return any(part is inner for argument in node.args for part, _ in scope.flowing(argument))
    return False


def _is_ordered(value: ast.expr, scope: Scope) -> bool:
    """Returns whether a value is printed the same each time: a literal whose keys stand in the source."""
    match value:
        case ast.Name(name):
            values = scope.values(name)
            return bool(values) and all(_is_ordered(each, scope) for each in values)
        case ast.Dict(keys, values):
            return None not in keys and all(_is_ordered(each, scope) for each in values)
        case ast.List(items) | ast.Tuple(items):
            return all(_is_ordered(item, scope) for item in items)
    return isinstance(value, ast.Constant | ast.JoinedStr)


def _is_set(value: ast.expr, scope: Scope) -> bool:
    match value:
        case ast.Set() | ast.SetComp() | ast.Call(ast.Name("set" | "frozenset")):
            return True
        case ast.Name(name):
            values = scope.values(name)
            return bool(values) and all(not isinstance(each, ast.Name) and _is_set(each, scope) for each in values)
    return False


def _sorted(value: ast.expr) -> str:
    written = ast.unparse(value)
    return f"{written} is a set, whose order differs between processes; write sorted({written})"


# --------------------------------------------------------------------------------- histories


def _rewritten(expression: ast.expr, program: SourceProgram) -> Iterator[_Found]:
    for node, scope in program.scope.flowing(expression):
        match node:
            case ast.Call(ast.Name("reversed"), [value]) as call:
                written = ast.unparse(value)
                what = f"{ast.unparse(call)} prints the newest first; print {written} in its order, and append to it"
                yield call, what
            case ast.Subscript(value, ast.Slice(None, None, ast.UnaryOp(ast.USub(), ast.Constant(1)))) as turned:
                if _is_given(value, program, scope):
                    written = ast.unparse(value)
                    what = f"{ast.unparse(turned)} is newest first; print {written} in its order, and append to it"
                    yield turned, what
            case ast.comprehension(_, ast.Subscript(value, ast.Slice(ast.UnaryOp(ast.USub()), None, None)) as window):
                if _is_given(value, program, scope):
                    yield (
                        window,
                        f"{ast.unparse(window)} loses its beginning at every turn; keep all of "
                        f"{ast.unparse(value)}, or cut it seldom and by many turns at once",
                    )


def _is_given(value: ast.expr, program: SourceProgram, scope: Scope) -> bool:
    """Returns whether a value comes from the program's arguments: what it makes itself is the same at every turn."""
    arguments = program.function.args
    names = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return any(isinstance(node, ast.Name) and node.id in names for node, _ in scope.flowing(value))


# --------------------------------------------------------------------------------- what is volatile


def _volatile(program: SourceProgram, counter: Counter) -> Iterator[Finding]:
    """Finds volatile values by the source alone: counts constant text in this run and the following ones."""
    for number, run in enumerate(program.runs):
        for place, source in enumerate(run.sources):
            call = None if source.text is not None else volatile_call(source.expression, program.scope)
            if call is None:
                continue
            after = free_tokens(_as_text(run, place, program), counter)
            after += sum(free_tokens(_as_text(other, -1, program), counter) for other in program.runs[number + 1 :])
            if after >= LEAST_AFTER:
                statement = source.statement
                yield Finding(
                    "volatile-early",
                    statement.lineno,
                    statement.end_lineno or statement.lineno,
                    program.function.name,
                    volatile_text(ast.unparse(call), after),
                    Shareable(after, after),
                )


def volatile_text(what: str, after: int) -> str:
    return f"{what} stands in front of {after} tokens that never change; put it after them, or leave it out"


def _as_text(run: Run, place: int, program: SourceProgram) -> Marked:
    """Returns the sources after one of a run, as far as their text is known; the hole itself comes first."""
    pieces = [Piece(Kind.VOLATILE)] if place >= 0 else []
    for source in run.sources[place + 1 :]:
        text = source.text if source.text is not None else program.scope.constant(source.expression)
        pieces.append(Piece(Kind.INSTANCE) if text is None else Piece(Kind.CONSTANT, text))
    return Marked.of(pieces)
