"""Chat templates are Jinja as transformers runs it: a sandbox, loop controls, and what templates expect to be there.

Imported when the first template is compiled: `import umbel` stays without jinja2.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .placeholders import write_json

MOST_REASON = 500  # characters of an error


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks what an assistant says, for training. Here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """Compiles a template. Raises jinja2.TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _tojson
    return environment.from_string(source)


def render_template(template: jinja2.Template, variables: Mapping[str, Any], most: int) -> str:
    """The text, of at most `most` characters; raises jinja2.TemplateError beyond them."""
    pieces: list[str] = []
    left = most
    for piece in template.root_render_func(template.new_context(dict(variables))):
        left -= len(piece)
        if left < 0:
            raise jinja2.TemplateError(f"it writes more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def reason_of(error: Exception) -> str:
    """Formats an error for messages, shortened: a template can raise a text of any length."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"[:MOST_REASON]
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(error)[:MOST_REASON]
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,  # Any: template data
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON as the filter of transformers does, which escapes no HTML."""
    return write_json(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
