"""Explains cache misses: records the calls of running programs, and reports why a prompt was not cached."""
