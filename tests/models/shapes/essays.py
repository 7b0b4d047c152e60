"""Essays about pictures, and what is to be said of them: what the paper's `multi_dimensional_judge` asks for.

An essay makes claims about a picture, clearly or not, with a thought of its own or without one. So there is something
to say about each of the three dimensions that the program judges, and it can be checked:

    related       a claim is true of the picture
    Clarity       nothing rambles
    Originality   a figure is compared with something
    Evidence      every claim is true of the picture

The grade is A when all three are good, and one letter lower for each that is not.
"""

from dataclasses import dataclass
from random import Random

from .scenes import COLOURS, SHAPES, Kind, Scene, listed

DIMENSIONS = ("Clarity", "Originality", "Evidence")
SYSTEM = "Evaluate an essay about an image."
WELCOME = "Sure!"
ASK_RELATED = "Is the essay related to the image?"
ASK_ALL = "Provide the judgment, summary, and a letter grade"
ASK_JSON = "Return in the JSON format."
RAMBLING = (
    "Well, it is what it is, or maybe it is not.",
    "Anyway, things are things, and so on and so on.",
    "Who can say why, and who would ask, and when.",
    "Somehow or other this goes with that, perhaps.",
)
LIKENESSES = (
    "a small sun",
    "a lost coin",
    "a quiet house",
    "a sail at sea",
    "a lantern in the fog",
    "a sleeping cat",
    "an island",
    "a closed door",
)
OFF_TOPIC = (
    "Dogs are loyal animals and sleep most of the day.",
    "The train to the coast was late again this morning.",
    "My grandmother bakes bread every Sunday.",
    "The third metro line of Rome is still being dug.",
    "Winter came early, and the lake is frozen.",
    "A good cup of tea needs patience and hot water.",
)


def instruction(dimension: str) -> str:
    """How a judgment is asked for."""
    return f"Evaluate based on the following dimension:{dimension}. End your judgment with the word 'END'"


@dataclass(frozen=True, slots=True)
class Essay:
    """An essay about a picture that shows `shown`."""

    text: str
    shown: frozenset[Kind]
    claims: tuple[Kind, ...]  # none: it is about something else
    clear: bool
    likeness: tuple[str, str] | None  # a shape, and what it is compared with

    @property
    def related(self) -> bool:
        return any(claim in self.shown for claim in self.claims)

    @property
    def true(self) -> bool:
        return all(claim in self.shown for claim in self.claims)

    def judgment(self, dimension: str) -> str:
        """One sentence. The dimensions are DIMENSIONS."""
        match dimension:
            case "Clarity" if self.clear:
                return "The sentences are short and easy to follow."
            case "Clarity":
                return "The essay rambles and is hard to follow."
            case "Originality" if self.likeness is not None:
                return "Comparing the {} with {} is a fresh idea.".format(*self.likeness)
            case "Originality":
                return "It only lists what is there and adds no idea of its own."
            case "Evidence":
                return self._evidence()
            case _:
                raise AssertionError(f"{dimension!r} is not one of {DIMENSIONS}")

    @property
    def summary(self) -> str:
        """Behind "In summary," and without its full stop; the JSON has it with a capital letter."""
        good, bad = [], []
        for word, holds in (
            ("clear", self.clear),
            ("original", self.likeness is not None),
            ("true to the picture", self.true),
        ):
            (good if holds else bad).append(word)
        if not bad:
            return "the essay is clear and original and true to the picture"
        if not good:
            return "the essay is not clear and not original and not true to the picture"
        return f"the essay is {' and '.join(good)} but not {' and not '.join(bad)}"

    @property
    def grade(self) -> str:
        return "ABCD"[(not self.clear) + (self.likeness is None) + (not self.true)]

    @property
    def report(self) -> str:
        """The last answer of the program."""
        return f'{{"summary": "T{self.summary[1:]}.", "grade": "{self.grade}"}}'

    def _evidence(self) -> str:
        right = [claim.phrase for claim in self.claims if claim in self.shown]
        wrong = [claim.phrase for claim in self.claims if claim not in self.shown]
        denied = "".join(f" but not {phrase}" for phrase in wrong)
        return f"The picture shows {listed(right)}{denied}."


def random_essay(scene: Scene, random: Random) -> Essay:
    """Half of the essays are related to the picture; of these, half are wholly true."""
    shown = frozenset(scene.kinds)
    if random.random() < 0.1:
        return Essay(" ".join(random.sample(OFF_TOPIC, random.randint(1, 3))), shown, (), True, None)
    claims = _claims(scene, random)
    clear = random.random() < 0.5
    likeness = (random.choice(claims).shape, random.choice(LIKENESSES)) if random.random() < 0.5 else None
    sentences = [_claim(claim, random, opening=number == 0) for number, claim in enumerate(claims)]
    if likeness is not None:
        shape, other = likeness
        verb = random.choice(("looks like", "waits there like", "makes me think of"))
        sentences.insert(random.randint(1, len(sentences)), f"The {shape} {verb} {other}.")
    if not clear:
        for sentence in random.sample(RAMBLING, random.randint(1, 2)):
            sentences.insert(random.randint(0, len(sentences)), sentence)
    return Essay(" ".join(sentences), shown, tuple(claims), clear, likeness)


def _claims(scene: Scene, random: Random) -> list[Kind]:
    """One to three kinds, each once, in random order."""
    true = sorted(set(scene.kinds))
    false = [kind for colour in COLOURS for shape in SHAPES if (kind := Kind(colour, shape)) not in true]
    near = [kind for kind in false if any(kind.colour == k.colour or kind.shape == k.shape for k in true)]
    decoys = near if random.random() < 0.5 else false
    if random.random() < 0.45:  # unrelated
        return random.sample(decoys, random.randint(1, 2))
    claims = random.sample(true, random.randint(1, min(2, len(true))))
    if random.random() < 0.5:
        claims.append(random.choice(decoys))
    random.shuffle(claims)
    return claims


def _claim(claim: Kind, random: Random, *, opening: bool) -> str:
    if opening:
        return random.choice(("The picture shows {}.", "There is {} in the picture.", "I see {}.")).format(claim.phrase)
    return random.choice(("It also shows {}.", "There is {} too.", "Beside it I see {}.")).format(claim.phrase)
