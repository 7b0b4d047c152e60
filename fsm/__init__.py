"""Enforces constraints on texts as automata. numpy at most; no torch, nothing of ours."""
