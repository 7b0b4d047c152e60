"""Files that leave this machine do not say where they were written."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import umbel as ul
from umbel.compiler.files import serialise
from umbel.compiler.lint.command import main as lint
from umbel.lang.prompt import public_name

CANARY = "canary-of-somebody"
PROGRAM = """
import umbel as ul

@ul.function
def tip(s, topic):
    s += "Question of " + topic + ". "
    s += "Rules: be brief, be kind, be right. " * 20
    s += ul.gen("x", max_tokens=4)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Of a package in a folder whose path is nobody's business."""
    folder = tmp_path / CANARY / "app" / "prompts"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").write_text("")
    (folder / "tip.py").write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location("tip", folder / "tip.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tip", module)
    spec.loader.exec_module(module)
    return module


def test_a_saved_graph_names_no_folder_of_this_machine(module: ModuleType, tmp_path: Path) -> None:
    graph = module.tip.trace()
    assert any(node.line is not None and CANARY in node.line.file for node in graph.nodes), "the test sees a path"
    graph.save(tmp_path / "tip.umbel.json")
    written = (tmp_path / "tip.umbel.json").read_text()
    assert CANARY not in written
    assert str(tmp_path) not in written
    assert json.loads(written)["files"] == ["app/prompts/tip.py"]
    again = serialise.read(tmp_path / "tip.umbel.json")
    assert {node.line.file for node in again.nodes if node.line is not None} == {"app/prompts/tip.py"}
    assert serialise.encode(again) == serialise.encode(graph)


def test_pictures_of_graphs_name_no_folder(module: ModuleType) -> None:
    graph = module.tip.trace()
    for picture in (graph.svg(), graph.dot(), str(graph)):
        assert CANARY not in picture


def test_reports_of_the_cache_name_no_folder(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    backend = ul.Echo()
    module.tip.run("birds", backend=backend)
    report = module.tip.run("fish", backend=backend).explain_cache()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert CANARY not in str(report)
    assert CANARY not in json.dumps(report.to_dict())
    assert "app/prompts/tip.py" in json.dumps(report.to_dict())


def test_findings_name_no_folder(
    module: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert module.__file__ is not None
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    lint([module.__file__, "--json"])
    written = capsys.readouterr().out
    assert "tip.py" in written
    assert CANARY not in written


def test_names_begin_with_the_outermost_package(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.py").write_text("")
    assert public_name(str(tmp_path / "a" / "b" / "c.py")) == "c.py"
    (tmp_path / "a" / "b" / "__init__.py").write_text("")
    assert public_name(str(tmp_path / "a" / "b" / "c.py")) == "b/c.py"
    (tmp_path / "a" / "__init__.py").write_text("")
    assert public_name(str(tmp_path / "a" / "b" / "c.py")) == "a/b/c.py"
    for name in ("<stdin>", "<string>", "tip.py", "app/tip.py", ""):
        assert public_name(name) == name
    assert public_name("../../secret/tip.py") == "tip.py"


def test_two_files_of_one_name_stay_two() -> None:
    lines = serialise._Lines()
    for file in ("/x/tip.py", "/y/tip.py", "/z/other.py", "/x/tip.py"):
        lines.written(serialise.Line(file, 1))
    assert lines.files == ["tip.py", "tip.py (2)", "other.py"]
