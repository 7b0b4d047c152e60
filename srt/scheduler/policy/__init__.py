"""Orders waiting requests for admission."""
