"""Questions and essays → what the model reads: text in segments, tokenized as a program's parts are.

Every text between control tokens is encoded on its own, and so is every answer, because a program's constant text and
what the model said meet at such a place too. The model learns to say the answers, and to end them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from .essays import ASK_ALL, ASK_JSON, ASK_RELATED, DIMENSIONS, SYSTEM, WELCOME, Essay, instruction, random_essay
from .scenes import Scene, question

BOS, END, PAD, IMAGE = "<|bos|>", "<|end|>", "<|pad|>", "<image>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
NOTHING = -100  # what losses pass over
CONTROL = (PAD, BOS, END, *ROLES.values(), IMAGE)

# The picture comes where the program puts it, and nothing is added around content.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}<image>{% else %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Encoder(Protocol):
    """Of a tokenizer: plain text → ids, and the ids of control tokens."""

    def encode(self, text: str) -> list[int]: ...

    def control(self, token: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """`said`: the model is to say it, and behind it `stop`, which the program cuts away. `control`: one such token."""

    text: str
    said: bool = False
    control: bool = False
    stop: str = ""


@dataclass(frozen=True, slots=True)
class Dialogue:
    scene: Scene
    segments: tuple[Segment, ...]

    def encode(self, encoder: Encoder, image_tokens: int) -> tuple[list[int], list[int]]:
        """Ids, with the place of the picture repeated; and what the model is to say behind each of them, or NOTHING."""
        ids: list[int] = []
        said: list[int] = []
        for segment in self.segments:
            new = [encoder.control(segment.text)] if segment.control else encoder.encode(segment.text)
            new *= image_tokens if segment.text == IMAGE else 1
            if segment.said:
                said[-1] = new[0]
                said += [*new[1:], encoder.encode(segment.stop)[0] if segment.stop else NOTHING]
            else:
                said += [NOTHING] * len(new)
            ids += new
        return ids, said


_IMAGE, _BOS = Segment(IMAGE, control=True), Segment(BOS, control=True)
_END, _SAID_END = Segment(END, control=True), Segment(END, said=True, control=True)


def _turn(role: str, *content: Segment) -> list[Segment]:
    end = _SAID_END if content and content[-1].said else _END
    return [Segment(ROLES[role], control=True), *content, end]


def questions_in_roles(scene: Scene, random: Random, count: int, kinds: Sequence[str]) -> Dialogue:
    """A conversation about one picture, with questions of these kinds. It begins with one, or with the picture and a
    welcome."""
    segments = [_BOS]
    if random.random() < 0.15:
        segments += _turn("system", Segment("You answer questions about pictures."))
    picture = (_IMAGE,)
    if random.random() < 0.15:
        segments += [*_turn("user", _IMAGE), *_turn("assistant", Segment(WELCOME))]
        picture = ()
    for _ in range(count):
        asked = question(scene, random, random.choice(kinds))
        segments += _turn("user", *picture, Segment(asked.text))
        segments += _turn("assistant", Segment(asked.answer, said=True))
        picture = ()
    return Dialogue(scene, tuple(segments))


def questions_in_lines(scene: Scene, random: Random, count: int, kinds: Sequence[str]) -> Dialogue:
    """The same without roles: lines that a program continues, up to their end."""
    segments = [_BOS, _IMAGE]
    for _ in range(count):
        asked = question(scene, random, random.choice(kinds))
        blank, other = random.choice((("", " "), (" ", "")))  # who writes it, the model or the program
        segments += [Segment(f"Question: {asked.text}\nAnswer:{blank}"), Segment(f"{other}{asked.answer}", said=True)]
        segments.append(Segment("\n", said=True))
    return Dialogue(scene, tuple(segments))


def judged(scene: Scene, random: Random) -> Dialogue:
    """An essay that is judged: in one dimension, or with all judgments merged into a summary and a grade."""
    essay = random_essay(scene, random)
    segments = [_BOS, *_turn("system", Segment(SYSTEM))]
    segments += _turn("user", _IMAGE, Segment(f"Essay:{random.choice(('', ' '))}{essay.text}"))
    segments += _turn("assistant", Segment(WELCOME))
    segments += _turn("user", Segment(ASK_RELATED))
    segments += _turn("assistant", Segment("yes" if essay.related else "no", said=True))
    if essay.related:
        segments += _merged(essay) if random.random() < 0.4 else _in_one_dimension(essay, random)
    return Dialogue(scene, tuple(segments))


def _in_one_dimension(essay: Essay, random: Random) -> list[Segment]:
    dimension = random.choice((*DIMENSIONS, "Evidence"))  # the one that looks at the picture
    return [
        *_turn("user", Segment(instruction(dimension))),
        *_turn("assistant", Segment("Judgment:"), Segment(f" {essay.judgment(dimension)} END", said=True)),
    ]


def _merged(essay: Essay) -> list[Segment]:
    judgments = "\n".join(f" {essay.judgment(dimension)} " for dimension in DIMENSIONS)  # as the word END left them
    return [
        *_turn("user", Segment(ASK_ALL)),
        *_turn(
            "assistant",
            Segment(f"{judgments}In summary,"),
            Segment(f" {essay.summary}", said=True, stop="."),
            Segment("The grade of it is"),
            Segment(f" {essay.grade}", said=True),
        ),
        *_turn("user", Segment(ASK_JSON)),
        *_turn("assistant", Segment(essay.report, said=True)),
    ]
