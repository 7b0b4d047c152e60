"""Programs with several fields in one stretch of text, as they are written for hosted models."""

from collections.abc import Mapping
from dataclasses import dataclass

import umbel as ul

CHARACTERS = """\
Name: Sherlock Holmes
Job: consulting detective
Home: 221B Baker Street, London
Friend: John Watson

Name: Elizabeth Bennet
Job: none, a gentleman's daughter
Home: Longbourn, Hertfordshire
Friend: Charlotte Lucas

Name: Captain Nemo
Job: commander of the Nautilus
Home: the Nautilus, under the sea
Friend: Professor Aronnax

"""

CITIES = """\
City: Lisbon
Country: Portugal
Founded: 1147
River: Tagus

City: Vienna
Country: Austria
Founded: 1137
River: Danube

City: Boston
Country: United States
Founded: 1630
River: Charles

"""


@ul.function(temperature=0, stop="\n")
def character(s: ul.State, name: str) -> None:
    """Name and job of someone from a book, and two more fields: the paper's extraction program."""
    s += CHARACTERS + "Name: " + name
    s += "\nJob:" + ul.gen("job", max_tokens=24)
    s += "\nHome:" + ul.gen("home", max_tokens=24)
    s += "\nFriend:" + ul.gen("friend", max_tokens=24)


@ul.function(temperature=0)
def city(s: ul.State, name: str) -> None:
    """Fields that end at one of several strings, and one that is a number."""
    s += CITIES + "City: " + name
    s += "\nCountry:" + ul.gen("country", max_tokens=16, stop=["\n", ",", ";"])
    s += "\nFounded: " + ul.gen("founded", max_tokens=8, regex="[0-9]{3,4}", stop="\n")
    s += "\nRiver:" + ul.gen("river", max_tokens=16, stop=["\n", "("])


@dataclass(frozen=True, slots=True)
class Case:
    program: ul.Program
    fields: tuple[str, ...]
    arguments: tuple[Mapping[str, str], ...]


def _names(*names: str) -> tuple[Mapping[str, str], ...]:
    return tuple({"name": name} for name in names)


CASES = (
    Case(
        character,
        ("job", "home", "friend"),
        _names(
            "Robinson Crusoe", "Jane Eyre", "Oliver Twist", "Count Dracula", "Victor Frankenstein", "Tom Sawyer",
            "Anna Karenina", "Don Quixote", "Ishmael", "Dorian Gray", "Emma Woodhouse", "Long John Silver",
        ),
    ),
    Case(
        city,
        ("country", "founded", "river"),
        _names("Paris", "Rome", "London", "Berlin", "Cairo", "New York", "Prague", "Budapest"),
    ),
)  # fmt: skip
