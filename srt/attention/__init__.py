"""Computes attention over the paged pool: one plan of work items for every backend and every kind of step."""
