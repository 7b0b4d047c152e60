"""Speaks Anthropic's HTTP API: messages, and the count of their tokens."""
