"""Runs a program now: streams, variables, forks, batches."""
