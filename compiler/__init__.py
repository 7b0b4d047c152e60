"""Compiles programs: traces them to graphs, which are looked at, rewritten, saved, and run without their Python."""
