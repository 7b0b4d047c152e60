"""Text constraints as automata. numpy at most; no torch, nothing of ours."""
