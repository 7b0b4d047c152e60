"""Which backend a program runs on when nobody says."""

import asyncio

import umbel as ul
from umbel.interpreter.run import chosen_backend


def test_where_nobody_chose_programs_run_on_the_embedded_model() -> None:
    ul.set_default_backend(None)
    try:
        backend = chosen_backend()
        assert isinstance(backend, ul.Runtime)
        assert backend.options.model == "default"
        assert chosen_backend() is backend
    finally:
        ul.set_default_backend(None)


def test_a_program_that_a_body_runs_goes_to_the_backend_of_the_body() -> None:
    @ul.function
    def inner(s: ul.State, name: str) -> None:
        s += name + ul.gen("text", max_tokens=4)

    @ul.function
    def body(s: ul.State, other: ul.Echo) -> object:
        texts = [inner.run("Ann")["text"], *(state["text"] for state in inner.run_batch([{"name": "Bob"}]))]
        with ul.default_backend(other):
            texts.append(inner.run("Ann")["text"])
        texts.append(inner.run("Ann", backend=other)["text"])
        return texts, chosen_backend()

    @ul.function
    async def async_body(s: ul.AsyncState, other: ul.Echo) -> object:
        first = await (await inner.run_async("Ann"))["text"]
        with ul.default_backend(other):
            second = await (await inner.run_async("Ann"))["text"]
        return [first, await (await inner.run_async("Bob"))["text"], second, second], chosen_backend()

    own = ul.Echo(lambda prompt: "own")
    expected = ["own", "own", "other", "other"], own
    with ul.default_backend(ul.Echo(lambda prompt: "outside")) as outside:
        for program in (body, async_body):
            arguments = {"other": ul.Echo(lambda prompt: "other")}
            assert program.run(**arguments, backend=own).ret_value == expected
            assert asyncio.run(program.run_async(**arguments, backend=own)).ret_value == expected
            assert [state.ret_value for state in program.run_batch([arguments] * 2, backend=own)] == [expected] * 2
        assert chosen_backend() is outside
        assert outside.calls == 0
