"""The language: operations, state, sampling, constraints, prompts, errors. No I/O, no torch; light to import."""

__version__ = "0.1.0"  # pyproject.toml reads it here
