"""Language, interpreter and compiler where the modules and functions that Windows lacks are hidden."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("no_posix")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(HERE / "no_posix.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_module_imports(seen: dict[str, Any]) -> None:
    assert seen["modules"] > 200


def test_programs_run_and_compile(seen: dict[str, Any]) -> None:
    assert seen["batch"] == ["yes", "yes"]
    assert seen["compiled"] in ("yes", "no")
    assert seen["saved"]


def test_a_journal_goes_on_and_is_for_one_run_at_a_time(seen: dict[str, Any]) -> None:
    assert seen["resumed"]
    assert "is in use by another run" in seen["locked"]


def test_hosted_models_answer(seen: dict[str, Any]) -> None:
    assert seen["hosted"] == "an umbel"


def test_foreign_templates_run_within_their_cpu_time(seen: dict[str, Any]) -> None:
    assert seen["template"] == "[user]hi\n"
    assert "takes more than 1 s of CPU time" in seen["bomb"]


def test_a_local_runtime_says_where_it_runs(seen: dict[str, Any]) -> None:
    assert "a Runtime needs Linux or macOS" in seen["runtime"]
