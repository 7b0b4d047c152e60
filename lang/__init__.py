"""The language: operations, state, sampling, constraints, prompts, errors. No I/O, no torch; light to import."""
