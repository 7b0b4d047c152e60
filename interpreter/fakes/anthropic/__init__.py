"""A provider of the Anthropic dialect, for tests."""
