"""The scripts of completion, run by the shells that are there."""

import shutil
import subprocess
from pathlib import Path

import pytest
from umbel.interpreter.cli import main
from umbel.interpreter.terminal import completion
from umbel.interpreter.terminal.commands import COMMANDS, Command
from umbel.interpreter.terminal.completion import Words, words_of

HAND_MADE = ("new", "run", "chat", "view", "replay", "lint", "compile", "keys", "completion")


@pytest.fixture(scope="module")
def words() -> dict[str, Words]:
    return {name: words_of(COMMANDS[name]) for name in HAND_MADE}


@pytest.fixture(scope="module")
def bash(words: dict[str, Words], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "umbel.bash"
    path.write_text(completion.bash_script(words))
    return path


def completed(script: Path, folder: Path, *typed: str) -> set[str]:
    """Asks bash what the last word of a line may become."""
    line = " ".join(f"'{word}'" for word in ("umbel", *typed))
    asked = (
        f'source "{script}"; COMP_WORDS=({line}); COMP_CWORD={len(typed)}; _umbel; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", asked], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands(bash: Path, tmp_path: Path) -> None:
    assert completed(bash, tmp_path, "com") == {"compile", "completion"}
    assert completed(bash, tmp_path, "help", "vi") == {"view"}
    assert {*HAND_MADE, "help", "--version"} <= completed(bash, tmp_path, "")


def test_bash_completes_options_and_their_words(bash: Path, tmp_path: Path) -> None:
    assert completed(bash, tmp_path, "chat", "--m") == {"--model", "--max-tokens"}
    assert completed(bash, tmp_path, "completion", "") == {"bash", "fish", "zsh"}
    assert completed(bash, tmp_path, "chat", "--temperature", "") == set()


def test_bash_completes_files_where_files_are_meant(bash: Path, tmp_path: Path) -> None:
    (tmp_path / "judge.py").touch()
    assert completed(bash, tmp_path, "run", "ju") == {"judge.py"}
    assert completed(bash, tmp_path, "chat", "--image", "ju") == {"judge.py"}
    assert completed(bash, tmp_path, "view", "--output", "ju") == {"judge.py"}
    assert completed(bash, tmp_path, "chat", "ju") == set()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_is_one_of_its_shell(shell: str, words: dict[str, Words], tmp_path: Path) -> None:
    script = completion._SCRIPTS[shell](words)
    for name in HAND_MADE:
        assert name in script
    if shutil.which(shell) is None:
        return  # its words were looked at
    path = tmp_path / "script"
    path.write_text(script)
    subprocess.run([shell, "-n", str(path)], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_and_options(words: dict[str, Words], tmp_path: Path) -> None:
    path = tmp_path / "umbel.fish"
    path.write_text(completion.fish_script(words))
    for typed, expected in (("com", {"compile", "completion"}), ("chat --mo", {"--model"})):
        asked = f"source {path}; complete -C 'umbel {typed}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", asked], capture_output=True, text=True, timeout=60, check=True
        )
        assert {line.split("\t")[0] for line in done.stdout.splitlines()} == expected


def test_a_command_without_its_extra_is_completed_by_name_alone() -> None:
    missing = Command("other", "does nothing", "no.such.module", (("umbel other", ""),), extra="server")
    assert [option.names for option in words_of(missing).options] == [("-h", "--help")]


def test_the_command_prints_a_script_with_all_commands(
    monkeypatch: pytest.MonkeyPatch, words: dict[str, Words], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        completion, "words_of", lambda command: words["view"]
    )  # the parsers of the runtime take seconds
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(f"        {name})" in script for name in COMMANDS)


def test_an_unknown_shell_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err
