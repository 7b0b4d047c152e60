"""Prompts in the order in which most of them can be shared: what stands in the way, and what to write instead."""
