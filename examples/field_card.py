"""A form to fill in: one regular expression is the form, and single values have types of their own."""

import re
from typing import Literal

import umbel as ul

CARD = r"""Species: [A-Z][a-z]+( [a-z]+){0,2}
Length: [1-9][0-9]{0,2} cm
Diet: (seeds|insects|fish|meat|fruit)
Nocturnal: (yes|no)"""

EXAMPLES = """\
A small round bird with an orange breast hops over the lawn and pulls worms and beetles out of the grass.
Species: European robin
Length: 14 cm
Diet: insects
Nocturnal: no
Seen: 3
Mood: calm

A heavy owl with orange eyes calls from the cliff at midnight, and comes back with a hare.
Species: Eurasian eagle owl
Length: 67 cm
Diet: meat
Nocturnal: yes
Seen: 1
Mood: excited

"""
SIGHTING = "Two tall grey birds stand in the shallow water without moving, until one of them stabs at a trout."


@ul.function
def fill_in(s, sighting):
    s += EXAMPLES + sighting + "\n"
    s += ul.gen("card", regex=CARD, max_tokens=64, temperature=0)
    s += "\nSeen: " + ul.gen("seen", dtype=int, max_tokens=4, temperature=0)
    s += "\nMood: " + ul.gen("mood", dtype=Literal["calm", "excited", "bored"], temperature=0)


def main() -> None:
    state = fill_in.run(sighting=SIGHTING)
    card = dict(line.split(": ") for line in state["card"].splitlines())
    assert re.fullmatch(CARD, state["card"])
    print(f"{SIGHTING}\n")
    for name, value in card.items():
        print(f"  {name:10} {value}")
    print(f"  {'Seen':10} {state.value('seen')} (an {type(state.value('seen')).__name__})")
    print(f"  {'Mood':10} {state.value('mood')}")


if __name__ == "__main__":
    main()
