"""Scripts: the answers of Echo and of the fake providers to prompts."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ...lang import checks
from ...lang.errors import ParameterError, RequestError, shown
from ...lang.prompt import Part, Text

Answer = str | Sequence[str]
Script = Mapping[str, Answer] | Sequence[Answer] | Callable[[str], Answer]


MOST_ANSWERS = 1_000_000
MOST_CHARACTERS = 1 << 24  # of a key


class ScriptReader:
    """A script and how far it has been read.

    Args:
        script: a dict (the answer whose key stands last in the prompt), a list (one answer per continuation, in the
            order of the calls), a function of the prompt's text, or None (the last piece of text that the program
            itself wrote is given back). An answer may be a list, one text per continuation of `n`.
        owner: who reads it, for messages.

    Raises:
        ParameterError: a bare string, or anything else that gives no answers.
    """

    def __init__(self, script: Script | None, owner: str) -> None:
        self._script = _checked(script, owner)
        self._owner = owner

    def answers(self, prompt: str, parts: Sequence[Part], n: int) -> list[str]:
        """Returns `n` answers to a prompt.

        Args:
            prompt: its text, for dicts and functions.
            parts: its parts, used where there is no script.

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
                _check_answer(said, self._owner)
        if isinstance(said, str):
            return [said] * n
        if len(said) != n:
            raise RequestError(f"{self._owner}'s script gives {len(said)} answers where n={n} are asked for")
        return list(said)


def _checked(script: object, owner: str) -> deque[Answer] | Mapping[str, Answer] | Callable[[str], Answer] | None:
    wanted = "a list of answers, a dict, or a function of the prompt"
    if script is None:
        return None
    if isinstance(script, Mapping):
        said = checks.entries(f"{owner}(): script", script, MOST_ANSWERS, wanted)
        for key, answer in said.items():
            checks.text(f"{owner}(): a key of the script", key, MOST_CHARACTERS, "a text", empty=True)
            _check_answer(answer, owner)
        return said
    if isinstance(script, Sequence) and not isinstance(script, str | bytes | bytearray):
        answers = deque(checks.members(f"{owner}(): script", script, MOST_ANSWERS, wanted))
        for answer in answers:
            _check_answer(answer, owner)
        return answers
    if callable(script) and not isinstance(script, type):
        return script
    raise ParameterError(f"{owner}({shown(script)}): script: write {wanted}")


def _check_answer(answer: object, owner: str) -> None:
    texts = [answer] if isinstance(answer, str) else answer
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ParameterError(f"{owner}(): script: an answer is {shown(answer)}; write a text, or a list of them for n")


def _last_words(parts: Sequence[Part]) -> str:
    """Returns the last text of a prompt that is not scaffolding."""
    said = [part.text for part in parts if isinstance(part, Text) and not part.control and part.text.strip()]
    return said[-1].strip() if said else "echo"
