"""Puts the texts of a conversation in place of an outline's placeholders."""

from collections.abc import Mapping
from itertools import pairwise

from ..chat_template import COPIES, MOST_TEXT, ChatTemplate
from ..errors import TemplateError
from ..prompt import Generated, Media, Part, Text
from ..templates.placeholders import Outline, spelled
from .form import ConversationForm
from .messages import BlockKey, Conversation
from .shown_tools import FIRST_TEXT, is_only_json, length_of_rest
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
        gaps, marks, shown = self._outline.gaps, self._outline.marks, self._form.tools
        owners = [shown.tool_of(number) for number, _ in marks]
        last = {tool: position for position, tool in enumerate(owners) if tool is not None}
        after = 0  # characters of the next gap that are in the prompt already
        for position, (number, codes) in enumerate(marks):
            tool = owners[position]
            gap, after = gaps[position][after:], 0
            if tool is not None:
                inside = position > 0 and owners[position - 1] == tool
                self._append_tool_text(shown.text(number, codes), gap, inside=inside)
                if last[tool] == position:
                    after = length_of_rest(shown.rests[tool], gaps[position + 1])
                    self._scaffold(gaps[position + 1][:after])
                    self._ends[TOOLS, tool] = len(self._parts)
            elif number < len(self._form.turns):
                self._append_content(number, codes, position, gap)
            else:
                self._scaffold(gap)
                text, block = self._form.fillings[number - len(self._form.turns)]
                self._append(Text(spelled(text, codes)), block)
        tail = gaps[-1][after:]
        self._scaffold(tail)
        tail += self._append_rest()
        tool_ends = tuple(self._ends.pop((TOOLS, index), None) for index in range(tools))
        return Conversation(tuple(self._parts), self._ends, tool_ends, tail)

    def _append_tool_text(self, text: str, gap: str, *, inside: bool) -> None:
        """Appends a text of a tool; to the last one of the same tool, where there is only JSON between them."""
        last = self._parts[-1] if inside and self._parts else None
        if isinstance(last, Text) and not last.control and is_only_json(gap):
            self._parts[-1] = Text(last.text + gap + text)
        else:
            self._scaffold(gap)
            self._append(Text(text), None)

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
        shown = self._form.tools
        known = dict(enumerate(lengths)) | {n: len(text) for n, (text, _) in enumerate(shown.texts, FIRST_TEXT)}
        if any(number not in known for number, _ in self._outline.marks):
            raise TemplateError(
                f"chat template of {self._template.name}: it writes the mark of a text it was not given"
            )
        written = sum(known[number] * (1 + len(codes)) for number, codes in self._outline.marks)
        if written > MOST_TEXT + 2 * COPIES * sum(known.values()):
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
