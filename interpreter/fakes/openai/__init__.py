"""A provider of the OpenAI dialect, for tests."""
