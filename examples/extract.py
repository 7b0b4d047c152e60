"""Extraction: facts of a text as objects of a class. Every answer parses, whatever the model would like to say."""

from dataclasses import dataclass
from typing import Literal

import umbel as ul

EXAMPLES = """\
Note: Bought "The Leopard" by Tomasi di Lampedusa at the station, 1958, the English translation. A novel at last.
Record: {"title": "The Leopard", "author": "Tomasi di Lampedusa", "year": 1958, "kind": "novel", "translated": true}

Note: Reading the poems of Emily Dickinson, collected in 1955, a gift from my sister.
Record: {"title": "The Poems", "author": "Emily Dickinson", "year": 1955, "kind": "poetry", "translated": false}

"""
NOTES = [
    "Found a copy of Hamlet, William Shakespeare's play of 1603, in the attic.",
    "Finished Walden, which Thoreau published in 1854. Essays about a pond, more or less.",
    "My aunt lent me War and Peace (Leo Tolstoy, 1869), translated from the Russian.",
]


@dataclass
class Book:
    title: str
    author: str
    year: int
    kind: Literal["novel", "poetry", "play", "essays"]
    translated: bool


@ul.function
def read(s, note):
    s += EXAMPLES + f"Note: {note}\nRecord:"
    s += " " + ul.gen("book", json_schema=Book, max_tokens=96, temperature=0)
    return s.value("book")


def main() -> None:
    states = read.run_batch([{"note": note} for note in NOTES])
    for state in states:
        book = state.ret_value
        language = "translated" if book.translated else "original"
        print(f"{book.title!r} by {book.author} ({book.year}), {book.kind}, {language}")
    forced = sum(state.meta("book")["forced_tokens"] for state in states)
    generated = sum(state.usage.completion_tokens for state in states)
    print(f"\n{forced} of {generated} tokens were written without asking the model: only one text could follow")


if __name__ == "__main__":
    main()
