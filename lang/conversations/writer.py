"""Writes whole conversations. All turns are known, so the template is rendered once for conversations of one form.

It is given placeholders for whatever a caller wrote (form.py). The outline it makes of them is kept:

    messages ─► turns ─► form ─► outline (kept, or one rendering) ─► parts, and where each block ends in them

A template that shows no tools is given them in our own words (turns.py): a system text says how to call them, earlier
calls stand in the assistant's text, and results in the user's.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

from ..chat_template import ChatTemplate, TemplateUnanswered
from ..errors import TemplateError
from ..prompt import Text
from ..templates.placeholders import Outline, placeholder, read_outline
from ..tool_calls import FENCED, CallFormat, Tool, ToolCall
from .filling import Filling, kept_spaces, text_of
from .form import NO_TOOLS, ArgumentsForm, ConversationForm, ToolHabits, form_of
from .messages import Conversation, Generation, Message, Option, check_messages, checked_options
from .shown_tools import NO_SHOWN_TOOLS, ShownTools, digest_of, show_tools
from .turns import Piece, WrittenTurn, instruct, instructions_of, pieces_of, turns_of, uses_tools

T = TypeVar("T")

_MOST_KEPT = 256
_MOST_OUTLINES = 4 << 20  # characters
_MOST_TOOLS = 4 << 20  # characters


class ConversationWriter:
    """Writes whole conversations with one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._outlines = _Kept[Outline | TemplateError](_MOST_OUTLINES)
        self._tools = _Kept[ShownTools](_MOST_TOOLS)
        self._knows_template = False  # nothing but outlines has to be rendered

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        call_format: CallFormat = FENCED,
        generation: Generation = True,
        options: Mapping[str, Option] | None = None,
    ) -> Conversation:
        """Returns the prompt, see `ChatTemplate.conversation`."""
        form = self._form(messages, tools, call_format, generation, checked_options(options, self._template))
        written = self._filled(form, len(tools))
        if not self._knows_template:
            self._template.lead_of_answers, self._template.trims, self.habits, self.takes_system  # noqa: B018  (kept)
            self._knows_template = True
        return written

    async def write_away(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        call_format: CallFormat = FENCED,
        generation: Generation = True,
        options: Mapping[str, Option] | None = None,
    ) -> Conversation:
        """Does `write` for an event loop: in a thread when the template has to be rendered in another process."""
        checked = checked_options(options, self._template)
        if not self._template.is_foreign or self._knows_template:
            form = self._form(messages, tools, call_format, generation, checked)
            if not self._template.is_foreign or self._is_kept(form):
                return self._filled(form, len(tools))
        return await asyncio.to_thread(
            self.write, messages, tools, call_format=call_format, generation=generation, options=options
        )

    # ------------------------------------------------------------------ what the template does with tools

    @cached_property
    def habits(self) -> ToolHabits | None:
        """The form of calls that the template takes; None if it does not show tools, calls and their results."""
        return self._find_habits() if "tools" in (self._template.source or "") else None

    @cached_property
    def takes_system(self) -> bool:
        """True if the template shows a system turn."""
        turns = [WrittenTurn(role, [(Text(role), None)]) for role in ("system", "user")]
        return self._is_shown(form_of(turns, NO_SHOWN_TOOLS, False, {}, NO_TOOLS))

    def _find_habits(self) -> ToolHabits | None:
        """Tries a conversation with a call in each form."""
        tool = Tool("trial", "A tool.", {"type": "object", "properties": {"word": {"type": "string"}}})
        shown = show_tools([tool])
        call = ToolCall("trial", '{"word": "text"}', "call")
        said = (
            Message("user", ("question",)),
            Message("assistant", calls=(call,)),
            Message("tool", ("result",), call_id="call", name="trial"),
        )

        def form(arguments: ArgumentsForm, no_content: str | None) -> ConversationForm:
            return form_of(turns_of(said, None), shown, True, {}, ToolHabits(arguments, no_content))

        for arguments in (ArgumentsForm.OBJECT, ArgumentsForm.TEXT):
            for no_content in ("", None):
                tried = form(arguments, no_content)
                if not self._is_shown(tried):
                    continue
                as_text = form(ArgumentsForm.TEXT, no_content)
                if self._is_shown(as_text) and text_of(self._filled(as_text, 1)) == text_of(self._filled(tried, 1)):
                    return as_text.habits
                return tried.habits
        return None

    def _is_shown(self, form: ConversationForm) -> bool:
        try:
            outline = self._outline(form, spaced=False)
        except TemplateUnanswered:
            raise
        except TemplateError:
            return False
        return form.wanted.keys() <= {number for number, _ in outline.marks}

    # ------------------------------------------------------------------ messages → form

    def _form(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        call_format: CallFormat,
        generation: Generation,
        options: Mapping[str, Option],
    ) -> ConversationForm:
        check_messages(messages, generation)
        rest: list[Piece] = []
        if generation == "continue":
            rest = pieces_of(messages[-1], len(messages) - 1)
            messages = messages[:-1]
        if not uses_tools(messages, tools):
            form = form_of(turns_of(messages, None), NO_SHOWN_TOOLS, bool(generation), options, NO_TOOLS)
        elif call_format is FENCED or self.habits is None:
            turns = turns_of(messages, call_format)
            if tools:
                instruct(turns, instructions_of(call_format, tools), takes_system=self.takes_system)
            form = form_of(turns, NO_SHOWN_TOOLS, bool(generation), options, NO_TOOLS)
        else:
            form = form_of(turns_of(messages, None), self._shown(tools), bool(generation), options, self.habits)
        form.rest = rest
        return form

    # ------------------------------------------------------------------ form → outline

    def _outline(self, form: ConversationForm, *, spaced: bool) -> Outline:
        """Returns the outline of a form; from what is kept if the template has rendered one like it.

        Raises:
            TemplateError: the template refuses it.
        """
        if self._template.source is None:
            return _plain_outline(form)
        key, messages = self._key(form, spaced=spaced)
        known = self._outlines.get(key)
        if known is None:
            try:
                text = self._template.render_form(
                    messages, generation=form.generation, tools=form.tools.outlines, options=form.options
                )
                known = read_outline(text)
            except TemplateUnanswered:
                raise
            except TemplateError as error:
                known = error
            self._outlines.put(key, known, known.size if isinstance(known, Outline) else 0)
        if isinstance(known, TemplateError):
            raise TemplateError(*known.args) from known.__cause__
        return known

    def _key(self, form: ConversationForm, *, spaced: bool) -> tuple[bytes, list[dict[str, Any]]]:
        messages = form.messages(spaced=spaced)
        shape = (messages, form.tools.digest, form.generation, sorted(form.options.items()), self._template.moment())
        return digest_of(shape), messages

    def _shown(self, tools: Sequence[Tool]) -> ShownTools:
        if not tools:
            return NO_SHOWN_TOOLS
        key = digest_of([(tool.name, tool.description, tool.parameters) for tool in tools])
        shown = self._tools.get(key)
        if shown is None:
            shown = show_tools(tools)
            self._tools.put(key, shown, shown.size)
        return shown

    def _is_kept(self, form: ConversationForm) -> bool:
        needed = (False, True) if form.has_space else (False,)
        return all(self._outlines.get(self._key(form, spaced=spaced)[0]) is not None for spaced in needed)

    # ------------------------------------------------------------------ outline → parts

    def _filled(self, form: ConversationForm, tools: int) -> Conversation:
        outline = self._outline(form, spaced=False)
        self._check_shown(form, outline)
        shows_space = form.has_space and self._template.source is not None
        spaces = kept_spaces(form, outline, self._outline(form, spaced=True)) if shows_space else {}
        return Filling(form, outline, spaces, self._template).conversation(tools)

    def _check_shown(self, form: ConversationForm, outline: Outline) -> None:
        numbers = {number for number, _ in outline.marks}
        missing = next((words for number, words in form.wanted.items() if number not in numbers), None)
        if missing is not None:
            raise TemplateError(
                f"the chat template of {self._template.name} leaves out {missing}, so the model would not see it; "
                "write its text into another turn, or give another template"
            )


class _Kept(Generic[T]):
    """Keeps what was made before, up to a size; the least recently used is given up first. Threads may share it.

    Args:
        most: of the sizes of all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self._size = 0

    def get(self, key: bytes) -> T | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: bytes, value: T, size: int) -> None:
        with self._lock:
            self._size += size - self._kept.pop(key, (None, 0))[1]
            self._kept[key] = value, size
            while len(self._kept) > _MOST_KEPT or self._size > self._most:
                self._size -= self._kept.popitem(last=False)[1][1]


def _plain_outline(form: ConversationForm) -> Outline:
    """Writes turns as lines that begin with the role, for a model without a template."""
    contents = [turn.space if turn.space is not None else placeholder(i) for i, turn in enumerate(form.turns)]
    lines = [f"{turn.role.upper()}: {content}\n" for turn, content in zip(form.turns, contents, strict=True)]
    return read_outline("".join(lines) + ("ASSISTANT:" if form.generation else ""))
