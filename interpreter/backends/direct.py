"""One prompt, one text, without a program: a backend is called as a function.

    model = ul.Runtime()
    model("The capital of France is", max_tokens=8, temperature=0)          # → " Paris ..."
    await model.complete_async("The capital of France is", max_tokens=8)

The call runs a program of two operations, so it takes the parameters of `gen`, raises the errors of `gen`, and is in
journals and observations as any other run is.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from ...lang import ops, sampling
from ...lang.errors import ParameterError, shown, unknown_option
from ...lang.generation import gen
from ...lang.ops import assistant, user
from ...lang.state import State
from ..loop import streams

_OF_RUN = frozenset({"budget", "journal", "priority", "record", "salt", "timeout"})  # what of `run` fits one text
_OTHER_NAMES = sampling.OPTIONS - inspect.signature(gen).parameters.keys()  # such as max_new_tokens, which run() takes


class DirectCalls:
    """Completes single prompts: the base class of backends."""

    def __call__(self, prompt: str, max_tokens: int | None = None, **options: Any) -> str:
        """Completes one prompt and returns the generated text; blocks.

        The prompt is continued as it is. Turns of a chat are for programs: see `ul.user` and `ul.assistant`. A model
        that takes turns alone, such as a hosted chat model, gets the prompt as the message of a user.

        Args:
            prompt: text.
            max_tokens: most tokens of the answer; 128 if it is left out.
            options: parameters of `gen`, such as temperature, stop, regex and json_schema; and timeout, budget,
                journal, priority, salt and record of `program.run`.

        Raises:
            ParameterError: a prompt that is no string, or a parameter that is unknown or wrong.
            UmbelError: what a `gen` of a program raises on this backend.

        Examples:
            >>> model = ul.Echo(["Paris", "blue"])  # or ul.Runtime()
            >>> model("The capital of France is ", max_tokens=8, temperature=0)
            'Paris'
            >>> model("The sky is ", choices=["blue", "grey"])
            'blue'
        """
        given = options if max_tokens is None else {"max_tokens": max_tokens, **options}
        return self.complete(prompt, given)

    def complete(self, prompt: str, sampling_params: Mapping[str, Any] | None = None, /, **options: Any) -> str:
        """Completes one prompt, as a call of the backend does; blocks.

        Args:
            prompt: text; continued as it is.
            sampling_params: the options as a dict.
            options: as of a call of the backend.

        Raises:
            ParameterError: a prompt that is no string, or a parameter that is unknown, wrong or given twice.
            UmbelError: what a `gen` of a program raises on this backend.

        Examples:
            >>> ul.Echo(["Paris"]).complete("The capital of France is ", {"max_tokens": 8})
            'Paris'
        """
        asked, of_run = _split(prompt, sampling_params, options)
        state: State = _program().run(prompt, asked, backend=self, **of_run)
        return _text(state["text"])

    async def complete_async(
        self, prompt: str, sampling_params: Mapping[str, Any] | None = None, /, **options: Any
    ) -> str:
        """Completes one prompt, as `complete` does, on the caller's event loop.

        Args:
            prompt: text; continued as it is.
            sampling_params: the options as a dict.
            options: as of a call of the backend.

        Raises:
            ParameterError: a prompt that is no string, or a parameter that is unknown, wrong or given twice.
            UmbelError: what a `gen` of a program raises on this backend.

        Examples:
            >>> import asyncio
            >>> async def both(model):
            ...     return await asyncio.gather(model.complete_async("One:"), model.complete_async("Two:"))
            >>> asyncio.run(both(ul.Echo({"One:": " a", "Two:": " b"})))
            [' a', ' b']
        """
        asked, of_run = _split(prompt, sampling_params, options)
        state = await _program().run_async(prompt, asked, backend=self, **of_run)
        return _text(await state["text"])


def _program() -> Any:  # a Program, whose module imports the runs, which import backends
    """Returns the program of a call. Raises an error where a program is traced, whose backend is not known."""
    from ..program import Program, maker
    from ..run import not_while_recording

    not_while_recording("a call of a backend", 's += prompt + ul.gen("text")')
    return maker(Program, name="complete")(_completed)


def _completed(s: State, prompt: str, options: Mapping[str, Any]) -> None:
    said: Any = s._sink  # a Stream
    backend = said.run.backend  # of a replay, the journal's
    streams.run(backend.start())  # some know only then what they are
    if backend.capabilities.converses:
        s += user(prompt) + assistant(gen("text", **options))
    else:
        s += prompt + gen("text", **options)


def _split(
    prompt: object, params: Mapping[str, Any] | None, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits options into those of `gen` and those of `run`. Raises ParameterError as `complete` does."""
    if not isinstance(prompt, str):
        raise ParameterError(
            f"complete() takes one prompt, a string; got {type(prompt).__name__} {shown(prompt)}. Turns and pictures "
            "are for programs: s += ul.user(...) + ul.assistant(ul.gen(...))"
        )
    ops.refuse_operations(prompt, "a prompt")
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        raise ParameterError(f"complete() takes a dict of parameters after the prompt, got {shown(params)}")
    both = sorted(given.keys() & params.keys())
    if both:
        raise ParameterError(f"complete() is given {both[0]} twice, in the dict and by keyword; give one of them")
    options = {**params, **given}
    if (count := options.get("n")) not in (None, 1):
        raise ParameterError(f'complete() gives one text, not n={shown(count)}; write gen("x", n=3) in a program')
    of_run = {name: options.pop(name) for name in list(options) if name in _OF_RUN}
    of_run["sampling"] = {name: options.pop(name) for name in list(options) if name in _OTHER_NAMES}
    if "name" in options:
        raise unknown_option("complete()", "name", {"max_tokens", "temperature", "stop", *_OF_RUN})
    gen("text", **options)  # raises before a model is started
    return options, of_run


def _text(value: object) -> str:
    assert isinstance(value, str), "one continuation is a text"
    return value
