"""How a reply begins that a model is asked for as a whole, where it cannot go on with what is there.

    assistant("Name: " + gen("name", stop="\\n") + ...)      prompt   ... <|im_start|>assistant
                                                            lead     Name:

A model that cannot continue a turn is asked for all of it, as it was trained to answer; a plain call has to ask it to
go on instead.
"""

from ...lang.prompt import Prompt, Text
from ..position import Position, since, text_of


def lead_of(position: Position, answered: Prompt | None) -> tuple[str, Prompt]:
    """Constant text at the beginning of the open turn, and the prompt before it; "" where nothing can be left out.

    Args:
        answered: the beginning of a turn that holds something generated.
    """
    turn = position.turn
    if turn is None or turn.role != "assistant" or turn.start is answered:
        return "", position.prompt
    parts = since(turn.start, position.prompt)
    if not all(isinstance(part, Text) and not part.control for part in parts):
        return "", position.prompt
    return text_of(parts), turn.start
