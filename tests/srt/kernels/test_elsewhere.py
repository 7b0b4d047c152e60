"""Kernels on instruction sets that take a compilation of their own: AVX-VNNI, and ARM in an emulator.

ARM needs Debian's `g++-aarch64-linux-gnu` and `qemu-user`. Each library is compiled whole, and runs on a processor that
has what the library needs and no more. The emulator orders memory as this machine does, so it shows no race that ARM's
weaker order would.
"""

import ctypes
import json
import random
import shutil
import struct
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from umbel.fsm.boolean.resolution import resolve
from umbel.fsm.errors import Limits
from umbel.fsm.schema import SchemaOptions, compile_schema
from umbel.fsm.tokens.masks import Fuelled, work_of
from umbel.fsm.tokens.trie import build_trie
from umbel.fsm.tokens.vocabulary import Vocabulary
from umbel.srt.kernels.cpu import automaton as native_automaton
from umbel.srt.kernels.cpu import library
from umbel.srt.kernels.cpu.library import FLAGS, SOURCES, Isa, cpu_flags, load_host_library, load_library, usable
from umbel.srt.kernels.cpu.linear import CODED, CodedRows, Format, IntegerRows, PackedMatrix
from umbel.srt.kernels.cpu.trie_walk import CpuTrieWalk
from umbel.srt.layers.checkpoint import BlockTensor
from umbel.srt.layers.quantized import TABLES, Codes

from .test_automaton import SCHEMA, compare
from .test_blocks import QUANTISED, assert_close, assert_fine, blocks, dequantised, integers, normal
from .test_linear import coded

pytestmark = pytest.mark.nightly

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
WARNINGS = ("-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror")
PROCESSORS = {Isa.PORTABLE: "cortex-a53", Isa.NEON: "cortex-a76", Isa.NEON_I8MM: "max"}  # as the emulator names them
INTEGERS = {4: Format.INT4, 8: Format.INT8_GROUPS}  # with zero points, by bits


@pytest.mark.skipif(not usable(Isa.AVX_VNNI, cpu_flags()), reason="this CPU has no AVX-VNNI")
@pytest.mark.parametrize("kind", QUANTISED)
def test_avx_vnni(kind: str) -> None:
    weight = blocks(kind, 50, 768)
    matrix = PackedMatrix(load_library(Isa.AVX_VNNI), [weight])
    fine = PackedMatrix(load_library(Isa.AVX_VNNI), [weight], fine=True)
    for rows in (1, 5, 70):
        assert_close(matrix(normal(rows, 768)), normal(rows, 768), dequantised(weight))
        assert_fine(fine(normal(rows, 768)), normal(rows, 768), dequantised(weight))


@pytest.mark.skipif(not usable(Isa.AVX_VNNI, cpu_flags()), reason="this CPU has no AVX-VNNI")
@pytest.mark.parametrize("bits", INTEGERS)
def test_integers_on_avx_vnni(bits: int) -> None:
    source, weight = integers(50, 768, 64, bits=bits)
    matrix = PackedMatrix(load_library(Isa.AVX_VNNI), [source])
    fine = PackedMatrix(load_library(Isa.AVX_VNNI), [source], fine=True)
    for rows in (1, 5, 70):
        assert_close(matrix(normal(rows, 768)), normal(rows, 768), weight)
        assert_fine(fine(normal(rows, 768)), normal(rows, 768), weight)


@dataclass(frozen=True, slots=True)
class Arm:
    """The library for one ARM instruction set, in objects. `command` compiles a source."""

    isa: Isa
    folder: Path
    command: list[str]

    def compile(self, source: Path) -> None:
        target = str(self.folder / f"{source.stem}.o")
        subprocess.run([*self.command, "-c", str(source), "-o", target], check=True)

    def driver(self, name: str) -> Path:
        """Links a program in this folder with all objects of the library."""
        program = self.folder / name
        if not program.exists():
            self.compile(Path(__file__).with_name(f"{name}.cpp"))
            objects = [self.folder / f"{source.stem}.o" for source in SOURCES.glob("*.cpp")]
            command = [COMPILER, "-static", "-pthread", str(self.folder / f"{name}.o"), *map(str, objects)]
            subprocess.run([*command, "-o", str(program)], check=True)
        return program

    def run(self, name: str, given: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        command = [EMULATOR, "-cpu", PROCESSORS[self.isa], str(self.driver(name))]
        return subprocess.run(command, input=given, capture_output=True)


@pytest.fixture(scope="module", params=PROCESSORS, ids=lambda isa: isa.value)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Arm:
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        pytest.skip(f"there is no {COMPILER} or no {EMULATOR}: install g++-aarch64-linux-gnu and qemu-user")
    isa, folder = request.param, tmp_path_factory.mktemp(request.param.value)
    command = [COMPILER, *(flag for flag in FLAGS if flag != "-shared"), *isa.compiler_flags, *WARNINGS]
    command += [f'-DUMBEL_ISA="{isa.value}"', f"-I{SOURCES}"]
    arm = Arm(isa, folder, command + library._precompiled(folder, command))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(arm.compile, SOURCES.glob("*.cpp")))
    return arm


def test_the_library_for_arm_links(arm: Arm) -> None:
    objects = [str(arm.folder / f"{source.stem}.o") for source in SOURCES.glob("*.cpp")]
    target = arm.folder / library.LIBRARY
    subprocess.run([COMPILER, *FLAGS, "-Wl,-z,defs", *objects, "-o", str(target)], check=True)
    assert target.exists()


def test_kernels_pass_their_self_check_on_arm(arm: Arm) -> None:
    """With two threads, with one and with four."""
    done = arm.run("check_driver")
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("kind", QUANTISED)
def test_arm(arm: Arm, kind: str) -> None:
    source = blocks(kind, 37, 768)
    check_both_inputs(arm, source, dequantised(source))


@pytest.mark.parametrize("bits", INTEGERS)
def test_integers_on_arm(arm: Arm, bits: int) -> None:
    check_both_inputs(arm, *integers(37, 768, 64, bits=bits))


@pytest.mark.parametrize("form", CODED)
def test_codes_on_arm(arm: Arm, form: Format) -> None:
    source, weight = coded(form, 37, 1200, 24)
    x = normal(70, 1200)
    together = product(arm, source, x)
    scale = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    assert bool(((together - x.double() @ weight.double().T).abs() <= 2e-6 * scale).all())
    for rows in (1, 2, 3, 5):
        assert torch.equal(product(arm, source, x[:rows]), together[:rows])


def check_both_inputs(arm: Arm, source: BlockTensor | IntegerRows, weight: torch.Tensor) -> None:
    """Products with inputs of 8 and of 16 bits, of many rows and of few."""
    x = normal(70, 768)
    together = product(arm, source, x)
    assert_close(together, x, weight)
    for rows in (1, 3, 4, 5):
        assert torch.equal(product(arm, source, x[:rows]), together[:rows])
    fine = product(arm, source, x, terms=2)
    assert_fine(fine, x, weight)
    assert torch.equal(product(arm, source, x[:3], terms=2), fine[:3])


def product(arm: Arm, source: BlockTensor | IntegerRows | CodedRows, x: torch.Tensor, terms: int = 1) -> torch.Tensor:
    empty = np.zeros(0, np.uint8)
    match source:
        case BlockTensor():
            form, group, parts = Format[source.kind], 0, (source.data, empty, empty)
        case IntegerRows():
            assert source.zeros is not None
            form, group, parts = INTEGERS[source.bits], source.group, (source.codes, source.scales, source.zeros)
        case CodedRows():
            table = TABLES.get(Codes[source.form.name], ())
            form, group = source.form, source.group
            parts = (source.codes, source.scales, np.array(table, dtype=np.float32))
    n, k = source.shape
    head = np.array([form.value, n, k, len(x), terms, group, *(part.nbytes for part in parts)], dtype=np.int64)
    given = b"".join(part.tobytes() for part in (head, *parts, x.numpy()))
    done = arm.run("blocks_driver", given)
    assert done.returncode == 0, done.stderr.decode()
    return torch.from_numpy(np.frombuffer(done.stdout, dtype=np.float32).reshape(len(x), n).copy())


# ----------------------------------------------------------------------------------------------- automata and masks

CALLS = (  # `enum Call` of walk_driver.cpp
    *("make", "node", "parts", "text", "trie", "character", "never", "states", "state", "begun_state", "characters"),
    *("start", "step", "run", "expand", "forced", "close", "close_length", "plain_run", "plain_limit", "lookahead"),
    *("walk", "answer", "result", "row", "view"),
)
_Given = tuple[tuple[int, ...], bytes]  # the numbers and the bytes of a record


class Tape:
    """Records of calls, as walk_driver.cpp reads them."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, call: str, numbers: tuple[int, ...], data: bytes = b"") -> None:
        head = (CALLS.index(call), len(numbers), *numbers, len(data))
        self.data += struct.pack(f"={len(head)}q", *head) + data + bytes(-len(data) % 8)


# What belongs to a call, without the handle: numbers and the bytes that its pointers point to.
GIVEN: dict[str, Callable[..., _Given]] = {
    "node": lambda number, kind, at, levels, count: ((number, kind, levels, count), ctypes.string_at(at, 8 * count)),
    "parts": lambda at, count: ((count,), ctypes.string_at(at, 8 * count)),
    "text": lambda data, length: ((), data),
    "trie": lambda data, at, count: ((count,), ctypes.string_at(at, 24 * count) + data),
    "character": lambda at, count, *rest: ((count, *rest), ctypes.string_at(at, 8 * count)),
    "never": lambda *numbers: (numbers, b""),
    "states": lambda at, flags, count, spelled: ((count, spelled), ctypes.string_at(at, 8 * count) + flags),
    "state": lambda *numbers: (numbers, b""),
    "begun_state": lambda *numbers: (numbers, b""),
    "characters": lambda at, count: ((count,), ctypes.string_at(at, 12 * count)),
}
ASKED: dict[str, Callable[..., _Given]] = {
    **{name: lambda *numbers: (numbers, b"") for name in ("start", "step", "expand", "close_length", "lookahead")},
    **{name: lambda *numbers: (numbers, b"") for name in ("plain_run", "plain_limit")},
    **{name: lambda state, at: ((state,), b"") for name in ("forced", "close")},
    "run": lambda state, data, length: ((state,), data),
}


class RecordedCalls(native_automaton.AutomatonCalls):
    """Calls of the automaton on this machine, whose results are those that another machine must have."""

    def __init__(self, library: ctypes.CDLL, tape: Tape) -> None:
        super().__init__(library)
        self.tape = tape
        make = self.make

        def answer(number: int, question: int, identity: int, depth: int) -> int:
            found = native_automaton._answer(number, question, identity, depth)
            tape.write("answer", (found,))
            return found

        self._answer = native_automaton._ASK(answer)

        def recorded_make(*arguments: Any) -> Any:
            *limits, _, number = arguments
            tape.write("make", tuple(limits))
            return make(*limits, self._answer, number)

        self.make = recorded_make
        for name, given in GIVEN.items():
            setattr(self, name, self._recorded(name, given, getattr(self, name), asked=False))
        for name, given in ASKED.items():
            setattr(self, name, self._recorded(name, given, getattr(self, name), asked=True))

    def _recorded(
        self, name: str, given: Callable[..., _Given], call: Callable[..., Any], *, asked: bool
    ) -> Callable[..., Any]:
        def recorded(handle: int, *arguments: Any) -> Any:
            self.tape.write(name, *given(*arguments))
            found = call(handle, *arguments)
            if asked:
                text = name in ("forced", "close") and found > 0
                at = ctypes.c_void_p.from_address(arguments[1]).value if text else None
                self.tape.write("result", (found,), b"" if at is None else ctypes.string_at(at, found))
            return found

        return recorded


def recorded_session(seed: int) -> bytes:
    """Steps along a schema, the rows of all states, and the masks of some."""
    tape = Tape()
    calls = RecordedCalls(load_host_library(), tape)
    grammar = resolve(compile_schema(json.dumps(SCHEMA), SchemaOptions()).grammar, Limits())
    compare(calls, grammar, Limits(), seed, 400)

    drawn = random.Random(seed)
    tokens = {bytes(drawn.choices(b'{}[]",: abz019\\\xc3\xa9', k=drawn.randint(1, 5))) for _ in range(3000)}
    vocabulary = Vocabulary([*sorted(tokens), b""], [len(tokens)])
    trie, walk = build_trie(vocabulary), CpuTrieWalk(load_host_library())
    tape.write("view", (len(trie.nodes), trie.depth, vocabulary.words), trie.nodes.tobytes() + trie.groups.tobytes())
    automaton = native_automaton.CpuAutomaton(calls, grammar, Limits())
    state = automaton.start
    for byte in b'{"name": "ab"':
        tape.write("walk", (state, trie.everything.end))
        bits = np.zeros(vocabulary.words, np.uint32)
        left, _ = walk(trie, Fuelled(automaton, 1 << 20), work_of([trie.everything], state), bits, 1 << 30)
        tape.write("result", (len(left),), bits.tobytes())
        tape.write("row", (state,))
        tape.write("result", (1024,), automaton.row(state).tobytes())
        state = automaton.step(state, byte)
    return bytes(tape.data)


@pytest.mark.parametrize("seed", range(3))
def test_automata_and_masks_are_those_of_this_machine_on_arm(arm: Arm, seed: int) -> None:
    done = arm.run("walk_driver", recorded_session(seed))
    assert done.stdout.startswith(b"0 of "), f"call {done.stdout!r} has another result: {done.stderr!r}"
