"""`umbel new`: a project to begin with. Its program is small and whole: it runs on a stand-in and on a model."""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ...lang.errors import ParameterError, shown

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")

PROGRAM = '''\
"""Reads reviews of a hotel, one a line: what each is about, whether it is good, and a reply.

Ways to run it:

    umbel run reviews.py                    on the default model; --model takes another one
    umbel run reviews.py other.txt          the reviews of another file
    python reviews.py --echo                without a model, on scripted answers
"""

import sys
from pathlib import Path

import umbel as ul

# Solved ones show a small model what is asked. All prompts begin with them: they are computed once.
EXAMPLES = """\\
Review: The waiter forgot us twice and did not say sorry. It is about the staff, and it is bad.
Reply: We are sorry that you had to wait so long.

Review: Quiet, warm, and the bed was the best of our trip. It is about the room, and it is good.
Reply: Thank you! We are glad that you slept so well.

Review: Cold eggs and old bread. It is about the food, and it is bad.
Reply: We are sorry about your breakfast.

Review: A fair sum for the middle of the town. It is about the price, and it is good.
Reply: Thank you! We try to stay affordable.

Review: The porter carried all our bags. It is about the staff, and it is good.
Reply: Thank you! The porter will be happy to read it.

Review: Loud street, broken shower. It is about the room, and it is bad.
Reply: We are sorry that your room was not as it should be.

"""


@ul.function(temperature=0)
def read_review(s, review):
    s += EXAMPLES + f"Review: {review} It is"
    about, judged = s.fork(2)  # two branches that go on from the review, at the same time
    about += " about the" + ul.select("topic", choices=[" food", " room", " staff", " price"])
    judged += ul.select("mood", choices=[" good", " bad"])
    s["topic"], s["mood"] = about["topic"], judged["mood"]  # reading a variable waits for it
    s += f" about the{s['topic']}, and it is{s['mood']}.\\nReply:"
    s += ul.gen("reply", max_tokens=40, stop="\\n")


def scripted():
    """Makes a stand-in for a model: its answers are written here, by what stands last in the prompt."""
    return ul.Echo(
        {"good.\\nReply:": " Thank you!", "bad.\\nReply:": " We are sorry."},
        scores={" food": -0.1, " room": -2, " staff": -3, " price": -3, " good": -1, " bad": -0.2},
    )


def main(arguments):
    files = [argument for argument in arguments if argument != "--echo"] or [Path(__file__).with_name("reviews.txt")]
    reviews = [line for line in Path(files[0]).read_text(encoding="utf-8").splitlines() if line.strip()]
    backend = scripted() if "--echo" in arguments else None  # None: the model of the command line
    if backend is not None:
        print("The answers are scripted, the same for every review; make run asks a model.\\n")
    states = read_review.run_batch([{"review": review} for review in reviews], backend=backend)
    for review, state in zip(reviews, states):
        print(f"{state['topic'].strip():<6} {state['mood'].strip():<5} {review}\\n{'':<13}{state['reply'].strip()}")
    usage = sum(state.usage for state in states)
    print(f"\\n{usage.calls} calls, {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    main(sys.argv[1:])
'''

REVIEWS = """\
The soup was cold, and so was the second one.
Friendly people, and the lady at the desk found our lost bag.
Too expensive for a window that does not close.
"""

TEST = '''\
"""The program on a stand-in: no model, no network, a second."""

import umbel as ul
from reviews import main, read_review, scripted


def test_topic_and_mood_are_chosen_and_the_reply_is_written():
    state = read_review.run(review="Cold soup.", backend=scripted())
    assert state.to_dict() == {"topic": " food", "mood": " bad", "reply": " We are sorry."}


def test_the_reply_knows_topic_and_mood():
    state = read_review.run(review="Cold soup.", backend=scripted())
    assert state.text().endswith("Review: Cold soup. It is about the food, and it is bad.\\nReply: We are sorry.")


def test_all_reviews_begin_with_the_same_tokens():
    states = read_review.run_batch([{"review": "One."}, {"review": "Two."}], backend=scripted())
    assert sum(state.usage for state in states).cached_tokens > 0


def test_an_error_of_the_model_is_raised_where_it_is_read():
    failing = ul.Echo(faults=ul.FailCall(1, ul.OverloadedError("busy")))
    try:
        read_review.run(review="Cold soup.", backend=failing)
    except ul.OverloadedError as error:
        assert "busy" in str(error)
    else:
        raise AssertionError("no error was raised")


def test_the_table_has_a_line_for_each_review(capsys):
    main(["--echo"])
    assert capsys.readouterr().out.count("We are sorry.") == 3
'''

MAKEFILE = """\
PYTHON ?= python3
MODEL ?= default

.PHONY: demo run test

demo:  # without a model: the answers are scripted
	$(PYTHON) reviews.py --echo

run:  # on a model: make run MODEL=Qwen/Qwen3-0.6B
	umbel run reviews.py --model $(MODEL)

test:  # without a model
	$(PYTHON) -m pytest -q
"""

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["umbel"]  # umbel[runtime,default-model] for models on this machine, umbel[openai] for hosted ones

[project.optional-dependencies]
test = ["pytest>=8"]

[tool.setuptools]
py-modules = ["reviews"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

README = """\
# {name}

Reads reviews, one a line, and says what each is about, whether it is good, and what to reply.

    make demo                          # without a model, on scripted answers
    make test                          # the tests, without a model
    make run                           # on Gemma 3 270M, the default model
    make run MODEL=Qwen/Qwen3-0.6B     # on another one, from the Hugging Face hub
    umbel run reviews.py --model openai:gpt-4.1-mini other.txt

| file | has |
| --- | --- |
| `reviews.py` | the program: two branches for each review, then a reply |
| `reviews.txt` | the reviews |
| `test_reviews.py` | its tests, on a stand-in that says what it is told |

`umbel lint reviews.py` says what keeps prompts from sharing their beginnings, `umbel chat` talks to the model.
"""

# Path in the project → its content and what the list of files says of it.
FILES: dict[str, tuple[str, str]] = {
    "reviews.py": (PROGRAM, "a program: what reviews are about, in branches, and a reply"),
    "reviews.txt": (REVIEWS, "what it reads"),
    "test_reviews.py": (TEST, "its tests, without a model"),
    "Makefile": (MAKEFILE, "make demo, make test, make run"),
    "pyproject.toml": (PYPROJECT, "what it needs"),
    "README.md": (README, "what is here"),
    ".gitignore": ("__pycache__/\n.pytest_cache/\n.venv/\n*.egg-info/\n", "what git leaves out"),
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel new",
        description="Makes a project to begin with: a program that runs on a model and, for its tests, without one. "
        "The folder must be new or empty; nothing is overwritten.",
    )
    made.add_argument("folder", metavar="NAME", help="the folder; its last part names the project")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit status; raises ParameterError."""
    given: str = parser().parse_args(arguments).folder
    make_project(Path(given))
    print(f"{given} has:")
    for name, (_, about) in FILES.items():
        print(f"  {name:<16} {about}")
    enter = "" if given == "." else f"  cd {shlex.quote(given)}\n"
    print(f"\nNext:\n{enter}  make demo        # without a model: scripted answers")
    print("  make test        # its tests; pip install pytest")
    print("  make run         # on the default model; make run MODEL=... on another one")
    return 0


def make_project(folder: Path) -> None:
    """Writes the files of a project.

    Raises:
        ParameterError: a name that is none, a folder that has files in it, or a place where none can be written.
    """
    name = folder.absolute().name
    if not _NAME.fullmatch(name):
        raise ParameterError(
            f"{shown(name)} is no name of a project; write letters, digits, - and _, a letter first: umbel new essays"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ParameterError(f"{folder} has files in it; write the name of a new folder, or of an empty one")
        for path, (content, _) in FILES.items():
            with (folder / path).open("x", encoding="utf-8") as file:
                file.write(content.replace("{name}", name))
    except OSError as error:
        raise ParameterError(f"{folder}: {error.strerror}; write the name of a folder that can be made") from None
