"""Builds the grammar of answers that may call tools, out of literals and the grammars of the tools' schemas.

    choice     thinking   the text                                            a call: header · arguments · }</tool_call>
    required   none       calls
    auto       none       text without the mark  |  text up to the first mark · the rest of the calls
    any        begun      text up to </think> · one of the above              the prompt ends with <think>
    any        optional   <think> text up to </think> · …  |  one of the above, not beginning with <think>

The texts of one answer can be read in one way only, whatever they hold: the mark is a call's outside of thoughts, and
thoughts end at the first closing tag. The reader of calls and the splitter of reasoning read them in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from ...fsm.algebra import ANY_TEXT, characters, concat, difference, renamed, repeat, union
from ...fsm.boolean.resolution import settled
from ...fsm.errors import ConstraintRefused, Limits
from ...fsm.language import NOTHING, CharSet, Grammar, Language, Literal
from ...fsm.marks import up_to, without
from ...fsm.schema import SchemaOptions, resolved_schema
from ...lang.tool_constraint import Thinking, ToolGrammar, ToolSchema

_NEWLINES = repeat(Literal(b"\n"), 0, 2)  # that models write between their reasoning and a call
_SPACES = repeat(characters(CharSet.of((code, code) for code in range(0x3001) if chr(code).isspace())), 0, None)
_SHARED = "any "  # begins the names of rules that do not depend on a schema: "any value", "any string"


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """A grammar of answers.

    Attributes:
        unenforced: (keyword, place) of what the schemas ask for and the grammar does not; the place is a tool's name
            and a JSON pointer.
        narrowed: (keyword, place, how) where fewer texts are admitted than a schema means.
    """

    grammar: Grammar
    unenforced: tuple[tuple[str, str], ...]
    narrowed: tuple[tuple[str, str, str], ...]


def answer_grammar(request: ToolGrammar, options: SchemaOptions, limits: Limits) -> AnswerGrammar:
    """Returns the grammar of all answers that a request admits.

    Raises:
        ConstraintRefused: a schema is not supported, or invalid; the message names the tool.
    """
    schemas = _Schemas(options, limits)
    arguments = [schemas.arguments(tool) for tool in request.tools]
    answer = None if request.answer is None else schemas.values("the answer", request.answer.schema)
    texts = _Texts(request, arguments, answer, limits)
    return AnswerGrammar(Grammar(texts.language(), schemas.rules), tuple(schemas.unenforced), tuple(schemas.narrowed))


class _Schemas:
    """Compiles schemas into one set of rules."""

    def __init__(self, options: SchemaOptions, limits: Limits) -> None:
        self.rules: dict[str, Language] = {}
        self.unenforced: list[tuple[str, str]] = []
        self.narrowed: list[tuple[str, str, str]] = []
        self._options = options
        self._limits = limits

    def arguments(self, tool: ToolSchema) -> Language:
        """Returns the texts of a tool's arguments."""
        schema = msgspec.json.decode(tool.schema)
        if not isinstance(schema, dict) or schema.get("type") != "object":
            raise ConstraintRefused(f'{tool.name}: the arguments are one JSON object; write "type": "object"')
        return self.values(tool.name, tool.schema, closed=True)

    def values(self, name: str, schema: msgspec.Raw, *, closed: bool = False) -> Language:
        """Returns the texts of a schema's values; its rules get names that no other schema's have.

        closed: objects that declare members and do not mention others have no others. Small models go on inventing
        arguments as long as they may, and functions refuse them.
        """
        try:
            compiled = resolved_schema(bytes(schema), replace(self._options, closed=closed), self._limits)
        except ConstraintRefused as error:
            raise ConstraintRefused(f"{name}: {error}") from None
        self.unenforced += [(keyword, f"{name}{place}") for keyword, place in compiled.unenforced]
        self.narrowed += [(keyword, f"{name}{place}", how) for keyword, place, how in compiled.narrowed]
        rules = compiled.grammar.rules
        alike = all(self.rules.get(rule, body) == body for rule, body in rules.items() if rule.startswith(_SHARED))
        names = {rule: rule if alike and rule.startswith(_SHARED) else f"{name} {rule}" for rule in rules}
        known: dict[int, Language] = {}
        for rule, body in rules.items():
            self.rules[names[rule]] = renamed(body, names, known)
        return renamed(compiled.grammar.start, names, known)


class _Texts:
    """The answers of one request."""

    def __init__(
        self, request: ToolGrammar, arguments: Iterable[Language], answer: Language | None, limits: Limits
    ) -> None:
        self._request = request
        self._format = request.call_format
        self._arguments = list(arguments)
        self._answer = answer
        self._limits = limits

    def language(self) -> Language:
        thinking = self._request.thinking
        if thinking is None:
            return self._answers(None)
        opened = concat((_SPACES, _text(thinking.open)))
        thoughts = up_to(thinking.close, self._limits)
        thought = concat((thoughts, _NEWLINES, self._answers(None)))
        if self._request.choice != "required" and self._answer is None:
            thought = union((thought, without([thinking.close], self._limits)))  # the model may end before it answers
        if thinking.begun:
            return thought
        return union((concat((opened, thought)), self._answers(thinking)))

    def _answers(self, thinking: Thinking | None) -> Language:
        """Returns texts and calls as the choice has them. thinking: they do not begin with its opening tag."""
        unlike = NOTHING if thinking is None else concat((_SPACES, _text(thinking.open), ANY_TEXT))
        choice = self._request.choice
        if choice == "required":
            return self._calls()
        text = self._answer or self._texts(unlike)
        if choice == "none":
            return text
        if self._answer is not None:
            return union((text, self._calls()))
        if not self._format.has_mark:
            return union((text, concat((_NEWLINES, self._calls()))))
        marked = up_to(self._format.mark, self._limits, unlike=unlike)
        return union((text, concat((marked, self._calls(len(self._format.mark))))))

    def _texts(self, unlike: Language) -> Language:
        """Returns texts without calls, none of them in `unlike`."""
        if self._format.has_mark:
            return without([self._format.mark], self._limits, unlike)
        headers = [_text(self._format.header(tool.name)) for tool in self._request.tools]
        # The splitter of reasoning leaves out any white space before the answer.
        before = _NEWLINES if self._request.thinking is None else _SPACES
        calls = concat((before, union(headers), ANY_TEXT))
        return settled(difference(ANY_TEXT, union((calls, unlike))), self._limits)

    def _calls(self, skipped: int = 0) -> Language:
        """Returns one call or, if they may be parallel, several. skipped: characters that have come already."""
        spelling = self._format
        call = self._call("", 0)
        first = self._call(spelling.open, skipped)
        several = self._request.parallel and spelling.parallel
        more = repeat(concat((_text(spelling.between), call)), 0, None if several else 0)
        # Some models write a newline and then end their answer.
        end = repeat(Literal(b"\n"), 0, 1) if spelling.has_mark else _text("")
        return concat((first, more, _text(spelling.close), end))

    def _call(self, before: str, skipped: int) -> Language:
        headers = [(before + self._format.header(tool.name))[skipped:] for tool in self._request.tools]
        after = _text(self._format.after_arguments)
        return union(
            [
                concat((_text(header), arguments, after))
                for header, arguments in zip(headers, self._arguments, strict=True)
            ]
        )


def _text(text: str) -> Literal:
    return Literal(text.encode())
