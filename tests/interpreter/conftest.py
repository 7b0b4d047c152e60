"""Toys shared by the interpreter's tests. Every wait in them is bounded: a hang is a DeadlineError."""

import pytest
from umbel.interpreter.backends.echo import Echo

PATIENCE = 20.0  # seconds; far above what any of these tests needs


@pytest.fixture
def echo() -> Echo:
    """Gives back the last piece of text that the program wrote."""
    return Echo()
