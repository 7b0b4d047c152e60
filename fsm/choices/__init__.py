"""Computes how probable choices are over all the ways to cut them into tokens (the paper's B.3)."""
