"""Facts about the repository itself: what ships, what is imported, what is forbidden."""

import ast
import collections
import functools
import importlib
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_SHIPPED = {"tests", "examples", "benchmarks", "docs", "release"}
PARTS = ("lang", "fsm", "interpreter", "compiler", "srt", "server", "compat")


def tracked(*suffixes: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in names if name.endswith(suffixes) and (ROOT / name).is_file()]


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_list_of_packages_is_the_folders() -> None:
    folders = {
        ".".join(("umbel", *path.parent.relative_to(ROOT).parts))
        for path in tracked("__init__.py")
        if path.relative_to(ROOT).parts[0] not in NOT_SHIPPED
    }
    assert set(project()["tool"]["setuptools"]["packages"]) == folders


def test_no_other_module_lies_at_the_root() -> None:
    """`testing` is for tests of users, and ships as `umbel.testing`."""
    assert {path.name for path in tracked(".py") if path.parent == ROOT} <= {"__init__.py", "__main__.py", "testing.py"}


def test_no_file_that_ships_names_a_folder_that_does_not() -> None:
    """The benchmark is run as `python -m benchmarks`: no installed command reaches for it."""
    found = [
        f"{path}: {line.strip()}"
        for path, text in shipped().items()
        for line in text.splitlines()
        if re.search(r"""^\s*(from|import) (umbel\.)?(benchmarks|tests|examples)\b|["'](benchmarks|tests)[."']""", line)
    ]
    assert found == []


FORBIDDEN = re.compile(
    r"\b(pickle|dill|marshal|shelve|diskcache)\b|recv_pyobj|send_pyobj|torch\.load|trust_remote_code\s*=\s*True"
    r"|(?<![\w.])eval\("
)


def test_nothing_that_runs_foreign_code_is_used() -> None:
    """Words in comments and docstrings that forbid it are fine."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] != "tests"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line.split("#")[0])
        and not re.search(r"\b(no|never|without|not)\b", line.lower())
        and "allow_pickle=False" not in line
    ]
    assert found == []


def test_wall_clock_time_is_not_used_for_decisions() -> None:
    """`time.time()` jumps when someone sets the clock; `SystemClock` and `time.monotonic` do not."""
    found = [
        str(path.relative_to(ROOT))
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] not in NOT_SHIPPED and "time.time()" in path.read_text()
    ]
    assert found == []


def test_files_refer_to_no_numbered_notes_of_elsewhere() -> None:
    """A reader has this repository alone."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()[:80]}"
        for path in [*tracked(".py"), *tracked(".md")]
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"""(\"{3}|# |\()[FNR][0-9]{1,2}(:|,|\)| of)|(reliability|review) notes?\b""", line)
    ]
    assert found == []


def test_no_merge_is_left_half_done() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked(".py", ".md", ".toml", ".txt", ".cpp", ".h", "Makefile")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.startswith(("<" * 7 + " ", ">" * 7 + " "))
    ]
    assert found == []


def test_the_command_exists() -> None:
    module, _, function = project()["project"]["scripts"]["umbel"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


# How the code is laid out. A number that is not yet the aim stands with the aim in a comment, and only goes down.


@functools.cache
def shipped() -> Mapping[str, str]:
    """Path from the root → text, of every Python file that ships."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] not in NOT_SHIPPED
    }


@functools.cache
def syntax(path: str) -> ast.Module:
    return ast.parse(shipped()[path])


def at_most(found: Sequence[str], limit: int) -> None:
    """Fails with everything that was found, a line each."""
    assert len(found) <= limit, "\n".join([f"{len(found)} where {limit} are allowed:", *found])


MOST_FILES = 22  # Python files in a folder, those of folders inside it not counted
MANY_FILES: dict[str, int] = {}


def test_folders_hold_few_files() -> None:
    count = collections.Counter(path.rpartition("/")[0] for path in shipped())
    assert {folder: n for folder, n in count.items() if n > MANY_FILES.get(folder, MOST_FILES)} == {}


SMALL = 130  # lines
# Path → why it is a file of its own though one other file, in the same folder, imports it.
SMALL_FILES = {
    "interpreter/backends/hosted/anthropic/tools.py": "how a dialogue with tools is spelled there; nothing of prompts",
    "interpreter/backends/hosted/openai/embeddings.py": "an API of its own; the dialect of texts knows nothing of it",
    "compat/sglang/global_config.py": "SGLang has a module of this name",
    "fsm/schema/satisfiability.py": "a test of its own for emptiness, which the normalizer and it call in turn",
    "fsm/tokens/jump.py": "the rule of jump-forward, next to the matching that asks for it",
    "interpreter/terminal/lines.py": "what is typed and its history; the chat knows neither terminal nor file",
    "interpreter/traces/journal.py": "one kind of file; the lines of saved runs say other things",
    "interpreter/traces/saved_run.py": "one kind of file; the lines of journals say other things",
    "server/history.py": "a cache with its own bounds, tested by itself; a front has one",
    "server/ray/application.py": "imports Ray, which the options of the command must not need",
    "server/ray/router.py": "the class that Ray loads by its path on every node",
    "srt/constraints/compiler_worker.py": "a process, started as a module, that loads the automata and no torch",
    "srt/models/cpu_latents.py": "one native structure and its weights, latent.h; the decoder has others",
    "srt/models/cpu_experts.py": "one native structure and its weights, experts.h; the decoder has others",
    "srt/runners/cuda/triton_kernels.py": "imports Triton when it is loaded, which needs a GPU",
    "srt/runners/cuda/pages.py": "copies in the order of a stream, tested without a runner",
    "srt/simulator/arrivals.py": "when sessions begin, apart from what they ask",
    "srt/simulator/measuring.py": "opens a real model; all else of the simulator imports none",
    "srt/simulator/comparison.py": "draws several simulations; report.py draws one",
    "srt/simulator/replayed_guesses.py": "a guesser of the scheduler, apart from the replica that has one",
    "srt/simulator/traced.py": "plays a trace, as recorded.py plays a recording",
    "srt/simulator/optimum.py": "a bound of its own, which the benchmark counts with, too",
    "srt/weights/folder_tensors.py": "imports torch, which the process that opens a model for its tokenizer must not",
    "srt/weights/native_rows.py": "one layout translated to another, apart from the methods that choose them",
}
UNEXPLAINED = 0  # files that need no reason any more are counted, too


def imports() -> Mapping[str, set[str]]:
    """Path → the paths of the files that import it."""
    files = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in shipped()}
    importers = collections.defaultdict(set)
    for name, path in files.items():
        package = name.split(".") if path.endswith("/__init__.py") else name.split(".")[:-1]
        for node in [node for node in ast.walk(syntax(path)) if isinstance(node, ast.ImportFrom)]:
            start = package[: len(package) - (node.level - 1)] if node.level else []
            base = ".".join([*start, *(node.module or "").removeprefix("umbel.").split(".")]).strip(".")
            for alias in node.names:
                target = files.get(f"{base}.{alias.name}") or files.get(base)
                if target is not None and target != path:
                    importers[target].add(path)
    return importers


def test_small_files_with_one_importer_have_a_reason() -> None:
    importers = imports()
    small = {
        path: min(importers[path])
        for path, text in shipped().items()
        if not path.endswith("__init__.py") and len(importers[path]) == 1 and text.count("\n") <= SMALL
        if not path.startswith("srt/models/families/")  # a file each
    }
    small = {path: importer for path, importer in small.items() if Path(path).parent == Path(importer).parent}
    found = [f"{path} <- {importer}" for path, importer in small.items() if path not in SMALL_FILES]
    at_most([*found, *(f"{path} needs no reason" for path in SMALL_FILES if path not in small)], UNEXPLAINED)


SHARED_CLASS_NAMES: dict[str, int] = {}


@pytest.mark.parametrize("part", PARTS)
def test_a_name_of_a_class_is_used_once_in_a_part(part: str) -> None:
    homes = collections.defaultdict(list)
    for path in shipped():
        if path.startswith(f"{part}/"):
            for node in ast.walk(syntax(path)):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(path)
    at_most([f"{n}: {', '.join(p)}" for n, p in sorted(homes.items()) if len(p) > 1], SHARED_CLASS_NAMES.get(part, 0))


LONGEST = 60  # lines of a body
LONG_FUNCTIONS = 0


def test_functions_are_short() -> None:
    """Neither the signature nor the docstring counts. Kernels are exempt: a compiler sees one function as a whole."""
    found = []
    for path in shipped():
        for node in [] if path.startswith("srt/kernels/") else ast.walk(syntax(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                lines = node.end_lineno - body[0].lineno + 1 if body else 0
                if lines > LONGEST:
                    found.append(f"{path}: {node.name} has {lines} lines")
    at_most(found, LONG_FUNCTIONS)


PEOPLE = re.compile(r"(?<![a-z])(whoever|somebody|nobody|anybody)(?![a-z])", re.IGNORECASE)
PEOPLE_LEFT: dict[str, int] = {}  # parts that are not at 0 yet
PLACES = re.compile(r"(?<![a-z])(behind|beside|besides)(?![a-z])", re.IGNORECASE)
PLACES_LEFT = {"interpreter": 4, "compiler": 1}  # error texts and a finding that tests pin


def places_of(pattern: re.Pattern[str], part: str) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in shipped().items()
        if path.startswith(f"{part}/")
        for number, line in enumerate(text.splitlines(), 1)
        for _ in pattern.findall(line)
    ]


@pytest.mark.parametrize("part", PARTS)
def test_components_are_named(part: str) -> None:
    """The gateway does a thing, not "whoever" does it."""
    at_most(places_of(PEOPLE, part), PEOPLE_LEFT.get(part, 0))


@pytest.mark.parametrize("part", PARTS)
def test_time_is_before_or_after_and_place_is_next_to(part: str) -> None:
    """ "Behind" and "beside" leave open which is meant."""
    at_most(places_of(PLACES, part), PLACES_LEFT.get(part, 0))


NOUN_CLAUSES_LEFT: dict[str, int] = {}  # parts that are not at 0 yet


@pytest.mark.parametrize("part", PARTS)
def test_docstrings_say_what_is_done(part: str) -> None:
    """ "Counts the slots", not "How many slots there are"."""
    at_most(
        [
            f"{path}:{getattr(node, 'lineno', 1)}: {text.partition(chr(10))[0]}"
            for path in shipped()
            if path.startswith(f"{part}/")
            for node in ast.walk(syntax(path))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if (text := ast.get_docstring(node) or "").startswith(("What ", "Who ", "Where ", "How "))
        ],
        NOUN_CLAUSES_LEFT.get(part, 0),
    )


def test_no_import_is_excepted_from_the_layers() -> None:
    contracts: Any = project()["tool"]["importlinter"]["contracts"]
    at_most([line for contract in contracts for line in contract.get("ignore_imports", ())], 0)


def test_of_the_rooms_of_the_runtime_the_server_sees_placement_alone() -> None:
    """It is named by all others: a room that is new has to be added."""
    contracts: Any = project()["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each.get("containers") == ["umbel.srt"])
    (forbidden,) = (each["forbidden_modules"] for each in contracts if each.get("source_modules") == ["umbel.server"])
    rooms = {f"umbel.srt.{room.strip()}" for layer in layers for room in layer.split("|")}
    assert rooms - set(forbidden) == {"umbel.srt.placement"}


def test_one_module_of_the_interpreter_sees_the_automata() -> None:
    """It checks texts of models that enforce no constraint."""
    of_automata = {path for path in shipped() if path.startswith("fsm/")}
    importers = set().union(*(paths for path, paths in imports().items() if path in of_automata))
    assert {path for path in importers if path.startswith("interpreter/")} == {"interpreter/guarantees/expressions.py"}


def declared_options() -> Iterator[tuple[str, str]]:
    """(option, file): fields of the classes of options, limits and configurations, and parameters of `Runtime`."""
    for path in shipped():
        if path.startswith(("compat/", "srt/models/")):  # SGLang's names; what a checkpoint says of its model
            continue
        for node in ast.walk(syntax(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            if node.name.endswith(("Options", "Config", "Limits", "Settings")):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        yield field.target.id, path
            if node.name == "Runtime":
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                        yield from ((argument.arg, path) for argument in method.args.kwonlyargs)


def test_an_option_of_the_runtime_is_declared_in_two_files() -> None:
    homes = collections.defaultdict(set)
    for option, path in declared_options():
        homes[option].add(path)
    options = [option for option, paths in homes.items() if "lang/runtime_options.py" in paths]
    assert len(options) > 20
    found = [f"{option}: {', '.join(sorted(homes[option]))}" for option in options if len(homes[option]) > 2]
    at_most(found, 0)


FIRST_WITH_BODIES = "srt: put the runtime's files into rooms"


def test_commits_have_a_short_subject_and_a_body() -> None:
    """From the commit of that subject on. A checkout without a history that reaches back to it says nothing."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    first = git("log", "--format=%H", "--fixed-strings", f"--grep={FIRST_WITH_BODIES}").split()
    if not first:
        pytest.skip("no history")
    found = []
    for commit in git("log", "--no-merges", "--format=%h%x00%s%x00%b%x01", f"{first[-1]}..HEAD").split("\x01")[:-1]:
        name, subject, body = commit.strip().split("\0")
        if len(subject) > 72:
            found.append(f"{name} {subject}: {len(subject)} characters")
        if not body.strip():
            found.append(f"{name} {subject}: no body")
    at_most(found, 0)
