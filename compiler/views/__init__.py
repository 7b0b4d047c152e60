"""Graphs as people look at them: a listing, DOT, and a picture."""
