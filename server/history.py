"""Keeps the token ids of answers, for conversations that bring their texts back.

A chat client sends an answer back as text. Encoded again it has the same tokens as a rule, but not always: a model may
write "th" and "e" where the tokenizer would write "the". Then all that follows would be computed again, however much of
it lies in the cache. An answer that was given here goes into the prompt with the ids that the model chose.

An answer is found by its text, among those of one salt: no salt's answers show in what another one's cost.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from ..lang.conversations.messages import Message
from ..lang.prompt import Generated
from ..lang.protocol import Completion

_MOST_SALTS = 1024
_MOST_TOKENS = 1 << 16  # of the answers of one salt; 2 MB
_TEXT_TOKEN = 4  # characters of a text that count as one token


class AnswerHistory:
    """The last answers of each salt.

    Args:
        most_tokens: of one salt's answers; the least recently used are given up first.
    """

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._most = most_tokens
        self._salts: OrderedDict[str, _Answers] = OrderedDict()

    def keep(self, salt: str, text: str, completion: Completion) -> None:
        """Keeps an answer under the text that the client was given.

        Nothing is kept where the ids do not spell that text: a part of it went elsewhere, as thoughts and calls do, or
        a stop text cut the last token. White space around the text may differ.
        """
        if completion.tail or not completion.kept or completion.text.strip() != text.strip():
            return
        answers = self._salts.setdefault(salt, _Answers(self._most))
        self._salts.move_to_end(salt)
        answers.put(text, Generated(completion.text, completion.token_ids[: completion.kept]))
        if len(self._salts) > _MOST_SALTS:
            self._salts.popitem(last=False)

    def recall(self, salt: str, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages, with the ids of the answers among them that are known."""
        answers = self._salts.get(salt)
        if answers is None:
            return list(messages)
        self._salts.move_to_end(salt)
        return [answers.replaced(message) for message in messages]


class _Answers:
    """Answers of one salt by their text, up to a number of tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._kept: OrderedDict[str, Generated] = OrderedDict()

    def put(self, text: str, answer: Generated) -> None:
        known = self._kept.pop(text, None)
        self._size += _size(answer) - (_size(known) if known is not None else 0)
        self._kept[text] = answer
        while self._size > self._most:
            self._size -= _size(self._kept.popitem(last=False)[1])

    def replaced(self, message: Message) -> Message:
        if message.role != "assistant" or len(message.content) != 1:
            return message
        (text,) = message.content
        if not isinstance(text, str) or text not in self._kept:
            return message
        answer = self._kept[text]
        self._kept.move_to_end(text)
        return replace(message, content=(answer,))


def _size(answer: Generated) -> int:
    return len(answer.token_ids) + len(answer.text) // _TEXT_TOKEN
