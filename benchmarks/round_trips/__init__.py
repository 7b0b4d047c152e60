"""Measures what shipping a program saves, in virtual time."""
