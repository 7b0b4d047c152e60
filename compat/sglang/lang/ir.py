"""`sglang.lang.ir`: expressions that programs build on, the classes of what they say, and `@sgl.function`."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, overload

from ....compiler.graph import Graph
from ....compiler.program import Program
from ....compiler.running.compiled import CompiledProgram
from ....compiler.shared_prefix import Cached, common_head
from ....interpreter import loop
from ....interpreter.batch import Source
from ....interpreter.body import Body
from ....interpreter.program import maker
from ....interpreter.run import checked, chosen_backend
from ....lang.errors import ParameterError
from ....lang.generation import INTEGER, NUMBER
from ....lang.ops import ConstantText as SglConstantText
from ....lang.ops import Gen as SglGen
from ....lang.ops import Image as SglImage
from ....lang.ops import Op as SglExpr
from ....lang.ops import RoleBegin as SglRoleBegin
from ....lang.ops import RoleEnd as SglRoleEnd
from ....lang.ops import Select as SglSelect
from ....lang.ops import SeparateReasoning as SglSeparateReasoning
from ....lang.ops import Sequence as SglExprList
from ....lang.ops import VarScopeBegin as SglVarScopeBegin
from ....lang.ops import VarScopeEnd as SglVarScopeEnd
from ....lang.ops import Video as SglVideo
from ....lang.protocol import Backend, Hint, Origin
from ....lang.sampling import SamplingParams as SglSamplingParams
from ....lang.state import State
from .interpreter import ProgramState

# What dtype=int, float, bool and str ask for; numbers are at most 19 digits long, and may end with a blank.
REGEX_INT = INTEGER
REGEX_FLOAT = NUMBER
REGEX_BOOL = "(True|False)"
REGEX_STR = r'"[\w\s]*"'

__all__ = [
    "REGEX_BOOL",
    "REGEX_FLOAT",
    "REGEX_INT",
    "REGEX_STR",
    "SglConstantText",
    "SglExpr",
    "SglExprList",
    "SglFunction",
    "SglGen",
    "SglImage",
    "SglRoleBegin",
    "SglRoleEnd",
    "SglSamplingParams",
    "SglSelect",
    "SglSeparateReasoning",
    "SglVarScopeBegin",
    "SglVarScopeEnd",
    "SglVideo",
]


@dataclass(frozen=True, slots=True, eq=False)
class _Pinned:
    """The prefix that `pin` keeps, and its owner: a program's head depends on its object and on bound arguments."""

    backend: Backend
    instance: tuple[object, ...]
    bound: Mapping[str, Any]
    cached: Cached

    def is_of(self, program: "SglFunction", backend: Backend) -> bool:
        instance, bound = program.body.instance, program.bound
        return (
            self.backend is backend
            and len(self.instance) == len(instance)
            and all(mine is theirs for mine, theirs in zip(self.instance, instance, strict=True))
            and self.bound.keys() == bound.keys()
            and all(_is_same(value, bound[name]) for name, value in self.bound.items())
        )


class SglFunction(Program):
    """A program, with SGLang's parameters of `run` and its way to trace and compile."""

    def __init__(self, body: Body, bound: Mapping[str, Any] | None = None) -> None:
        super().__init__(body, bound)
        self._kept: list[_Pinned] = []  # by `pin`; one list of all programs of the same function

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        return self._sharing(super().__get__(instance, owner))

    def bind(self, **arguments: Any) -> Self:
        return self._sharing(super().bind(**arguments))

    def _sharing(self, other: Self) -> Self:
        """The other program, which is made anew for each use, with what `pin` keeps of this one."""
        other._kept = self._kept
        return other

    @property
    def func(self) -> Callable[..., Any]:
        """The user's function; its first parameter is the state."""
        return self.body.function

    @property
    def bind_arguments(self) -> Mapping[str, Any]:
        return self.bound

    # -------------------------------------------------------------------------------- running

    def run(self, *arguments: Any, **keywords: Any) -> ProgramState:
        """As `Program.run`, and

        use_thread                False: wait for all of the text, and raise its error here
        return_text_in_logprobs   texts are always told with log-probabilities; False is refused
        """
        own, waits = self._mapped(keywords)
        state = super().run(*arguments, **own)
        if waits:
            state.sync()
        return _shown(state)

    def run_batch(self, batch_kwargs: Source, **options: Any) -> Any:  # type: ignore[override]  # SGLang's name
        """Runs a batch as `Program.run_batch` does, with SGLang's name of the arguments."""
        own, waits = self._mapped(options)
        if waits:
            raise ParameterError("run_batch() waits for all of every program as it is; leave use_thread= out")
        return super().run_batch(batch_kwargs, **own)

    def _mapped(self, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Keywords of `run` as ours, and whether all of the text is waited for. A program's own parameters stay."""
        if not _RUN_ALONE & keywords.keys():
            return dict(keywords), False
        named = inspect.signature(self.func).parameters
        own = {name: value for name, value in keywords.items() if name in named or name not in _RUN_ALONE}
        texts = True if "return_text_in_logprobs" in named else keywords.get("return_text_in_logprobs")
        if texts is False:
            raise ParameterError(
                "run() takes no return_text_in_logprobs=False: every token comes with its text; leave it out"
            )
        threads = True if "use_thread" in named else keywords.get("use_thread", True)
        if not isinstance(threads, bool) or not isinstance(texts, bool | None):
            raise ParameterError("use_thread and return_text_in_logprobs are True or False")
        return own, not threads

    # -------------------------------------------------------------------------------- compiling

    @property
    def _plain(self) -> Program:
        """The same program with our own parameters of tracing and compiling."""
        return Program(self.body, self.bound)

    def trace(self, *, backend: Backend | None = None, **arguments: Any) -> "TracedProgram":  # type: ignore[override]  # SGLang's parameters
        """The program as a graph; `arguments` are fixed in it.

        Args:
            backend: checked to be one. A graph is the same for all of them: it has roles, and no chat template.
        """
        _check_backend(backend)
        return TracedProgram(self._plain.trace(static_args=arguments or None))

    def compile(self, *, backend: Backend | None = None, **options: Any) -> "CompiledFunction":  # type: ignore[override]  # SGLang's parameters
        """The program as its graph, ready to run.

        Args:
            backend: what it runs on where a run is given none.
            options: of `Program.compile`.
        """
        _check_backend(backend)
        return CompiledFunction(self._plain.compile(**options), backend)

    def cache(self, backend: Backend | None = None, **options: Any) -> Cached | None:  # type: ignore[override]  # SGLang's result
        """Has the backend compute what all runs of the program begin with.

        A Runtime keeps it, as of `Program.cache`. Another server computes it, and evicts it when it needs the room;
        then the result is None.
        """
        chosen = chosen_backend(backend)
        loop.streams.run(chosen.start())
        capabilities = chosen.capabilities
        if capabilities.pins or not capabilities.hint:
            return self._plain.cache(chosen, **options)
        head = common_head(self._plain.trace(), chosen.chat_template)
        if head:
            loop.streams.call(chosen.hint, Hint(f"head-{self.name}", tuple(head), Origin()))
        return None

    def pin(self, backend: Backend | None = None) -> None:
        """Computes what all runs begin with, and keeps it until `unpin`. Again it is computed anew, and kept once."""
        chosen = chosen_backend(backend)
        kept = self.cache(chosen)
        self.unpin(chosen)
        if kept is not None:
            self._kept.append(_Pinned(chosen, self.body.instance, self.bound, kept))

    def unpin(self, backend: Backend | None = None) -> None:
        """Lets go of what `pin` keeps on this backend."""
        chosen = chosen_backend(backend)
        for pinned in [each for each in self._kept if each.is_of(self, chosen)]:
            self._kept.remove(pinned)
            pinned.cached.release()


_RUN_ALONE = frozenset({"use_thread", "return_text_in_logprobs"})


class TracedProgram:
    """A graph where SGLang has a tracer."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @property
    def last_node(self) -> "TracedProgram":
        """The node that `print_graph_dfs` starts from."""
        return self

    def print_graph_dfs(self) -> str:
        """The graph as text."""
        return self.graph.text()


class CompiledFunction:
    """A compiled program with SGLang's parameters.

    Args:
        program: ours.
        backend: what it runs on where a run is given none; None: the default one.
    """

    def __init__(self, program: CompiledProgram, backend: Backend | None) -> None:
        self.program, self._backend = program, backend

    @property
    def graph(self) -> Graph:
        return self.program.graph

    def print_graph(self) -> None:
        print(self.graph.text())

    def run(self, *arguments: Any, backend: Backend | None = None, **keywords: Any) -> ProgramState:
        return _shown(self.program.run(*arguments, backend=backend or self._backend, **keywords))

    def run_batch(self, batch_kwargs: Source, *, backend: Backend | None = None, **options: Any) -> Any:
        return self.program.run_batch(batch_kwargs, backend=backend or self._backend, **options)

    __call__ = run


@overload
def function(func: Callable[..., Any], /) -> SglFunction: ...


@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None, **options: Any
) -> Callable[[Callable[..., Any]], SglFunction]: ...


def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None, **options: Any
) -> SglFunction | Callable[[Callable[..., Any]], SglFunction]:
    """Makes a program, as `umbel.function` does: bare, or with `num_api_spec_tokens` and sampling defaults."""
    name, speculate = options.pop("name", None), options.pop("speculate", None)
    make = maker(SglFunction, name=name, num_api_spec_tokens=num_api_spec_tokens, speculate=speculate, options=options)

    def decorated(body: Callable[..., Any]) -> SglFunction:
        program = make(body)
        return SglFunction(replace(program.body, state=ProgramState), program.bound)

    return decorated if func is None else decorated(func)


def _shown(state: State) -> ProgramState:
    if isinstance(state, ProgramState):
        return state
    shown = ProgramState(state._sink)
    shown.ret_value = state.ret_value
    return shown


def _is_same(one: object, other: object) -> bool:
    """Values of other classes are compared by code of their own."""
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and one == other)


_PLAIN = (str, bytes, int, float, bool)


def _check_backend(backend: Backend | None) -> None:
    if backend is not None:
        checked(backend)
