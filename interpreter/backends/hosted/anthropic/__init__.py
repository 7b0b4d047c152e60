"""Claude models through Anthropic's API."""
