"""Measures the CPU time that the language and the runtime take next to the model."""
