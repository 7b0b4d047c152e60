"""Journals: the finished calls of runs in a file, for a run that goes on, and for replays without a model."""
