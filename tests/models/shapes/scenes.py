"""Pictures of coloured shapes: what they show, how they are drawn, and what can be asked about them.

    top left    | top    | top right        one figure at most in a cell, so that "where" has one answer;
    left        | centre | right            figures differ in size, shade, and place within their cell
    bottom left | bottom | bottom right

A scene is *held out* by what it shows, not by how it was drawn: a sixteenth of all arrangements of figures never
occurs in training, in whatever sizes and shades.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple
from zlib import crc32

from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 40, 40),
    "green": (42, 157, 66),
    "blue": (38, 84, 214),
    "yellow": (244, 211, 32),
    "purple": (134, 48, 172),
    "orange": (242, 132, 24),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
MOST_FIGURES = 4
HELD_OUT = 16  # one arrangement in so many

Points = list[tuple[float, float]]


class Kind(NamedTuple):
    """What a figure is, in words."""

    colour: str
    shape: str

    @property
    def phrase(self) -> str:
        """With its article: "a red circle"."""
        return f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class Figure:
    kind: Kind
    place: int  # of PLACES
    radius: float  # as a part of the picture's side, as the other lengths
    offset: tuple[float, float]  # from the middle of its cell
    shade: tuple[int, int, int]

    @property
    def middle(self) -> tuple[float, float]:
        row, column = divmod(self.place, 3)
        return (2 * column + 1) / 6 + self.offset[0], (2 * row + 1) / 6 + self.offset[1]

    def draw(self, canvas: ImageDraw.ImageDraw, side: int, fill: int | tuple[int, int, int]) -> None:
        x, y = (side * value for value in self.middle)
        radius = side * self.radius
        match self.kind.shape:
            case "circle":
                canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
            case "square":
                half = 0.88 * radius
                canvas.rectangle((x - half, y - half, x + half, y + half), fill=fill)
            case "triangle":
                canvas.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], fill=fill)
            case "star":
                canvas.polygon(_star(x, y, 1.12 * radius), fill=fill)
            case "cross":
                arm = 0.3 * radius
                canvas.rectangle((x - radius, y - arm, x + radius, y + arm), fill=fill)
                canvas.rectangle((x - arm, y - radius, x + arm, y + radius), fill=fill)
            case shape:
                raise AssertionError(f"{shape!r} is not one of {SHAPES}")


@dataclass(frozen=True, slots=True)
class Scene:
    figures: tuple[Figure, ...]  # in reading order
    background: tuple[int, int, int]
    specks: Points  # decoys: too small to be shapes

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(figure.kind for figure in self.figures)

    @property
    def held_out(self) -> bool:
        told = ";".join(f"{figure.place} {figure.kind.phrase}" for figure in self.figures)
        return crc32(told.encode()) % HELD_OUT == 0

    @property
    def description(self) -> str:
        """All figures in reading order, as the model is trained to say it."""
        said = [f"{figure.kind.phrase} at the {PLACES[figure.place]}" for figure in self.figures]
        return listed(said)

    def draw(self, side: int = 128) -> Image.Image:
        """The picture, side × side, RGB."""
        picture = Image.new("RGB", (side, side), self.background)
        canvas = ImageDraw.Draw(picture)
        dark = tuple(value - 40 for value in self.background)
        for x, y in self.specks:
            canvas.rectangle((side * x, side * y, side * (x + 0.012), side * (y + 0.012)), fill=dark)
        for figure in self.figures:
            figure.draw(canvas, side, figure.shade)
        return picture

    def covers(self, side: int) -> Image.Image:
        """Which figure covers a pixel, counted from 1; 0 is the background. side × side, mode L."""
        picture = Image.new("L", (side, side))
        canvas = ImageDraw.Draw(picture)
        for number, figure in enumerate(self.figures, 1):
            figure.draw(canvas, side, number)
        return picture


def listed(said: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said)


def scenes(seed: int, *, held_out: bool) -> Iterator[Scene]:
    """Random scenes without end, all of them held out of training, or none."""
    random = Random(seed)
    while True:
        scene = random_scene(random)
        if scene.held_out == held_out:
            yield scene


def random_scene(random: Random) -> Scene:
    """One to four figures. Every other scene takes them from few kinds, so that equal ones are there to be counted."""
    colours, shapes = list(COLOURS), list(SHAPES)
    if random.random() < 0.5:
        colours, shapes = random.sample(colours, 2), random.sample(shapes, 2)
    places = sorted(random.sample(range(len(PLACES)), random.randint(1, MOST_FIGURES)))
    figures = tuple(_figure(random, Kind(random.choice(colours), random.choice(shapes)), place) for place in places)
    light = random.randint(215, 255)
    background = (light, light - random.randint(0, 12), light - random.randint(0, 12))
    specks = [(random.random(), random.random()) for _ in range(random.randint(0, 6))]
    return Scene(figures, background, specks)


def _figure(random: Random, kind: Kind, place: int) -> Figure:
    red, green, blue = (min(255, max(0, value + random.randint(-14, 14))) for value in COLOURS[kind.colour])
    offset = (random.uniform(-0.03, 0.03), random.uniform(-0.03, 0.03))
    return Figure(kind, place, random.uniform(0.095, 0.13), offset, (red, green, blue))


def _star(x: float, y: float, radius: float) -> Points:
    """Five points, beginning with the upper one."""
    corners = []
    for corner in range(10):
        reach = radius if corner % 2 == 0 else 0.45 * radius
        angle = math.pi * (corner / 5 - 0.5)
        corners.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return corners


# ------------------------------------------------------------------------------------------ questions


class Question(NamedTuple):
    """`about`: the kind of question, a key of QUESTIONS."""

    about: str
    text: str
    answer: str


def _once(values: list[str]) -> list[str]:
    return [value for value, count in Counter(values).items() if count == 1]


def _colour(scene: Scene, random: Random) -> Question | None:
    shapes = _once([kind.shape for kind in scene.kinds])
    if not shapes:
        return None
    shape = random.choice(shapes)
    answer = next(kind.colour for kind in scene.kinds if kind.shape == shape)
    asked = random.choice((f"What colour is the {shape}?", f"Which colour does the {shape} have?"))
    return Question("colour", asked, answer)


def _shape(scene: Scene, random: Random) -> Question | None:
    colours = _once([kind.colour for kind in scene.kinds])
    if not colours:
        return None
    colour = random.choice(colours)
    answer = next(kind.shape for kind in scene.kinds if kind.colour == colour)
    asked = random.choice((f"Which shape is {colour}?", f"What is the shape of the {colour} thing?"))
    return Question("shape", asked, answer)


def _count(scene: Scene, random: Random) -> Question:
    match random.randrange(3):
        case 0:
            return Question("count", "How many shapes are there?", str(len(scene.kinds)))
        case 1:
            shape = random.choice([*SHAPES, *(kind.shape for kind in scene.kinds)])
            number = sum(kind.shape == shape for kind in scene.kinds)
            plural = "crosses" if shape == "cross" else f"{shape}s"
            return Question("count", f"How many {plural} are there?", str(number))
        case _:
            colour = random.choice([*COLOURS, *(kind.colour for kind in scene.kinds)])
            number = sum(kind.colour == colour for kind in scene.kinds)
            return Question("count", f"How many {colour} shapes are there?", str(number))


def _position(scene: Scene, random: Random) -> Question | None:
    names = _once([kind.shape for kind in scene.kinds] + [f"{kind.colour} {kind.shape}" for kind in scene.kinds])
    if not names:
        return None
    name = random.choice(names)
    place = next(f.place for f in scene.figures if name in (f.kind.shape, f"{f.kind.colour} {f.kind.shape}"))
    return Question("position", f"Where is the {name}?", PLACES[place])


def _presence(scene: Scene, random: Random) -> Question:
    kind = random.choice(scene.kinds)
    match random.randrange(4):  # half of the answers are yes; decoys share a colour or a shape with what is there
        case 0:
            kind = Kind(random.choice(list(COLOURS)), kind.shape)
        case 1:
            kind = Kind(kind.colour, random.choice(SHAPES))
        case _:
            pass
    return Question("presence", f"Is there {kind.phrase}?", "yes" if kind in scene.kinds else "no")


def _content(scene: Scene, random: Random) -> Question:
    place = random.choice([random.randrange(len(PLACES)), *(figure.place for figure in scene.figures)])
    there = [figure.kind.phrase for figure in scene.figures if figure.place == place]
    return Question("content", f"What is at the {PLACES[place]}?", there[0] if there else "nothing")


def _description(scene: Scene, random: Random) -> Question:
    asked = random.choice(("Describe the picture.", "What does the picture show?"))
    return Question("description", asked, scene.description)


QUESTIONS: dict[str, Callable[[Scene, Random], Question | None]] = {
    "colour": _colour,
    "shape": _shape,
    "count": _count,
    "position": _position,
    "presence": _presence,
    "content": _content,
    "description": _description,
}


def question(scene: Scene, random: Random, about: str) -> Question:
    """A question of this kind. A scene that has no answer to it is asked how many shapes it shows."""
    return QUESTIONS[about](scene, random) or _count(scene, random)
