"""The command `umbel`: run a file of programs, chat with a model, look at models, graphs and constraints."""

import argparse
import importlib
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..lang import __version__
from ..lang.errors import MissingExtraError, ParameterError, UmbelError, shown
from ..lang.generation import gen
from ..lang.state import State
from .backends.runtime import Runtime
from .backends.runtime_remote import make_key
from .program import Program, maker
from .run import get_server_info, set_default_backend

COMMANDS = {
    "run": "run a Python file; its programs use the model that is named here",
    "chat": "talk to a model in the terminal",
    "serve": "serve a model over HTTP, with the APIs of OpenAI and Anthropic",
    "deploy": "serve a model by several replicas on Ray Serve",
    "cost": "say what providers would have charged for a run that umbel serve recorded",
    "pull": "download a model from the Hugging Face hub",
    "warm": "make all that a first start of a model makes and keeps: download, kernels, tables",
    "models": "list the models on this machine, and the families that run",
    "rm": "remove a model that umbel models lists",
    "doctor": "look at what umbel needs of this machine, and say what to do",
    "simulate": "say how a workload would run on a number of replicas, without computing it",
    "eval": "measure a program over data; or weight formats of a model on a text",
    "keys": "make the keys of a runtime that listens on a TCP port, and of its clients",
    "compile": "print, draw or keep the graph of a program",
    "view": "open the page of a run, or of a batch while it runs",
    "lint": "say what keeps prompts from sharing their beginnings, and what to write instead",
    "replay": "run a program against the journal of an earlier run, and say which prompts have changed",
    "fsm": "print or draw the automaton of a regular expression or a JSON schema",
}


WARMS = (
    "Starts a model, lets it answer, and starts it again, so that the next start finds all that a first one makes: the "
    "model from the hub, compiled kernels, tables for constraints. For the image of a container, or after an update."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit status; errors of umbel are printed without a traceback."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if given[:1] == ["fsm"]:
            return _fsm(given[1:])  # its options are its own, like those of lint and compile
        if given[:1] == ["lint"]:
            return _lint(given[1:])
        if given[:1] == ["replay"]:
            return _replay(given[1:])
        if given[:1] == ["compile"]:
            return _compile(given[1:])
        if given[:1] == ["view"]:
            return _view(given[1:])
        if given[:1] == ["eval"]:
            return _eval(given[1:])
        if given[:1] == ["simulate"]:
            return _simulate(given[1:])
        if given[:1] == ["doctor"]:
            return int(_of_runtime("doctor").main(given[1:]))
        if given and given[0] in ("pull", "models", "rm"):
            return int(_of_runtime("models_command").main(given[0], given[1:]))
        if given[:1] == ["serve"]:
            return _of_server("command", given[1:])
        if given[:1] == ["deploy"]:
            return _of_server("ray.command", given[1:])
        if given[:1] == ["cost"]:
            return _of_server("cost", given[1:])
        if not given:
            _parser().print_help()
            return 0
        options = _parse(given)
        command: Callable[[argparse.Namespace], int] = {
            "run": _run,
            "chat": _chat,
            "warm": _warm,
            "keys": _keys,
        }[options.command]
        return command(options)
    except UmbelError as error:
        print(f"umbel: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments. Those after `FILE --model NAME`, which argparse calls unknown, go to the file."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    for argument in rest:
        if options.command != "run" or argument.startswith("-"):
            hint = "; write -- before the options of the file" if options.command == "run" else ""
            parser.error(f"unknown argument {argument!r}{hint}")
    if rest:
        options.arguments = [*options.arguments, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="umbel",
        description="Programs that call language models many times.",
        epilog="umbel COMMAND --help says more of one. A first try: umbel chat, or umbel run FILE.py.",
    )
    parser.add_argument("--version", action="version", version=f"umbel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help=COMMANDS["run"])
    run.add_argument("file", type=Path, help="the Python file")
    run.add_argument(
        "arguments",
        nargs="*",
        default=[],  # without one argparse calls them required
        help="what the file finds in sys.argv; write -- before options of its own",
    )
    chat = commands.add_parser("chat", help=COMMANDS["chat"])
    chat.add_argument("--system", help="a system message to begin with")
    chat.add_argument("--temperature", type=float, default=0.7, help="0 for the likeliest answer; default: 0.7")
    chat.add_argument("--max-tokens", type=int, default=256, help="of one answer; default: 256")
    chat.add_argument(
        "--image", action="append", default=[], metavar="PATH", help="a picture for the first message; may be repeated"
    )
    warm = commands.add_parser("warm", help=COMMANDS["warm"], description=WARMS)
    warm.add_argument("--device", default="auto", help='as for Runtime: "cpu", "cuda", "cuda:1"; default: auto')
    warm.add_argument("--dtype", default="auto", help="as for Runtime")
    warm.add_argument("--weights", default="auto", help="as for Runtime")
    warm.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="as for Runtime")
    named = "a name (org/repo, ollama:NAME), a folder or a GGUF file; default: Gemma 3 270M"
    warm.add_argument("model", nargs="?", metavar="MODEL", help=named)
    for command in (run, chat):
        command.add_argument("--model", help=named)
    commands.add_parser("serve", help=COMMANDS["serve"], add_help=False)
    commands.add_parser("deploy", help=COMMANDS["deploy"], add_help=False)
    commands.add_parser("cost", help=COMMANDS["cost"], add_help=False)
    for name in ("pull", "models", "rm", "doctor", "eval", "simulate"):
        commands.add_parser(name, help=COMMANDS[name], add_help=False)
    keys = commands.add_parser("keys", help=COMMANDS["keys"])
    keys.add_argument("file", help="the new key file, for its owner alone (0600)")
    keys.add_argument("--server", help="for a client: the server's public key, or the path of its key file")
    keys.add_argument("--clients", metavar="LIST", help="add the public key to this list of clients")
    keys.add_argument("--name", help="in that list; default: the name of the file")
    commands.add_parser("compile", help=COMMANDS["compile"], add_help=False)
    commands.add_parser("replay", help=COMMANDS["replay"], add_help=False)
    commands.add_parser("view", help=COMMANDS["view"], add_help=False)
    commands.add_parser("lint", help=COMMANDS["lint"], add_help=False)
    commands.add_parser("fsm", help=COMMANDS["fsm"], add_help=False)
    return parser


def _run(options: argparse.Namespace) -> int:
    if not os.path.isfile(options.file):  # False also for what no file can be called
        raise ParameterError(f"{shown(str(options.file))} is not a file; write the path of a Python file with programs")
    if options.model is not None:
        set_default_backend(Runtime(options.model))
    sys.argv = [str(options.file), *options.arguments]
    sys.path.insert(0, str(options.file.resolve().parent))
    runpy.run_path(str(options.file), run_name="__main__")
    return 0


def _view(arguments: Sequence[str]) -> int:
    from .view.page import main as view

    return view(arguments)


def _eval(arguments: Sequence[str]) -> int:
    from .evaluation.command import is_about_programs, main

    return main(arguments) if is_about_programs(arguments) else int(_of_runtime("evaluation").main(arguments))


def _keys(options: argparse.Namespace) -> int:
    if options.name is not None and options.clients is None:
        raise ParameterError("--name is the name in a list; write --clients LIST, too")
    print(make_key(options.file, server=options.server, clients=options.clients, name=options.name).public)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from .chat import chat

    return chat(
        options.model,
        system=options.system,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        images=options.image,
    )


def _warm(options: argparse.Namespace) -> int:
    """Starts a runtime, lets it answer, and starts it again: the first start makes what the second one finds."""
    given = {name: getattr(options, name) for name in ("device", "dtype", "weights", "tensor_parallel")}
    seconds = []
    for _ in range(2):
        began = time.monotonic()
        with Runtime(options.model, **given) as runtime:
            runtime.wait_ready()
            seconds.append(time.monotonic() - began)
            if len(seconds) == 1:
                print(f"it says: {_warmed.run(backend=runtime).text()}", flush=True)
            kernels = get_server_info(runtime).get("kernels")
    print(f"first start {seconds[0]:.1f} s, the next one {seconds[1]:.1f} s ({kernels} kernels)")
    return 0


@maker(Program)
def _warmed(s: State) -> None:
    s += "A number: "
    s += gen("number", regex="[1-9][0-9]", max_tokens=8)


def _simulate(arguments: Sequence[str]) -> int:
    from .traces.reading import read_trace

    return int(_of_runtime("simulator.command").main(arguments, read_trace))


def _of_server(module: str, arguments: Sequence[str]) -> int:
    try:
        command: Any = importlib.import_module(f"umbel.server.{module}")  # by name: the interpreter imports no server
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "uvicorn", "server") from None
    return int(command.main(arguments))


def _fsm(arguments: Sequence[str]) -> int:
    try:
        # By name: the interpreter imports no automata.
        inspector: Any = importlib.import_module("umbel.fsm.inspector.command")
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "numpy", "runtime") from None
    status: int = inspector.main(arguments)
    return status


def _of_runtime(module: str) -> Any:
    """Imports a module of the runtime by name: the interpreter imports none. Raises MissingExtraError."""
    try:
        return importlib.import_module(f"umbel.srt.{module}")
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "runtime") from None


def _lint(arguments: Sequence[str]) -> int:
    # By name: the interpreter imports no compiler.
    linter: Any = importlib.import_module("umbel.compiler.lint.command")
    status: int = linter.main(arguments)
    return status


def _replay(arguments: Sequence[str]) -> int:
    from .journal.command import main

    return main(arguments)


def _compile(arguments: Sequence[str]) -> int:
    # By name: the interpreter imports no compiler.
    compiler: Any = importlib.import_module("umbel.compiler.command")
    status: int = compiler.main(arguments)
    return status
