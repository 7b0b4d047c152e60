"""Runs a workload file by the language or on a peer, and counts what was asked and whether it is valid."""
