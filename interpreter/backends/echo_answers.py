"""Reads a test's script, cuts its answers into tokens as a real backend does, and checks them against constraints.

Echo and the fake providers answer by it. There is no automaton here. A regular expression is applied with `re` (or with
the `regex` package, where it is installed and `re` does not know the syntax), JSON is parsed, and validated where
`jsonschema-rs` is installed; blanks between JSON tokens are not looked at. Grammars are looked at by llguidance, where
it is installed. A script that a real backend could not have said is reported.
"""

import difflib
import importlib.util
import json
import math
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import msgspec

from ...lang import checks
from ...lang.errors import CapabilityError, ConstraintError, ParameterError, RequestError, shown
from ...lang.ops import MAX_CHOICE_LENGTH, MAX_CHOICES
from ...lang.prompt import Part, Text
from ...lang.protocol import Chunk, Completion, ConstraintSpec, FinishReason, GenRequest, TokenLogprob
from ...lang.sampling import MAX_TOKENS, SamplingParams
from ..guarantees import expressions, schemas
from .echo_tokens import pieces, token_id

Answer = str | Sequence[str]
Script = Mapping[str, Answer] | Sequence[Answer] | Callable[[str], Answer]


MOST_ANSWERS = 1_000_000
MOST_CHARACTERS = 1 << 24  # of a key
_ALIKE = 0.85  # "goood" and "good"; less is another word, such as "disagree" and "agree"


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
        self.given = script is not None
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
    if checks.is_function(script):
        return cast(Callable[[str], Answer], script)
    raise ParameterError(f"{owner}({shown(script)}): script: write {wanted}")


def _check_answer(answer: object, owner: str) -> None:
    texts = [answer] if isinstance(answer, str) else answer
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ParameterError(f"{owner}(): script: an answer is {shown(answer)}; write a text, or a list of them for n")


def _last_words(parts: Sequence[Part]) -> str:
    """Returns the last text of a prompt that is not scaffolding."""
    said = [part.text for part in parts if isinstance(part, Text) and not part.control and part.text.strip()]
    return said[-1].strip() if said else "echo"


_FLAGS = re.compile(r"(?:\(\?[aimsux]+\))?")  # they stand at the beginning of an expression, or nowhere


def check(text: str, constraint: ConstraintSpec) -> None:
    """Checks that a whole answer satisfies the constraint.

    Raises:
        RequestError: it does not; the message says how.
        ConstraintError: the constraint itself is wrong.
        CapabilityError: no installed engine can check it.
    """
    match constraint.kind:
        case "regex":
            if compiled(constraint.source).fullmatch(text) is None:
                raise RequestError(
                    f"Echo's answer {shown(text)} does not match regex {shown(constraint.source)} as a whole"
                )
        case "json_schema":
            _check_json(text, constraint.source)
        case "choices":
            if text not in json.loads(constraint.source):
                raise RequestError(f"Echo's answer {shown(text)} is none of {shown(constraint.source)}")
        case "lark" | "gbnf":
            if expressions.walk(constraint.kind, constraint.source, text).accepted != len(text):
                raise RequestError(f"Echo's answer {shown(text)} is no text of the grammar {shown(constraint.source)}")
        case "expression":
            if expressions.walk("expression", constraint.source, text).accepted != len(text):
                form = expressions.spelled(constraint.source)
                raise RequestError(f"Echo's answer {shown(text)} is no text of the expression {shown(form)}")
        case "tools":
            raise CapabilityError("Echo checks no calls of tools; leave the constraint out, or use a Runtime")


def fitting(text: str, constraint: ConstraintSpec) -> str:
    """Returns a text that satisfies the constraint: the given one if it does, else a shortest one.

    Raises:
        RequestError: it does not, and our automata read no constraint of this kind.
        ConstraintError, CapabilityError: as `check`.
    """
    try:
        check(text, constraint)
    except RequestError:
        match constraint.kind:
            case "regex" | "json_schema" | "expression":
                return expressions.shortest(constraint.kind, constraint.source)
        raise
    return text


def compiled(pattern: str) -> "re.Pattern[str]":
    """Compiles a pattern. Raises ConstraintError for one that no engine here supports."""
    try:
        return re.compile(pattern)
    except (RecursionError, OverflowError, MemoryError):
        raise ConstraintError(f"regex {shown(pattern)}: it is nested too deep, or repeats too often") from None
    except re.error as error:
        if importlib.util.find_spec("regex") is None:
            raise ConstraintError(f"regex {shown(pattern)}: {error}") from None
    import regex  # type: ignore[import-untyped]

    try:
        return cast("re.Pattern[str]", regex.compile(pattern, flags=regex.VERSION0))  # it has the same methods
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ConstraintError(f"regex {shown(pattern)}: {error}") from None


def _check_json(text: str, schema: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"Echo's answer {shown(text)} is no JSON: {error}") from None
    if importlib.util.find_spec("jsonschema_rs") is not None and (problems := schemas.violations(schema, text)):
        raise RequestError(f"Echo's answer {shown(text)} is not of the schema: {'; '.join(problems)}")


def first_stop(pattern: str, text: str, free: int) -> tuple[int, int] | None:
    """Finds the first match of a stop_regex: (end, start); None without one.

    The match that ends first counts, and of those that end together the one that begins first. `free`: characters
    at the beginning in which none may end.

    Raises:
        ConstraintError: a pattern that is wrong, or that matches the empty text, which stands everywhere.
    """
    if compiled(pattern).fullmatch("") is not None:
        raise ConstraintError(f"stop_regex {shown(pattern)} matches the empty text; write one that takes a character")
    flags = _FLAGS.match(pattern)
    assert flags is not None, "it matches the empty text too"
    ending = compiled(rf"{flags[0]}(?:{pattern[flags.end() :]})\Z")
    for end in range(free + 1, len(text) + 1):
        found = ending.search(text, 0, end)
        if found is not None:
            return end, found.start()
    return None


def completed(said: str, request: GenRequest) -> tuple[Completion, list[str]]:
    """Returns the completion and the texts of its tokens, for an answer that satisfies the request's constraint."""
    sampling, constraint = request.sampling, request.constraint
    if constraint is None:
        return cut(said, sampling)
    # Nothing is said after the end of a constrained text, whatever the request would like.
    least = min(sampling.min_tokens, len(pieces(said)))
    bounded = msgspec.structs.replace(sampling, min_tokens=least, ignore_eos=False)
    try:
        check(said, constraint)  # a stop of the program may end it anywhere
    except RequestError:  # or the stop stands after it
        try:
            check(cut(said, msgspec.structs.replace(bounded, max_tokens=MAX_TOKENS))[0].text, constraint)
        except RequestError as error:
            raise error from None  # the text up to its stop is what was asked for
    completion, texts = cut(said, bounded)
    whole = completion.finish_reason is FinishReason.STOP and not isinstance(completion.matched_stop, str)
    return msgspec.structs.replace(completion, guarantee="enforced" if whole else ""), texts


def cut(said: str, sampling: SamplingParams) -> tuple[Completion, list[str]]:
    """Applies stops and limits to a text. Returns its completion, and the texts of the tokens."""
    texts = _long_enough(said, sampling)
    endings = [
        ending
        for ending in (_stop_token(texts, sampling), _stop_string(texts, sampling))
        if ending is not None and ending[0] <= sampling.max_tokens
    ]
    if endings:
        count, length, matched = min(endings, key=lambda ending: ending[0])  # a stop token goes before a string
        return _completion(texts[:count], length, FinishReason.STOP, matched), texts[:count]
    reason = FinishReason.STOP
    if len(texts) > sampling.max_tokens or sampling.ignore_eos:
        texts, reason = texts[: sampling.max_tokens], FinishReason.LENGTH
    return _completion(texts, sum(map(len, texts)), reason, None), texts


def _long_enough(said: str, sampling: SamplingParams) -> list[str]:
    """Returns the tokens; the text is repeated up to min_tokens."""
    texts = pieces(said)
    wanted = sampling.max_tokens if sampling.ignore_eos else sampling.min_tokens
    while len(texts) < wanted:
        texts.extend(pieces(" " + said) if said.strip() else [" echo"])
    return texts


# An ending: how many tokens there are then, how many characters of them are text, what matched.
_Ending = tuple[int, int, str | int]


def _stop_token(texts: list[str], sampling: SamplingParams) -> _Ending | None:
    for place in range(max(0, sampling.min_tokens - 1), len(texts)):
        if sampling.stop_token_ids and token_id(texts[place]) in sampling.stop_token_ids:
            return place + 1, sum(map(len, texts[:place])), token_id(texts[place])
    return None


def _stop_string(texts: list[str], sampling: SamplingParams) -> _Ending | None:
    """Finds the stop, or match of a stop_regex, that ends first; of those that end together the longest. None may end
    in the first min_tokens - 1."""
    text = "".join(texts)
    free = sum(map(len, texts[: max(0, sampling.min_tokens - 1)]))
    found: list[tuple[int, int, str]] = []  # end, start, stop
    for stop in sampling.stop:
        start = text.find(stop, max(0, free - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), start, stop))
    for pattern in sampling.stop_regex:
        place = first_stop(pattern, text, free)
        if place is not None:
            found.append((*place, pattern))
    if not found:
        return None
    end, start, stop = min(found)
    count = length = 0
    while length < end:
        length, count = length + len(texts[count]), count + 1
    return count, start, stop


def _completion(texts: list[str], length: int, reason: FinishReason, matched: str | int | None) -> Completion:
    """Builds a completion of the first `length` characters; the tokens wholly inside are kept."""
    kept = end = 0
    for piece in texts:
        if end + len(piece) > length:
            break
        end, kept = end + len(piece), kept + 1
    text = "".join(texts)[:length]
    return Completion(text, tuple(map(token_id, texts)), kept, text[end:], reason, matched)


def chunks(request_id: str, completions: list[Completion], texts: list[list[str]]) -> list[Chunk]:
    """Makes one chunk per kept token, the continuations in turn; a tail comes last."""
    result: list[Chunk] = []
    for place in range(max((completion.kept for completion in completions), default=0) + 1):
        for index, completion in enumerate(completions):
            if place < completion.kept:
                ids, logprobs = completion.token_ids[place : place + 1], completion.logprobs[place : place + 1]
                result.append(Chunk(request_id, index, texts[index][place], ids, logprobs))
            elif place == completion.kept and completion.tail:
                result.append(Chunk(request_id, index, completion.tail))
    return result


def hashed_logprobs(seed: int, tokens: Iterable[tuple[int, str]], top: int) -> tuple[TokenLogprob, ...]:
    """Derives log-probabilities from a hash of the prefix; the token itself is the best."""
    result: list[TokenLogprob] = []
    history = seed
    for token, text in tokens:
        history = zlib.crc32(f"{history}.{token}".encode())
        own = -(history % 2000) / 1000
        others = [(token_id(f"{text}{i}"), f"{text}{i}", own - i) for i in range(1, top)]
        best = [(token, text, own), *others][:top]
        data = tuple(each.encode("utf-8", "surrogatepass") for _, each, _ in best)
        result.append(TokenLogprob(token, text, own, tuple(best), text.encode("utf-8", "surrogatepass"), data))
    return tuple(result)


def checked_scores(name: str, given: object) -> dict[str, float | tuple[float, ...]]:
    """Checks log-probabilities of choices: one number for all tokens of a choice, or one for each.

    Raises:
        ParameterError: anything else.
    """
    if given is None:
        return {}
    wanted = "a dict of choices to log-probabilities, such as {'yes': -0.1}"
    scores = checks.entries(name, given, MAX_CHOICES, wanted)
    return {
        checks.text(f"{name}: a choice", choice, MAX_CHOICE_LENGTH): _scores(f"{name}[{shown(choice)}]", each)
        for choice, each in scores.items()
    }


def _scores(name: str, given: object) -> float | tuple[float, ...]:
    if checks.as_number(given) is not None:
        return float(checks.number(name, given, -math.inf, math.inf, "a log-probability"))
    numbers = checks.members(name, given, MAX_CHOICE_LENGTH, "a log-probability, or a list with one for each token")
    return tuple(float(checks.number(name, each, -math.inf, math.inf, "a log-probability")) for each in numbers)


def refuse_mistyped(scores: Mapping[str, object], choices: Sequence[str]) -> None:
    """Raises RequestError where a choice has no score, and a nearly equal text that is no choice has one.

    A choice without a score is no mistake otherwise: it gets a hash.
    """
    asked = set(choices)
    others = {_compared(text): text for text in scores if text not in asked}
    if not others:
        return
    for choice in choices:
        if choice not in scores and (near := difflib.get_close_matches(_compared(choice), others, 1, _ALIKE)):
            raise RequestError(
                f"Echo's scores have {shown(others[near[0]])}, which is no choice here, and not the choice "
                f"{shown(choice)}; write it as the select does, or give both a score"
            )


def _compared(text: str) -> str:
    return text.strip().lower()


def scores_of(given: float | Sequence[float] | None, choice: str, seed: int) -> tuple[float, ...]:
    """Returns the log-probabilities of a choice from one number for all its tokens, one for each, or None: a hash.

    Raises:
        ParameterError: another number of them than of tokens.
    """
    texts = pieces(choice)
    if given is None:
        history, result = seed, []
        for piece in texts:
            history = zlib.crc32(f"{history}.{piece}".encode("utf-8", "surrogatepass"))
            result.append(-(history % 5000 + 1) / 1000)
        return tuple(result)
    if isinstance(given, int | float):
        return (float(given),) * len(texts)
    if len(given) != len(texts):
        raise ParameterError(
            f"Echo's scores for {shown(choice)} are {len(given)} numbers for the tokens {shown(texts)}"
        )
    return tuple(given)


def checked_bounds(given: object) -> dict[str, tuple[float, float]]:
    """Converts probabilities of choices, or pairs of bounds, to bounds of their logarithms.

    Raises:
        ParameterError: no probabilities, or bounds in the wrong order.
    """
    if given is None:
        return {}
    wanted = "a dict of choices to numbers, such as {'yes': 0.5}"
    found = checks.entries("probabilities", given, MAX_CHOICES, wanted)
    return {
        checks.text("probabilities: a choice", choice, MAX_CHOICE_LENGTH): _bounds(choice, each)
        for choice, each in found.items()
    }


def _bounds(choice: str, given: object) -> tuple[float, float]:
    pair = given if isinstance(given, tuple) else (given, given)
    lower, upper = map(checks.as_number, pair) if len(pair) == 2 else (None, None)
    if lower is None or upper is None or not 0 <= lower <= upper <= 1:
        raise ParameterError(
            f"probabilities: Echo's probability of {shown(choice)} is {shown(given)}; write 0 to 1, or (least, most)"
        )
    return _log(lower), _log(upper)


def _log(probability: float) -> float:
    return math.log(probability) if probability else -math.inf
