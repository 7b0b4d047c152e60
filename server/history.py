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
from .limits import ALL_ANSWERS, SALT_ANSWERS

_LEAST_TOKENS = 16  # that any answer counts as; its entries take so much memory
_TEXT_TOKEN = 4  # characters of a text that count as one token


class AnswerHistory:
    """The last answers of each salt. The least recently used give way, first those of their own salt.

    Args:
        salt_tokens: of one salt's answers.
        all_tokens: of all answers; beyond them the salts that have asked longest ago are given up.
        most: tokens that the cache holds; ids of an answer that it does not hold are of no use. 0 where that is not
            known.
    """

    def __init__(self, salt_tokens: int = SALT_ANSWERS, all_tokens: int = ALL_ANSWERS, most: int = 0) -> None:
        self._salt_tokens = min(salt_tokens, most or salt_tokens)
        self._all_tokens = min(all_tokens, most or all_tokens)
        self._salts: OrderedDict[str, _Answers] = OrderedDict()
        self._size = 0  # of all

    def __len__(self) -> int:
        """Returns the number of salts that have answers."""
        return len(self._salts)

    def keep(self, salt: str, text: str, completion: Completion) -> None:
        """Keeps an answer under the text that the client was given.

        Nothing is kept where the ids do not spell that text: a part of it went elsewhere, as thoughts and calls do, or
        a stop text cut the last token. White space around the text may differ.
        """
        if completion.tail or not completion.kept or completion.text.strip() != text.strip():
            return
        answers = self._salts.setdefault(salt, _Answers(self._salt_tokens))
        self._salts.move_to_end(salt)
        before = answers.size
        answers.put(text, Generated(completion.text, completion.token_ids[: completion.kept]))
        self._size += answers.size - before
        while self._size > self._all_tokens:
            self._size -= self._salts.popitem(last=False)[1].size

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
        self.size = 0
        self._kept: OrderedDict[str, Generated] = OrderedDict()

    def put(self, text: str, answer: Generated) -> None:
        known = self._kept.pop(text, None)
        self.size += _size(answer) - (_size(known) if known is not None else 0)
        self._kept[text] = answer
        while self.size > self._most:
            self.size -= _size(self._kept.popitem(last=False)[1])

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
    return _LEAST_TOKENS + len(answer.token_ids) + len(answer.text) // _TEXT_TOKEN
