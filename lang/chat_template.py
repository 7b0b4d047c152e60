"""Chat templates: roles → text, with the model's own Jinja template.

A program writes a conversation piece by piece, and each piece must extend the text before it, or
the prefix cache could not help and earlier generations would be rewritten. So a template is used
through its *scaffolding*: it is rendered with a placeholder for every message's content, and the
text around the placeholders is what opening and closing a role append. Templates for which a later
message changes earlier scaffolding are reported (`TemplateWarning`), naming the turn.

Placeholders also keep content apart from scaffolding: only scaffolding is marked `control=True` and
may become special tokens, so an argument that spells `<|im_end|>` stays text.

A template is a program, and comes with a downloaded model. Those that umbel ships are rendered here; all others in a
child process (templates/process.py), within limits of time, memory and text. So these may wait, and event loops call
what uses a template by `ChatTemplate.away`.
"""

import asyncio
import difflib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cache, cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from . import checks
from .errors import ParameterError, TemplateError
from .prompt import Part, Place, Text
from .templates.formats import CHATML, NAMES, source_of

if TYPE_CHECKING:
    from .conversations.messages import Conversation, Generation, Message, Option
    from .conversations.writer import ConversationWriter
    from .tool_calls import CallFormat, Tool

__all__ = ["CHATML", "ROLES", "ChatTemplate", "TemplateWarning", "Turn", "chat_template_by_name", "read_chat_template"]

ROLES = ("system", "user", "assistant", "tool", "developer")
MOST_SOURCE = 1 << 20  # characters of a template

# A private-use code point on both sides: no tokenizer, template or filter touches it.
_PLACEHOLDER = "\ue000{}\ue001"
_MARK = "\ue002"  # content of a template that is only tried
_FIND_PLACEHOLDER = re.compile("\ue000([0-9]+)\ue001")
_MOST_NAMES = 256  # of special tokens, and of options
_LONGEST_NAME = 8192  # characters; a model may be called by its path
_MOST_OUTLINES = 256  # each as long as a conversation without its content
MOST_TEXT = 1 << 20  # characters that a template may write on top of what it is given
_SMALL = 4096  # characters
COPIES = 4  # of what it is given, that it may write

_REASONING_TAGS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("<thinking>", "</thinking>"))
# Plain lines end in no token: a model that goes on would write the other side's too.
_PLAIN_STOPS = ("\nUSER:", "\nASSISTANT:", "\nSYSTEM:")

P = ParamSpec("P")
R = TypeVar("R")

_line: ContextVar[Place | None] = ContextVar("umbel.line_of_a_turn", default=None)


@contextmanager
def written_by(line: Place | None) -> Iterator[None]:
    """Names the line of the program whose turn is written in the block: warnings are about that line."""
    token = _line.set(line)
    try:
        yield
    finally:
        _line.reset(token)


class TemplateWarning(UserWarning):
    """Warns that a chat template does not fit what the program does; the text says how.

    Examples:
        >>> import warnings
        >>> plain = ul.ChatTemplate(None, name="my model")  # which has no template of its own
        >>> @ul.function
        ... def chat(s, question):
        ...     s += ul.user(question) + ul.assistant(ul.gen("answer", max_tokens=8))
        >>> with warnings.catch_warnings(record=True, action="always") as told:
        ...     chat.run("Why?", backend=ul.Echo([" So."], chat_template=plain)).text().splitlines()
        ...     print(told[0].message)
        ['USER: Why?', 'ASSISTANT: So.']
        my model has no chat template: roles are written as plain 'SYSTEM:', 'USER:' and ... lines. ...
    """

    __module__ = "umbel"


class TemplateUnanswered(TemplateError):
    """The process that renders templates gave no answer. That says nothing about the template, so nothing is kept."""


class Turn:
    """One role block of a conversation: its role and, once closed, its content."""

    __slots__ = ("content", "role")

    def __init__(self, role: str, content: str | None = None) -> None:
        self.role = role
        self.content = content


class ChatTemplate:
    """Writes the roles of a conversation as a model was trained to read them.

    Backends take one as `chat_template=`. The methods are what the interpreter, the server and tests call.

    Args:
        source: Jinja source as in a tokenizer's `chat_template`, the name of a format such as "chatml", or None for
            the plain fallback (`SYSTEM:`, `USER:`, `ASSISTANT:` lines), of which the first use warns.
        tokens: names the template may use, such as `bos_token`, with their text.
        options: extra variables of the template, such as `enable_thinking`. Plain data.
        name: of the model, for messages.
        checked: compiles it now. False leaves that to the first use: compiling may take a second.

    Attributes:
        source: the Jinja source; None of the plain fallback.
        tokens: as given.
        options: as given.
        name: as given.

    Raises:
        TemplateError: the source does not compile, or it is text without Jinja that names no format.

    Examples:
        >>> template = ul.ChatTemplate("chatml")
        >>> messages = [{"role": "user", "content": "Why?"}]
        >>> template.render(messages, add_generation_prompt=True).splitlines()
        ['<|im_start|>user', 'Why?<|im_end|>', '<|im_start|>assistant']
        >>> @ul.function
        ... def chat(s, question):
        ...     s += ul.user(question) + ul.assistant(ul.gen("answer", max_tokens=8))
        >>> model = ul.Echo(["So."], chat_template=template)
        >>> chat.run("Why?", backend=model)["answer"]
        'So.'
    """

    def __init__(
        self,
        source: str | None,
        *,
        tokens: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        name: str = "this model",
        checked: bool = True,
    ) -> None:
        checks.instance("ChatTemplate(): source", source, str | None)
        checks.text("ChatTemplate(): name", name, _LONGEST_NAME)
        self.source = None if source is None else _source(checks.plain(source))
        self.tokens = (
            {} if tokens is None else checks.entries("tokens", tokens, _MOST_NAMES, "a dict of names to texts")
        )
        for token in self.tokens.values():
            checks.text("ChatTemplate(): one of the tokens", token, _LONGEST_NAME, "a string", empty=True)
        self.options = {} if options is None else checks.entries("options", options, _MOST_NAMES, "a dict by name")
        for option in (*self.tokens, *self.options):
            checks.text("ChatTemplate(): a name in tokens or options", option, _LONGEST_NAME)
        self.name = name
        self._warned: set[str] = set()
        self._outlines: dict[tuple[tuple[str, ...], bool, str], str | TemplateError] = {}
        self._compiled: Any = None  # jinja2.Template of a template that is rendered here
        self._trims: bool | None = None
        self._lead: str | None = None
        self._writer: ConversationWriter | None = None
        self._reads_parts: bool | None = None
        self._told_apart = source is None
        self._limit: str | None = None  # that it reached with little to write
        if checked:
            self._compile()

    # ------------------------------------------------------------------ what the interpreter calls

    def open(self, turns: Sequence[Turn], role: str) -> tuple[Part, ...]:
        """Returns the parts that begin a block of a role after closed turns.

        Usually it is one piece of scaffolding. A template that moves a system message into the first user turn makes
        the earlier content appear here, as ordinary text.

        Args:
            turns: that are closed, oldest first.
            role: of the block.

        Raises:
            TemplateError: the template refuses these turns, or does not tell conversations apart.
        """
        if role not in ROLES:
            raise TemplateError(f"unknown role {role!r}; write one of {', '.join(ROLES)}")
        if self.source is None:
            self._warn(
                f"{self.name} has no chat template: roles are written as plain "
                "'SYSTEM:', 'USER:' and 'ASSISTANT:' lines. Prompt it by completion, or pass chat_template=."
            )
            return (Text("ASSISTANT:" if role == "assistant" else f"{role.upper()}: "),)
        self._check_tells_apart()
        before = self._closed_text(turns)
        if role == "assistant":
            whole = self._outline(_roles(turns), generation=True)
            self._check_shown(before, whole, turns)
        else:
            following = (*_roles(turns), role)
            # A lone system turn may be refused because it is merged into the user turn that comes next.
            rendered = self._try_outline(following) if role == "system" else self._outline(following)
            mark = _PLACEHOLDER.format(len(turns))
            if rendered is not None:
                self._check_shown(before, rendered, turns)
            if rendered is None or mark not in rendered:
                return ()  # the template shows this turn only together with the next one
            whole = rendered[: rendered.index(mark)]
        return self._parts(self._extend(before, whole, turns), turns)

    def lead(self, turns: Sequence[Turn], role: str) -> str:
        """Returns the white space between the opening of an assistant turn and constant content.

        A model writes that space itself as a part of its first token, so the opening must not: Llama 2 and the
        plain fallback have one.

        Args:
            turns: that are closed, oldest first.
            role: of the block that follows; "" is returned for any but "assistant".
        """
        if role != "assistant":
            return ""
        if self.source is None:
            return " "
        mark = _PLACEHOLDER.format(len(turns))
        whole = self._try_outline((*_roles(turns), role)) or ""
        generation = self._outline(_roles(turns), generation=True)
        space = whole[len(generation) : whole.find(mark)] if whole.startswith(generation) and mark in whole else ""
        return space if space.isspace() else ""

    @property
    def lead_of_answers(self) -> str:
        """The `lead` of an assistant turn after a user's first one."""
        if self._lead is None:
            try:
                self._lead = self.lead([Turn("user", "")], "assistant")
            except TemplateUnanswered:
                raise
            except TemplateError:
                self._lead = ""
        return self._lead

    def close(self, turns: Sequence[Turn]) -> tuple[Part, ...]:
        """Returns the parts that end the last of `turns`, whose content is known now."""
        if self.source is None:
            return (Text("\n"),)
        mark = _PLACEHOLDER.format(len(turns) - 1)
        rendered = self._closed_text(turns)
        if mark not in rendered:
            return ()
        self._check_content(turns)
        if turns[-1].role == "assistant":
            self._check_generation_prompt(turns, rendered)
        return self._parts(rendered[rendered.index(mark) + len(mark) :], turns)

    def shows(self, turns: Sequence[Turn]) -> bool:
        """Returns whether the last of `turns` is written at its place, and not only together with the next turn."""
        return self.source is None or _PLACEHOLDER.format(len(turns) - 1) in self._closed_text(turns)

    @property
    def trims(self) -> bool:
        """True if the template strips white space around content, as Gemma's does."""
        if self._trims is None:
            spaced = f" {_MARK} "
            self._trims = self.source is not None and spaced not in (
                self._try([{"role": "user", "content": spaced}]) or spaced
            )
        return self._trims

    @property
    def is_foreign(self) -> bool:
        """True if it is rendered in another process, so that using it may wait for a second or more."""
        return self.source is not None and not _is_shipped(self.source)

    def opens_at_once(self, turns: Sequence[Turn], role: str) -> bool:
        """Returns whether opening a block waits for no other process: it is rendered here, or was opened before.

        Args:
            turns: that are closed, oldest first.
            role: of the block.
        """
        if not self.is_foreign:
            return True
        roles, moment = _roles(turns), self.moment()
        needed = {((*roles, role), False, moment)}
        needed.update((before, False, moment) for before in (roles, roles[:-1]) if before)
        if role == "assistant":
            needed.add((roles, True, moment))
        return self._told_apart and self._trims is not None and needed <= self._outlines.keys()

    async def away(self, work: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Calls what uses this template; in a thread if it may wait for another process.

        Args:
            work: the function.
            arguments: of the function.
            named: its keyword arguments.
        """
        if self.is_foreign:
            return await asyncio.to_thread(work, *arguments, **named)
        return work(*arguments, **named)

    # ------------------------------------------------------------------ what a server calls

    def conversation(
        self,
        messages: Sequence["Message"],
        tools: Sequence["Tool"] = (),
        *,
        call_format: "CallFormat | None" = None,
        generation: "Generation" = True,
        options: "Mapping[str, Option] | None" = None,
    ) -> "Conversation":
        """Writes a whole conversation. Only the template's own text may become special tokens.

        Args:
            messages: the turns, oldest first.
            tools: shown to the model; in our own words where the template shows none, or where `call_format` is ours.
            call_format: the spelling of calls, by `call_format_of` with the names of control tokens; None:
                of this template, as if it had none.
            generation: True: the prompt for an answer. "continue": the last message is the beginning of the answer.
                False: a conversation that is over.
            options: variables of the template for this conversation, such as `enable_thinking`: numbers and words.

        Raises:
            ParameterError: a role, a tool, a call or an option that cannot be meant.
            TemplateError: the template refuses these turns, or leaves one of them out.
        """
        return self.writer.write(
            messages, tools, call_format=call_format or self.call_format, generation=generation, options=options
        )

    def pair(self, query: str, text: str, instruction: str | None = None) -> tuple[Part, ...]:
        """Writes a query and a text as a reranker reads them: in turns of the roles "query" and "document".

        Args:
            query: the question.
            text: the text whose relevance to it is asked for.
            instruction: what "relevant" means, in a turn of the role "system"; None leaves that to the template.

        Raises:
            TemplateError: the template does not name these roles, or leaves one out.
        """
        turns = [Turn("query", query), Turn("document", text)]
        if instruction is not None:
            turns.insert(0, Turn("system", instruction))
        rendered = ""
        if self.source is not None and all(role in self.source for role in _roles(turns)):
            rendered = self._outline(_roles(turns), generation=True)
        if any(_PLACEHOLDER.format(index) not in rendered for index in range(len(turns))):
            raise TemplateError(
                f"{self.name} has no chat template with the roles {' and '.join(_roles(turns))}; write "
                "template='Query: {query}\\nDocument: {text}', as the model was trained"
            )
        return self._parts(rendered, turns)

    async def conversation_away(
        self,
        messages: Sequence["Message"],
        tools: Sequence["Tool"] = (),
        *,
        call_format: "CallFormat | None" = None,
        generation: "Generation" = True,
        options: "Mapping[str, Option] | None" = None,
    ) -> "Conversation":
        """Does `conversation` for an event loop: in a thread where it waits for another process.

        Args:
            messages: as of `conversation`.
            tools: as of `conversation`.
            call_format: as of `conversation`.
            generation: as of `conversation`.
            options: as of `conversation`.
        """
        return await self.writer.write_away(
            messages, tools, call_format=call_format or self.call_format, generation=generation, options=options
        )

    @property
    def writer(self) -> "ConversationWriter":
        """Writes whole conversations, and keeps their outlines."""
        if self._writer is None:
            from .conversations.writer import ConversationWriter

            self._writer = ConversationWriter(self)
        return self._writer

    @property
    def takes_tools(self) -> bool:
        """True if the template shows tools, calls and their results itself. Foreign ones may have to be rendered."""
        return self.writer.habits is not None

    @cached_property
    def call_format(self) -> "CallFormat":
        """The spelling of tool calls that the template shows, as if the tokenizer had no control tokens."""
        from .tool_calls import call_format_of

        return call_format_of(self.source)

    @cached_property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """The tags around the model's reasoning that the template knows of; None if it knows of none."""
        source = self.source or ""
        return next((tags for tags in _REASONING_TAGS if tags[1] in source), None)

    @property
    def turn_stops(self) -> tuple[str, ...]:
        """Texts that begin another turn; only without a template, whose turns end in no token."""
        return () if self.source is not None else _PLAIN_STOPS

    def render_form(
        self,
        messages: Sequence[Mapping[str, Any]],  # Any: JSON
        *,
        generation: bool,
        tools: Sequence[Mapping[str, Any]],
        options: "Mapping[str, Option]",
    ) -> str:
        """Renders messages, with calls if they have some, and tools; for the writer of conversations.

        Args:
            messages: dicts, as templates read them.
            generation: adds the beginning of an answer.
            tools: that are shown to the model, as templates read them.
            options: variables of the template, which go before its own.

        Raises:
            TemplateError: the template refuses them.
        """
        self._check_tells_apart()
        variables = {**options, "tools": list(tools) or None}
        if self._sees_parts():
            messages = [{**m, "content": m["content"] and _as_parts(m["content"])} for m in messages]
        return self._fill(messages, generation=generation, more=variables)

    def moment(self) -> str:
        """Returns a text that changes when outlines are out of date: each minute, if a template asks for the time."""
        return f"{datetime.now():%Y-%m-%d %H:%M}" if "strftime_now" in (self.source or "") else ""

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = False) -> str:
        """Renders messages, as `apply_chat_template` of transformers does.

        Args:
            messages: dicts with "role" and "content", oldest first.
            add_generation_prompt: adds the beginning of an answer.

        Raises:
            TemplateError: the template refuses them, or does not tell conversations apart.
        """
        if self.source is None:
            text = "".join(f"{m['role'].upper()}: {m['content']}\n" for m in messages)
            return text + ("ASSISTANT:" if add_generation_prompt else "")
        self._check_tells_apart()
        return self._render(messages, generation=add_generation_prompt)

    # ------------------------------------------------------------------ how

    def _compile(self) -> None:
        """Raises TemplateError when the source does not compile."""
        if self.source is not None:
            try:
                self._run(None, 0)
            except TemplateError as error:
                raise _said_of(error, f"chat template of {self.name}, {error}") from error.__cause__

    def _run(self, variables: Mapping[str, Any] | None, most: int) -> str:
        """Compile, and render with variables. Raises TemplateError with the reason, and nothing else, whatever the
        template does."""
        assert self.source is not None, "the plain fallback is no template"
        if not _is_shipped(self.source):
            return self._run_elsewhere(variables, most)
        from .templates.jinja import compile_template, reason_of, render_template

        try:
            if self._compiled is None:
                self._compiled = compile_template(self.source)
            return "" if variables is None else render_template(self._compiled, variables, most)
        except Exception as error:
            raise TemplateError(reason_of(error)) from error

    def _run_elsewhere(self, variables: Mapping[str, Any] | None, most: int) -> str:
        from .templates.process import TemplateLimit, render_elsewhere

        assert self.source is not None, "the plain fallback is no template"
        if self._limit is not None:
            raise TemplateError(self._limit)
        try:
            return render_elsewhere(self.source, variables, most)
        except TemplateLimit as error:
            if most <= MOST_TEXT + COPIES * _SMALL:  # it will do so again, and a call tries several times
                self._limit = str(error)
            raise

    def _sees_parts(self) -> bool:
        """Returns whether the template shows content only as a list of parts, as those of some vision models do."""

        def shows(content: Any) -> bool:  # Any: text, or parts
            try:
                return _MARK in self._fill([{"role": "user", "content": content}], generation=False)
            except TemplateUnanswered:
                raise
            except TemplateError:  # also of a template that adds text to what it is given
                return False

        if self._reads_parts is None:
            self._reads_parts = not shows(_MARK) and shows(_as_parts(_MARK))
        return self._reads_parts

    def _render(self, messages: Sequence[Mapping[str, str]], *, generation: bool) -> str:
        if self._sees_parts():
            return self._fill([{**m, "content": _as_parts(m["content"])} for m in messages], generation=generation)
        return self._fill(list(messages), generation=generation)

    def _fill(
        self,
        messages: Sequence[Mapping[str, Any]],  # Any: text, or parts
        *,
        generation: bool,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders with the template's variables and `more`, which go before options of the same name."""
        variables = {"tools": None, "documents": None, **self.tokens, **self.options, **(more or {})}
        variables |= {"messages": list(messages), "add_generation_prompt": generation}
        given = sum(len(message["content"]) for message in messages if isinstance(message["content"], str))
        try:
            return self._run(variables, MOST_TEXT + COPIES * given)
        except TemplateError as error:
            roles = ", ".join([message["role"] for message in messages[-8:]])
            turns = f"… {roles}" if len(messages) > 8 else roles
            message = f"chat template of {self.name} refuses the turns {turns}: {error}"
            raise _said_of(error, message) from error.__cause__

    def _try(self, messages: list[Mapping[str, str]]) -> str | None:
        """Rendered text, or None where the template refuses (a lone system turn, say)."""
        try:
            return self._render(messages, generation=False)
        except TemplateUnanswered:
            raise
        except TemplateError:
            return None

    def _outline(self, roles: tuple[str, ...], *, generation: bool = False) -> str:
        """Turns of these roles, with placeholders for their content. They are kept: a conversation asks for the same
        ones as the last one did."""
        key = (roles, generation, self.moment())
        known = self._outlines.get(key)
        if known is None:
            try:
                messages: list[Mapping[str, str]] = [
                    {"role": role, "content": _PLACEHOLDER.format(index)} for index, role in enumerate(roles)
                ]
                known = self._render(messages, generation=generation)
            except TemplateUnanswered:
                raise
            except TemplateError as error:
                known = error
            if len(self._outlines) >= _MOST_OUTLINES:
                self._outlines.clear()
            self._outlines[key] = known
        if isinstance(known, TemplateError):
            raise TemplateError(*known.args) from known.__cause__
        return known

    def _try_outline(self, roles: tuple[str, ...]) -> str | None:
        try:
            return self._outline(roles)
        except TemplateUnanswered:
            raise
        except TemplateError:
            return None

    def _closed_text(self, turns: Sequence[Turn]) -> str:
        """Everything emitted for closed turns, with placeholders. A turn the template does not show yet is absent."""
        if not turns:
            return ""
        rendered = self._try_outline(_roles(turns))
        if rendered is None:
            return ""
        return rendered if _PLACEHOLDER.format(len(turns) - 1) in rendered else ""

    def _extend(self, before: str, whole: str, turns: Sequence[Turn]) -> str:
        if whole.startswith(before):
            return whole[len(before) :]
        common = next(
            (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole))
        )
        turn = len(_FIND_PLACEHOLDER.findall(before[:common]))
        self._warn(
            f"the chat template of {self.name} is not prefix-stable: what follows rewrites turn {turn} "
            f"({turns[min(turn, len(turns) - 1)].role}); the text already sent is kept as it was"
        )
        last = _PLACEHOLDER.format(len(turns) - 1)
        return whole[whole.index(last) + len(last) :] if last in whole else whole[common:]

    def _check_tells_apart(self) -> None:
        """Refuses a template that does not show what a user says: all conversations would be alike."""
        if self._told_apart:
            return
        said = [self._try([{"role": "user", "content": content}]) for content in ("hello", "good bye")]
        if said[0] is not None and said[0] == said[1]:
            raise TemplateError(
                f"the chat template of {self.name} writes two different conversations alike, as {said[0][:100]!r}: it "
                "does not show what the user says; give another one by chat_template="
            )
        self._told_apart = True

    def _check_shown(self, before: str, whole: str, turns: Sequence[Turn]) -> None:
        """Refuses a template that leaves a turn out: neither written when it was closed nor together with the next."""
        if not turns:
            return
        new = len(turns) - 1 if len(turns) < 2 or self.shows(turns[:-1]) else len(turns) - 2
        for index, turn in enumerate(turns[new:], new):
            mark = _PLACEHOLDER.format(index)
            if (turn.content or "").strip() and mark not in whole and mark not in before:
                raise TemplateError(
                    f"the chat template of {self.name} leaves out turn {index} ({turn.role}), so the model would not "
                    "see it; write its text into another turn, or give another template by chat_template="
                )

    def _check_content(self, turns: Sequence[Turn]) -> None:
        """Does the template write this content as it is? Some strip reasoning or refuse roles in this order."""
        real = [{"role": t.role, "content": t.content or ""} for t in turns]
        rendered = self._try(list(real))
        if rendered is None:
            return
        for index, turn in enumerate(turns):
            if turn.content and turn.content.strip() not in rendered:
                self._warn(
                    f"the chat template of {self.name} rewrites the content of turn {index} ({turn.role}); "
                    "umbel keeps the text as the program wrote it"
                )

    def _check_generation_prompt(self, turns: Sequence[Turn], rendered: str) -> None:
        """Does history show what the generation prompt wrote? Qwen 3 writes an empty thought that history omits."""
        generation = self._outline(_roles(turns[:-1]), generation=True)
        if not rendered.startswith(generation):
            self._warn(
                f"the chat template of {self.name} is not prefix-stable: its generation prompt ends in "
                f"{generation[-24:]!r}, which it leaves out of turn {len(turns) - 1} (assistant) afterwards; "
                "umbel keeps the text as it was generated"
            )

    def _parts(self, text: str, turns: Sequence[Turn]) -> tuple[Part, ...]:
        """Scaffolding with placeholders → parts: content is plain text, the rest may be special tokens."""
        found = list(_FIND_PLACEHOLDER.finditer(text))
        self._check_placeholders([match.group(1) for match in found], turns)
        parts: list[Part] = []
        end = 0
        for match in found:
            if match.start() > end:
                parts.append(Text(text[end : match.start()], control=True))
            content = turns[int(match.group(1))].content
            parts.append(Text((content or "").strip() if self.trims else content or ""))
            end = match.end()
        if end < len(text):
            parts.append(Text(text[end:], control=True))
        return tuple(parts)

    def _check_placeholders(self, numbers: Sequence[str], turns: Sequence[Turn]) -> None:
        """A template may write numbers of its own between the marks, and any content a hundred thousand times."""
        known = {str(index): len(turn.content or "") for index, turn in enumerate(turns)}
        forged = next((number for number in numbers if number not in known), None)
        if forged is not None:
            raise TemplateError(f"chat template of {self.name}: it writes the mark of a turn that is not there")
        if sum(known[number] for number in numbers) > MOST_TEXT + COPIES * sum(known.values()):
            raise TemplateError(f"chat template of {self.name}: it repeats what was said more than {COPIES} times")

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            line = _line.get()
            if line is None:
                warnings.warn(message, TemplateWarning, stacklevel=3)
            else:
                warnings.warn_explicit(message, TemplateWarning, line.file, line.number, Path(line.file).stem)


def chat_template_by_name(name: str) -> ChatTemplate:
    """The chat template of a named format, such as "chatml", "llama-3-instruct" or "gemma-it".

    Raises:
        TemplateError: no format has this name; the message has the nearest ones.
    """
    source = source_of(name)
    if source is None:
        raise TemplateError(f"there is no chat format {name[:100]!r}; {_near_names(name)}")
    return ChatTemplate(source, name=name)


def read_chat_template(
    given: "str | PathLike[str] | ChatTemplate", *, options: Mapping[str, Any] | None = None, name: str
) -> ChatTemplate:
    """Makes a ChatTemplate of the parameter `chat_template=` of a backend.

    Args:
        given: a ChatTemplate, Jinja source, the name of a format, or the path of a file with Jinja source. Text that
            holds `{{` or `{%` is source.
        options: extra variables of the template; a ChatTemplate has its own.
        name: for messages.

    Raises:
        ParameterError: it is neither text, nor a path, nor a ChatTemplate.
        TemplateError: it is none of them, the file cannot be read, or the source does not compile.
    """
    if isinstance(given, ChatTemplate):
        return given
    if not isinstance(given, str | PathLike):
        raise ParameterError(
            f"chat_template must be Jinja source, the name of a format, a path or a ChatTemplate, "
            f"got {type(given).__name__}"
        )
    text = checks.plain(given) if isinstance(given, str) else given
    if isinstance(text, str) and (_is_jinja(text) or source_of(text) is not None):
        return ChatTemplate(text, options=options, name=name)
    return ChatTemplate(_file_content(text), options=options, name=name)


def _said_of(error: TemplateError, message: str) -> TemplateError:
    """The same kind of error with more words."""
    return TemplateUnanswered(message) if isinstance(error, TemplateUnanswered) else TemplateError(message)


def _source(given: str) -> str:
    """Jinja source, given as it is or by the name of a format."""
    if len(given) > MOST_SOURCE:
        raise TemplateError(f"a chat template of {len(given)} characters; the limit is {MOST_SOURCE}")
    source = given if _is_jinja(given) else source_of(given)
    if source is None:
        raise TemplateError(
            f"the chat template {given[:100]!r} is text without {{{{ }}}} or {{% %}}: every conversation would be that "
            f"text; {_near_names(given)}"
        )
    return source


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


def _file_content(given: "str | PathLike[str]") -> str:
    try:
        path = Path(given).expanduser()
        if path.is_file():
            with path.open(encoding="utf-8") as file:
                content = file.read(MOST_SOURCE + 1)
            if not _is_jinja(content):
                raise TemplateError(f"the file {str(path)[:500]!r} holds no Jinja source; give a chat_template.jinja")
            return content
    except (OSError, ValueError, RuntimeError) as error:  # the latter two: no path, no such user, no UTF-8
        raise TemplateError(
            f"chat_template={str(given)[:100]!r} cannot be read as a file ({str(error)[:100]})"
        ) from None
    raise TemplateError(
        f"chat_template={str(given)[:100]!r} is no Jinja source (it holds no {{{{ or {{%), no existing file, and no "
        f"name of a format; {_near_names(str(given))}"
    )


def _near_names(name: str) -> str:
    near = difflib.get_close_matches(name[:100].lower(), NAMES, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known names are {', '.join(NAMES)}"


def _is_shipped(source: str) -> bool:
    return source in _shipped()


@cache
def _shipped() -> frozenset[str | None]:
    return frozenset(map(source_of, NAMES))


def _roles(turns: Sequence[Turn]) -> tuple[str, ...]:
    return tuple([turn.role for turn in turns])


def _as_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]
