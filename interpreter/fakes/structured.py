"""Checks a script's answers against the form that a provider enforces."""

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any

from ...lang.errors import RequestError
from ...lang.protocol import ConstraintSpec
from ...lang.sampling import MAX_TOKENS, SamplingParams
from ..backends.echo_answers import check, cut

_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
_LITERALS = re.compile(rf"root ::= {_LITERAL.pattern}(?: \| {_LITERAL.pattern})*")

# Keywords that OpenAI's strict mode refuses.
_NOT_STRICT = (
    "allOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
)


@dataclass(frozen=True, slots=True)
class Form:
    """The form that an answer must have. `kind` and `source` as of a ConstraintSpec."""

    constraint: ConstraintSpec

    def shaped(self, said: str, sampling: SamplingParams) -> str:
        """Writes a script's answer as the model does: as it is, or wrapped into the requested object.

        A script may say what comes after a stop as well, as without a form.

        Raises:
            AssertionError: no model that is held to the form says this.
        """
        try:
            check(said, self.constraint)
        except RequestError as error:
            problem = error
        else:
            return said
        bounded = SamplingParams(stop=sampling.stop, max_tokens=MAX_TOKENS)
        for text in dict.fromkeys((said, cut(said, bounded)[0].text)):
            for candidate in (text, *self._wrapped(text)):
                if self._holds(candidate):
                    return candidate
        raise AssertionError(f"the script breaks the form that the request asks for: {problem}")

    def _wrapped(self, text: str) -> list[str]:
        """Wraps a bare answer, where the schema has one member: a string, or a value spelled as JSON."""
        if self.constraint.kind != "json_schema":
            return []
        schema = json.loads(self.constraint.source)
        members = list(schema.get("properties", ()))
        if len(members) != 1:
            return []
        values: list[Any] = [text]  # Any: JSON
        with contextlib.suppress(ValueError):
            values.append(json.loads(text))
        return [json.dumps({members[0]: value}, ensure_ascii=False) for value in values]

    def _holds(self, text: str) -> bool:
        try:
            check(text, self.constraint)
        except RequestError:
            return False
        return True


def of_schema(schema: object) -> Form:
    return Form(ConstraintSpec("json_schema", json.dumps(schema)))


def of_literals(grammar: str) -> Form | None:
    """Reads a grammar of llama.cpp that is one rule of literals, as `root ::= "yes" | "no"`; None for any other."""
    if _LITERALS.fullmatch(grammar) is None:
        return None
    texts = [json.loads(found) for found in _LITERAL.findall(grammar)]
    return Form(ConstraintSpec("choices", json.dumps(texts)))


def of_any_object() -> Form:
    return of_schema({"type": "object"})


def strictness(schema: dict[str, Any]) -> str | None:
    """Returns OpenAI's error for a schema outside its strict mode; None for a valid one."""
    if schema.get("type") != "object":
        return f"schema must be a JSON Schema of 'type: \"object\"', got 'type: \"{schema.get('type')}\"'."
    return _strictness(schema, ())


def _strictness(schema: object, context: tuple[str, ...]) -> str | None:
    if not isinstance(schema, dict):
        return None
    if found := [keyword for keyword in _NOT_STRICT if keyword in schema]:
        return f"In context={context}, '{found[0]}' is not permitted."
    properties = schema.get("properties", {})
    if schema.get("type") == "object":
        if schema.get("additionalProperties") is not False:
            return f"In context={context}, 'additionalProperties' is required to be supplied and to be false."
        if missing := [name for name in properties if name not in schema.get("required", ())]:
            return (
                f"In context={context}, 'required' is required to be supplied and to be an array including every key "
                f"in properties. Missing '{missing[0]}'."
            )
    inner = [((*context, "properties", name), value) for name, value in properties.items()]
    inner += [((*context, "$defs", name), value) for name, value in schema.get("$defs", {}).items()]
    inner += [((*context, "anyOf", str(i)), value) for i, value in enumerate(schema.get("anyOf", ()))]
    inner.append(((*context, "items"), schema.get("items")))
    return next((problem for place, value in inner if (problem := _strictness(value, place)) is not None), None)
