"""Computes intersections and differences of languages as automata over characters."""
