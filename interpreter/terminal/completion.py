"""`umbel completion`: scripts that complete commands, options and files in bash, zsh and fish.

A script is written from the parsers of the commands and holds all words, so that a press of the tabulator starts no
Python. Commands whose extra is not installed are completed by their name alone.
"""

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ...lang.errors import MissingExtraError
from .commands import COMMANDS, Command

_FILES = re.compile(r"FILE|PATH|LIST|FOLDER|RUN|RECORDING", re.IGNORECASE)  # in the name of a value: it is a file
_FILE_VALUES = frozenset({"file", "journal", "program", "constraint", "workload", "run", "source"})  # positional ones
_MOST_ABOUT = 70  # characters of help next to an option


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command.

    Attributes:
        names: with their hyphens.
        about: its help, shortened.
        value: what it takes: "" nothing, "file" a path, "word" anything else.
        choices: the words that it takes, if they are given.
    """

    names: tuple[str, ...]
    about: str
    value: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Words:
    """The words after a command: its options, those of its arguments, and whether these are files."""

    options: tuple[Option, ...]
    choices: tuple[str, ...]
    files: bool


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel completion",
        description="Prints the script that completes commands, options and files in a shell. Write it to the folder "
        "that the shell reads (see the examples) and open a new shell; again after an update of umbel.",
    )
    made.add_argument("shell", choices=sorted(_SCRIPTS), help="the shell")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit status."""
    options = parser().parse_args(arguments)
    words = {name: words_of(command) for name, command in COMMANDS.items()}
    print(_SCRIPTS[options.shell](words), end="")
    return 0


def words_of(command: Command) -> Words:
    """Reads the parser of a command. That of a command that cannot be imported has nothing but --help."""
    try:
        made = command.parser()
    except MissingExtraError:
        made = argparse.ArgumentParser()
    options, choices, files = [], list[str](), False
    for action in made._actions:
        if action.help == argparse.SUPPRESS:
            continue
        given = tuple(str(choice) for choice in action.choices or ())
        if action.option_strings:
            options.append(Option(tuple(action.option_strings), _about(action.help), _value_of(action), given))
        else:
            choices += given
            files = files or action.dest in _FILE_VALUES
    return Words(tuple(options), tuple(choices), files)


def _value_of(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    return "file" if _FILES.search(str(action.metavar or action.dest)) else "word"


def _about(text: str | None) -> str:
    line = " ".join((text or "").replace("%%", "%").split())
    return line if len(line) <= _MOST_ABOUT else f"{line[: _MOST_ABOUT - 1].rstrip()}…"


# ------------------------------------------------------------------------------------------- scripts


def bash_script(words: dict[str, Words]) -> str:
    """Writes the script for bash 3.2 and later, without the package bash-completion."""
    cases = []
    for name, each in words.items():
        flags = " ".join(flag for option in each.options for flag in option.names)
        lines = [f"        {name})"]
        chosen = [(option.names, option.choices) for option in each.options if option.choices]
        paths = [flag for option in each.options if option.value == "file" for flag in option.names]
        others = [flag for o in each.options if o.value == "word" and not o.choices for flag in o.names]
        lines.append('            case "$previous" in')
        lines += [f"                {'|'.join(flags_)}) words={_quoted(' '.join(w))} ;;" for flags_, w in chosen]
        lines += [f"                {'|'.join(paths)}) files=yes ;;"] if paths else []
        lines += [f"                {'|'.join(others)}) return ;;"] if others else []
        lines += [
            "                *)",
            f"                    words={_quoted(' '.join(each.choices))}",
            *(["                    files=yes"] if each.files else []),
            f'                    case "$current" in -*) words={_quoted(flags)}; files= ;; esac',
            "                    ;;",
            "            esac",
            "            ;;",
        ]
        cases.append("\n".join(lines))
    return _BASH.replace("{commands}", " ".join(words)).replace("{cases}", "\n".join(cases))


_BASH = """# Completion of umbel for bash; made by: umbel completion bash
_umbel() {
    local current previous command words= files= word
    current="${COMP_WORDS[COMP_CWORD]}"
    previous="${COMP_WORDS[COMP_CWORD - 1]}"
    command="${COMP_WORDS[1]}"
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands} help --help --version"
        command=
    fi
    case "$command" in
        "") ;;
        help)
            words="{commands}"
            ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [ -n "$files" ]; then
        while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$current")
        compopt -o filenames 2>/dev/null
    fi
}
complete -F _umbel umbel
"""


def zsh_script(words: dict[str, Words]) -> str:
    """Writes the script for zsh: a function that compinit loads."""
    listed = "\n".join(f"        {_quoted(f'{name}:{COMMANDS[name].about}')}" for name in words)
    cases = []
    for name, each in words.items():
        specs = [_zsh_option(option) for option in each.options]
        if each.choices:
            specs.append(_quoted(f"*:argument:({' '.join(each.choices)})"))
        elif each.files:
            specs.append(_quoted("*:file:_files"))
        cases.append(
            f"        {name})\n            _arguments " + " \\\n                ".join(specs) + "\n            ;;"
        )
    return _ZSH.replace("{listed}", listed).replace("{cases}", "\n".join(cases))


def _zsh_option(option: Option) -> str:
    about = re.sub(r"([\[\]:\\])", r"\\\1", option.about)
    action = "_files" if option.value == "file" else f"({' '.join(option.choices)})" if option.choices else " "
    value = f":value:{action}" if option.value else ""
    return " ".join(_quoted(f"{flag}[{about}]{value}") for flag in option.names)


_ZSH = """#compdef umbel
# Completion of umbel for zsh; made by: umbel completion zsh
_umbel() {
    local -a commands
    commands=(
{listed}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command="$words[2]"
    shift words
    (( CURRENT-- ))
    case "$command" in
        help) _describe command commands ;;
{cases}
    esac
}
if [ "$funcstack[1]" = _umbel ]; then
    _umbel "$@"
else
    compdef _umbel umbel
fi
"""


def fish_script(words: dict[str, Words]) -> str:
    """Writes the script for fish: a line for each command and each option."""
    lines = [
        "# Completion of umbel for fish; made by: umbel completion fish",
        "complete -c umbel -f",
        "complete -c umbel -n __fish_use_subcommand -l help -d 'list the commands'",
        "complete -c umbel -n __fish_use_subcommand -l version -d 'print the version'",
    ]
    for name, each in words.items():
        lines.append(f"complete -c umbel -n __fish_use_subcommand -a {name} -d {_fish(COMMANDS[name].about)}")
        after = f"complete -c umbel -n '__fish_seen_subcommand_from {name}'"
        if each.choices:
            lines.append(f"{after} -a {_fish(' '.join(each.choices))}")
        elif each.files:
            lines.append(f"{after} -F")
        lines += [f"{after} {_fish_option(option)}" for option in each.options]
    return "\n".join([*lines, ""])


def _fish_option(option: Option) -> str:
    parts = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.names]
    if option.value:
        parts.append("-r -F" if option.value == "file" else "-x")
    if option.choices:
        parts.append(f"-a {_fish(' '.join(option.choices))}")
    return " ".join([*parts, f"-d {_fish(option.about)}"])


def _fish(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"


def _quoted(text: str) -> str:
    return f"'{text}'" if "'" not in text else shlex.quote(text)


_SCRIPTS = {"bash": bash_script, "fish": fish_script, "zsh": zsh_script}
