"""The lazy automaton over bytes: a grammar read as it is, nothing determinised ahead of need."""
