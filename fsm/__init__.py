"""Enforces constraints on texts as automata. numpy at most; no torch; nothing of ours, but for the language in `composed`."""
