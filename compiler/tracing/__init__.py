"""Traces functions to graphs: a function runs once, with symbols for what is not known."""
