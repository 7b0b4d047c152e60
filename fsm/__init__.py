"""Enforces constraints on texts as automata. numpy at most, no torch; `composed` alone knows the language."""
