"""JSON Schema as a grammar of JSON texts. Nothing that a schema says is weakened in silence.

source ──▶ document ──▶ meaning ──▶ compiler ──▶ Grammar
values     schemas,     clauses:    rules: members (objects), items (arrays),
           references   ways to     strings, numbers, spelling
                        meet it
"""

from .compiler import SchemaGrammar, SchemaOptions, compile_schema, resolved_schema

__all__ = ["SchemaGrammar", "SchemaOptions", "compile_schema", "resolved_schema"]
