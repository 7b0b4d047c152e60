"""The nine steps of the paper's figure 3: the tree after each, by its shape and its words."""

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "radix_replay.py"

HELLO, CHAT_2A, CHAT_2B = "Hello! … Hi!", "What … strings.", "User: … tree."
TURN_2, TURNS = "User: … me.", "User: … Gladly!"

# (depth, first word … last word) of every node, parents first. The numbers are those of the figure.
FIGURE = [
    [],  # (1)
    [(0, "You … Hi!")],  # (2) one edge for system prompt, message and answer
    [(0, "You … Hi!"), (1, TURN_2)],  # (3)
    [(0, "You … User:"), (1, HELLO), (2, TURN_2), (1, CHAT_2A)],  # (4) split
    [(0, "You … User:"), (1, HELLO), (1, CHAT_2A), (2, CHAT_2B)],  # (5) the second turn of the first chat is gone
    [(0, "You … User:"), (1, HELLO), (1, CHAT_2A), (2, CHAT_2B), (0, "Q: … 7")],  # (6) a new branch at the root
    [  # (7) the branch splits after the examples
        *[(0, "You … User:"), (1, HELLO), (1, CHAT_2A), (2, CHAT_2B)],
        *[(0, "Q: … Q:"), (1, "3+4 … 7"), (1, "6+6 … 12"), (1, "8+1 … 9"), (1, "5+6 … 11")],
    ],
    [  # (8) both nodes of the second chat are gone
        *[(0, "You … User:"), (1, HELLO), (2, TURNS)],
        *[(0, "Q: … Q:"), (1, "3+4 … 7"), (1, "6+6 … 12"), (1, "8+1 … 9"), (1, "5+6 … 11")],
    ],
    [  # (9) the three other questions are gone, the sampled one branches behind its prompt
        *[(0, "You … User:"), (1, HELLO), (2, TURNS)],
        *[(0, "Q: … Q:"), (1, "5+6 … A:"), (2, "11"), (2, "Eleven, … think."), (2, "It … 11."), (2, "That … 11.")],
    ],
]


def shorten(words: str) -> str:
    first, *rest = words.split()
    return f"{first} … {rest[-1]}" if rest else first


def test_the_nine_steps_of_the_figure() -> None:
    spec = importlib.util.spec_from_file_location("radix_replay", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    trees = [[(depth, shorten(words)) for depth, words in tree] for _, tree in example.replay()]
    assert len(trees) == 9
    for number, (tree, figure) in enumerate(zip(trees, FIGURE, strict=True), start=1):
        if number == 9:  # which sample ends first is not part of the figure
            tree = tree[:6] + sorted(tree[6:])
        assert tree == figure, f"step {number}"


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
