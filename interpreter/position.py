"""The position of a stream: its prompt, the conversation so far, and the scopes that are open.

Owned by one stream and changed only on the streams' loop. Prompt and turns are persistent, so a
copy for a branch costs the same however long the text is.
"""

from dataclasses import dataclass, replace

from ..lang.caching import COUNTED_MARKS, CacheMark, Caching
from ..lang.chat_template import ChatTemplate, Turn, written_by
from ..lang.errors import TemplateError
from ..lang.prompt import EMPTY, Media, Part, Private, Prompt, Source, SourceKind, Text


@dataclass(slots=True)
class OpenTurn:
    """A role block that is not closed yet.

    prompt   ... scaffolding | content ...
                             ^ start
    """

    role: str
    start: Prompt
    deferred: list[str] | None  # content of a turn that the template shows only together with the next one
    trims: bool  # the template strips white space around content, so we do as it is written
    lead: str  # white space that goes before constant content, unless that brings it; generated content brings its own
    blank: bool = True  # no content yet
    # White space that was said and is not in the prompt. Where the template trims: the end of the content, which is
    # dropped if the turn ends here. Elsewhere: the beginning of the content, which may become the whole lead.
    held: str = ""


@dataclass(slots=True)
class Position:
    prompt: Prompt = EMPTY
    turns: tuple[Turn, ...] = ()
    turn: OpenTurn | None = None
    owed: bool = False  # the last closed turn is not in the prompt yet
    scopes: tuple[tuple[str, Prompt], ...] = ()  # open var_scopes: name, prompt at the beginning
    points: tuple[tuple[Prompt, float], ...] = ()  # the last cache points: prompt before each, and its TTL in seconds
    coming_point: float | None = None  # TTL of a point after text that the template shows with the next turn
    coming_private: tuple[Private, ...] = ()  # after such text

    def copy(self) -> "Position":
        turn = self.turn
        if turn is not None:
            turn = replace(turn, deferred=None if turn.deferred is None else list(turn.deferred))
        return replace(self, turn=turn)

    # -------------------------------------------------------------------------------- roles

    def open_turn(self, template: ChatTemplate, role: str, source: Source | None = None) -> tuple[Part, ...]:
        """Begins a block. Returns the scaffolding that was appended."""
        with written_by(None if source is None else source.place):
            scaffolding = template.open(self.turns, role)
            deferred = role != "assistant" and not template.shows((*self.turns, Turn(role, "")))
        if deferred and self.coming_private:
            raise TemplateError(
                f"the chat template writes the turn before private() and a {role} turn together with the next turn, so "
                f"nothing can part them; move private() before both, or leave out {role}(...)"
            )
        if not deferred:
            self.owed = False
        self._scaffold(scaffolding, role, source)
        if not deferred and self.coming_point is not None:
            self._set_point(self.coming_point)
            self.coming_point = None
        if not deferred:
            for part in self.coming_private:
                self.append(part)
            self.coming_private = ()
        lead = template.lead(self.turns, role)
        self.turn = OpenTurn(role, self.prompt, [] if deferred else None, template.trims, lead)
        return scaffolding

    def close_turn(self, template: ChatTemplate, source: Source | None = None) -> tuple[Part, ...]:
        """Ends the block, dropping trailing white space if the template trims. Returns the appended scaffolding."""
        turn = self.turn
        assert turn is not None, "the stream checks roles when they are submitted"
        self.lead_in()
        content = "".join(turn.deferred) if turn.deferred is not None else text_of(since(turn.start, self.prompt))
        self.turns = (*self.turns, Turn(turn.role, content))
        self.turn = None
        self.owed = turn.deferred is not None
        with written_by(None if source is None else source.place):
            scaffolding = () if self.owed else template.close(self.turns)
        self._scaffold(scaffolding, turn.role, source)
        return scaffolding

    def _scaffold(self, parts: tuple[Part, ...], role: str, source: Source | None) -> None:
        written = None if source is None else source.of(SourceKind.SCAFFOLD, role)
        for part in parts:
            self.prompt = self.prompt.append(part, written)

    # -------------------------------------------------------------------------------- content

    def append_text(self, text: str, source: Source | None = None) -> str:
        """Appends constant text. Returns the part appended now; the rest is held back."""
        turn = self.turn
        if turn is None:
            self._check_owed()
        elif turn.trims:
            if turn.blank:
                text = text.lstrip()
            text = turn.held + text
            turn.held = text[len(text.rstrip()) :]
            text = text.rstrip()
        elif turn.blank:
            text, turn.held = turn.held + text, ""
            if text != turn.lead and turn.lead.startswith(text):
                turn.held, text = text, ""
        if not text:
            return ""
        lead = ""
        if turn is not None:
            if turn.blank and not text.startswith(turn.lead):
                lead = turn.lead
                self.prompt = turn.start = self.prompt.append(Text(lead), source)
            turn.blank = False
            if turn.deferred is not None:
                turn.deferred.append(text)
                return ""
        self.prompt = self.prompt.append(Text(text), source)
        return lead + text

    def lead_in(self) -> str:
        """Appends the turn's lead and the beginning of the content that was held back. Returns the appended text.

        Called before the turn ends, and before a scope, a fork or a call, which use the position. So the text of an
        answer does not depend on how it is split into pieces.
        """
        turn = self.turn
        if turn is None or turn.trims or not turn.held:
            return ""
        text, turn.held, turn.blank = turn.held, "", False
        self.prompt = turn.start = self.prompt.append(Text(turn.lead))
        self.prompt = self.prompt.append(Text(text))
        return turn.lead + text

    def settle(self, what: str) -> str:
        """Appends white space that was held back, before a call or a picture. Returns the appended text.

        Raises:
            TemplateError: the template does not show this turn, or the one before it, here.
        """
        self._check_owed()
        self._check_shown(what)
        return self._release()

    def take_over(self, reached: "Reached") -> str:
        """Appends a branch's parts and its closed turns. Returns the text of this position released before them."""
        said = reached.said
        held = self._release() if said else ""
        points = {id(prompt): ttl for prompt, ttl in reached.position.points}
        for prompt in said:
            assert prompt.part is not None, "what was said has a part"
            self.prompt = self.prompt.append(prompt.part, prompt.source)
            if id(prompt) in points:
                self._set_point(points[id(prompt)])
        self.coming_private = max(self.coming_private, reached.position.coming_private, key=len)
        if self.turn is not None:
            self.turn.held += reached.held if said else reached.held.removeprefix(reached.start_held)
        self.turns += reached.turns
        self.owed = self.owed and not reached.turns
        return held

    @property
    def held(self) -> str:
        """White space of the open turn that is held back from the prompt."""
        return "" if self.turn is None else self.turn.held

    def _release(self) -> str:
        turn = self.turn
        if turn is None:
            return ""
        led = self.lead_in()
        held, turn.held, turn.blank = turn.held, "", False
        if held:
            self.prompt = self.prompt.append(Text(held))
        return led + held

    def append(self, part: Part, source: Source | None = None) -> None:
        self.prompt = self.prompt.append(part, source)

    def _check_owed(self) -> None:
        if self.owed:
            raise TemplateError(
                f"the chat template writes a {self.turns[-1].role} turn only together with the next turn; "
                "add a user(...) turn before anything else"
            )

    def _check_shown(self, what: str) -> None:
        turn = self.turn
        if turn is not None and turn.deferred is not None:
            raise TemplateError(
                f"the chat template writes a {turn.role} turn only together with the next turn, so {what} cannot "
                f"stand inside it; move it out of {turn.role}(...)"
            )

    def open_private(self, tenant: str, source: Source | None = None) -> str:
        """Opens a private part: here, or where the text said so far is shown. Returns white space released before it.

        Raises:
            TemplateError: the template shows what this turn says so far only together with what it says later.
        """
        self._check_shown("private()")
        if self.owed:
            self.coming_private += (Private(tenant),)
            return ""
        released = self._release() if self.held else ""
        self.append(Private(tenant), source)
        return released

    # -------------------------------------------------------------------------------- cache points

    def set_point(self, ttl: float) -> None:
        """Keeps a place for explicit caching: here, or where the text said so far is shown. Says nothing."""
        if self.owed or (self.turn is not None and self.turn.deferred is not None):
            self.coming_point = max(ttl, self.coming_point or 0.0)
        else:
            self._set_point(ttl)

    def _set_point(self, ttl: float) -> None:
        if self.prompt.length:
            others = tuple(point for point in self.points if point[0] is not self.prompt)
            same = [former for prompt, former in self.points if prompt is self.prompt]
            self.points = (*others, (self.prompt, max([ttl, *same])))[-COUNTED_MARKS:]

    def marked(self) -> tuple[tuple[Part, ...], Caching | None]:
        """Returns the prompt's parts, split at the cache points, and the points as marks; None where there are none."""
        if not self.points:
            return self.prompt.parts, None
        parts: list[Part] = []
        marks: list[CacheMark] = []
        start = EMPTY
        for prompt, ttl in self.points:
            parts += _joined(since(start, prompt) if start.length else list(prompt.parts))
            start = prompt
            if parts and (not marks or len(parts) > marks[-1].place):
                marks.append(CacheMark(len(parts), ttl))
        return (*parts, *_joined(since(start, self.prompt))), Caching(tuple(marks), look_back=None)

    # -------------------------------------------------------------------------------- reading

    def messages(self) -> list[dict[str, str]]:
        """Returns the closed turns, and the open one if it has content."""
        result = [{"role": turn.role, "content": turn.content or ""} for turn in self.turns]
        turn = self.turn
        if turn is not None:
            content = "".join(turn.deferred) if turn.deferred is not None else text_of(since(turn.start, self.prompt))
            if content:
                result.append({"role": turn.role, "content": content})
        return result


@dataclass(frozen=True, slots=True)
class Reached:
    """The positions of a stream at a mark and at its beginning."""

    start: Prompt
    start_turns: int
    position: Position
    start_held: str = ""  # white space that was held back where it began
    stream: int = 0  # its number in the record of the run

    @property
    def said(self) -> list[Prompt]:
        """The prompt after each part the stream itself appended. White space held back by the parent comes first in
        the stream's text and is left out."""
        steps = steps_since(self.start, self.position.prompt)
        first = steps[0].part if steps else None
        if not self.start_held or not isinstance(first, Text) or first.control:
            return steps
        own = first.text.removeprefix(self.start_held)
        return [self.start.append(Text(own), steps[0].source), *steps[1:]] if own else steps[1:]

    @property
    def held(self) -> str:
        """Trailing white space of the stream that is held back."""
        return self.position.held

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that the stream itself has closed."""
        return self.position.turns[self.start_turns :]


def since(start: Prompt, end: Prompt) -> list[Part]:
    """Returns the parts appended between `start` and `end`."""
    return [prompt.part for prompt in steps_since(start, end) if prompt.part is not None]


def steps_since(start: Prompt, end: Prompt) -> list[Prompt]:
    """Returns the prompts from `start`, excluded, to `end`, each one part longer than the one before."""
    steps: list[Prompt] = []
    prompt: Prompt | None = end
    while prompt is not start:
        assert prompt is not None, "end does not begin with start"
        steps.append(prompt)
        prompt = prompt.parent
    steps.reverse()
    return steps


def text_of(parts: list[Part]) -> str:
    """Returns the text of parts, with <image> or <video> for media."""
    return "".join(f"<{part.kind}>" if isinstance(part, Media) else part.text for part in parts)


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    prompt = EMPTY
    for part in parts:
        prompt = prompt.append(part)
    return prompt.parts


def media_text(part: Media) -> str:
    return f"<{part.kind}>"
