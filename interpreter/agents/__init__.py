"""Agents: answers that call tools, the calls, and their results, step by step until the model answers in text."""
