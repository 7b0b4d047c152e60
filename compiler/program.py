"""The public `@function` and `Program`: programs that run, and that can be traced, compiled and kept in the cache.

    program.run(x), ...        as `interpreter.program.Program`, from which this class is derived
    program.trace()            its operations, as a graph
    program.compile()          that graph, ready to run
    program.cache()            the common prefix of its runs, kept in the runtime's prefix cache

The interpreter knows no compiler. Tracing, passes and the rest are imported when a method first needs them, so that
`import umbel` stays light.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from ..interpreter import loop
from ..interpreter.body import run_options
from ..interpreter.program import Function, maker
from ..interpreter.program import Program as RunnableProgram
from ..lang.protocol import Backend

if TYPE_CHECKING:
    from .graph import Graph
    from .running.compiled import CompiledProgram
    from .shared_prefix import Cached


class Program(RunnableProgram):
    """Runs a function of the language: once, over many inputs, or as a graph. Made by `@ul.function`; immutable.

    Called with a state first, as in `capital(s, "France")`, it runs inside another program, and returns what its
    function returns; else a call is a `run`.

    Args:
        body: the user's function with its name and options.
        bound: arguments fixed by `bind`.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += f"The capital of {country} is" + ul.gen("city", max_tokens=4)
        >>> model = ul.Echo({"France": " Paris", "Italy": " Rome"})
        >>> capital.run("France", backend=model)["city"]
        ' Paris'
        >>> states = capital.run_batch([{"country": "Italy"}, {"country": "France"}], backend=model)
        >>> [state["city"] for state in states]
        [' Rome', ' Paris']
        >>> capital.bind(country="Italy").run(backend=model).text()
        'The capital of Italy is Rome'
        >>> capital.estimate("France", backend=model).calls
        1
    """

    def trace(self, *, static_args: Mapping[str, Any] | None = None) -> "Graph":
        """Traces the program to a graph. The function runs once, and no model is called.

            graph = ask.trace()
            graph = sample.trace(static_args={"n": 3})     # n decides how often the program forks

        Arguments are symbols then, except bound and static ones; so are variables. Putting them into text, slicing
        and stripping them is recorded. What looks at them (`if s["x"] == "yes"`, `for _ in range(n)`) cannot be, and
        raises TraceError with the line. Side effects of the function (it prints, it reads the time) happen once, now,
        and never in a run of the graph: a `TraceWarning` names the lines.

        Args:
            static_args: arguments by name that are fixed, such as numbers that the program forks by.

        Raises:
            TraceError: the program does what no graph can say.
            ParameterError: `static_args` that the program has no parameter for.
            Exception: whatever the function raises.
        """
        from .tracing.effects import warn
        from .tracing.trace import trace

        traced = trace(self, static_args=static_args)
        warn(self.name, traced.effects)
        return traced.graph

    def compile(
        self,
        *,
        static_args: Mapping[str, Any] | None = None,
        passes: str | Iterable[str] = "default",
        keep: Iterable[str] | None = None,
        independent: Iterable[str] | None = None,
        server: Literal["auto"] | bool = "auto",
    ) -> "CompiledProgram":
        """Compiles the program: returns its graph, made ready to run. A run of it has the same variables, and does not
        run the function again.

            compiled = ask.compile()
            state = compiled.run("Why?", backend=model)

        Args:
            static_args: as of `trace`.
            passes: how the graph is rewritten: "default" only in ways that no run shows (fold, merge_text); "none"; or
                a list of "default" and of passes that change which calls are made, or when: drop_unused (calls that
                nothing depends on are not made), merge_equal (equal calls are made once), merge_samples (samples of one
                prompt are one call), fork_independent (branches begin as early as they can).
            keep: for drop_unused: variables that are asked for; None for all of them, and the text.
            independent: for fork_independent: variables whose calls need not see each other's text; None for none.
            server: True ships the graph to the runtime, which runs all of it: one message there and one way back,
                instead of those of every `gen`. "auto" does so where it saves ways and is possible: on a Runtime with
                its model's own chat template, for a program of two calls or more whose arguments are plain values
                (str, int, float, bool, bytes, None, and lists, tuples and dicts of them). False never does.

        Raises:
            TraceError: the program does what no graph can say.
            ParameterError: `static_args` that the program has no parameter for, or passes that do not exist.
            Exception: whatever the function raises.
        """
        from .passes import rewrite
        from .running.compiled import CompiledProgram

        graph = self.trace(static_args=static_args)
        rewritten = rewrite(graph, passes, keep=keep, independent=independent)
        return CompiledProgram(
            rewritten.graph,
            report=rewritten.report,
            speculation=self.body.speculation,
            server=server,
        )

    def cache(
        self,
        backend: Backend | None = None,
        *,
        static_args: Mapping[str, Any] | None = None,
        ttl: float | None = None,
        salt: str = "",
    ) -> "Cached":
        """Prefills the common prefix of all runs of the program in the runtime, and keeps it.

            with classify.bind(labels=LABELS).cache(ttl=3600) as cached:
                print(cached.tokens)
                serve(...)

        The head is all text up to the first argument, call or picture, with its roles; arguments that are bound or
        static are part of it. It is traced, as by `trace`. Short heads (16 tokens) are not worth it: then `tokens` is
        0. What is kept gives way where requests find no room next to it. It blocks; leaving the block, or
        `cached.release()`, ends it.

        Args:
            backend: to keep it on; None for the default one.
            static_args: as of `trace`.
            ttl: seconds after its last use for which it is kept; None: until it is released, or this process ends.
            salt: of the runs that are to find it.

        Raises:
            CapabilityError: the backend keeps nothing that it is asked to keep, such as a hosted model.
            TraceError: the program does what no graph can say.
            ParameterError: a wrong `ttl` or `salt`, or `static_args` that the program has no parameter for.
            Exception: whatever the function raises.
        """
        from .shared_prefix import cache_head

        options = run_options({"backend": backend, "salt": salt})
        graph = self.trace(static_args=static_args)
        return loop.streams.run(cache_head(graph, options.backend, salt=options.salt, ttl=ttl))


@overload
def function(body: Function, /) -> Program: ...


@overload
def function(
    *,
    name: str | None = None,
    num_api_spec_tokens: int | None = None,
    speculate: Literal["auto"] | None = None,
    **options: Any,
) -> Callable[[Function], Program]: ...


def function(
    body: Function | None = None,
    /,
    *,
    name: str | None = None,
    num_api_spec_tokens: int | None = None,
    speculate: Literal["auto"] | None = None,
    **options: Any,
) -> Program | Callable[[Function], Program]:
    """Makes a program of a function whose first parameter is the state (after `self` for a method).

    Bare, `@ul.function`, or with options. `program.run(...)` runs it, `program(s, ...)` runs it inside another program.

    Speculation saves calls to models that are paid for call by call: a `gen` that ends at a stop or a constraint is
    asked for more than it needs, and what comes after its end answers the gens that follow, as long as it is what the
    program says. Variables are the same; `state.cost.speculation` tells what was saved and what was wasted, and
    `state.meta(name)["speculated"]` which variables took no call. It has no effect on backends whose calls are not paid
    one by one, such as a Runtime: their prefix cache has the prompt already.

    Args:
        body: the function, which may be an `async def`.
        name: of the program, in messages, journals and graphs; None: that of the function.
        num_api_spec_tokens: tokens more than it needs, wherever something may follow; None: 0.
        speculate: "auto": as many as what follows needs, where that pays. What the program has queued after a `gen`
            is looked at, and the chance that it fits is learned over all runs of the program. None: as many as
            num_api_spec_tokens says.
        options: sampling options of `gen`, such as temperature and stop, for those calls of the program that say
            nothing else.

    Returns:
        A Program; with options alone, a decorator that makes one.

    Raises:
        ParameterError: an unknown option, a function without a parameter, or a generator.

    Examples:
        >>> @ul.function(temperature=0, stop=".")
        ... def ask(s, country):
        ...     s += f"The capital of {country} is " + ul.gen("capital")
        >>> echo = ul.Echo({"France": "Paris. It lies", "Italy": "Rome. It has"})
        >>> ask.run("France", backend=echo)["capital"]
        'Paris'
        >>> @ul.function
        ... def two(s):
        ...     ask(s, "France")  # inside another program: in its state
        ...     s += ". "
        ...     ask(s, "Italy")
        >>> two.run(backend=echo).text()
        'The capital of France is Paris. The capital of Italy is Rome'
    """
    make = maker(Program, name=name, num_api_spec_tokens=num_api_spec_tokens, speculate=speculate, options=options)
    return make if body is None else make(body)
