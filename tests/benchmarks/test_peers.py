"""Peers without the peers: the servers they are asked through, the processes they run in, where they are looked for."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from umbel.srt.simulator.workload import Gen
from umbel.srt.weights import open_model

from benchmarks.peers.completion_server import cut_at_stop, shared_length
from benchmarks.peers.folder import write_folder
from benchmarks.peers.gbnf import grammar_of
from benchmarks.peers.locate import create, find
from benchmarks.peers.peer import PeerError, PeerOptions
from benchmarks.peers.process import ServerProcess
from benchmarks.peers.served import OwnServerPeer
from benchmarks.workload import read

from ..srt.weights.tiny import BY_NAME, write_gguf

# A server of our own protocol with an engine that says what it was asked, and refuses one prompt.
PARROT = """
import sys
from peers.completion_server import serve

class Parrot:
    def generate(self, request):
        if request["prompt"] == "forbidden":
            raise ValueError("not this one")
        return f"{request['prompt']}|{request['max_tokens']}|{request['stop']}|{request['regex']}"
    def score(self, request):
        return len(request["choices"]) - 1

serve(Parrot(), int(sys.argv[1]))
"""


class ParrotPeer(OwnServerPeer):
    name: ClassVar[str] = "parrot"
    version = "1"

    def server_arguments(self) -> list[str]:
        return []

    def command(self, port: int) -> list[str]:
        return [str(self.options.python), "-c", PARROT, str(port)]


@pytest.fixture
def parrot(tmp_path: Path) -> Iterator[ParrotPeer]:
    peer = ParrotPeer(PeerOptions(python=Path(sys.executable), model=tmp_path, log=tmp_path / "log"))
    peer.start()
    yield peer
    peer.stop()


@pytest.mark.processes
def test_requests_in_flight_together_get_their_own_answers(parrot: ParrotPeer) -> None:
    async def ask() -> list[str]:
        return await asyncio.gather(
            *(parrot.generate(f"p{number}", max_tokens=number, stop=["\n"]) for number in range(50))
        )

    assert asyncio.run(ask()) == [f"p{number}|{number}|['\\n']|None" for number in range(50)]
    assert asyncio.run(parrot.score("p", ["a", "b", "c"])) == 2  # a second event loop uses the same peer


@pytest.mark.processes
def test_a_refused_request_raises_what_the_engine_said_and_the_server_goes_on(parrot: ParrotPeer) -> None:
    with pytest.raises(PeerError, match="not this one"):
        asyncio.run(parrot.generate("forbidden", max_tokens=1))
    assert asyncio.run(parrot.generate("allowed", max_tokens=1, regex="a")) == "allowed|1|[]|a"


@pytest.mark.processes
def test_a_stopped_peer_holds_no_memory_and_takes_no_request(parrot: ParrotPeer) -> None:
    assert parrot.resident_bytes() > 0
    with pytest.raises(PeerError, match="stop"):
        parrot.start()
    parrot.stop()
    assert parrot.resident_bytes() == 0
    with pytest.raises(PeerError, match="start"):
        asyncio.run(parrot.generate("p", max_tokens=1))


@pytest.mark.processes
def test_a_server_that_ends_before_it_answers_is_reported_with_its_log(tmp_path: Path) -> None:
    server = ServerProcess([sys.executable, "-c", "raise SystemExit('no such model')"], log=tmp_path / "log")
    with pytest.raises(PeerError, match="no such model"):
        server.wait_until(lambda: False, seconds=30)


@pytest.mark.processes
def test_a_peer_that_did_not_start_can_be_started_again(tmp_path: Path) -> None:
    peer = ParrotPeer(PeerOptions(python=Path("/bin/false"), model=tmp_path, log=tmp_path / "log"))
    for _ in range(2):
        with pytest.raises(PeerError, match="/bin/false"):
            peer.start()
        assert peer.resident_bytes() == 0


@pytest.mark.processes
def test_stopping_a_server_ends_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, signal\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    server = ServerProcess([sys.executable, "-c", code], log=tmp_path / "log")
    server.wait_until(lambda: server.log_tail().endswith("\n") or server.log_tail().isdigit(), seconds=30)
    child = int(server.log_tail())
    assert Path(f"/proc/{child}").exists()
    server.stop()
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


# ------------------------------------------------------------------------------------------ grammars


@pytest.mark.parametrize(
    ("regex", "grammar"),
    [
        ("ab", 'root ::= "a" "b"'),
        (r'\{\n  "x": "[a-z ]{1,12}"', 'root ::= "{" "\\n" " " " " "\\"" "x" "\\"" ":" " " "\\"" [a-z ] {1,12} "\\""'),
        ("(?:yes|no)?", 'root ::= ( "y" "e" "s" | "n" "o" ) ?'),
        (r"[\]a]\.\d", 'root ::= [\\]a] "." [0-9]'),
        (r"[\^\d\-\.]\w", r"root ::= [\x5E0-9\-\x2E] [a-zA-Z0-9_]"),
        (r"a\\b", 'root ::= "a" "\\\\" "b"'),
    ],
)
def test_a_regex_is_the_same_language_in_gbnf(regex: str, grammar: str) -> None:
    assert grammar_of(regex) == grammar


@pytest.mark.parametrize("regex", ["^a", r"\bword", "(?=a)b", r"(a)\1", r"[\b]"])
def test_what_gbnf_cannot_say_is_refused_by_name(regex: str) -> None:
    with pytest.raises(PeerError, match="regex"):
        grammar_of(regex)


def test_every_regex_of_the_workload_files_has_a_grammar() -> None:
    grammars = [
        grammar_of(op.regex)
        for name in ("json_decode_regex", "llm_judge_bsm")
        for program in read(name).programs
        for op in program.ops
        if isinstance(op, Gen) and op.regex is not None
    ]
    assert len(grammars) >= 64
    assert all(grammar.count("(") == grammar.count(")") for grammar in grammars)


# ---------------------------------------------------------------------------------- small helpers


def test_the_earliest_stop_string_cuts() -> None:
    assert cut_at_stop("one\ntwo.three", [".", "\n"]) == "one"
    assert cut_at_stop("one", ["x"]) == "one"


def test_shared_length_counts_from_the_start() -> None:
    assert shared_length([1, 2, 3], [1, 2, 4, 3]) == 2
    assert shared_length([1, 2], [1, 2, 4]) == 2


# -------------------------------------------------------------------------------- where peers are


def test_peers_are_found_on_the_command_line_before_the_environment(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.touch()
    there.touch()
    environment = {"UMBEL_PEER_LLAMA_CPP_PYTHON": str(there), "UMBEL_PEER_LLAMA_CPP_MODEL": str(there)}
    assert find([], [], environment)["llama_cpp"].python == there
    assert find([f"llama_cpp={here}"], [], environment)["llama_cpp"].python == here
    assert find([], [], environment)["llama_cpp"].dtype is None
    assert find([], [], {**environment, "UMBEL_PEER_LLAMA_CPP_DTYPE": "float32"})["llama_cpp"].dtype == "float32"
    assert find([], [], {}) == {}


def test_a_peer_without_a_model_is_answered_with_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"--peer-model vllm_cpu=PATH \(python -m benchmarks\.peers\.folder PATH"):
        find([f"vllm_cpu={tmp_path}"], [], {})


def test_a_gguf_is_written_as_a_folder_that_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = write_gguf(tmp_path / "tiny.gguf", BY_NAME["qwen3"])
    source = open_model(tmp_path / "tiny.gguf", cache=tmp_path / "cache")
    write_folder(source, tmp_path / "folder")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
    ours = source.tokenizer().encode("the", first=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "folder").encode("the", add_special_tokens=False) == ours
    assert again.generation_config.eos_token_id == sorted(source.eos_ids)


@pytest.mark.parametrize("text", ["vllm_cpu", "sglang=/bin/sh", "vllm_cpu=/no/such/file"])
def test_a_peer_that_cannot_be_meant_is_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(PeerError, match=text.rpartition("=")[2]):
        find([text], [], {})


def test_a_peer_computes_in_what_it_is_told_to(tmp_path: Path) -> None:
    for name in ("openvino_genai", "transformers_generate", "vllm_cpu"):
        told = create(name, PeerOptions(python=tmp_path, model=tmp_path, dtype="float32"))
        assert {"float32", "f32"} & set(told.command(1))  # type: ignore[attr-defined]  # of every served peer


def test_each_peer_is_made_by_its_name_and_checks_its_dtype(tmp_path: Path) -> None:
    options = PeerOptions(python=tmp_path, model=tmp_path, dtype="float64")
    for name in ("openvino_genai", "llama_cpp", "transformers_generate", "vllm_cpu"):
        with pytest.raises(PeerError, match="float64"):
            create(name, options)
        plain = create(name, PeerOptions(python=tmp_path, model=tmp_path))
        assert plain.name == name
        assert plain.resident_bytes() == 0
    with pytest.raises(PeerError, match="sglang"):
        create("sglang", options)
