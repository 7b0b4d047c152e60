"""Random programs of constant text and gens, as a template for forms is one, with the text that fills it."""

import random
from collections.abc import Callable
from typing import Any

import umbel as ul

LABELS = ("Name", "Job", "Age", "Home town", "Motto", "Pet")
VALUES = ("Harry", "wizard", "11", "Little Whinging", "never tickle a dragon", "an owl; white", "1997", "x")


class Form:
    """One random program. `text`: what a model that follows it has in mind."""

    def __init__(self, seed: int, *, chat: bool = False) -> None:
        rng = random.Random(seed)
        self.chat = chat
        self.names: list[str] = []
        self.pieces: list[tuple[str, str, dict[str, Any]]] = []
        separator = rng.choice(("\n", "\n", ";", "\n- ", ". "))
        text = ""
        for index in range(rng.randint(2, 6)):
            space = rng.choice(("", " "))
            label = (separator if index else "") + rng.choice(LABELS) + ":" + space
            value = rng.choice(VALUES)
            name = f"v{index}"
            self.names.append(name)
            self.pieces.append((label, name, self._options(rng, separator, value)))
            text += label + ("" if space else " ") + value
        self.text = (
            ("assistant\n" if chat else "") + text + separator + rng.choice(("", "The end.", "Name: Ron" + separator))
        )
        self.separate = rng.random() < 0.5  # one statement for each piece
        self.fork = rng.random() < 0.2

    def _options(self, rng: random.Random, separator: str, value: str) -> dict[str, Any]:
        options: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 4, 8, 50, 200))}
        match rng.randrange(12):
            case 0:
                pass  # ends by max_tokens, or with the model
            case 1:
                options["stop"] = [separator, "\n"]
            case 2:
                options["stop_regex"] = r"[\n;]|\. "
            case 3 if not self.chat:
                options["regex"] = r" ?[A-Za-z ]+"
            case 4 if not self.chat:
                options |= {"regex": r" ?[A-Za-z0-9 ]{1,9}", "stop": separator}
            case 5 if not self.chat:
                options = {"choices": [f" {value}", value, "none"]}
            case 6 if not self.chat:
                options["dtype"] = int
            case 7:
                options |= {"stop": separator, "temperature": 0.5}
            case 8:
                options |= {"stop": separator, "presence_penalty": 0.5}
            case _:
                options["stop"] = separator
        return options

    def program(self) -> Callable[..., None]:
        def body(s: ul.State) -> None:
            s += "A form.\n" if not self.chat else ul.user("Fill in the form.")
            if self.chat:
                s += ul.assistant(self._filled(self.pieces))
                return
            half = len(self.pieces) // 2 if self.fork else len(self.pieces)
            self._say(s, self.pieces[:half])
            if self.fork:
                branches = s.fork(2)
                for branch in branches:
                    self._say(branch, self.pieces[half:])
                branches.join()
                self._say(s, [(label, "own " + name, options) for label, name, options in self.pieces[half:]])

        return body

    def _say(self, s: ul.State, pieces: list[tuple[str, str, dict[str, Any]]]) -> None:
        if self.separate:
            for label, name, options in pieces:
                s += label + ul.gen(name, **options)
        elif pieces:
            s += self._filled(pieces)

    @staticmethod
    def _filled(pieces: list[tuple[str, str, dict[str, Any]]]) -> Any:
        return [label + ul.gen(name, **options) for label, name, options in pieces]
