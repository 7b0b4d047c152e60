"""The explanation over two processes, with a real tokenizer."""

from datetime import datetime

import pytest
import umbel as ul
from umbel.lang.cache_report import CacheCause
from umbel.lang.chat_template import CHATML

pytestmark = [pytest.mark.model, pytest.mark.processes]

RULES = "Answer in one word. Be polite. Never invent facts that are not in the question. " * 3


@ul.function
def dated(s, question):
    s += ul.system(f"It is {datetime.now()}. " + RULES)
    s += ul.user(question) + ul.assistant(ul.gen("answer", max_tokens=3, temperature=0))


@ul.function
def ask(s, question):
    s += ul.system(RULES)
    s += ul.user("Please: " + question) + ul.assistant(ul.gen("answer", max_tokens=3, temperature=0))


@pytest.mark.nightly
def test_the_line_with_the_date_is_named() -> None:
    with ul.Runtime(chat_template=CHATML, progress=False) as backend:
        dated.run("Is water wet?", backend=backend).sync()
        report = dated.run("Is water wet?", backend=backend).explain_cache()
        call = report["answer"]
        assert call.cause is CacheCause.VOLATILE
        assert call.miss is not None
        assert call.miss.token == call.cached_tokens
        assert call.miss.source is not None
        assert call.miss.source.expression == "datetime.now()"
        assert call.miss.source.code.startswith('s += ul.system(f"It is {datetime.now()}. "')

        ask.run("Is water wet?", backend=backend).sync()
        call = ask.run("Is fire cold?", backend=backend).explain_cache()["answer"]
        assert (call.cause, call.miss is not None and call.miss.argument) == (CacheCause.ARGUMENT, "question")
        assert ask.run("Is fire cold?", backend=backend).explain_cache()["answer"].cause is CacheCause.HIT
