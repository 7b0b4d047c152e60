"""Requests to chat models as the one text that a script is asked about: what Echo would have been asked.

A provider's own template is nobody's business; conversations are written as ChatML here, as the hosted backends have
them (`hosted/conversation.py`), so that one script answers Echo and every fake.
"""

from collections.abc import Iterable

from ...lang.prompt import Part, Text
from ..backends.hosted.conversation import Content, Conversation, Message, PlainText, asked_to_continue


def meant(messages: tuple[Message, ...]) -> tuple[Part, ...]:
    """What the messages ask to be continued: a turn that a continuation request quotes is an open turn again."""
    return written(asked_to_continue(messages))


def written(asked: Conversation | PlainText) -> tuple[Part, ...]:
    """The parts of a prompt as the interpreter writes it."""
    match asked:
        case PlainText(content):
            return content
        case Conversation(turns, begun):
            return (*_closed(turns), Text("<|im_start|>assistant\n", control=True), *begun)


def sent(messages: tuple[Message, ...], begun: Content = ()) -> tuple[Part, ...]:
    """All that travels, as it is counted."""
    return written(Conversation(messages, begun))


def _closed(turns: Iterable[Message]) -> Iterable[Part]:
    for turn in turns:
        yield Text(f"<|im_start|>{turn.role}\n", control=True)
        yield from turn.content
        yield Text("<|im_end|>\n", control=True)
