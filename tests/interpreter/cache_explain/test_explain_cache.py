"""Why a call found no more in the cache: the line, the value and the argument, on backends that know their tokens."""

import asyncio
import itertools
import json
from collections.abc import Callable

import pytest
import umbel as ul
from umbel.interpreter.loop import streams
from umbel.lang.cache_report import CacheCause
from umbel.lang.chat_template import CHATML
from umbel.lang.errors import ProgramError
from umbel.lang.prompt import shown_name
from umbel.lang.protocol import Backend
from umbel.srt.in_process import LocalBackend

from ..conftest import PATIENCE

CONTEXT = "A long context of a good many words, and some more of them. " * 4
_clock = itertools.count(1000)


def now() -> int:
    return next(_clock)


@ul.function
def dated(s, question):
    s += f"It is {now()}.\n"  # the line that spoils it
    s += CONTEXT
    s += f"Question: {question}\nAnswer:" + ul.gen("answer", max_tokens=4, temperature=0)


@ul.function
def ask(s, question, context=CONTEXT):
    s += context
    s += f"Question: {question}\nAnswer:" + ul.gen("answer", max_tokens=4, temperature=0)


@ul.function
def fan(s, count):
    s += CONTEXT
    forks = s.fork(count)
    for number, branch in enumerate(forks):
        branch += f"Tip {number}:" + ul.gen("tip", max_tokens=2, temperature=0)
    forks.join()


@ul.function
def chat(s, questions):
    s += ul.system(CONTEXT)
    for question in questions:
        s += ul.user(question) + ul.assistant(ul.gen("answer", max_tokens=3, temperature=0))


def line_of(program: ul.Program, marker: str) -> int:
    """The number of the first line of a program's source that holds the marker."""
    with open(__file__) as file:
        lines = file.read().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"def {program.name}("))
    return next(number + 1 for number, line in enumerate(lines) if number >= start and marker in line)


def oracle(**options: object) -> LocalBackend:
    return LocalBackend(pool_tokens=8192, chat_template=CHATML, **options)


BACKENDS = pytest.mark.parametrize("make", [ul.Echo, oracle])


@BACKENDS
def test_a_volatile_value_is_named_with_its_line(make: Callable[[], Backend]) -> None:
    backend = make()
    dated.run("Why?", backend=backend, timeout=PATIENCE).sync()
    call = dated.run("Why?", backend=backend, timeout=PATIENCE).explain_cache()["answer"]
    assert call.cause is CacheCause.VOLATILE
    assert call.miss is not None
    assert call.miss.source is not None
    assert call.miss.source.file == __file__
    assert call.miss.source.number == line_of(dated, "It is")
    assert call.miss.source.expression == "now()"
    assert call.miss.argument == ""
    assert call.miss.earlier is not None
    assert call.miss.earlier != call.miss.here
    assert "now() changes from run to run" in call.explanation


@BACKENDS
def test_another_argument_is_named(make: Callable[[], Backend]) -> None:
    backend = make()
    ask.run("What is it?", backend=backend, timeout=PATIENCE).sync()
    call = ask.run("Where is it?", backend=backend, timeout=PATIENCE).explain_cache()["answer"]
    assert call.cause is CacheCause.ARGUMENT
    assert call.miss is not None
    assert call.miss.argument == "question"
    assert call.miss.before.endswith("Question: Wh")
    assert call.miss.here.startswith("ere is it?")
    assert call.miss.earlier is not None
    assert call.miss.earlier.startswith("at is it?")
    assert call.cached_tokens > 0
    assert call.computed_tokens == call.created_tokens == call.prompt_tokens - call.cached_tokens


@BACKENDS
def test_the_first_run_has_nothing_to_compare_with(make: Callable[[], Backend]) -> None:
    call = ask.run("Why?", backend=make(), timeout=PATIENCE).explain_cache()["answer"]
    assert call.cause is CacheCause.FIRST


@BACKENDS
def test_all_but_the_last_token_is_a_hit(make: Callable[[], Backend]) -> None:
    backend = make()
    ask.run("Why?", backend=backend, timeout=PATIENCE).sync()
    call = ask.run("Why?", backend=backend, timeout=PATIENCE).explain_cache()["answer"]
    assert (call.cause, call.miss) == (CacheCause.HIT, None)
    assert call.computed_tokens == 1
    assert call.explanation == "all of the prompt was cached but its end, which is computed always"


@BACKENDS
def test_another_salt_is_another_cache(make: Callable[[], Backend]) -> None:
    backend = make()
    ask.run("Why?", backend=backend, timeout=PATIENCE).sync()
    call = ask.run("Why?", backend=backend, salt="mine", timeout=PATIENCE).explain_cache()["answer"]
    assert (call.cause, call.salt) == (CacheCause.SALT, "mine")


@BACKENDS
def test_a_private_part_of_another_tenant_is_another_cache(make: Callable[[], Backend]) -> None:
    @ul.function(max_tokens=2, temperature=0)
    def private(s: ul.State, tenant: str) -> None:
        s += "A manual for all. "
        s.private(tenant)
        s += "A question. " + ul.gen("answer")

    backend = make()
    first, other, again = (
        private.run(name, backend=backend, timeout=PATIENCE).explain_cache()["answer"] for name in ("a", "b", "b")
    )
    assert [call.cause for call in (first, other, again)] == [CacheCause.FIRST, CacheCause.SALT, CacheCause.HIT]
    assert other.miss is not None
    assert other.miss.here.startswith("A question")
    assert other.cached_tokens > 0


@BACKENDS
def test_what_was_flushed_had_been_there(make: Callable[[], Backend]) -> None:
    backend = make()
    ask.run("Why?", backend=backend, timeout=PATIENCE).sync()
    streams.run(backend.control("flush_cache"))
    call = ask.run("Why?", backend=backend, timeout=PATIENCE).explain_cache()["answer"]
    assert call.cause is CacheCause.EVICTED


@BACKENDS
def test_branches_are_told_apart_from_changes(make: Callable[[], Backend]) -> None:
    report = fan.run(3, backend=make(), timeout=PATIENCE).explain_cache()
    causes = [call.cause for call in report.calls]
    assert len(causes) == 3
    assert set(causes) <= {CacheCause.FIRST, CacheCause.BRANCH, CacheCause.NEW, CacheCause.CONCURRENT}
    assert causes.count(CacheCause.BRANCH) >= 1


@BACKENDS
def test_a_conversation_goes_on_where_it_ended(make: Callable[[], Backend]) -> None:
    report = chat.run(["One?", "Two?"], backend=make(), timeout=PATIENCE).explain_cache()
    assert [call.cause for call in report.calls] == [CacheCause.FIRST, CacheCause.NEW]
    miss = report.calls[1].miss
    assert miss is not None
    assert miss.source is not None
    assert miss.source.what == "chat template (role assistant)"


def test_a_member_of_a_list_is_named() -> None:
    backend = ul.Echo()
    chat.run(["One?", "Two?"], backend=backend, timeout=PATIENCE).sync()
    report = chat.run(["One?", "Three?"], backend=backend, timeout=PATIENCE).explain_cache()
    miss = report.calls[1].miss
    assert miss is not None
    assert miss.argument == "questions[1]"


def test_a_pool_that_is_too_small_evicts() -> None:
    backend = LocalBackend(pool_tokens=640)
    words = "many other words that take the room in the pool away from what was there before them " * 6
    ask.run("Why?", backend=backend, timeout=PATIENCE).sync()
    ask.run("Why?", words, backend=backend, timeout=PATIENCE).sync()
    call = ask.run("Why?", backend=backend, timeout=PATIENCE).explain_cache()["answer"]
    assert call.cause is CacheCause.EVICTED


def test_a_backend_that_keeps_nothing_says_so() -> None:
    backend = oracle(radix_cache=False)
    ask.run("Why?", backend=backend, timeout=PATIENCE).sync()
    call = ask.run("Why?", backend=backend, timeout=PATIENCE).explain_cache()["answer"]
    assert (call.cause, call.created_tokens) == (CacheCause.OFF, 0)


def test_another_line_is_shown_with_both_lines() -> None:
    @ul.function
    def either(s, first):
        s += CONTEXT
        if first:
            s += "This way." + ul.gen("answer")
        else:
            s += "No, that way." + ul.gen("answer")

    backend = ul.Echo()
    either.run(True, backend=backend, timeout=PATIENCE).sync()
    call = either.run(False, backend=backend, timeout=PATIENCE).explain_cache()["answer"]
    assert call.cause is CacheCause.OTHER_LINE
    assert call.miss is not None
    assert call.miss.source is not None
    assert call.miss.earlier_source is not None
    assert call.miss.source.number == call.miss.earlier_source.number + 2


def test_a_select_is_explained() -> None:
    @ul.function
    def choose(s, text):
        s += CONTEXT + f"{text} is" + ul.select("answer", choices=["good", "bad", "neither"])

    for make in (ul.Echo, oracle):
        backend = make()
        choose.run("Cheese", backend=backend, timeout=PATIENCE).sync()
        call = choose.run("Bread", backend=backend, timeout=PATIENCE).explain_cache()["answer"]
        assert (call.kind, call.cause) == ("select", CacheCause.ARGUMENT)
        assert call.miss is not None
        assert call.miss.argument == "text"
        again = choose.run("Bread", backend=backend, timeout=PATIENCE).explain_cache()["answer"]
        choices = "the tokens of the choices, which are computed always"
        assert again.explanation == f"all of the prompt was cached but its end and {choices}"


def test_a_gen_that_was_answered_without_a_call_says_so() -> None:
    @ul.function(num_api_spec_tokens=16)
    def pair(s):
        s += "Name:" + ul.gen("name", stop="\n") + "\nJob:" + ul.gen("job", stop="\n")

    backend = ul.Echo(
        {"Name:": " Ann\nJob: baker\n"}, capabilities=ul.Echo().capabilities.__class__("paid", speculation=True)
    )
    report = pair.run(backend=backend, timeout=PATIENCE).explain_cache()
    assert [call.cause for call in report.calls] == [CacheCause.FIRST, CacheCause.NO_CALL]


def test_async_programs_are_explained_too() -> None:
    @ul.function
    async def program(s, question):
        s += CONTEXT + question + ul.gen("answer")
        await s["answer"]

    async def run(backend: Backend) -> ul.CacheReport:
        await program.run_async("One?", backend=backend, timeout=PATIENCE)
        state = await program.run_async("Two?", backend=backend, timeout=PATIENCE)
        return await state.explain_cache()

    call = asyncio.run(run(ul.Echo()))["answer"]
    assert call.cause is CacheCause.ARGUMENT
    assert call.miss is not None
    assert call.miss.argument == "question"


def test_a_run_that_failed_is_explained_as_far_as_it_came() -> None:
    backend = ul.Echo({"Question": " yes"}, faults=ul.FailCall(2, ul.BackendError("gone")))

    @ul.function
    def two(s):
        s += CONTEXT + "Question" + ul.gen("one") + "Question" + ul.gen("two")

    report = two.run(backend=backend, timeout=PATIENCE).explain_cache()
    assert [call.cause for call in report.calls] == [CacheCause.FIRST, CacheCause.UNKNOWN]


def test_a_report_is_read_by_people_and_by_programs() -> None:
    backend = oracle()
    dated.run("Why?", backend=backend, timeout=PATIENCE).sync()
    report = dated.run("Why?", backend=backend, timeout=PATIENCE).explain_cache()
    shown = str(report)
    assert f"{shown_name(__file__)}:{line_of(dated, 'It is')}" in shown
    assert 's += f"It is {now()}.\\n"' in shown
    assert "earlier  …" in shown
    told = json.loads(json.dumps(report.to_dict()))
    assert told["calls"][0]["cause"] == "volatile"
    assert report.prompt_tokens == report.cached_tokens + report.computed_tokens
    with pytest.raises(KeyError, match="answer"):
        report["question"]


def test_a_state_that_makes_no_calls_has_nothing_to_explain() -> None:
    from umbel.lang.state import Sink

    with pytest.raises(ProgramError, match="explain_cache"):
        Sink.explain_cache(object(), None)  # type: ignore[arg-type]  # what a sink that only records inherits
