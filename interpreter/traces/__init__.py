"""Journals and saved runs as traces, for the simulator."""
