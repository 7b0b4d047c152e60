"""The table of commands: their groups, one line each, examples, and where they live.

A command is a module with two functions: `parser()` gives its `argparse.ArgumentParser`, `main(arguments)` runs it. The
modules are imported by name when their command is used: the interpreter imports no compiler, no runtime and no server.
"""

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...lang.errors import MissingExtraError

_PACKAGES = {"runtime": "torch", "server": "uvicorn"}  # of an extra, where an import does not name what is missing


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the command line.

    Attributes:
        name: as it is typed.
        about: one line for the list of commands.
        module: where it lives, from the package on.
        examples: pairs of a command line and what it does.
        extra: the extra of the package that its module needs.
        by_name: its module has several commands, whose functions take the name first.
        judges: its exit status 1 is a verdict, and an error is 2.
    """

    name: str
    about: str
    module: str
    examples: tuple[tuple[str, str], ...]
    extra: str = ""
    by_name: bool = False
    judges: bool = False

    def load(self) -> Any:  # Any: a module with parser() and main()
        """Imports the module. Raises MissingExtraError."""
        try:
            return importlib.import_module(f"umbel.{self.module}")
        except ModuleNotFoundError as error:
            if not self.extra:
                raise
            raise MissingExtraError(error.name or _PACKAGES[self.extra], self.extra) from None

    def parser(self) -> argparse.ArgumentParser:
        """Makes the parser of its arguments. Raises MissingExtraError."""
        module = self.load()
        made: argparse.ArgumentParser = module.parser(self.name) if self.by_name else module.parser()
        return made

    def main(self, arguments: Sequence[str]) -> int:
        """Runs it. Returns the exit status; raises UmbelError."""
        module = self.load()
        if self.name == "simulate":
            from ..traces.reading import read_trace  # the runtime knows no journals

            return int(module.main(arguments, read_trace))
        return int(module.main(self.name, arguments) if self.by_name else module.main(arguments))


# The groups of the list of commands, in the order in which a person meets them.
GROUPS: dict[str, tuple[Command, ...]] = {
    "Begin": (
        Command(
            "new",
            "make a project: a program, its test, a Makefile, a README",
            "interpreter.terminal.project",
            (("umbel new essays", "the folder essays/, ready to run"), ("cd essays && make test", "without a model")),
        ),
        Command(
            "run",
            "run a Python file; its programs use the model named here",
            "interpreter.terminal.run_file",
            (
                ("umbel run judge.py", "on the default model"),
                ("umbel run judge.py --model Qwen/Qwen3-0.6B essay.txt", "essay.txt is in sys.argv"),
                ("umbel run judge.py --url http://127.0.0.1:30000", "on the model of a server"),
            ),
        ),
        Command(
            "chat",
            "talk to a model in the terminal",
            "interpreter.terminal.chat",
            (
                ("umbel chat", "with the default model, which continues text"),
                ("umbel chat --model Qwen/Qwen3-0.6B", "with one that answers"),
                ("umbel chat --model anthropic:claude-haiku-4-5", "with a hosted one"),
                ("umbel chat --url http://127.0.0.1:30000", "with the model of a server"),
            ),
        ),
    ),
    "Models on this machine": (
        Command(
            "pull",
            "download a model from the Hugging Face hub",
            "srt.models_command",
            (("umbel pull Qwen/Qwen3-0.6B", ""), ("umbel pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", "")),
            by_name=True,
            extra="runtime",
        ),
        Command(
            "models",
            "list the models on this machine, and the families that run",
            "srt.models_command",
            (("umbel models", "those on this machine"), ("umbel models --supported", "families that run")),
            by_name=True,
            extra="runtime",
        ),
        Command(
            "rm",
            "remove a model that umbel models lists",
            "srt.models_command",
            (("umbel rm Qwen/Qwen3-0.6B", "asks before it removes"),),
            by_name=True,
            extra="runtime",
        ),
        Command(
            "warm",
            "start a model once, so that its next start finds everything made",
            "interpreter.terminal.warm",
            (("umbel warm Qwen/Qwen3-0.6B", "for the image of a container, say"),),
            extra="runtime",
        ),
        Command(
            "doctor",
            "look at what umbel needs of this machine, and say what to do",
            "srt.doctor",
            (("umbel doctor", ""),),
            extra="runtime",
        ),
        Command(
            "weights",
            "measure weight formats of a model on a text",
            "srt.evaluation",
            (("umbel weights default --text README.md --weights int8,int4", "perplexity and divergence of both"),),
            extra="runtime",
        ),
    ),
    "Servers": (
        Command(
            "serve",
            "serve a model over HTTP, with the APIs of OpenAI and Anthropic",
            "server.command",
            (
                ("umbel serve", "the default model, at http://127.0.0.1:30000"),
                ("umbel serve --model Qwen/Qwen3-0.6B --api-key team=SECRET", "for clients with a key"),
                ("umbel serve --config serve.toml", "settings of a file"),
            ),
            extra="server",
        ),
        Command(
            "deploy",
            "serve a model by several replicas on Ray Serve",
            "server.ray.command",
            (("umbel deploy default --replicas 2", ""),),
            extra="server",
        ),
        Command(
            "keys",
            "make keys for a runtime that listens on a TCP port",
            "interpreter.terminal.keys",
            (
                ("umbel keys server.key", "prints the public key of the server"),
                ("umbel keys me.key --server PUBLIC --clients clients.toml", "the key of a client, admitted"),
            ),
        ),
        Command(
            "cost",
            "say what providers would have charged for a recorded run",
            "server.cost",
            (("umbel cost requests.jsonl --price 2.5", "dollars for a million input tokens"),),
            extra="server",
        ),
        Command(
            "simulate",
            "say how a workload would run on N replicas, computing nothing",
            "srt.simulator.command",
            (
                ("umbel simulate run.jsonl --replicas 4", "the journal of a batch, on four replicas"),
                ("umbel simulate run.jsonl --pool 10000,20000 --svg pools.svg", "two sizes of the cache"),
            ),
            extra="runtime",
            judges=True,
        ),
    ),
    "Looking into programs": (
        Command(
            "eval",
            "measure a program over data: figures, cost, worst rows",
            "interpreter.evaluation.command",
            (
                ("umbel eval quiz.py:quiz questions.csv --exact answer=label", "a figure with its interval"),
                ("umbel eval quiz.py:careful questions.csv --exact answer=label --compare first.json", "two prompts"),
            ),
            judges=True,
        ),
        Command(
            "lint",
            "say what keeps prompts from sharing their beginnings",
            "compiler.lint.command",
            (("umbel lint judge.py", "all programs of the file"), ("umbel lint judge.py:judge --json", "one of them")),
            judges=True,
        ),
        Command(
            "view",
            "open the page of a run, or of a batch while it runs",
            "interpreter.view.page",
            (
                ("umbel view run.jsonl", "a file that state.save() wrote"),
                ("umbel view run.jsonl --output run.html", "writes the page and opens nothing"),
                ("umbel view --live batch.jsonl", "run_batch(..., view=...) while it runs"),
            ),
        ),
        Command(
            "replay",
            "run a program against a journal, and say which prompts differ",
            "interpreter.journal.command",
            (("umbel replay run.journal judge.py:judge", "no model is asked"),),
            judges=True,
        ),
        Command(
            "compile",
            "print, draw or keep the graph of a program",
            "compiler.command",
            (
                ("umbel compile judge.py:judge", "a listing"),
                ("umbel compile judge.py:judge -o judge.umbel.json", "for umbel.load() and umbel serve --program"),
            ),
        ),
        Command(
            "fsm",
            "print or draw the automaton of a regex or a JSON schema",
            "fsm.inspector.command",
            (
                ("umbel fsm '[0-9]{4}-[0-9]{2}'", "a regular expression"),
                ("umbel fsm schema.json --svg schema.svg", "a schema, drawn"),
            ),
            extra="runtime",
        ),
    ),
    "Your shell": (
        Command(
            "completion",
            "print the script that completes umbel's commands and options",
            "interpreter.terminal.completion",
            (
                ("umbel completion bash > ~/.local/share/bash-completion/completions/umbel", ""),
                ("umbel completion zsh > ~/.zfunc/_umbel", "with ~/.zfunc in fpath"),
                ("umbel completion fish > ~/.config/fish/completions/umbel.fish", ""),
            ),
        ),
    ),
}
COMMANDS: dict[str, Command] = {command.name: command for group in GROUPS.values() for command in group}
