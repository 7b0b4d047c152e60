"""Messages → the turns that a template is given, with tools, calls and results in our own words if it shows none."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..prompt import Part, Text
from ..tool_calls import CallFormat, Tool, ToolCall, described
from .messages import BlockKey, Message

TOOLS = -1  # in a BlockKey, in place of a message's number: the block is a tool
Piece = tuple[Part, BlockKey | None]  # a part of a turn's content, and the block that ends with it

_MOST_SPACE = 256  # characters of white space at an end of a content that the template is shown
_MARK = "\ue002"  # a content, to find what stands around it


@dataclass(slots=True)
class WrittenTurn:
    """A turn as the template is given it. In our own words one may stand for several messages, or for tools."""

    role: str
    pieces: list[Piece]
    number: int | None = None  # of its message, or of the first one
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    reasoning: str = ""
    has_results: bool = False  # of calls, in our own words

    @property
    def space(self) -> str | None:
        """The content, where it is nothing but a little white space; else None."""
        texts = [part.text for part, _ in self.pieces if isinstance(part, Text)]
        content = "".join(texts)
        is_space = len(texts) == len(self.pieces) and len(content) <= _MOST_SPACE and not content.strip()
        return content if is_space else None

    @property
    def around(self) -> tuple[str, str]:
        """White space at the beginning and at the end of the content; none where that is generated or a picture."""
        first, last = self.pieces[0][0], self.pieces[-1][0]
        before = first.text[: len(first.text) - len(first.text.lstrip())] if isinstance(first, Text) else ""
        after = last.text[len(last.text.rstrip()) :] if isinstance(last, Text) else ""
        return before[-_MOST_SPACE:], after[:_MOST_SPACE]


def turns_of(messages: Sequence[Message], call_format: CallFormat | None) -> list[WrittenTurn]:
    """Returns the turns of messages; with calls and results in our own words if a format is given.

    Results become one user turn together with the user's next message: many templates want turns to alternate.
    """
    names = {call.id: call.name for message in messages for call in message.calls if call.id}
    turns: list[WrittenTurn] = []
    for number, message in enumerate(messages):
        pieces = pieces_of(message, number)
        name = message.name or (names.get(message.call_id, "") if message.role == "tool" else "")
        if call_format is None:
            turn = WrittenTurn(message.role, pieces, number, message.calls, message.call_id, name, message.reasoning)
        elif message.role == "tool":
            head, _, tail = call_format.spell_result(name or message.call_id, _MARK).rpartition(_MARK)
            last, block = pieces[-1]
            pieces = [(Text(head), None), *pieces[:-1], (last, None), (Text(tail), block)]
            turn = WrittenTurn("user", pieces, number, has_results=True)
        else:
            pieces += _spelled_calls(message, number, call_format)
            turn = WrittenTurn(message.role, pieces, number, name=name, reasoning=message.reasoning)
        if turn.role == "user" and turns and turns[-1].has_results:
            turns[-1].pieces += [(Text("\n"), None), *turn.pieces]
            turns[-1].has_results = turn.has_results
        else:
            turns.append(turn)
    return turns


def uses_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    return bool(tools) or any(message.calls or message.role == "tool" for message in messages)


def instruct(turns: list[WrittenTurn], instructions: list[Piece], *, takes_system: bool) -> None:
    """Puts the text that shows the tools before all else: into the system turn, or into the user's first one."""
    role = "system" if takes_system else "user"
    turn = next((turn for turn in turns if turn.role == role), None)
    if turn is None or (takes_system and turn is not turns[0]):
        turns.insert(0, WrittenTurn(role, instructions))
    elif turn.space is not None:
        turn.pieces = [*instructions, *turn.pieces]
    else:
        turn.pieces = [*instructions, (Text("\n\n"), None), *turn.pieces]


def instructions_of(call_format: CallFormat, tools: Sequence[Tool]) -> list[Piece]:
    """Returns the text that shows the tools, cut where each of them ends."""
    text, pieces, start = call_format.instructions(tools), list[Piece](), 0
    for index, tool in enumerate(tools):
        shown_as = described(tool)
        end = text.index(shown_as, start) + len(shown_as)
        pieces.append((Text(text[start:end]), (TOOLS, index)))
        start = end
    return [*pieces, (Text(text[start:]), None)]


def pieces_of(message: Message, number: int) -> list[Piece]:
    """Returns the content of a message as pieces; at least one, which may be empty."""
    parts = [Text(block) if isinstance(block, str) else block for block in message.content]
    return [(part, (number, index)) for index, part in enumerate(parts)] or [(Text(""), None)]


def _spelled_calls(message: Message, number: int, call_format: CallFormat) -> list[Piece]:
    """Returns the calls of a message as text after its content, a piece for each."""
    calls = message.calls
    texts = [f"{call_format.header(call.name)}{call.arguments or '{}'}{call_format.after_arguments}" for call in calls]
    if not texts:
        return []
    said = "".join(block if isinstance(block, str) else " " for block in message.content)
    before = "\n" if said and not said.endswith("\n") else ""
    texts = [(call_format.between if index else before + call_format.open) + text for index, text in enumerate(texts)]
    texts[-1] += call_format.close
    first = len(message.content)
    return [(Text(text), (number, first + index)) for index, text in enumerate(texts)]
