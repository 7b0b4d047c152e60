"""The explanation over two processes."""

import pytest
import umbel as ul
from umbel.lang.cache_report import CacheCause
from umbel.lang.chat_template import CHATML

from ..conftest import PATIENCE

pytestmark = pytest.mark.processes

RULES = "Answer in one word. Be polite. " * 12


@ul.function
def ask(s, question):
    s += ul.system(RULES)
    s += ul.user("Please: " + question) + ul.assistant(ul.gen("answer", max_tokens=3, temperature=0))


def test_the_gateway_says_where_tokens_stand() -> None:
    with ul.Runtime("oracle", chat_template=CHATML, progress=False) as backend:
        ask.run("Is water wet?", backend=backend, timeout=3 * PATIENCE).sync()
        call = ask.run("Is fire cold?", backend=backend, timeout=PATIENCE).explain_cache()["answer"]
        assert (call.cause, call.miss is not None and call.miss.argument) == (CacheCause.ARGUMENT, "question")
        assert call.miss is not None
        assert call.miss.token == call.cached_tokens
        assert call.miss.before.endswith("Please: Is ")
        assert ask.run("Is fire cold?", backend=backend).explain_cache()["answer"].cause is CacheCause.HIT
