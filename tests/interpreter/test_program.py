"""Defining programs and calling them: arguments, methods, binding, nesting, backends."""

import asyncio
import threading

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo

from .conftest import PATIENCE


def test_the_state_is_the_first_parameter_whatever_its_name(echo: Echo) -> None:
    @ul.function
    def program(conversation, /, text):
        conversation += text + ul.gen("x")
        return conversation["x"]

    assert program.run("a", backend=echo, timeout=PATIENCE).ret_value == "a"
    assert program.run(text="b", backend=echo, timeout=PATIENCE).ret_value == "b"


def test_every_kind_of_parameter_works(echo: Echo) -> None:
    @ul.function
    def program(s, a, b=2, *rest, c, d=4, **others):
        return a, b, rest, c, d, others

    assert program.run(1, c=3, backend=echo).ret_value == (1, 2, (), 3, 4, {})
    assert program.run(1, 5, 6, 7, c=3, extra=8, backend=echo).ret_value == (1, 5, (6, 7), 3, 4, {"extra": 8})


def test_methods_are_programs(echo: Echo) -> None:
    class Judge:
        def __init__(self, style: str) -> None:
            self.style = style

        @ul.function(temperature=0)
        def grade(self, s, essay):
            s += f"{self.style}: {essay}" + ul.gen("grade")
            return self.style

        @staticmethod
        @ul.function
        def plain(s, essay):
            return essay

    judge = Judge("strict")
    state = judge.grade.run(essay="text", backend=echo, timeout=PATIENCE)
    assert (state.ret_value, state["grade"]) == ("strict", "strict: text")
    assert [s.ret_value for s in judge.grade.run_batch([("a",), ("b",)], backend=echo)] == ["strict", "strict"]
    assert Judge.plain.run("x", backend=echo).ret_value == "x"
    assert judge.grade.options == {"temperature": 0}


def test_a_parameter_with_the_name_of_an_option_gets_its_own_value(echo: Echo) -> None:
    @ul.function
    def program(s, stop, temperature, stream, timeout):
        s += "a" + ul.gen("x")
        return stop, temperature, stream, timeout

    state = program.run(
        "own stop",
        temperature="own temperature",
        stream="own stream",
        timeout="own timeout",
        backend=echo,
        sampling={"stop": "!", "temperature": 0.5, "timeout": PATIENCE, "stream": False},
    )
    assert state.ret_value == ("own stop", "own temperature", "own stream", "own timeout")
    state.sync()
    sampling = echo.requests[-1].sampling
    assert (sampling.stop, sampling.temperature) == (("!",), 0.5)


def test_a_parameter_called_backend_gets_its_own_value(echo: Echo) -> None:
    @ul.function
    def program(s, backend):
        s += "a" + ul.gen("x")
        return backend

    with ul.default_backend(echo):
        assert program.run(backend="own").ret_value == "own"


@pytest.mark.parametrize(
    ("arguments", "keywords", "problem"),
    [
        ((), {}, r"program\(a, \*, b=1\): missing a required argument: 'a'"),
        ((1, 2), {}, "too many positional"),
        ((1,), {"a": 2}, "multiple values for argument 'a'"),
        ((1,), {"temprature": 0}, "no parameter 'temprature'.*did you mean 'temperature'"),
        ((1,), {"max_tokens": 1, "max_new_tokens": 2}, "max_new_tokens=2 is a second value of max_tokens"),
        ((1,), {"temperature": -1}, "temperature=-1"),
        ((1,), {"timeout": 0}, "timeout=0"),
        ((1,), {"timeout": "soon"}, "timeout='soon'"),
        ((1,), {"stream": 1}, "stream must be True or False, got 1"),
        ((1,), {"sampling": 3}, "sampling must be a dict such as sampling="),
        ((1,), {"sampling": {"nothing": 3}}, "sampling has no option 'nothing'; none of the 25 known"),
        ((1,), {"backend": "gpt"}, "'gpt' is not a backend"),
        ((1,), {"backend": Echo}, "is not a backend"),
    ],
)
def test_wrong_arguments_raise_before_anything_runs(
    echo: Echo, arguments: tuple[object, ...], keywords: dict[str, object], problem: str
) -> None:
    ran = []

    @ul.function
    def program(s, a, *, b=1):
        ran.append(a)

    with pytest.raises(ul.ParameterError, match=problem):
        program.run(*arguments, **{"backend": echo, **keywords})
    assert ran == []


def test_an_unknown_option_of_the_decorator_is_an_error() -> None:
    with pytest.raises(ul.ParameterError, match="num_tokens"):
        ul.function(num_tokens=64)


def test_a_function_without_a_state_is_not_a_program() -> None:
    with pytest.raises(ul.ParameterError, match="no parameter for the state"):

        @ul.function
        def program():
            pass


def test_a_generator_is_not_a_program() -> None:
    def body(s):
        yield s

    async def async_body(s):
        yield s

    for generator in (body, async_body):
        with pytest.raises(ul.ParameterError, match="is a generator"):
            ul.function(generator)


def test_bound_arguments_are_filled_in_and_can_be_given_anew(echo: Echo) -> None:
    @ul.function
    def program(s, a, b, c=3):
        return a, b, c

    bound = program.bind(a=1)
    assert bound.run(2, backend=echo).ret_value == (1, 2, 3)
    assert bound.bind(c=9).run(b=2, backend=echo).ret_value == (1, 2, 9)
    assert bound.run(b=2, a=7, backend=echo).ret_value == (7, 2, 3)
    assert [s.ret_value for s in bound.run_batch([(5,), {"b": 6}], backend=echo)] == [(1, 5, 3), (1, 6, 3)]
    with pytest.raises(ul.ParameterError, match="no parameter 'z' to bind"):
        program.bind(z=1)


def test_bind_reaches_a_catch_all(echo: Echo) -> None:
    @ul.function
    def program(s, **others):
        return others

    assert program.bind(a=1).run(b=2, backend=echo).ret_value == {"a": 1, "b": 2}


def test_a_nested_program_runs_in_the_same_state_and_gives_its_result() -> None:
    echo = Echo(lambda prompt: "ok")

    @ul.function(temperature=0.25)
    def helper(s, text):
        s += text + ul.gen("inner")
        return s["inner"] + "!"

    @ul.function(temperature=0.75, top_p=0.5)
    def program(s):
        s += "a" + ul.gen("outer")
        result = helper(s, "b")
        s += "c" + ul.gen("last")
        return result

    state = program.run(backend=echo, timeout=PATIENCE)
    assert state.ret_value == "ok!"
    assert state.text() == "aokbokcok"
    assert [r.sampling.temperature for r in echo.requests] == [0.75, 0.25, 0.75]
    assert [r.sampling.top_p for r in echo.requests] == [0.5, 0.5, 0.5]
    assert len({r.origin.program_id for r in echo.requests}) == 1


def test_calling_without_a_state_is_a_run(echo: Echo) -> None:
    @ul.function
    def program(s, a):
        return a

    assert program(5, backend=echo).ret_value == 5


def test_what_the_body_raises_is_what_run_raises(echo: Echo) -> None:
    @ul.function
    def program(s):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        program.run(backend=echo)


def test_the_default_backend_of_a_block_does_not_leak_into_other_threads() -> None:
    @ul.function
    def program(s):
        s += "x" + ul.gen("who")
        return s["who"]

    barrier = threading.Barrier(2)
    seen: dict[str, str] = {}

    def work(name: str) -> None:
        with ul.default_backend(Echo(lambda prompt: name)):
            barrier.wait(PATIENCE)
            seen[name] = program.run(timeout=PATIENCE).ret_value
            barrier.wait(PATIENCE)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert seen == {"one": "one", "two": "two"}


def test_set_default_backend_serves_the_process_and_a_block_wins() -> None:
    @ul.function
    def program(s):
        s += "x" + ul.gen("who")
        return s["who"]

    ul.set_default_backend(Echo(lambda prompt: "process"))
    try:
        assert program.run(timeout=PATIENCE).ret_value == "process"
        with ul.default_backend(Echo(lambda prompt: "block")):
            assert program.run(timeout=PATIENCE).ret_value == "block"
            assert program.run(backend=Echo(lambda prompt: "given"), timeout=PATIENCE).ret_value == "given"
        assert program.run(timeout=PATIENCE).ret_value == "process"
    finally:
        ul.set_default_backend(None)


def test_flush_cache_makes_the_next_run_compute_all_of_its_prompt(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "one two three four" + ul.gen("x")
        return s.get_meta_info("x")["cached_tokens"]

    assert program.run(backend=echo, timeout=PATIENCE).ret_value == 0
    assert program.run(backend=echo, timeout=PATIENCE).ret_value == 3  # all but the last, whose result is needed
    ul.flush_cache(echo)
    assert program.run(backend=echo, timeout=PATIENCE).ret_value == 0
    assert ul.get_server_info(echo)["calls"] == 3


def test_the_program_of_the_seed_runs_verbatim() -> None:
    import umbel as sgl

    @sgl.function
    def multi_turn_qa(s, document, questions):
        s += sgl.system("You are a document QA assistant.")
        s += sgl.user(f"Document: {document}")  # 长文档前缀

        answers = []
        for question in questions:
            s += sgl.user(question)
            s += sgl.assistant(sgl.gen("answer", max_tokens=100))
            answers.append(s["answer"])
        return answers

    with sgl.default_backend(Echo()):
        # SGLang 自动缓存 document 的 KV Cache
        result = multi_turn_qa.run(
            document="...(长文档内容)...",
            questions=["问题1", "问题2", "问题3"],
        )
    assert result.ret_value == ["问题1", "问题2", "问题3"]
    assert len(result.messages()) == 8


def test_a_program_keeps_the_name_and_the_text_of_its_function() -> None:
    @ul.function
    def documented(s, x: int = 3):
        """What it does."""

    assert documented.__doc__ == "What it does."
    assert repr(documented) == "<program documented(x: int = 3)>"


def test_salt_and_priority_go_with_every_request(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "one two three" + ul.gen("x") + ul.select("y", ["a", "b"])
        forks = s.fork(2)
        forks += ul.gen("z")
        forks.join()
        return s.get_meta_info("x")["cached_tokens"]

    first = program.run(backend=echo, salt="tenant-1", priority=3, timeout=PATIENCE)
    first.sync()
    assert {(r.origin.salt, r.origin.priority) for r in echo.requests} == {("tenant-1", 3)}
    assert program.run(backend=echo, salt="tenant-2", timeout=PATIENCE).ret_value == 0
    assert program.run(backend=echo, salt="tenant-1", timeout=PATIENCE).ret_value == 2
    for wrong in ({"salt": "a b"}, {"salt": "x" * 129}, {"salt": 3}, {"priority": "high"}, {"priority": True}):
        with pytest.raises(ul.ParameterError, match=next(iter(wrong))):
            program.run(backend=echo, **wrong)


def test_a_verbose_run_prints_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    @ul.function
    def program(s):
        s += "Count: " + ul.gen("x") + "."

    for each in (program, program.compile()):
        each.run(backend=Echo(["one [two] three"]), verbose=True, timeout=PATIENCE)
        printed = capsys.readouterr().out
        assert "Count: one [two] three.\n" in printed
        assert "program" in printed.splitlines()[0]


def test_a_verbose_run_of_a_coroutine_has_been_printed_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    @ul.function
    async def program(s):
        s += "Count: " + ul.gen("x") + "."

    asyncio.run(program.run_async(backend=Echo(["one"]), verbose=True, timeout=PATIENCE))
    assert "Count: one.\n" in capsys.readouterr().out


def test_a_turn_of_nothing_is_refused(echo: Echo) -> None:
    @ul.function
    def program(s):
        s.user(None)

    with pytest.raises(ul.ParameterError, match=r"user\(\) needs its content"):
        program.run(backend=echo)


@pytest.mark.filterwarnings("ignore:coroutine 'Stream.read_async' was never awaited")
def test_a_sync_program_in_the_state_of_an_async_one_is_named(echo: Echo) -> None:
    @ul.function
    def inner(s):
        s += "x" + ul.gen("y")
        return s["y"].strip()

    @ul.function
    async def outer(s):
        inner(s)

    with pytest.raises(AttributeError) as raised:
        outer.run(backend=echo)
    assert raised.value.__notes__ == ["inner is a sync program in the state of an async one; make it async def, too"]


def test_a_verbose_run_shows_what_ended_it(capsys: pytest.CaptureFixture[str]) -> None:
    @ul.function
    def program(s):
        s += "Count: " + ul.gen("x")

    state = program.run(backend=Echo([]), verbose=True, timeout=PATIENCE)
    with pytest.raises(ul.RequestError):
        state["x"]
    assert "RequestError: Echo's list of answers is used up" in capsys.readouterr().out.replace("\n", " ")
