"""Compiles regular expressions to languages: Python's syntax, and ECMAScript's as JSON Schema uses it."""
