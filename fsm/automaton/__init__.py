"""Runs a grammar as a lazy automaton over bytes: nothing is determinised ahead of need."""
