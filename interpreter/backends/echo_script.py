"""Scripts: what a model that does not exist would say to a prompt. Echo reads them, and so do the fake providers."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ...lang.errors import ParameterError, RequestError
from ...lang.prompt import Part, Text

Answer = str | Sequence[str]
Script = Mapping[str, Answer] | Sequence[Answer] | Callable[[str], Answer]


class ScriptReader:
    """A script and how far it has been read.

    Args:
        script: a dict (the answer whose key stands last in the prompt), a list (one answer per continuation, in the
            order of the calls), a function of the prompt's text, or None (the last piece of text that the program
            itself wrote is given back). An answer may be a list, one text per continuation of `n`.
        owner: who reads it, for messages.

    Raises:
        ParameterError: a bare string.
    """

    def __init__(self, script: Script | None, owner: str) -> None:
        if isinstance(script, str):
            raise ParameterError(f"{owner}({script!r}): write a list of answers, a dict, or a function of the prompt")
        self._script = deque(script) if isinstance(script, Sequence) else script
        self._owner = owner

    def answers(self, prompt: str, parts: Sequence[Part], n: int) -> list[str]:
        """What is said to a prompt, `n` times.

        Args:
            prompt: its text, for dicts and functions.
            parts: what it is made of, where there is no script.

        Raises:
            RequestError: the script has no answer.
        """
        script = self._script
        match script:
            case None:
                said: Answer = _last_words(parts)
            case Mapping():
                key = max((key for key in script if key in prompt), key=prompt.rfind, default=None)
                if key is None:
                    raise RequestError(
                        f"{self._owner}'s dict has no key that stands in the prompt ending with {prompt[-60:]!r}"
                    )
                said = script[key]
            case deque():
                whole = bool(script) and not isinstance(script[0], str)  # one entry for all of n
                if len(script) < (1 if whole else n):
                    raise RequestError(
                        f"{self._owner}'s list of answers is used up; prompt ending with {prompt[-60:]!r}"
                    )
                said = script.popleft() if whole else [str(script.popleft()) for _ in range(n)]
            case _:
                said = script(prompt)
        if isinstance(said, str):
            return [said] * n
        if len(said) != n:
            raise RequestError(f"{self._owner}'s script gives {len(said)} answers where n={n} are asked for")
        return list(said)


def _last_words(parts: Sequence[Part]) -> str:
    """The last text of a prompt that is not scaffolding."""
    said = [part.text for part in parts if isinstance(part, Text) and not part.control and part.text.strip()]
    return said[-1].strip() if said else "echo"
