"""The linter of prompts: finds what keeps their beginnings from being shared, and says what to write instead."""
