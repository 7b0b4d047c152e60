"""Models without weights for tests: an oracle whose tokens are known, and slowed runners."""
