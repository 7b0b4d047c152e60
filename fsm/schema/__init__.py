"""Compiles a JSON Schema to a grammar of JSON texts. Nothing that a schema says is weakened in silence.

text   ──▶ document ──▶ normalizer ──▶ compiler ──▶ Grammar
values     schemas,     disjunctive    rules: members (objects), items (arrays),
           references   normal form    strings, numbers, expressions

The normal form of a schema is a union of conjuncts (`conjuncts`); `satisfiability` leaves out those that nothing meets.
"""

from .compiler import SchemaGrammar, SchemaOptions, compile_schema, resolved_schema

__all__ = ["SchemaGrammar", "SchemaOptions", "compile_schema", "resolved_schema"]
