"""One server process for the short tests over HTTP."""

from collections.abc import Iterator

import pytest

from .serving import Serving, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`umbel serve` on an oracle whose steps take 20 ms, with room for 64 requests."""
    options = {"debug": {"step_delay": 0.02}, "pool_tokens": 16_384}
    with serving(
        tmp_path_factory.mktemp("serve"), options, "--most-in-flight", "64", "--cache-minimum", "16"
    ) as running:
        yield running
