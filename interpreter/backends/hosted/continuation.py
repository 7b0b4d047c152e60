"""How a chat model is asked to go on with a text, where its provider cannot simply let it.

The wording is constant: a provider's prefix cache finds it again, and fakes recognise it.
"""

from .conversation import Conversation, Message, PlainText, message

CONTINUE_TURN = (
    "Continue your last message exactly where it stops. Write only what comes next, without repeating anything."
)
CONTINUE_TEXT = (
    "You continue texts. The user gives the beginning of a text; answer with what comes next in it. "
    "Begin exactly where it stops, repeat nothing of it, and write only what comes next."
)


def of_turn(conversation: Conversation) -> tuple[Message, ...]:
    """The turns of a call that goes on with an assistant turn; of an ordinary call when nothing is said in it yet."""
    if not conversation.begun:
        return conversation.turns
    return (*conversation.turns, Message("assistant", conversation.begun), message("user", CONTINUE_TURN))


def of_text(text: PlainText) -> tuple[Message, ...]:
    """The turns of a call that goes on with a text outside of roles."""
    return (message("system", CONTINUE_TEXT), Message("user", text.content))


def begun_by(messages: tuple[Message, ...]) -> Conversation | PlainText:
    """The inverse of both: what a chat request asks to be continued."""
    match messages:
        case (Message("system") as asked, Message("user", content)) if asked.text == CONTINUE_TEXT:
            return PlainText(content)
        case (*turns, Message("assistant", content), Message("user") as asked) if asked.text == CONTINUE_TURN:
            return Conversation(tuple(turns), content)
        case _:
            return Conversation(messages, ())


def warning(backend: str) -> str:
    """What is told once when a chat model is asked to continue a text."""
    return (
        f"{backend} is a chat model, and this program writes text outside of roles: the model is asked to continue it, "
        "which it does less reliably than a completion model; write user(...) and assistant(gen(...)), or give a "
        "completion model"
    )
