"""The prompt state a program writes to and reads from.

`State` says what; a `Sink` decides when: the interpreter's sink runs operations, the compiler's
records them, and the user's function cannot tell. A state is one stream of operations; `fork`
makes more of them that share everything said so far.
"""

import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Literal, NoReturn, Protocol, Self, TypeGuard, TypeVar, get_origin, overload

from . import checks, notebook, ops
from .agents.plan import AgentPlan, AgentResult, agent_plan
from .cache_report import CacheReport
from .errors import ParameterError, ProgramError, shown
from .ops import Op, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd, checked_name, expression, refuse_awaitable, role
from .protocol import Backend, Cost, Usage

JoinMode = Literal["gather_variable", "concate_and_append"]
MAX_BRANCHES = 16_384  # of one fork; each is a stream of its own
JOIN_MODES: tuple[JoinMode, ...] = ("gather_variable", "concate_and_append")

# Values of variables are str, list[str] (n > 1), lists with None (after a join), or what the program assigned.
Value = Any


class Sink(Protocol):
    """Takes operations and gives variables.

    Reads take a timeout in seconds; None waits for the run's deadline.
    """

    def submit(self, op: Op) -> None:
        """Queue an operation; returns at once."""

    def fork(self, size: int) -> list["Sink"]:
        """`size` streams that begin with everything submitted so far; returns at once."""

    def join(self, children: list["Sink"], mode: JoinMode, quorum: int | None = None) -> None:
        """Bring the children's variables (see `StateGroup.join`) or text into this stream; returns at once."""

    def race(self, children: list["Sink"], timeout: float | None) -> "Race":
        """Tells which children end, one after the other. timeout: seconds from now for all of them."""

    def assign(self, name: str, value: Value) -> None: ...

    def has(self, name: str) -> bool: ...

    def names(self) -> list[str]: ...

    def read(self, name: str, timeout: float | None) -> Value: ...

    def read_async(self, name: str, timeout: float | None) -> Coroutine[Any, Any, Value]: ...

    def value(self, name: str, timeout: float | None) -> Any: ...

    def value_async(self, name: str, timeout: float | None) -> Coroutine[Any, Any, Any]: ...

    def meta(self, name: str, timeout: float | None) -> dict[str, Any]: ...

    def meta_async(self, name: str, timeout: float | None) -> Coroutine[Any, Any, dict[str, Any]]: ...

    def text(self, timeout: float | None) -> str: ...

    def text_async(self, timeout: float | None) -> Coroutine[Any, Any, str]: ...

    def messages(self, timeout: float | None) -> list[dict[str, str]]: ...

    def messages_async(self, timeout: float | None) -> Coroutine[Any, Any, list[dict[str, str]]]: ...

    def sync(self, timeout: float | None) -> None: ...

    def sync_async(self, timeout: float | None) -> Coroutine[Any, Any, None]: ...

    def error(self) -> BaseException | None:
        """The first error so far; does not wait."""

    def cost(self) -> Cost:
        """Returns the cost of the whole run. Waits until all its streams have run their steps or failed."""

    def cost_async(self) -> Coroutine[Any, Any, Cost]: ...

    def cost_so_far(self) -> Cost:
        """Returns the cost of the calls that have ended; does not wait."""

    def call_tools(self, plan: AgentPlan) -> AgentResult:
        """Raises ProgramError: sinks that run nothing call no tools."""
        raise ProgramError("call_tools() runs tools, and here nothing runs; write it in a program that is run")

    async def call_tools_async(self, plan: AgentPlan) -> AgentResult:
        return self.call_tools(plan)

    def explain_cache(self, timeout: float | None) -> CacheReport:
        """Raises ProgramError: sinks that make no calls have nothing to explain."""
        raise ProgramError("explain_cache() is about calls that were made, and here none are; ask after program.run()")

    async def explain_cache_async(self, timeout: float | None) -> CacheReport:
        return self.explain_cache(timeout)

    def record(self, timeout: float | None) -> "RunRecord":
        """Raises ProgramError: sinks that run nothing have no record."""
        raise ProgramError("show(), save() and record() are about a run, and here none is; ask after program.run()")

    async def record_async(self, timeout: float | None) -> "RunRecord":
        return self.record(timeout)

    def described(self) -> dict[str, str]:
        """Returns the variables with their values in words, as far as they are known; does not wait."""
        return dict.fromkeys(self.names(), "…")

    def html(self) -> str:
        """Returns a short description as HTML; does not wait."""
        return notebook.folded("state", notebook.table([[notebook.escaped(name)] for name in self.names()]))

    def cancel(self) -> None:
        """Stops a branch with those that it forked off; other streams stop their run."""

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled as a branch."""

    def iterate(self, name: str | None) -> Iterator[tuple[str, dict[str, Any]]]: ...

    def iterate_async(self, name: str | None) -> AsyncIterator[tuple[str, dict[str, Any]]]: ...

    def grow(self, name: str) -> Iterator[Any]:
        """Yields the parts of a variable's value as they come, and at last the value."""

    def grow_async(self, name: str) -> AsyncIterator[Any]: ...


class Race(Protocol):
    """Tells which branches of a fork end, by their places: all that was said to them has run, or failed."""

    def next(self) -> int:
        """Waits for the next one. Raises DeadlineError when the time is up."""

    def next_async(self) -> Coroutine[Any, Any, int]: ...


class RunRecord(Protocol):
    """The record of a run, which can be shown and saved: `interpreter.view.page.RunRecord`."""

    @property
    def lines(self) -> list[dict[str, Any]]: ...

    def save(self, path: str | os.PathLike[str]) -> str: ...

    def page(self) -> str: ...

    def show(self, path: str | os.PathLike[str] | None = None, *, against: Any = None) -> str: ...


S = TypeVar("S", bound="BaseState")
T = TypeVar("T")


class VariableNames(list[str]):
    """Names of variables. A call returns them as well: programs of earlier versions write `state.variables()`."""

    __slots__ = ()

    def __call__(self) -> list[str]:
        return list(self)


class BaseState:
    """The part of a state that sync and async programs share: everything that only appends."""

    __slots__ = ("_copied_from", "_sink", "ret_value")

    def __init__(self, sink: Sink, copied_from: Sink | None = None) -> None:
        self._sink = sink
        self._copied_from = copied_from
        self.ret_value: Any = None  # what the user's function returned

    # -------------------------------------------------------------------------------- saying

    def __iadd__(self, other: object) -> Self:
        """Append a string, an operation, or a list of them.

        Raises:
            ParameterError: anything else, None in particular.
        """
        self._sink.submit(expression(other))
        return self

    def copy(self) -> Self:
        """Returns an independent state that begins with everything said so far. O(1).

        `with s.copy() as branch:` joins it at the end of the block, as a fork of one branch.
        """
        return type(self)(self._sink.fork(1)[0], copied_from=self._sink)

    def __enter__(self) -> Self:
        """Raises ProgramError for a state that is no copy: it has nothing to be joined into."""
        if self._copied_from is None:
            raise ProgramError("a state is no block; write with s.copy() as branch: or with s.user():")
        return self

    def __exit__(self, *_: object) -> None:
        if self._copied_from is not None:
            self._copied_from.join([self._sink], "gather_variable")

    def _branches(self, size: object) -> list[Self]:
        branches = checks.integer("fork: size", size, 1, MAX_BRANCHES, f"a number of branches from 1 to {MAX_BRANCHES}")
        return [type(self)(sink) for sink in self._sink.fork(branches)]

    def system(self, content: object = ...) -> Any:  # a context manager without content, else nothing
        """Appends a system turn, or opens one for a block.

        Args:
            content: a string, an operation, or a list of them; left out: the turn is what `with s.system():` appends.
        """
        return self._role("system", content)

    def user(self, content: object = ...) -> Any:
        """Appends a user turn, or opens one for a block, as `system` does.

        Args:
            content: as of `system`.
        """
        return self._role("user", content)

    def assistant(self, content: object = ...) -> Any:
        """Appends an assistant turn, or opens one for a block, as `system` does.

        Args:
            content: as of `system`.
        """
        return self._role("assistant", content)

    def _role(self, name: str, content: object) -> Any:
        if content is not ...:
            self._sink.submit(role(name, content))
            return None
        return self._block(RoleBegin(name), RoleEnd(name))

    def var_scope(self, name: str) -> Any:
        """Opens a block whose text becomes a variable: `with s.var_scope("plan"):`.

        Args:
            name: of the variable, which has all text that is appended inside, generated or not.
        """
        name = checked_name(name)
        return self._block(VarScopeBegin(name), VarScopeEnd(name))

    def private(self, tenant: str) -> None:
        """Makes all that comes after it private: it is cached for this tenant alone. What was said before stays shared.

            s += system(MANUAL)             # computed once for all users
            s.private(user_id)
            s += user(record + question)    # found in the cache by runs for this user alone
            s += assistant(gen("answer"))

        It changes no text. The tail of one tenant is kept from another as the cache of one `salt` from that of another:
        no tokens, no counts, no order of answers. Branches inherit it, and a join that appends a branch brings its
        private part along. Inside a private part it opens one for both names; there may be 16 inside of each other.
        What the program itself reads from a private part and says elsewhere is not private there.

        Args:
            tenant: up to 128 letters, digits, - or _.
        """
        ops.refuse_operations(tenant, "the tenant of private()")
        self._sink.submit(ops.PrivateBegin(tenant))

    @contextmanager
    def _block(self, begin: Op, end: Op) -> Iterator[None]:
        self._sink.submit(begin)
        try:
            yield
        finally:  # closed also when the body raises: the state stays well formed
            self._sink.submit(end)

    # -------------------------------------------------------------------------------- variables

    def __setitem__(self, name: str, value: Value) -> None:
        """Raises ProgramError where the value holds an operation, or has to be waited for."""
        name = checked_name(name)
        if isinstance(value, ops.Op):
            raise ProgramError(
                f"variable {name!r} is an operation, which can only be said: s += ... ; write a text there, such as "
                "s[name]"
            )
        ops.refuse_operations(value, f"variable {name!r}")
        for each in list.__iter__(value) if isinstance(value, list) else (value,):
            refuse_awaitable(each, "cannot assign {} to a variable")
        self._sink.assign(name, value)

    def set_var(self, name: str, value: Value) -> None:
        """Sets a variable, as `s[name] = value` does.

        Args:
            name: of the variable.
            value: any object, such as a text or a number. Texts that hold an operation are refused.
        """
        self[name] = value

    def __contains__(self, name: object) -> bool:
        """Returns whether the program has bound this variable, its value known or not."""
        return isinstance(name, str) and self._sink.has(checks.plain(name))

    @property
    def variables(self) -> "VariableNames":
        """Names of the variables, in the order in which the program first used them. Does not wait."""
        return VariableNames(self._sink.names())

    # -------------------------------------------------------------------------------- the run

    @property
    def usage_so_far(self) -> Usage:
        """Tokens and calls of this run, branches included, without those that are in flight. Does not wait."""
        return self._sink.cost_so_far().usage

    @property
    def cost_so_far(self) -> Cost:
        """`cost` without the calls that are in flight. Does not wait."""
        return self._sink.cost_so_far()

    def cancel(self) -> None:
        """Stops the whole run: requests in flight are aborted, later reads raise CancelledError.

        A branch of a fork, or a copy, stops alone, with what was forked off it: its reads raise BranchCancelledError,
        the run goes on, and a join leaves the branch out. Texts that it has finished stay readable.
        """
        self._sink.cancel()

    def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """As `State.text_iter`, for `async for`.

        Args:
            var_name: as of `State.text_iter`.
            return_meta_data: as of `State.text_iter`.
        """
        checks.switch("return_meta_data", return_meta_data)
        return _async_pieces(self._sink.iterate_async(var_name), return_meta_data)

    def stream_value_async(self, name: str) -> AsyncIterator[Any]:
        """As `State.stream_value`, for `async for`.

        Args:
            name: of the variable.
        """
        return self._sink.grow_async(name)

    def __repr__(self) -> str:
        values = [f"{name}={value}" for name, value in self._sink.described().items()]
        error = self._sink.error()
        if error is not None:
            values.append(f"error={shown(error)}")
        return f"<{type(self).__name__} {', '.join(values) or 'without variables'}>"

    def _repr_html_(self) -> str:
        """Describes the state for a notebook: its variables, and its text by origin, as far as they are known."""
        return self._sink.html()

    def __str__(self) -> str:
        """Describes the state for print; raises ProgramError in a prompt, since it is not the state's text."""
        return ops.unsayable(repr(self))

    def __format__(self, specification: str) -> str:
        return str(self)


class State(BaseState):
    """Holds what a program has said and its variables: the first parameter of a program, and what `run` returns.

    `s += ...` appends text, calls and turns, and returns at once. `s[name]` is the value of a variable, and waits for
    it; a call that failed raises its own error there. `s[name] = value` sets a variable, `name in s` says whether the
    program has one, known or not, and `dict(s)` has them all.

    What a method reads waits for all that was appended before. A `timeout` is in seconds, and None, its default, waits
    until the run's own deadline, if it has one.

    Args:
        sink: takes the operations. States are made by runs, `fork` and `copy`, which give it.
        copied_from: the sink of the state that this one is a copy of; None for others.

    Attributes:
        ret_value: what the program's function has returned.

    Examples:
        >>> @ul.function
        ... def plan(s, city):
        ...     s += f"Three days in {city}:" + ul.gen("days", max_tokens=16)
        ...     s += " Cost: " + ul.gen("cost", dtype=int)
        >>> state = plan.run("Rome", backend=ul.Echo([" the Forum, the Vatican, Ostia.", "420"]))
        >>> state["days"], state["cost"], state.value("cost") + 80
        (' the Forum, the Vatican, Ostia.', '420', 500)
        >>> print(state.text())
        Three days in Rome: the Forum, the Vatican, Ostia. Cost: 420
        >>> state.usage.calls, state.meta("days")["finish_reason"], state.error()
        (2, 'stop', None)
    """

    __slots__ = ()

    def __getitem__(self, name: str) -> Value:
        """The variable's latest value; waits until it is known.

        Raises:
            VariableError: the program never sets it.
            DeadlineError: the run's deadline passed.
            Whatever made the step fail, with its traceback.
        """
        return self._sink.read(name, None)

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the variables, as a dict does its keys."""
        return iter(self.variables)

    def keys(self) -> list[str]:
        """Returns the names of the variables: `dict(state)` has them with their values, as `to_dict()` does."""
        return self.variables

    def values(self) -> list[Value]:
        """Returns the values of all variables, in the order of `keys()`; waits for them."""
        return list(self.to_dict().values())

    def items(self) -> list[tuple[str, Value]]:
        """Returns pairs of a name and its value, in the order of `keys()`; waits for them."""
        return list(self.to_dict().items())

    def to_dict(self, timeout: float | None = None) -> dict[str, Value]:
        """Returns all variables with their values, each as `s[name]` gives it; waits for them.

            rows = [state.to_dict() for state in program.run_batch(questions)]

        Args:
            timeout: seconds for all of them; None: the run's deadline.

        Raises:
            DeadlineError: `timeout` passed before all were known.
            UmbelError: what `s[name]` raises, for the first variable that failed.
        """
        if timeout is not None:
            self._sink.sync(timeout)
        return {name: self._sink.read(name, None) for name in self.variables}

    def fork(self, size: int = 1) -> "StateGroup[Self]":
        """Returns branches that share everything said so far, and run in parallel. Does not wait.

        Args:
            size: number of branches.

        Raises:
            ParameterError: `size` is not an integer from 1 to 16,384.
        """
        return StateGroup(self, self._branches(size))

    def call_tools(
        self,
        tools: Iterable[object],
        name: str | None = None,
        *,
        max_steps: int = 8,
        tool_choice: str = "auto",
        parallel: bool = True,
        timeout: float = 60.0,
        max_result_bytes: int = 32_768,
        on_error: Literal["tell", "raise"] = "tell",
        **sampling: Any,
    ) -> AgentResult:
        """Lets the model answer with the help of tools: its calls are run and told to it until it answers in text.

            s += ul.user("How many people live in Iceland and Norway together?")
            result = s.call_tools([population, add], "answer", max_tokens=256)
            print(result.answer, len(result.calls))

        Calls of one answer run at the same time, in threads. Results come back as content: what they spell is never a
        control token. The state gets the answers as assistant turns and the results as user turns.

        Args:
            tools: functions made by `ul.tool`, and tools of `ul.mcp`.
            name: variable for the answer; `name + "_calls"` has the calls. None sets none.
            max_steps: most answers of the model. Calls of the last one are not run, and `result.answer` is None.
            tool_choice: "auto", "required", "none" or the name of a tool, for the first answer; later ones are free.
            parallel: one answer may make several calls.
            timeout: seconds for each call of a tool.
            max_result_bytes: of each result; the model is told that the rest was cut.
            on_error: "tell" gives an exception of a tool to the model, "raise" ends the program with it.
            sampling: parameters of `gen` for each answer, such as max_tokens and temperature.

        Raises:
            ParameterError: a wrong argument.
            ProgramError: there is no turn to answer, or text outside of turns.
            CapabilityError: the conversation has pictures or private parts.
        """
        plan = agent_plan(tools, name, max_steps, tool_choice, parallel, timeout, max_result_bytes, on_error, sampling)
        return self._sink.call_tools(plan)

    def get_var(self, name: str, timeout: float | None = None) -> Value:
        """Returns `s[name]`, waiting no longer than the timeout.

        Args:
            name: of the variable.
            timeout: seconds; None: the run's deadline.

        Raises:
            DeadlineError: the time was up.
            UmbelError: what `s[name]` raises.
        """
        return self._sink.read(name, timeout)

    def value(self, name: str, timeout: float | None = None) -> Any:  # Any: whatever type the gen asked for
        """Returns the object that the variable's text stands for, by the `dtype` or `json_schema` of its gen: a number,
        a member, an instance of the class; for a schema that is no type what json.loads gives. Made anew at every call.
        What has no such type is as `s[name]` gives it; a list for n above 1, and after a join.

        Args:
            name: of the variable.
            timeout: seconds; None: the run's deadline.

        Raises:
            ResultError: the text was cut off, or was kept although the class refuses its values.
            UmbelError: what `s[name]` raises.
        """
        return self._sink.value(name, timeout)

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Any]:
        """Returns what is known of the call that set a variable, as a dict; a list of dicts for n above 1.

        - Every call has `id`, `prompt_tokens`, `cached_tokens` and `completion_tokens`; a gen also `finish_reason`
          ("stop", "length", "length_closed" where a constrained text was led to its end) and `matched_stop`.
        - Where they were asked for: `output_token_logprobs` and `input_token_logprobs`, lists of (log-probability,
          token, text), and `output_top_logprobs` and `input_top_logprobs`, such lists for each token.
        - A runtime adds `guessed_tokens`, which it had guessed right, and `spans`: (origin, start, end) of the
          characters that were "forced" by a constraint or "guessed".
        - A select has by choice `choice_scores`, by which they were compared, and `probabilities`, which add up to 1.
          With method="exact" also `bounds` of these, `mass` (bounds of the probability among all texts: what is missing
          from 1 is the probability of something else) and `evaluations` of the model. On a model that scores nothing it
          has `choices_method` "generated" and no probabilities: reading them raises CapabilityError.
        - A constrained gen has `guarantee`, as below, `narrowed`: (keyword, place, how) wherever fewer texts could come
          than its schema admits (see docs/constraints.md), `forced_tokens`, which were not sampled, and `tries`, the
          number of calls that it took (the tokens are those of all of them).
        - Where a run speculates: `speculated`, whether the text was there already, from the call with this `id`. Then
          it took no call and no prompt tokens, and `completion_tokens` is its share.

        `guarantee` is one of these; a select on a model that scores nothing has it, too:

        - "enforced": nothing else could be generated.
        - "incomplete": a stop ended the text early.
        - "validated": the text was looked at afterwards, and satisfies the constraint: the provider of a hosted model
          does not enforce it, or `allow_unenforced` left something over.
        - "violated": the text breaks what `allow_unenforced` left over.
        - "best_effort": the text breaks the constraint or is refused by the type itself, and `allow_best_effort` keeps
          it.

        `unenforced` lists what was left over, and `violations` says what a "violated" or "best_effort" text breaks.

        Args:
            name: of the variable.
            timeout: seconds; None: the run's deadline.
        """
        return self._sink.meta(name, timeout)

    meta = get_meta_info

    @property
    def usage(self) -> Usage:
        """Tokens and calls of this run, branches included. Waits for everything that was said, as `text()` does; of a
        run that failed or was cancelled it counts the calls that were made. `usage_so_far` does not wait."""
        return self._sink.cost().usage

    @property
    def cost(self) -> Cost:
        """The cost of this run, branches included: `usage`, `dollars` by the table `umbel.prices`, and what
        speculation saved. Waits as `usage` does; a call that failed counts when its cost is known. `cost_so_far` does
        not wait.

        Costs add up: `sum(state.cost for state in states)` is that of a batch.
        """
        return self._sink.cost()

    def text(self, timeout: float | None = None) -> str:
        """Returns all text of this state, the tags of its turns included; waits for what was appended.

        Args:
            timeout: seconds; None: the run's deadline.
        """
        return self._sink.text(timeout)

    def messages(self, timeout: float | None = None) -> list[dict[str, str]]:
        """Returns the conversation as dicts of `role` and `content`; waits for what was appended.

        Args:
            timeout: seconds; None: the run's deadline.
        """
        return self._sink.messages(timeout)

    def sync(self, timeout: float | None = None) -> None:
        """Waits until everything appended has run. Raises the stream's error if it failed.

        Args:
            timeout: seconds; None: the run's deadline.
        """
        self._sink.sync(timeout)

    def error(self, timeout: float | None = None) -> BaseException | None:
        """Returns the first error of this state, or None; waits for what was appended.

        Args:
            timeout: seconds; None: the run's deadline.

        Raises:
            DeadlineError: `timeout` passed before that was known.
        """
        try:
            self._sink.sync(timeout)
        except Exception:
            if self._sink.error() is None:
                raise
        return self._sink.error()

    def explain_cache(self, timeout: float | None = None) -> CacheReport:
        """Explains why calls of this run found no more of their prompts in the cache. Waits for what was appended.

            state = program.run(question)
            print(state.explain_cache())

        Each call of the run, branches included, has its numbers of tokens and the place where the cached part of its
        prompt ends: the text there, what earlier prompts have instead, the line that says it, and the argument it comes
        from. Compared are the latest prompts of this process to the same backend. What providers do not tell is
        estimated from their counts, and said to be.

        Args:
            timeout: seconds; None: the run's deadline.
        """
        return self._sink.explain_cache(timeout)

    def record(self, timeout: float | None = None) -> RunRecord:
        """Returns the record of this run, branches included; waits for everything that was said, as `usage` does.

        Args:
            timeout: seconds; None: the run's deadline.

        Raises:
            ProgramError: the run was started with record=False.
            DeadlineError: `timeout` seconds passed before.
        """
        return self._sink.record(timeout)

    def show(self, path: str | os.PathLike[str] | None = None, *, against: "State | RunRecord | None" = None) -> str:
        """Writes the page of this run and returns its path: one HTML file that needs nothing else.

            state.show("run.html")
            state.show(against=earlier)         # next to another run, the first difference of each text marked

        It has the streams over time, their text coloured by origin, and of each call tokens, cache, latency,
        log-probabilities, guarantee and error. Waits as `usage` does.

        Args:
            path: of the file; None: a temporary one, which opens in a browser, or in a notebook's cell.
            against: the state or the record of another run, to compare with; None: none.
        """
        other = against.record() if isinstance(against, State) else against
        return self.record().show(path, against=other)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Writes the record of this run into a file, which `umbel view FILE` shows. Returns its path.

        Args:
            path: of the file.
        """
        return self.record().save(path)

    @overload
    def text_iter(self, var_name: str | None = None, return_meta_data: Literal[False] = False) -> Iterator[str]: ...

    @overload
    def text_iter(
        self, var_name: str | None = None, *, return_meta_data: Literal[True]
    ) -> Iterator[tuple[str, dict[str, Any]]]: ...

    def text_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> Iterator[Any]:
        """Yields the pieces of a variable, or of all text, as they come; any number of readers.

        Args:
            var_name: of the variable; None: all that is appended after the start of the state; a branch starts at its
                fork.
            return_meta_data: True yields pairs of a piece and a dict of what is known of its call.
        """
        checks.switch("return_meta_data", return_meta_data)
        for text, meta in self._sink.iterate(var_name):
            yield (text, meta) if return_meta_data else text

    def stream_value(self, name: str) -> Iterator[Any]:  # Any: whatever type the gen asked for
        """Yields the object of a variable as it grows, and at last the whole one: what `s.value(name)` returns.

            state = program.run(stream=True)
            for book in state.stream_value("book"):         # s += ul.gen("book", dtype=Book)
                show(book.title, book.chapters)             # None for what has not come

        Parts read as the whole value does. Of a class (dataclass, NamedTuple, Pydantic, msgspec) a part is a
        `Partial` with its attributes, None for those that have not come; of a TypedDict, a dict or a schema a dict of
        the keys that have come; of a list, tuple or set a list of the items that have come. Strings grow. Numbers,
        bools, dates, members of enums and literals are there once they are complete. Text without a type grows as text.

        Any number of readers; one that is slow gets the latest part. Do not change a part: the next ones share what is
        complete. The program's own classes are made of the whole value alone. An answer that is judged before it
        counts (see `gen`) has no parts: it may be asked again, so the whole value is all that comes. The same goes for
        answers that come at once. With n above 1 the parts are of the first text, and the last is the list.

        Args:
            name: of the variable.

        Raises:
            ResultError: at the end, as `s.value` does: the text was cut off, or kept although it holds no such value.
            UmbelError: what `s[name]` raises.
        """
        return self._sink.grow(name)


class AsyncValue(Coroutine[Any, Any, T]):
    """A value of an `async def` program that is still to come: `await` gives the value itself.

    Used as the value without `await` (in text, in a condition, compared, by an attribute) it raises ProgramError or
    AttributeError, which say so.
    """

    __slots__ = ("_coroutine", "_written")

    def __init__(self, coroutine: Coroutine[Any, Any, T], written: str) -> None:
        self._coroutine = coroutine
        self._written = written  # what the program wrote, for messages

    def __await__(self) -> Generator[Any, None, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    # -------------------------------------------------------------------------------- without await

    def _refuse(self, *_: object) -> NoReturn:
        self.close()
        raise ProgramError(f"{self._written} is a value to wait for; write await {self._written}")

    __str__ = __format__ = __bool__ = __add__ = __radd__ = _refuse

    def __eq__(self, other: object) -> bool:
        return self is other if isinstance(other, AsyncValue) else self._refuse()

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<await {self._written}>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self._written} is a value to wait for; write (await {self._written}).{name}")


class AsyncState(BaseState):
    """Holds what an `async def` program has said and its variables, as `State` does: what is read is awaited.

    `s += ...` returns at once, as in a sync program; `await s["x"]`, `await s.text()` and `await s.usage` wait. A
    `timeout` is in seconds, and None, its default, waits until the run's own deadline, if it has one.

    Args:
        sink: takes the operations. States are made by runs, `fork` and `copy`, which give it.
        copied_from: the sink of the state that this one is a copy of; None for others.

    Attributes:
        ret_value: what the program's function has returned.

    Examples:
        >>> import asyncio
        >>> @ul.function
        ... async def capital(s, country):
        ...     s += f"The capital of {country} is" + ul.gen("city", max_tokens=4)
        ...     if await s["city"] == " Paris":
        ...         s += " on the" + ul.gen("river", max_tokens=4)
        >>> async def main():
        ...     state = await capital.run_async("France", backend=ul.Echo([" Paris", " Seine"]))
        ...     print(await state.text(), (await state.usage).calls)
        >>> asyncio.run(main())
        The capital of France is Paris on the Seine 2
    """

    __slots__ = ()

    def __getitem__(self, name: str) -> AsyncValue[Value]:
        return AsyncValue(self._sink.read_async(name, None), f"s[{name!r}]")

    def __iter__(self) -> Iterator[str]:
        """As of `State`."""
        return iter(self.variables)

    def keys(self) -> NoReturn:
        """Raises ProgramError: `dict(s)` asks for these, and the values of an `async def` program are waited for."""
        raise ProgramError("the variables of an async program are waited for; write await s.to_dict(), or s.variables")

    def to_dict(self, timeout: float | None = None) -> AsyncValue[dict[str, Value]]:
        """As `State.to_dict`, awaited: `(await s.to_dict())["answer"]`.

        Args:
            timeout: seconds for all of them; None: the run's deadline.
        """
        return AsyncValue(_all_of(self._sink, timeout), "s.to_dict()")

    def fork(self, size: int = 1) -> "AsyncStateGroup[Self]":
        """As `State.fork`.

        Args:
            size: number of branches.
        """
        return AsyncStateGroup(self, self._branches(size))

    def call_tools(
        self,
        tools: Iterable[object],
        name: str | None = None,
        *,
        max_steps: int = 8,
        tool_choice: str = "auto",
        parallel: bool = True,
        timeout: float = 60.0,
        max_result_bytes: int = 32_768,
        on_error: Literal["tell", "raise"] = "tell",
        **sampling: Any,
    ) -> AsyncValue[AgentResult]:
        """As `State.call_tools`, awaited. Async tools run on the caller's event loop, others in threads.

        `tools`, `name`, `max_steps`, `tool_choice`, `parallel`, `timeout`, `max_result_bytes`, `on_error` and the
        sampling parameters are those of `State.call_tools`.
        """
        plan = agent_plan(tools, name, max_steps, tool_choice, parallel, timeout, max_result_bytes, on_error, sampling)
        return AsyncValue(self._sink.call_tools_async(plan), "s.call_tools(...)")

    def get_var(self, name: str, timeout: float | None = None) -> AsyncValue[Value]:
        """As `State.get_var`, awaited.

        Args:
            name: of the variable.
            timeout: seconds; None: the run's deadline.
        """
        return AsyncValue(self._sink.read_async(name, timeout), f"s.get_var({name!r})")

    def value(self, name: str, timeout: float | None = None) -> AsyncValue[Any]:
        """As `State.value`, awaited: `(await s.value("book")).title`.

        Args:
            name: of the variable.
            timeout: seconds; None: the run's deadline.
        """
        return AsyncValue(self._sink.value_async(name, timeout), f"s.value({name!r})")

    def stream_value(self, name: str) -> AsyncIterator[Any]:
        """As `State.stream_value`: `async for book in s.stream_value("book")`.

        Args:
            name: of the variable.
        """
        return self._sink.grow_async(name)

    def get_meta_info(self, name: str, timeout: float | None = None) -> AsyncValue[dict[str, Any]]:
        """As `State.get_meta_info`, awaited: `(await s.meta("answer"))["cached_tokens"]`.

        Args:
            name: of the variable.
            timeout: seconds; None: the run's deadline.
        """
        return AsyncValue(self._sink.meta_async(name, timeout), f"s.get_meta_info({name!r})")

    meta = get_meta_info

    @property
    def usage(self) -> AsyncValue[Usage]:
        """The usage, awaited, as of `State.usage`: `(await state.usage).calls`."""
        return AsyncValue(_usage_of(self._sink), "state.usage")

    @property
    def cost(self) -> AsyncValue[Cost]:
        """The cost, awaited, as of `State.cost`: `(await state.cost).dollars`."""
        return AsyncValue(self._sink.cost_async(), "state.cost")

    def text(self, timeout: float | None = None) -> AsyncValue[str]:
        """As `State.text`, awaited."""
        return AsyncValue(self._sink.text_async(timeout), "s.text()")

    def messages(self, timeout: float | None = None) -> AsyncValue[list[dict[str, str]]]:
        """As `State.messages`, awaited."""
        return AsyncValue(self._sink.messages_async(timeout), "s.messages()")

    def sync(self, timeout: float | None = None) -> AsyncValue[None]:
        """As `State.sync`, awaited."""
        return AsyncValue(self._sink.sync_async(timeout), "s.sync()")

    def explain_cache(self, timeout: float | None = None) -> AsyncValue[CacheReport]:
        """As `State.explain_cache`, awaited: `print(await state.explain_cache())`."""
        return AsyncValue(self._sink.explain_cache_async(timeout), "state.explain_cache()")

    def record(self, timeout: float | None = None) -> AsyncValue[RunRecord]:
        """The record of this run, awaited, as of `State.record`: `(await state.record()).show("run.html")`."""
        return AsyncValue(self._sink.record_async(timeout), "state.record()")

    def show(self, path: str | os.PathLike[str] | None = None) -> AsyncValue[str]:
        """Writes the page of this run, as `State.show` does, and is awaited.

        Args:
            path: of the file; None: a temporary one, which is opened.
        """
        return AsyncValue(_show(self._sink, path), "state.show()")

    def error(self, timeout: float | None = None) -> AsyncValue[BaseException | None]:
        """As `State.error`, awaited."""
        return AsyncValue(_error_of(self._sink, timeout), "state.error()")


async def _show(sink: Sink, path: str | os.PathLike[str] | None) -> str:
    return (await sink.record_async(None)).show(path)


async def _all_of(sink: Sink, timeout: float | None) -> dict[str, Value]:
    if timeout is not None:
        await sink.sync_async(timeout)
    return {name: await sink.read_async(name, None) for name in sink.names()}


async def _usage_of(sink: Sink) -> Usage:
    return (await sink.cost_async()).usage


async def _error_of(sink: Sink, timeout: float | None) -> BaseException | None:
    try:
        await sink.sync_async(timeout)
    except Exception:
        if sink.error() is None:
            raise
    return sink.error()


class Ended(list[S]):
    """Branches that have ended, in the order in which they did. `waiting`: the number of those that may still end."""

    def __init__(self, waiting: int) -> None:
        super().__init__()
        self.waiting = waiting


class BaseStateGroup(Generic[S]):
    """The branches of a fork. `forks += x` appends to each; a list gives one item per branch, a function is called
    with the branch number."""

    __slots__ = ("_parent", "_states")

    def __init__(self, parent: S, states: list[S]) -> None:
        self._parent = parent
        self._states = states

    def __iadd__(self, other: object) -> Self:
        """Raises ParameterError when a list is not as long as the group."""
        if isinstance(other, list | tuple):
            given = checks.members("forks += a list", other, MAX_BRANCHES, "one item per branch")
            if len(given) != len(self._states):
                raise ParameterError(
                    f"forks += a list of {len(given)} for {len(self._states)} branches; give one item per branch, "
                    "or one expression for all"
                )
            contents: list[object] = list(given)
        elif _is_function(other):
            contents = [_call(other, index) for index in range(len(self._states))]
        else:
            contents = [expression(other)] * len(self._states)
        operations = [expression(content) for content in contents]  # all or none
        for state, operation in zip(self._states, operations, strict=True):
            state._sink.submit(operation)
        return self

    def __getitem__(self, index: int) -> S:
        return self._states[index]

    def __setitem__(self, index: int, state: S) -> None:
        """Makes `forks[i] += x` work; a branch cannot be replaced by another state."""
        if state is not self._states[index]:
            raise ParameterError("a branch cannot be replaced; write forks[i] += ...")

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[S]:
        return iter(self._states)

    def join(self, mode: JoinMode = "gather_variable", *, quorum: int | None = None) -> None:
        """Brings the branches back into the state they came from. Returns at once; reads wait.

        `gather_variable`: every variable that a branch set becomes a list on the parent, one entry per branch. For a
        branch that did not set it the entry is the value from before the fork, or None if there was none. A variable
        that no branch set stays as it is. `concate_and_append`: the text each branch appended is appended to the
        parent, in order. A branch that failed fails the parent, with its own error. A branch that was cancelled is
        left out: the lists have an entry less.

        Args:
            mode: "gather_variable" or "concate_and_append".
            quorum: so many branches that end first are enough, and the others are cancelled. A branch that fails does
                not count; the parent fails where too few are left. None: all branches.

        Raises:
            ParameterError: an unknown mode, or a quorum that is no number of branches.
        """
        checks.one_of("join mode", mode, JOIN_MODES)
        wanted = None if quorum is None else self._count("quorum", quorum)
        self._parent._sink.join([state._sink for state in self._states], mode, wanted)

    def cancel(self) -> None:
        """Stops all branches, as `branch.cancel()` stops one."""
        for state in self._states:
            state.cancel()

    def _count(self, name: str, number: object) -> int:
        return checks.integer(name, number, 1, len(self._states), f"a number of branches, up to {len(self._states)}")

    def _race(self, timeout: float | None) -> Race:
        return self._parent._sink.race([state._sink for state in self._states], timeout)

    def _note(self, index: int, ended: "Ended[S]", failed: list[BaseException]) -> bool:
        """Notes a branch that has ended, and returns whether it ended well. Its error is noted, if it has one."""
        state = self._states[index]
        ended.waiting -= 1
        if state._sink.cancelled:
            return False
        if (error := state._sink.error()) is not None:
            failed.append(error)
            return False
        ended.append(state)
        return True

    def _decided(self, ended: "Ended[S]", failed: list[BaseException], wanted: int) -> "Ended[S]":
        """Cancels the branches that are not among `ended`, and returns these. Raises an error if they are too few."""
        if len(ended) < wanted:
            raise (
                failed[0]
                if failed
                else ProgramError(f"{len(ended)} of {wanted} branches have ended, and the others were cancelled")
            )
        for state in self._states:
            if all(state is not other for other in ended):
                state.cancel()
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.join()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._states)} branches>"

    def __str__(self) -> str:
        """As of a state."""
        return ops.unsayable(repr(self))

    def __format__(self, specification: str) -> str:
        return str(self)


class StateGroup(BaseStateGroup[S]):
    """Holds the branches of a fork, in a sync program: made by `s.fork(n)`.

    `forks += x` appends to each branch; a list gives one item per branch, and a function is called with the number of
    each. `forks[i]`, `len(forks)` and a loop give the branches, which are states. Leaving `with s.fork(n) as forks:`
    joins them. A `timeout` is in seconds for all branches together.

    Args:
        parent: the state that was forked.
        states: the branches.

    Examples:
        >>> @ul.function
        ... def advise(s, topic):
        ...     s += topic
        ...     with s.fork(2) as tips:
        ...         tips += lambda number: f" Tip {number + 1}:" + ul.gen("tip", max_tokens=8)
        >>> model = ul.Echo({"Tip 1:": " sleep", "Tip 2:": " walk"})
        >>> advise.run("Health.", backend=model)["tip"]
        [' sleep', ' walk']
        >>> @ul.function
        ... def fastest(s, question):
        ...     s += question
        ...     forks = s.fork(3)
        ...     forks += ul.gen("answer", max_tokens=4)
        ...     return [branch["answer"] for branch in forks.first(2)]
        >>> fastest.run("3 + 4 =", backend=ul.Echo(lambda prompt: " 7")).ret_value
        [' 7', ' 7']
    """

    __slots__ = ()

    def as_completed(self, timeout: float | None = None) -> Iterator[S]:
        """Yields the branches, each when all that was said to it has run, or failed: `branch.error()` tells.

        Args:
            timeout: seconds for all of them; None: the run's deadline.

        Raises:
            DeadlineError: the time was up.
        """
        race = self._race(timeout)
        for _ in self._states:
            yield self._states[race.next()]

    def first(self, count: int = 1, timeout: float | None = None) -> list[S]:
        """Waits for the first branches that end well, cancels the others, and returns those, as they ended.

        Args:
            count: number of branches to wait for.
            timeout: seconds; None: the run's deadline.

        Raises:
            ParameterError: `count` is no number of branches.
            DeadlineError: the time was up; no branch is cancelled.
            Exception: the first error of a branch, where too few are left.
        """
        wanted = self._count("count", count)
        return self._until(lambda ended: len(ended) == wanted, timeout, wanted)

    def until(self, rule: "Rule[S]", timeout: float | None = None) -> list[S]:
        """Waits until `rule` is true of the branches that have ended well, and cancels the others.

        Args:
            rule: called with the ended branches whenever one more has ended, such as `ul.vote("answer")`.
            timeout: seconds; None: the run's deadline.

        Returns:
            Those that ended, in the order in which they did; all of them where the rule was never true.

        Raises:
            ParameterError: `rule` is no function, a coroutine function, or a vote of more branches than there are.
            DeadlineError: the time was up; no branch is cancelled.
            Exception: the first error of a branch, where none ended well.
        """
        _check_rule(rule, len(self._states))
        if inspect.iscoroutinefunction(rule):
            raise ParameterError(_AWAITED_RULE)
        return self._until(rule, timeout, 1)

    def _until(self, rule: "Rule[S]", timeout: float | None, wanted: int) -> list[S]:
        race, ended, failed = self._race(timeout), Ended[S](len(self._states)), list[BaseException]()
        while ended.waiting and len(ended) + ended.waiting >= wanted:
            if self._note(race.next(), ended, failed):
                decided = rule(ended)
                if inspect.isawaitable(decided):
                    if inspect.iscoroutine(decided):
                        decided.close()
                    raise ParameterError(_AWAITED_RULE)
                if decided:
                    break
        return self._decided(ended, failed, wanted)


class AsyncStateGroup(BaseStateGroup[S]):
    """Holds the branches of a fork in an `async def` program: as `StateGroup`, and what waits is awaited.

    Args:
        parent: the state that was forked.
        states: the branches.

    Examples:
        >>> import asyncio
        >>> @ul.function
        ... async def solve(s, question):
        ...     s += question
        ...     forks = s.fork(5)
        ...     forks += ul.gen("answer", max_tokens=4, temperature=0.8)
        ...     ended = await forks.until(ul.vote("answer", agree=3))
        ...     return [await branch["answer"] for branch in ended]
        >>> asyncio.run(solve.run_async("3 + 4 =", backend=ul.Echo(lambda prompt: " 7"))).ret_value
        [' 7', ' 7', ' 7']
    """

    __slots__ = ()

    async def as_completed(self, timeout: float | None = None) -> AsyncIterator[S]:
        """As `StateGroup.as_completed`: `async for branch in forks.as_completed()`.

        Args:
            timeout: seconds for all of them; None: the run's deadline.
        """
        race = self._race(timeout)
        for _ in self._states:
            yield self._states[await race.next_async()]

    async def first(self, count: int = 1, timeout: float | None = None) -> list[S]:
        """As `StateGroup.first`, awaited.

        Args:
            count: number of branches to wait for.
            timeout: seconds; None: the run's deadline.
        """
        wanted = self._count("count", count)
        return await self._until(lambda ended: len(ended) == wanted, timeout, wanted)

    async def until(self, rule: "Rule[S]", timeout: float | None = None) -> list[S]:
        """As `StateGroup.until`, awaited.

        Args:
            rule: as of `StateGroup.until`; it may be a coroutine function.
            timeout: seconds; None: the run's deadline.
        """
        _check_rule(rule, len(self._states))
        return await self._until(rule, timeout, 1)

    async def _until(self, rule: "Rule[S]", timeout: float | None, wanted: int) -> list[S]:
        race, ended, failed = self._race(timeout), Ended[S](len(self._states)), list[BaseException]()
        while ended.waiting and len(ended) + ended.waiting >= wanted:
            if self._note(await race.next_async(), ended, failed):
                decided = rule(ended)
                if await decided if inspect.isawaitable(decided) else decided:
                    break
        return self._decided(ended, failed, wanted)


Rule = Callable[[Ended[S]], object]
_AWAITED_RULE = "until(): the rule is a coroutine function in a sync program; write def, or an async def program"


def _check_rule(rule: object, branches: int) -> None:
    if not callable(rule):
        raise ParameterError(
            f'until({shown(rule)}) has no rule; write a function of the ended branches, such as ul.vote("answer")'
        )
    agree = getattr(rule, "agree", None)  # of a vote
    if isinstance(agree, int):
        checks.integer("agree", agree, 0, branches, f"a number of branches, up to {branches}")


def _is_function(value: object) -> TypeGuard[Callable[[int], object]]:
    """Returns whether a value is a function of a branch number: no class, and no backend, which takes prompts."""
    return (
        callable(value) and not isinstance(value, type) and get_origin(value) is None and not isinstance(value, Backend)
    )


def _call(function: Callable[[int], object], index: int) -> object:
    return function(index)


async def _async_pieces(pieces: AsyncIterator[tuple[str, dict[str, Any]]], meta: bool) -> AsyncIterator[Any]:
    async for text, data in pieces:
        yield (text, data) if meta else text
