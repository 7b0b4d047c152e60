"""The program that is every workload: it says a file's operations in the language, and returns every variable.

Branches are tasks, because a branch that needs a value waits for it while its siblings go on. The parent goes on
at once after a fork; it waits where it needs a branch's variable, where the file says `join`, and at its end.
"""

import asyncio

import umbel as ul
from umbel.lang.ops import Gen as GenOp
from umbel.lang.ops import Select as SelectOp
from umbel.srt.simulator.workload import (
    Branch,
    Fork,
    Gen,
    Image,
    Op,
    Ops,
    Program,
    Select,
    Text,
    Values,
    Var,
    key_of,
    keys_of,
    scope_of,
)


def gen(op: Gen) -> GenOp | SelectOp:
    """The operation of the language that a file's is. What of a schema cannot be enforced is left over, as peers leave
    it over in silence; `validity.py` looks at every value."""
    return ul.gen(
        op.name,
        op.max_tokens,
        stop=op.stop or None,
        temperature=op.temperature,
        ignore_eos=op.ignore_eos,
        regex=op.regex,
        json_schema=op.json_schema,
        allow_unenforced=None if op.json_schema is None else True,
    )


def check(program: Program) -> None:
    """Whether the language takes all of it, before anything runs.

    Raises:
        ConstraintError, ParameterError: a schema or an option that no runtime takes.
        CapabilityError: an image.
    """

    def visit(ops: Ops) -> None:
        for op in ops:
            match op:
                case Gen():
                    gen(op)
                case Image(path=path):
                    raise ul.CapabilityError(f"image {path.name!r}: the benchmark's models read text only")
                case Fork(branches=branches):
                    for branch in branches:
                        visit(branch)

    visit(program.ops)


@ul.function
async def play(s: ul.AsyncState, ops: Ops, parallel: bool = True) -> Values:
    """Run `ops`; the value of every variable by its key.

    `parallel=False` is the ablation "no frontend parallelism": a branch begins when the one before it has ended.
    """
    run = _Play(ops, parallel)
    try:
        async with asyncio.TaskGroup() as run.tasks:
            await run.say(s, ops, ())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # the first failure cancelled the rest
    return {key: await run.value(key) for key in run.states}


class _Play:
    """One run of one program. `states` says where a variable is to be found, as soon as its operation is submitted."""

    def __init__(self, ops: Ops, parallel: bool) -> None:
        loop = asyncio.get_running_loop()
        self.states: dict[str, asyncio.Future[ul.AsyncState]] = {key: loop.create_future() for key in keys_of(ops)}
        self.parallel = parallel
        self.tasks = asyncio.TaskGroup()

    async def value(self, key: str) -> str:
        state = await self.states[key]
        value: str = await state[key.rpartition(".")[2]]
        return value

    async def say(self, s: ul.AsyncState, ops: Ops, branch: Branch) -> None:
        for op in ops:
            await self._say_one(s, op, branch)

    async def _say_one(self, s: ul.AsyncState, op: Op, branch: Branch) -> None:
        match op:
            case Text(text):
                s += text
            case Image(path):
                s += ul.image(path)
            case Gen(name=name):
                s += gen(op)
                self.states[key_of(branch, name)].set_result(s)
            case Select(name, choices):
                s += ul.select(name, choices)
                self.states[key_of(branch, name)].set_result(s)
            case Var(name):
                s += await self.value(scope_of(self.states, branch, name))
            case Fork():
                await self._fork(s, op, branch)

    async def _fork(self, s: ul.AsyncState, op: Fork, branch: Branch) -> None:
        forks = s.fork(len(op.branches))
        branches = [
            (inner, ops, (*branch, number)) for number, (inner, ops) in enumerate(zip(forks, op.branches, strict=True))
        ]
        if not self.parallel:
            for inner in branches:
                await self._to_the_end(*inner)
            return
        if not op.join:
            for inner in branches:
                self.tasks.create_task(self.say(*inner))
            return
        # A branch that forks again has ended when those have; otherwise saying all of it is enough.
        await asyncio.gather(
            *((self._to_the_end if _forks(ops) else self.say)(inner, ops, at) for inner, ops, at in branches)
        )
        forks.join()  # what the parent says from here on waits for the branches

    async def _to_the_end(self, s: ul.AsyncState, ops: Ops, branch: Branch) -> None:
        """Until everything said here, and in forks of it, has run."""
        await self.say(s, ops, branch)
        for key in keys_of(ops, branch):
            await self.value(key)
        await s.sync()


def _forks(ops: Ops) -> bool:
    return any(isinstance(op, Fork) for op in ops)
