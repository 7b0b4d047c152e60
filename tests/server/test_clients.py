"""The clients of OpenAI against a server process."""

import openai
import pytest

from .serving import KEY, Serving

pytestmark = pytest.mark.processes


def test_the_model_is_listed(oracle_server: Serving) -> None:
    client = openai.OpenAI(base_url=oracle_server.address + "/v1", api_key=KEY, _strict_response_validation=True)
    (listed,) = client.models.list()
    assert listed == client.models.retrieve("oracle")
    assert (listed.id, listed.object, listed.owned_by) == ("oracle", "model", "umbel")
