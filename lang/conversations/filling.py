"""Puts the texts of a conversation in place of an outline's placeholders."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

from ..chat_template import COPIES, MOST_TEXT, ChatTemplate
from ..errors import TemplateError
from ..prompt import Generated, Media, Part, Text
from ..templates.placeholders import Outline, spelled
from .form import ConversationForm, length_of_rest
from .messages import BlockKey, Conversation
from .turns import TOOLS, Piece


class Filling:
    """Puts texts in place of an outline's placeholders.

    Args:
        spaces: position in the outline → the white space that the template leaves around a content; without an entry
            the content is taken as it is.
    """

    def __init__(
        self, form: ConversationForm, outline: Outline, spaces: Mapping[int, tuple[str, str]], template: ChatTemplate
    ) -> None:
        self._form = form
        self._outline = outline
        self._spaces = spaces
        self._template = template
        self._parts: list[Part] = []
        self._ends: dict[BlockKey, int] = {}

    def conversation(self, tools: int) -> Conversation:
        """Returns the whole prompt."""
        self._check_length()
        last = {block: position for position, block in self._blocks() if block is not None and block[0] == TOOLS}
        ends = {position: index for (_, index), position in last.items()}
        after = 0  # characters of the next gap that are in the prompt already
        for position, (number, codes) in enumerate(self._outline.marks):
            gap, after = self._outline.gaps[position][after:], 0
            if number < len(self._form.turns):
                self._append_content(number, codes, position, gap)
            else:
                self._scaffold(gap)
                text, block = self._form.fillings[number - len(self._form.turns)]
                self._append(Text(spelled(text, codes)), block)
            if position in ends:
                rest = self._outline.gaps[position + 1]
                after = length_of_rest(self._form.tools[ends[position]], rest)
                self._scaffold(rest[:after])
                self._ends[TOOLS, ends[position]] = len(self._parts)
        tail = self._outline.gaps[-1][after:]
        self._scaffold(tail)
        tail += self._append_rest()
        tool_ends = tuple(self._ends.pop((TOOLS, index), None) for index in range(tools))
        return Conversation(tuple(self._parts), self._ends, tool_ends, tail)

    def _blocks(self) -> Iterator[tuple[int, BlockKey | None]]:
        first = len(self._form.turns)
        for position, (number, _) in enumerate(self._outline.marks):
            if number >= first:
                yield position, self._form.fillings[number - first][1]

    def _append(self, part: Part, block: BlockKey | None) -> None:
        if not isinstance(part, Text) or part.text:
            self._parts.append(part)
        if block is not None:
            self._ends[block] = len(self._parts)

    def _scaffold(self, text: str) -> None:
        if text:
            self._parts.append(Text(text, control=self._template.source is not None))

    def _append_content(self, number: int, codes: str, position: int, gap: str) -> None:
        turn = self._form.turns[number]
        pieces = turn.pieces
        if position in self._spaces:
            pieces = _with_spaces(pieces, turn.around, self._spaces[position])
        lead = self._template.lead_of_answers if turn.role == "assistant" and not codes else ""
        self._scaffold(gap.removesuffix(lead))
        if lead and gap.endswith(lead) and not _brings(pieces[0][0], lead):
            self._append(Text(lead), None)
        for part, block in pieces:
            self._append(_respelled(part, codes), block)

    def _append_rest(self) -> str:
        """Appends the message that is continued. Returns its text."""
        pieces = self._form.rest
        if not pieces:
            return ""
        first, block = pieces[0]
        lead = self._template.lead_of_answers
        if isinstance(first, Text) and self._template.trims:
            pieces = [(Text(first.text.lstrip()), block), *pieces[1:]]
        elif lead and not _brings(first, lead):
            self._append(Text(lead), None)
        for part, owner in pieces:
            self._append(part, owner)
        return "".join(part.text for part, _ in pieces if not isinstance(part, Media))

    def _check_length(self) -> None:
        """A template may write what it is given a hundred thousand times, or placeholders of its own."""
        lengths = [sum(_length(part) for part, _ in turn.pieces) for turn in self._form.turns]
        lengths += [len(text) for text, _ in self._form.fillings]
        if any(number >= len(lengths) for number, _ in self._outline.marks):
            raise TemplateError(
                f"chat template of {self._template.name}: it writes the mark of a text it was not given"
            )
        written = sum(lengths[number] * (1 + len(codes)) for number, codes in self._outline.marks)
        if written > MOST_TEXT + 2 * COPIES * sum(lengths):
            raise TemplateError(
                f"chat template of {self._template.name}: it repeats what was said more than {COPIES} times"
            )


def kept_spaces(form: ConversationForm, bare: Outline, spaced: Outline) -> dict[int, tuple[str, str]]:
    """Finds the white space around contents that a template writes, by its outlines without and with that.

    Returns:
        Position in the outline → what is left at the beginning and at the end of the content. Contents whose white
        space the template writes in another form, as JSON say, are not in it.
    """
    if bare.marks != spaced.marks:
        return {}
    around = [form.turns[n].around if n < len(form.turns) and not codes else ("", "") for n, codes in bare.marks]
    before, after = [*(first for first, _ in around), ""], ["", *(last for _, last in around)]
    found = [
        _space_in(gap, wide, space_after, space_before)
        for gap, wide, space_after, space_before in zip(bare.gaps, spaced.gaps, after, before, strict=True)
    ]
    kept = {}
    for position, (left, right) in enumerate(pairwise(found)):
        if around[position] != ("", "") and left is not None and right is not None:
            kept[position] = (left[1], right[0])
    return kept


def _space_in(gap: str, wide: str, after: str, before: str) -> tuple[str, str] | None:
    """Returns the beginning of `after` and the end of `before` that stand around `gap` in `wide`."""
    extra = len(wide) - len(gap)
    for length in range(min(len(after), extra), -1, -1):
        rest = extra - length
        if rest <= len(before) and wide == after[:length] + gap + before[len(before) - rest :]:
            return after[:length], before[len(before) - rest :]
    return None


def _with_spaces(pieces: list[Piece], around: tuple[str, str], kept: tuple[str, str]) -> list[Piece]:
    """Returns the pieces of a content with the white space that is kept of that around it."""
    pieces = list(pieces)
    first, block = pieces[0]
    if isinstance(first, Text) and kept[0] != around[0]:
        pieces[0] = Text(kept[0] + first.text.lstrip()), block
    last, block = pieces[-1]
    if isinstance(last, Text) and kept[1] != around[1]:
        pieces[-1] = Text(last.text.rstrip() + kept[1]), block
    return pieces


def _brings(part: Part, lead: str) -> bool:
    """Returns whether an answer brings the white space at its beginning itself. Generated text does."""
    return isinstance(part, Generated) or (bool(lead) and isinstance(part, Text) and part.text.startswith(lead))


def _respelled(part: Part, codes: str) -> Part:
    if not codes or isinstance(part, Media):
        return part
    return Text(spelled(part.text, codes))


def _length(part: Part) -> int:
    return 0 if isinstance(part, Media) else len(part.text)


def text_of(conversation: Conversation) -> str:
    return "".join(part.text for part in conversation.parts if not isinstance(part, Media))
