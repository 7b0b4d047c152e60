"""`import umbel`: fast, light, and what it says it is."""

import ast
import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import umbel

ROOT = Path(umbel.__file__).parent


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.processes
def test_import_loads_no_heavy_module() -> None:
    heavy = ["torch", "numpy", "transformers", "jinja2", "rich", "zmq", "PIL", "httpx", "msgspec", "asyncio"]
    loaded = run_python(f"import sys, umbel; print([name for name in {heavy} if name in sys.modules])")
    assert loaded == "[]"


@pytest.mark.processes
def test_a_program_on_echo_needs_no_runtime() -> None:
    heavy = ["torch", "numpy", "transformers", "zmq", "rich", "PIL"]
    code = (
        "import sys, umbel as ul\n"
        "@ul.function\n"
        "def program(s):\n"
        "    s += ul.user('hello') + ul.assistant(ul.gen('x'))\n"
        "print(program.run(backend=ul.Echo())['x'])\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert run_python(code).split("\n") == ["hello", "[]"]


def test_every_public_name_is_there() -> None:
    for name in umbel.__all__:
        assert getattr(umbel, name) is not None
    assert set(umbel.__all__) <= set(dir(umbel))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        umbel.nothing  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    """The block for type checkers and the table for the interpreter say the same."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (statement.module, alias.asname)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == {(module, name) for module, names in umbel._HOMES.items() for name in names}


def test_an_error_can_be_copied_to_another_process() -> None:
    error = umbel.MissingExtraError("torch", "runtime")
    assert str(copy.copy(error)) == str(error)


def test_all_errors_of_the_tree_are_public() -> None:
    from umbel.lang import errors

    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.UmbelError)
    }
    assert classes <= set(umbel.__all__)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_runs_programs_of_its_own() -> None:
    code = """
import os, umbel as ul
from umbel.interpreter.backends.echo import Gate
@ul.function
def program(s, x):
    s += x + ul.gen("y")
gate = Gate()
pending = program.run("parent", backend=ul.Echo(gate=gate))
gate.wait_for(1)
child = os.fork()
if child == 0:
    assert program.run("child", backend=ul.Echo(), timeout=20)["y"] == "child"
    try:
        pending["y"]
    except ul.ProgramError as error:
        assert "belongs to the parent process" in str(error)
        os._exit(0)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
gate.open()
print(pending["y"])
"""
    assert run_python(code).split() == ["0", "parent"]


@pytest.mark.processes
def test_a_process_that_ends_with_its_programs_just_begun_says_nothing() -> None:
    code = """
import umbel as ul
@ul.function
def program(s):
    s += "a" + ul.gen("x")
    forks = s.fork(2)
    forks += ul.gen("y")
    forks.join()
for _ in range(50):
    program.run(backend=ul.Echo())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.processes
def test_a_process_ends_although_calls_are_pending() -> None:
    code = """
import umbel as ul
from umbel.interpreter.backends.echo import Gate
@ul.function
def program(s):
    s += "a" + ul.gen("x")
program.run(backend=ul.Echo(gate=Gate()))
print("done")
"""
    assert run_python(code) == "done"
