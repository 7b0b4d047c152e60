"""The k-th call of the backend fails, for every k, over several shapes of programs: nothing ever hangs."""

from collections.abc import Callable

import pytest
import umbel as ul
from umbel.interpreter import loop
from umbel.interpreter.backends.echo import Echo, FailCall

from .conftest import PATIENCE
from .test_batch import _tick


class Injected(Exception):
    pass


def chain(s):
    for name in ("a", "b", "c"):
        s += name + ul.gen(name)


def reading(s):
    s += "q" + ul.gen("a")
    if s["a"]:
        s += "r" + ul.select("b", ["x", "y"])
    s["b"]


def fork_join(s):
    s += "root" + ul.gen("a")
    forks = s.fork(3)
    forks += lambda i: f"{i}" + ul.gen("b") + ul.select("c", ["x", "y"])
    forks.join()
    s += "end" + ul.gen("d")


def fork_concatenate(s):
    s += "root"
    forks = s.fork(2)
    forks += lambda i: f"{i}" + ul.gen("b")
    forks.join("concate_and_append")
    s += ul.gen("d")


def nested_forks(s):
    s += "root"
    outer = s.fork(2)
    for branch in outer:
        inner = branch.fork(2)
        inner += "i" + ul.gen("a")
        inner.join()
        branch += "o" + ul.gen("b")
    outer.join()


def roles_and_scopes(s):
    s += ul.system("be brief")
    with s.user(), s.var_scope("scope"):
        s += "hello" + ul.gen("a", n=2)
    s += ul.assistant(ul.separate_reasoning(ul.gen("b")))


SHAPES = [chain, reading, fork_join, fork_concatenate, nested_forks, roles_and_scopes]
VERBS = ("start", "generate", "score", "hint", "chunk")


def outcome_of(read: Callable[[], object]) -> object:
    try:
        return read()
    except Exception as error:
        return error


def reads_of(state: ul.State) -> list[Callable[[], object]]:
    reads: list[Callable[[], object]] = []
    for name in ("a", "b", "c", "d", "scope", "b_reasoning_content"):
        reads += [lambda name=name: state[name], lambda name=name: list(state.text_iter(name))]
    reads += [state.text, state.messages, state.sync, lambda: list(state.text_iter())]
    reads += [lambda: state.get_meta_info("b"), state.fork(2)[1].text]
    return reads


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_every_read_returns_or_raises_the_injected_error(shape: Callable[..., None], stream: bool) -> None:
    program = ul.function(shape)
    for k in range(1, 200):
        error = Injected(f"call {k}")
        faults = FailCall(k, error, VERBS)
        echo = Echo(lambda prompt: "one two", faults=faults)
        state = outcome_of(lambda options={"backend": echo, "stream": stream}: program.run(timeout=PATIENCE, **options))
        if isinstance(state, Exception):
            assert state is error
            continue
        for read in reads_of(state):
            outcome = outcome_of(read)
            if isinstance(outcome, Exception):
                assert outcome is error or isinstance(outcome, ul.VariableError), repr(outcome)
        loop.streams.run(_tick(), PATIENCE)
        assert echo.active == set()
        if faults.calls < k:
            break  # the program makes fewer calls than k: every one of them has failed once
    else:
        pytest.fail("the program never ran through")
    assert state.error() is None
    assert k > 2


def test_an_error_that_is_no_exception_class_of_ours_comes_through_unchanged() -> None:
    class Strange(BaseException):
        pass

    error = Strange("odd")
    state = ul.function(chain).run(backend=Echo(faults=FailCall(1, error)), timeout=PATIENCE)
    with pytest.raises(Strange) as caught:
        state["c"]
    assert caught.value is error


def test_a_backend_that_gives_no_result_is_an_error() -> None:
    class Silent(Echo):
        async def generate(self, request):
            return
            yield

    state = ul.function(chain).run(backend=Silent(), timeout=PATIENCE)
    with pytest.raises(ul.BackendError, match=r"ended request .* without a result"):
        state["a"]


def test_a_backend_that_gives_too_few_continuations_is_an_error() -> None:
    class Short(Echo):
        async def generate(self, request):
            import msgspec

            async for event in super().generate(request):
                yield msgspec.structs.replace(event, completions=event.completions[:1])

    @ul.function
    def program(s):
        s += "a" + ul.gen("x", n=3)

    with pytest.raises(ul.BackendError, match="asked for n=3 continuations, Echo gave 1"):
        program.run(backend=Short(), timeout=PATIENCE)["x"]


def test_a_request_whose_pieces_cannot_be_delivered_is_closed_at_the_backend() -> None:
    import msgspec

    class Nonsense(Echo):
        async def generate(self, request):
            async for event in super().generate(request):
                yield msgspec.structs.replace(event, text=None) if hasattr(event, "index") else event

    class Closing(Nonsense):
        closed = False

        async def generate(self, request):
            try:
                async for event in super().generate(request):
                    yield event
            finally:
                self.closed = True

    @ul.function
    def program(s):
        s += "a" + ul.separate_reasoning(ul.gen("x"))

    echo = Closing(lambda prompt: "one two")
    state = program.run(backend=echo, stream=True, timeout=PATIENCE)
    with pytest.raises(TypeError):
        state["x"]
    assert echo.closed
