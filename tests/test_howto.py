"""Recipes of docs/howto/ that need more than a block that runs: a browser, two processes, settings, pytest."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
import uvicorn

from .serving import ServerProcess, until

RECIPES = Path(__file__).resolve().parents[1] / "docs" / "howto"
PLUGIN = "umbel.interpreter.journal.pytest_plugin"
BODY = b'{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
HEAD = b"POST /chat HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)


def block(page: str, title: str) -> str:
    """Returns the code of a titled block."""
    found = re.search(rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```', (RECIPES / page).read_text(), re.S | re.M)
    assert found is not None, f"{page} has no block {title}"
    return found[1]


@contextmanager
def served(app: Any) -> Iterator[int]:
    """Serves an application on a free port in a thread, as `uvicorn FILE:app` does."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        until(lambda: server.started, "uvicorn does not start")
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def ask_and_leave(port: int, model: ul.Echo, gate: ul.Gate) -> None:
    """Asks as a browser does, reads two pieces of the answer, and closes the connection."""
    with socket.create_connection(("127.0.0.1", port)) as browser:
        browser.sendall(HEAD + BODY)
        gate.step(3)  # the call itself, and two pieces
        read = b""
        while read.count(b"data: ") < 2:
            read += browser.recv(4096)
        assert model.aborted == []
    until(lambda: model.aborted, "the call goes on without its reader")


@pytest.mark.parametrize("page", sorted(path.name for path in RECIPES.glob("*.md")))
def test_what_a_recipe_installs_is_enough_for_its_backends(page: str) -> None:
    text = (RECIPES / page).read_text()
    installed = set(re.findall(r"\w[\w-]*", " ".join(re.findall(r"(?:umbel|'\.)\[([\w,-]+)\]", text))))
    blocks = "\n".join(re.findall(r"^```py(?:thon)?[^\n]*\n(.*?)^```", text, re.S | re.M))
    made = set(re.findall(r"ul\.(OpenAI|RuntimeEndpoint|Anthropic|Gemini)\(", re.sub("#.*", "", blocks)))
    needed = {{"RuntimeEndpoint": "openai"}.get(name, name.lower()) for name in made}
    assert needed <= installed, f"{page}: pip install '.[{','.join(sorted(needed))}]'"


def test_a_browser_that_leaves_ends_its_call() -> None:
    recipe: dict[str, Any] = {}
    exec(block("chat_on_a_web_page.md", "chat_server.py"), recipe)
    gate = ul.Gate()
    recipe["model"] = ul.Echo(lambda prompt: "Paris is the capital of France.", gate=gate)
    with served(recipe["app"]) as port:
        ask_and_leave(port, recipe["model"], gate)
    assert recipe["model"].calls == 1


def test_fastapi_takes_the_same_events() -> None:
    pytest.importorskip("fastapi")
    recipe: dict[str, Any] = {}
    exec(block("chat_on_a_web_page.md", "chat_server.py"), recipe)
    gate = ul.Gate()
    recipe["model"] = ul.Echo(lambda prompt: "Paris is the capital of France.", gate=gate)
    exec(block("chat_on_a_web_page.md", "chat_fastapi.py"), recipe)
    with served(recipe["app"]) as port:
        ask_and_leave(port, recipe["model"], gate)


@pytest.mark.processes
def test_two_processes_share_what_a_server_has_computed(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text(block("production.md", "serve.toml"))
    settings = ("--config", str(tmp_path / "serve.toml"), "--model", "oracle", "--host", "127.0.0.1")
    server = ServerProcess(*settings, "--pool-memory", "4194304")
    try:
        until(lambda: server.said("ready: (small)"), "it is not ready")
        mine = f'"{server.address}", api_key="sk-change-me"'
        code = block("share_a_runtime.md", "ask.py").replace('"http://127.0.0.1:30000"', mine)
        (tmp_path / "ask.py").write_text(code)
        said = []
        for country in ("Norway", "Italy"):
            command = [sys.executable, str(tmp_path / "ask.py"), country]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stderr
            said.append([int(number) for number in re.findall(r"(\d+) of (\d+) prompt tokens", ended.stdout)[0]])
    finally:
        server.end()
    (first, _), (second, whole) = said
    assert first <= 1
    assert 0.8 * whole < second < whole


def test_the_tests_of_a_program_pass_and_its_answers_are_replayed(tmp_path: Path) -> None:
    for title in ("reviews.py", "test_reviews.py"):
        (tmp_path / title).write_text(block("test_your_programs.md", title))
    recorded = block("test_your_programs.md", "test_recorded.py")
    echo = 'ul.Echo({"What was wrong?": "It was cold."}, scores={"good": -3.0, "bad": -0.1})'
    file = tmp_path / "test_recorded.py"
    for model, option in ((echo, "once"), ("None.asked()", "none")):
        file.write_text(recorded.replace('ul.OpenAI("gpt-4o-mini")', model))
        command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, f"--umbel-record={option}", "."]
        alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other plugins take a second to import
        ended = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False)
        assert "4 passed" in ended.stdout, ended.stdout
    lines = (tmp_path / "journals" / "test_recorded.test_review.jsonl").read_text().splitlines()
    assert [json.loads(line)["type"] for line in lines].count("call") == 2
