"""Builds the parts of a runtime from its options: a tokenizer for the gateway, a scheduler and model for the engine.

No other module knows which classes make up a runtime. torch and the tokenizers library are imported
only by the function that needs them, so the gateway process stays without torch.
"""

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from hashlib import sha256
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..lang.errors import MissingExtraError, ModelError, ParameterError
from ..lang.runtime_options import ORACLE, SAVE_SECONDS, TIER_OPTIONS, RuntimeOptions
from .core.batch import AsyncRunner, Runner, TimedRunner, VectorHead
from .core.instruments import Clock, FaultHook
from .core.machine import available_memory, usable_cores
from .core.messages import NO_TIERS, Heartbeat, TierRooms
from .core.step_sizes import CPU_SIZES, StepSizes, cuda_sizes
from .core.vectors import VectorConfig
from .multimodal.format import PictureFormat
from .tokenizer.tokenizer import ByteTokenizer, Tokenizer, VocabularyTokenizer

if TYPE_CHECKING:
    from .constraints.matcher import MatcherCache
    from .constraints.matcher_factory import ConstraintVocabulary
    from .distributed.communicator import Communicator
    from .scheduler.page_cache import PageTiers
    from .scheduler.policy import SchedulerConfig
    from .scheduler.recording import EngineRecorder
    from .scheduler.scheduler import Scheduler
    from .scheduler.trace import StepTrace
    from .testing.launched_oracle import LaunchedOracle
    from .testing.oracle import OracleRunner
    from .weights import ModelSource


def return_freed_memory() -> None:
    """Returns freed pages to the system, where the allocator keeps them (glibc).

    Reading a tokenizer of 262,144 tokens frees 270 MB that it would keep, and leaves 100 MB in use."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


# Of hints, tokens: computing so many takes about as long as a step that does nothing else.
LEAST_AHEAD = 256
ORACLE_CONTEXT = 4096
ORACLE_POOL = 1 << 16
PRETENDED_CONTEXT, PRETENDED_POOL = 1 << 17, 1 << 19
PRETENDED_WORDS = 1_000
ORACLE_PICTURES = PictureFormat("fixed", 16, 16, tile_tokens=4, patch_size=8, resize=(16, 16))
ORACLE_VECTORS = VectorConfig(8, answers=(ord("y"), ord("n")))  # testing.oracle.HIDDEN
# Letters and spaces: the oracle's texts can be printed. They seldom end by themselves.
ORACLE_FAVOURITES = (*range(ord("a"), ord("z") + 1), ord(" "))
CPU_POOL_BYTES = 2 << 30  # at most, unless asked for: other programs need memory too
CPU_POOL_SHARE = 0.25  # of the free memory
WHOLE_PROMPT = 8192  # tokens that memory is planned for where prompts are not cut into chunks
MOST_LOGITS = 256  # rows of one step with logits, or max_running where that is more

Phase = Callable[[str], None]
OpenVocabulary = Callable[[int], "ConstraintVocabulary"]  # from the width of the model's logits

log = logging.getLogger("umbel.engine")


@dataclass(frozen=True, slots=True)
class Engine:
    """A scheduler, its runner and its threads."""

    scheduler: "Scheduler"
    runner: Runner
    first_token: int  # a token that may begin a text, for the warm-up
    constraints: "MatcherCache"
    constraints_ready: Future[None] | None  # set by prepare_constraints, see `open_engine`
    endings: tuple[Callable[[], object], ...]  # of its own threads
    save_cache: Callable[[], None]  # ends the tiers of the cache, which keep what outlives the engine

    def heartbeat(self) -> Heartbeat:
        """Returns the engine's state, for the next heartbeat."""
        scheduler = self.scheduler
        counters = scheduler.counters
        return Heartbeat(int(counters["steps"]), scheduler.running, scheduler.waiting, counters, scheduler.kv.gauges)

    @property
    def tiers(self) -> TierRooms:
        """Returns what the slower tiers of its cache hold at most."""
        pages = self.scheduler.kv.pages
        return NO_TIERS if pages is None else pages.rooms

    def close(self) -> None:
        """Saves its cache, and ends its threads, which hold the objects of their last work. No step may begin then."""
        self.save_cache()
        for end in self.endings:
            end()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, used in place of the one that options name."""

    name: str
    tokenizer: Tokenizer  # covers the runner's whole vocabulary
    runner: Runner


class ModelReading(NamedTuple):
    """The facts of a model that the gateway needs. `pictures`: its format; None for a model that reads text only."""

    name: str
    tokenizer: Tokenizer
    pictures: PictureFormat | None
    vectors: VectorConfig


def open_tokenizer(options: RuntimeOptions) -> ModelReading:
    """Opens a model's tokenizer and picture format. Raises ModelError or MissingExtraError."""
    if options.model == ORACLE:
        return ModelReading(ORACLE, ByteTokenizer(), ORACLE_PICTURES, ORACLE_VECTORS)
    source = _open_source(options)
    with source.named_in_errors():
        tokenizer = source.tokenizer()
        return_freed_memory()  # twice as much as it keeps
        return ModelReading(source.name, tokenizer, source.picture_format, source.vectors)


def open_engine(
    options: RuntimeOptions,
    *,
    clock: Clock,
    faults: FaultHook,
    phase: Phase,
    loaded: LoadedModel | None = None,
    rendezvous: Path | None = None,
    replica: int = 0,
    lasting: Callable[[], object] | None = None,
    prepare_constraints: bool = False,
) -> Engine:
    """Loads the model and makes its scheduler.

    Args:
        prepare_constraints: opens the vocabulary and makes masks in threads while the model is loaded, not at the first
            constraint. It may not be finished when this returns: `Engine.constraints_ready`.
        lasting: called after each large object that lasts as long as the engine. A process that ends with its engine
            freezes its objects there, so that no collection walks them. Any other process must not: frozen objects
            would never be freed, because an engine has reference cycles.
        rendezvous: file at which the ranks of tensor_parallel meet, see distributed/communicator.py. None: this
            process starts no others, and there is one rank.
        replica: number of this engine among the replicas of `options`, which says which devices it takes.
        loaded: used in place of the model of `options`. No other engine may run it meanwhile.

    Raises:
        ModelError: the model cannot be used.
        ParameterError: options that do not fit it or this machine.
        MissingExtraError: a package is not installed.
    """
    from .constraints.matcher import ImmediateExecutor
    from .scheduler.guesses import make_guesser
    from .scheduler.scheduler import Scheduler
    from .testing.launched_oracle import Slowed

    # One thread opens constraints, after opening the vocabulary once. Another one opens those of llguidance, which may
    # take seconds.
    openers: list[Executor] = [
        ImmediateExecutor() if options.model == ORACLE else ThreadPoolExecutor(1, thread_name_prefix=name)
        for name in ("constraints", "llguidance")
    ]
    endings: list[Callable[[], object]] = [partial(opener.shutdown, cancel_futures=True) for opener in openers]
    oracle: OracleRunner | LaunchedOracle | None = None
    source: ModelSource | None = None
    draft: Runner | None = None
    sizes = CPU_SIZES.under(options)
    if options.model == ORACLE:
        tokenizer = ByteTokenizer()
        oracle = _oracle(options, tokenizer.vocab_size)
        runner: Runner = Slowed(oracle, options.debug.step_delay) if options.debug.step_delay else oracle
        vocabulary, eos_ids, first = tokenizer.token_bytes, tokenizer.eos_ids, tokenizer.bos_id

        open_words: OpenVocabulary = partial(_open_vocabulary, lambda: tokenizer, None)
    elif loaded is not None:
        given = _require_alone(options, loaded).tokenizer
        runner = loaded.runner
        vocabulary, eos_ids, first = given.token_bytes, given.eos_ids, given.bos_id
        open_words = partial(_open_vocabulary, lambda: given, None)
    else:
        source = _open_source(options)
        if options.debug.random_weights:
            source = _with_random_weights(options, source, replica)
        phase(f"loading {source.name}")
        draft_source = _open_draft(options, source)
        sizes = _step_sizes(options, replica)
        open_words = partial(_open_vocabulary, source.constraint_tokenizer, _tries_folder())
        if prepare_constraints:
            import_module(".runners.build", __package__)  # before the thread, which would share the interpreter lock
            open_words = _begun(openers[0], open_words, source.vocab_size)
        if options.debug.pretend_step:
            runner = _pretended(options, source)
        else:
            runner = _runner_of_all_ranks(options, source, sizes, rendezvous, replica, phase)
        draft = None if draft_source is None else _draft_runner(options, draft_source, sizes, runner, replica, phase)
        vocabulary, eos_ids, first = source.vocabulary().token_bytes, source.eos_ids, source.bos_id
    matcher_cache = _matcher_cache(options, runner, open_words, openers, lasting)
    both_ways = source is not None and source.vectors.both_ways
    _check_block_cache(options, runner)
    config = _scheduler_config(options, sizes, overlap=_overlaps(options, runner), both_ways=both_ways)
    head = None if options.debug.pretend_step else _vector_head(options, source)
    tiers = _page_tiers(options, runner, source, clock)
    recorder, trace = _recorder(options, runner, config, endings), _trace(options, runner, clock, endings)
    others = matcher_cache, head, tiers, recorder, make_guesser(config, runner, draft), trace
    scheduler = Scheduler(runner, vocabulary, eos_ids, config, clock, faults, *others)
    if oracle is not None:
        oracle.expected = scheduler.planned_tokens  # it compares the content of slots with the expected tokens
    ready = matcher_cache.prepare() if prepare_constraints else None
    first_token = 0 if first is None else first
    save = _begin_tiers(scheduler, tiers, first_token, phase, clock)
    return Engine(scheduler, runner, first_token, matcher_cache, ready, tuple(endings), save)


def _oracle(options: RuntimeOptions, vocab_size: int) -> "OracleRunner | LaunchedOracle":
    """Makes the oracle, whose steps are launched where they are to overlap."""
    from .testing.launched_oracle import LaunchedOracle
    from .testing.oracle import OracleRunner

    context, slots = options.context_length or ORACLE_CONTEXT, (options.pool_tokens or ORACLE_POOL) + 1
    oracle = OracleRunner(vocab_size, context, slots, favourites=ORACLE_FAVOURITES)
    return LaunchedOracle(oracle) if options.overlap is True else oracle


def _pretended(options: RuntimeOptions, source: "ModelSource") -> Runner:
    """Makes the device that computes nothing."""
    from .runners.build import host_walk
    from .testing.pretended import PretendedDevice

    token_bytes = source.vocabulary().token_bytes
    words = (token for token in range(source.vocab_size) if token_bytes(token)[1:].isalpha())
    return PretendedDevice(
        options.debug.pretend_step,
        list(islice(words, PRETENDED_WORDS)),
        vocab_size=source.vocab_size,
        context_length=options.context_length or PRETENDED_CONTEXT,
        num_slots=(options.pool_tokens or PRETENDED_POOL) + 1,
        trie_walk=host_walk(),
    )


def _require_alone(options: RuntimeOptions, loaded: LoadedModel) -> LoadedModel:
    """Returns the loaded model. Raises ParameterError for options that need one on disk."""
    if options.adapters:
        raise ParameterError("adapters are read for a model on disk; build the runner of the loaded one with them")
    if options.draft_model is not None:
        raise ParameterError("draft_model: a loaded model has no tokenizer to compare with; leave it out")
    return loaded


def _check_block_cache(options: RuntimeOptions, runner: Runner) -> None:
    """Raises ParameterError where the cache of blocks cannot take the place of the tree."""
    size = options.debug.block_cache
    if not size:
        return
    if runner.num_states or runner.window_pool is not None:
        layers = "recurrent states" if runner.num_states else "slots of window layers"
        raise ParameterError(f"block_cache={size}: {layers} are cached by the tree only; leave block_cache out")
    if options.replicas > 1 or options.kv_events is not None:
        other = "replicas" if options.replicas > 1 else "kv_events"
        raise ParameterError(f"block_cache={size} does not tell the gateway what is cached; leave {other} out")
    if options.salt_share < 1:
        raise ParameterError(f"block_cache={size} does not count blocks by salt; leave salt_share out")
    if runner.num_slots <= size:
        raise ParameterError(f"block_cache={size}: the pool holds no block; write a larger pool_tokens")


def _recorder(
    options: RuntimeOptions, runner: Runner, config: "SchedulerConfig", endings: list[Callable[[], object]]
) -> "EngineRecorder | None":
    """Opens the recording that `debug` asks for, which ends with the engine. Raises ParameterError."""
    from .scheduler.recording import EngineRecorder

    if not options.debug.recording:
        return None
    window = runner.window_pool
    facts = {
        "model": options.model,
        "pool": runner.num_slots - 1,
        "max_running": config.max_running,
        "chunk": config.max_step_tokens,
        "policy": config.policy.value,
        "least_ahead": config.least_ahead,
        "window": None if window is None else [window.num_slots, window.reach],
    }
    recorder = EngineRecorder(Path(options.debug.recording).expanduser(), facts)
    endings.append(recorder.close)
    return recorder


def _trace(
    options: RuntimeOptions, runner: Runner, clock: Clock, endings: list[Callable[[], object]]
) -> "StepTrace | None":
    """Opens the trace that `debug` asks for, which ends with the engine. Raises ParameterError."""
    from .scheduler.trace import StepTrace

    if not options.debug.trace:
        return None
    trace = StepTrace(Path(options.debug.trace).expanduser(), clock)
    endings.append(trace.close)
    if isinstance(runner, TimedRunner):
        runner.time_steps()
    return trace


def _overlaps(options: RuntimeOptions, runner: Runner) -> bool:
    """Returns whether steps are planned while others run. Raises ParameterError where they cannot be and are to be."""
    possible = isinstance(runner, AsyncRunner) and not runner.num_states
    if options.overlap is True and not possible:
        waits = "of a model with recurrent states" if runner.num_states else "on this device"
        raise ParameterError(f'overlap=True: steps {waits} are waited for; write overlap="auto"')
    return options.overlap is not False and possible and options.draft_model is None


def _scheduler_config(
    options: RuntimeOptions, sizes: StepSizes, *, overlap: bool, both_ways: bool
) -> "SchedulerConfig":
    """Makes the scheduler's settings: options of the same name, and values derived from the others.

    both_ways: the model's tokens see those after them.
    """
    from .scheduler.policy import PolicyName, SchedulerConfig

    shared = {field.name for field in fields(SchedulerConfig)} & set(RuntimeOptions.__struct_fields__)
    same = {name: getattr(options, name) for name in shared - {"policy", "overlap", "token_guesses", "max_running"}}
    same["radix_cache"] = options.radix_cache and not both_ways
    return SchedulerConfig(
        max_running=sizes.max_running,
        max_step_tokens=sizes.chunk_size,
        max_step_logits=max(MOST_LOGITS, sizes.max_running),
        policy=PolicyName(options.policy),
        least_ahead=0 if options.model == ORACLE else LEAST_AHEAD,
        token_guesses=options.token_guesses and options.model != ORACLE,  # its pieces come by token, however slow it is
        # For the gateway, which chooses between engines by what they have cached, and for those that it publishes to.
        cache_events=options.replicas > 1 or options.kv_events is not None,
        block_cache=options.debug.block_cache,
        check_every_step=options.debug.check_every_step,
        overlap=overlap,
        whole_texts=both_ways,
        **same,
    )


def _vector_head(options: RuntimeOptions, source: "ModelSource | None") -> VectorHead | None:
    """Loads what makes vectors of texts; None: the model makes none. Raises ModelError for wrong tensors.

    source: of a model on disk.
    """
    from .models.vision.config import decoder_config
    from .weights.vector_head import LoadedHead, load_head

    if options.model == ORACLE:
        return LoadedHead(ORACLE_VECTORS)
    if source is None or source.vectors.refused:
        return None
    with source.named_in_errors():
        hidden = decoder_config(source.config).get("hidden_size", 0)
        return load_head(source.vectors, source.tensors, source.path, hidden)


def _page_tiers(
    options: RuntimeOptions, runner: Runner, source: "ModelSource | None", clock: Clock
) -> "PageTiers | None":
    """Opens the tiers of the cache that options name; None: there are none, or the model has no pages.

    source: of a model on disk.
    """
    given = [name for name in TIER_OPTIONS if getattr(options, name) is not None]
    if not given:
        return None
    if runner.pages is None:
        log.warning("%s: nothing is kept, for the recurrent states of this model are not in pages", ", ".join(given))
        return None
    from .core.batch import PagePart
    from .scheduler.page_cache import PageTiers
    from .tiers.access import DirectAccess, ThreadedAccess, TierAccess
    from .tiers.disk import DiskTier
    from .tiers.memory import HostMemory
    from .tiers.names import PAGE_TOKENS, PageScheme
    from .tiers.shared_store import SharedStore
    from .tiers.tier import Tier

    adapters = {name: name.encode() for name in options.adapters}  # the oracle's have no weights
    if options.model == ORACLE:
        model = b"oracle"
    elif source is None:
        model = os.urandom(32)  # a model in memory has no name that another process could know
    else:
        from .weights.catalog.digests import adapter_digests, weights_digest

        model = weights_digest(source.config, source.files, source.cache)
        adapters = dict(zip(options.adapters, adapter_digests(options.adapters, source.cache), strict=True))
    facts = runner.facts()
    computed = (type(runner).__name__, facts.get("weights", ""), options.dtype, str(runner.context_length))
    fingerprint = sha256(repr((model, *computed)).encode()).digest()
    scheme = PageScheme(fingerprint, str(facts.get("kv_dtype", "")), runner.pages.layout)
    tiers: list[TierAccess] = []
    if options.host_cache is not None:
        tiers.append(DirectAccess(HostMemory(options.host_cache)))
    slow: list[Tier] = []
    if options.disk_cache is not None:
        slow.append(DiskTier(Path(options.disk_cache).expanduser(), options.disk_cache_size, scheme.digest))
    if options.shared_cache is not None:
        slow.append(SharedStore(options.shared_cache, scheme.digest))
    page_bytes = PAGE_TOKENS * sum(map(runner.pages.bytes_per_token, PagePart))
    tiers += [ThreadedAccess(tier, page_bytes=page_bytes) for tier in slow]
    return PageTiers(scheme, tuple(tiers), adapters, measured=options.model != ORACLE)


def _begin_tiers(
    scheduler: "Scheduler", tiers: "PageTiers | None", first_token: int, phase: Phase, clock: Clock
) -> Callable[[], None]:
    """Measures what tiers are compared with, and returns the call that ends them."""
    from .tiers.memory import HostMemory

    if tiers is None:
        return lambda: None
    if tiers.measured:
        phase("measuring the tiers of the cache")
        scheduler.measure_prompts(first_token)

    def end() -> None:
        """Saves what is left, and gives the tiers the rest of SAVE_SECONDS to store it. Logs how much that was."""
        began = clock.now()
        before = [access.facts() for access in tiers.accesses]
        scheduler.kv.save_rest(SAVE_SECONDS)
        tiers.close(max(0.1, SAVE_SECONDS - (clock.now() - began)))
        seconds = clock.now() - began
        for was, access in zip(before, tiers.accesses, strict=True):
            facts = access.facts()
            stored, left = facts.stored - was.stored, facts.dropped - was.dropped
            if access.name != HostMemory.name and (stored or left):
                late = f"; {left} were left out" if left else ""
                log.info("%s cache: %d pages saved at the end, in %.1f s%s", access.name, stored, seconds, late)

    return end


def _open_vocabulary(
    open_tokenizer: Callable[[], VocabularyTokenizer], tries: Path | None, vocab_size: int
) -> "ConstraintVocabulary":
    """Opens a vocabulary for constraints. tries: folder that keeps the vocabulary's trie."""
    from .constraints.matcher_factory import open_vocabulary  # with the automata, at the first constraint

    opened = open_vocabulary(open_tokenizer, tries, vocab_size)
    return_freed_memory()  # twice as much as it keeps
    return opened


def _begun(executor: Executor, make: OpenVocabulary, vocab_size: int) -> OpenVocabulary:
    """Starts `make` in the executor → a function that returns its result; it calls `make` again after a failure, and
    for a model that has another size than its configuration says."""
    begun = executor.submit(make, vocab_size)

    def finish(size: int) -> "ConstraintVocabulary":
        return begun.result() if size == vocab_size and begun.exception() is None else make(size)

    return finish


def _matcher_cache(
    options: RuntimeOptions,
    runner: Runner,
    open_vocabulary: OpenVocabulary,
    openers: list[Executor],
    lasting: Callable[[], object] | None,
) -> "MatcherCache":
    """Makes the cache of open constraints."""
    from .constraints.matcher import MatcherCache, MatcherFactory

    def load() -> MatcherFactory:
        from .constraints.matcher_factory import VocabularyMatcherFactory  # with the automata, at the first constraint

        factory = VocabularyMatcherFactory(open_vocabulary(runner.vocab_size), runner.trie_walk)
        if lasting is not None:
            lasting()  # a vocabulary and its tokenizer are many objects
        return factory

    return MatcherCache(load, *openers, entries=options.constraint_cache)


def _tries_folder() -> Path | None:
    """Returns the folder for tries; None where other users could write to it: the trie is then made each time."""
    from .core.cache_folder import cache_folder, make_private

    try:
        return make_private(cache_folder() / "tries")
    except ModelError as error:
        log.warning("the trie of the vocabulary is not kept for the next start: %s", error)
        return None


def _remote_names(options: RuntimeOptions) -> list[str]:
    """Returns the names of models that may have to be downloaded. Loads nothing: a path that exists is no such name."""
    names = [options.model] if options.draft_model is None else [options.model, options.draft_model]
    found = []
    for name in names:
        with contextlib.suppress(OSError, RuntimeError):  # a name that is no path
            if "/" in name and not Path(name).expanduser().exists():
                found.append(name)
    return found


def may_be_remote(options: RuntimeOptions) -> bool:
    """Returns whether the model, or its draft, may have to be downloaded."""
    return bool(_remote_names(options))


def fetch_model(options: RuntimeOptions, report: Callable[[str], object]) -> bool:
    """Downloads the model, and its draft, if they are on the hub and not on this machine → whether it did.

    Args:
        report: called with its name before a download.

    Raises:
        ModelError: it can be found nowhere, or not be downloaded.
        MissingExtraError: a package is not installed.
    """
    try:
        from .weights.catalog.names import locate
        from .weights.catalog.places import model_places
        from .weights.catalog.repository import HubName
    except ImportError as error:
        raise MissingExtraError(error.name or "torch", "runtime") from error
    places = model_places()
    missing = [found for name in _remote_names(options) if isinstance(found := locate(name, places), HubName)]
    for found in missing:
        from .weights.catalog.download import download

        report(str(found))
        download(found, places)
    return bool(missing)


def _open_source(options: RuntimeOptions) -> "ModelSource":
    try:
        from .weights import open_model
    except ImportError as error:
        raise MissingExtraError(error.name or "torch", "runtime") from error
    return open_model(options.model)


def _with_random_weights(options: RuntimeOptions, source: "ModelSource", replica: int) -> "ModelSource":
    """Returns the model with random numbers in place of its weights, made on its device. Raises ParameterError for
    files that are no safetensors, and as `device_of`."""
    import torch

    from .distributed.launch import device_of
    from .testing.random_weights import random_tensors

    other = next((path for path in source.files if path.suffix != ".safetensors"), None)
    if other is not None:
        raise ParameterError(f"debug.random_weights: {other.name} is no safetensors file; name a folder of such")
    device = device_of(options, 0, replica)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # the runner rounds to its own
    return replace(source, open_tensors=partial(random_tensors, source.files, dtype, device))


def _open_draft(options: RuntimeOptions, source: "ModelSource") -> "ModelSource | None":
    """Opens the draft that options name; None: there is none. Raises ModelError or ParameterError if it cannot guess.

    source: of the model.
    """
    from .core.cards import chosen_device

    if options.draft_model is None:
        return None
    draft = _open_source(msgspec.structs.replace(options, model=options.draft_model, draft_model=None))
    with draft.named_in_errors():
        _require_same_tokens(source, draft)
    on_cuda = chosen_device(options.device) != "cpu"
    if on_cuda and options.pool_tokens is None and options.pool_memory is None:
        raise ParameterError(
            f"draft_model={options.draft_model}: the KV pool takes all memory of the device; write pool_tokens or "
            "pool_memory, so that the draft has room"
        )
    return draft


def _draft_runner(
    options: RuntimeOptions, draft: "ModelSource", sizes: StepSizes, runner: Runner, replica: int, phase: Phase
) -> Runner:
    """Loads a draft, with as many slots as the model. Raises ModelError if it cannot be used."""
    from .distributed.communicator import SINGLE_RANK

    phase(f"loading the draft {draft.name}")
    own = msgspec.structs.replace(
        options,
        draft_model=None,
        adapters={},
        context_length=None,
        pool_tokens=runner.num_slots - 1,
        pool_memory=None,
    )
    found = _model_runner(own, draft, sizes, SINGLE_RANK, replica, one_pool=True)
    if found.num_states:
        raise ModelError(f"{draft.path}: a draft has no recurrent states; choose one with attention only")
    return found


def _require_same_tokens(source: "ModelSource", draft: "ModelSource") -> None:
    """Raises ModelError if a draft has other tokens than the model. What pads their vocabularies may differ."""
    if source.documents.tokenizer_digest() == draft.documents.tokenizer_digest():
        return
    tokens, others = source.vocabulary(), draft.vocabulary()
    shared = min(len(tokens), len(others))
    differs = next((i for i in range(shared) if tokens.token_bytes(i) != others.token_bytes(i)), None)
    if differs is None and len(tokens) != len(others):
        longer = max(tokens, others, key=len)
        differs = next((i for i in range(shared, len(longer)) if longer.token_bytes(i)), None)
    if differs is None:
        ids, other_ids = source.constraint_tokenizer().special_ids, draft.constraint_tokenizer().special_ids
        differs = next((ids[text] for text in ids if ids[text] < shared and other_ids.get(text) != ids[text]), None)
    if differs is not None:
        raise ModelError(
            f"it cannot guess for {source.name}: token {differs} is another one in its tokenizer; choose a draft of "
            "the same family"
        )


def open_rank(options: RuntimeOptions, rank: int, rendezvous: Path, replica: int) -> Runner:
    """Loads the part of a rank other than 0 of an engine. Raises as `open_engine`."""
    from .distributed.launch import connect, device_of

    # First of all: rank 0 waits for the connection, and no failure can be reported before it.
    communicator = connect(options, rank, rendezvous, device_of(options, rank, replica))
    return _model_runner(options, _open_source(options), _step_sizes(options, replica), communicator, replica)


def _runner_of_all_ranks(
    options: RuntimeOptions,
    source: "ModelSource",
    sizes: StepSizes,
    rendezvous: Path | None,
    replica: int,
    phase: Phase,
) -> Runner:
    from .distributed.communicator import SINGLE_RANK
    from .distributed.launch import launch_ranks
    from .models.sharding import require_shardable
    from .models.vision.config import decoder_config

    ranks = options.tensor_parallel
    if replica == 0:  # once for all engines
        _report_unused_cards(options)
    if ranks == 1:
        return _model_runner(options, source, sizes, SINGLE_RANK, replica)
    if rendezvous is None:
        raise ParameterError(f"tensor_parallel={ranks}: ranks are processes, which only umbel.Runtime starts; write 1")
    require_shardable(decoder_config(source.config), ranks)
    phase(f"loading {source.name} on {ranks} ranks")
    return launch_ranks(
        options, rendezvous, replica, lambda communicator: _model_runner(options, source, sizes, communicator, replica)
    )


def _step_sizes(options: RuntimeOptions, replica: int) -> StepSizes:
    """Returns the size of the largest step of an engine, by the device of its first rank. Raises as `device_of`."""
    import torch

    from .distributed.launch import device_of

    device = device_of(options, 0, replica)
    if device.type == "cpu":
        return CPU_SIZES.under(options)
    card = torch.cuda.get_device_properties(device)
    memory = int((options.memory_share or 1.0) * card.total_memory)
    return cuda_sizes(memory, card.multi_processor_count).under(options)


def _report_unused_cards(options: RuntimeOptions) -> None:
    """Logs which GPU the CPU computes in place of, and why, where options leave the device to the machine."""
    from .core.cards import unused_for

    if (reason := unused_for(options.device, 'write device="cpu"')) is not None:
        log.warning("%s", reason)


@cache
def _threads_of_torch() -> int:
    """Returns torch's choice, as it is before the first engine of this process takes its part of them.

    torch counts the cores of the machine: of those that a container may not use, threads would wait for each other.
    """
    import torch

    chosen = torch.get_num_threads()
    return chosen if "OMP_NUM_THREADS" in os.environ else min(chosen, usable_cores())


def _model_runner(
    options: RuntimeOptions,
    source: "ModelSource",
    sizes: StepSizes,
    communicator: "Communicator",
    replica: int,
    *,
    one_pool: bool = False,
) -> Runner:
    """Loads the part of a rank of an engine. one_pool: window layers have the slots of the others."""
    import torch

    from .distributed.launch import device_of
    from .runners.build import build_runner
    from .runners.cuda.device import StepLimits
    from .weights.adapters import read_adapters
    from .weights.vector_head import decoder_part

    processes = communicator.ranks * options.replicas  # those on the CPU share its cores
    if options.threads is not None or processes > 1 or usable_cores() < torch.get_num_threads():
        torch.set_num_threads(max(1, (options.threads or _threads_of_torch()) // processes))
    device = str(device_of(options, communicator.rank, replica))  # refused here, before its memory is measured
    adapters = read_adapters(options.adapters, source.config, source.name)  # and before the weights are read
    slots = options.pool_tokens + 1 if options.pool_tokens is not None else None
    pool_memory = options.pool_memory
    if slots is None and pool_memory is None and device == "cpu":  # a GPU's is planned once the weights are loaded
        pool_memory = communicator.minimum(
            min(CPU_POOL_BYTES, int(CPU_POOL_SHARE * available_memory()) // options.replicas) // communicator.ranks
        )
    with source.named_in_errors():
        config, tensors = decoder_part(source.config, source.tensors, source.vectors)
        runner = build_runner(
            config,
            tensors,
            num_slots=slots,
            kv_bytes=pool_memory,
            memory_share=options.memory_share,
            window_slots=0 if one_pool else None,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            device=device,
            cuda_graphs=options.cuda_graphs,
            limits=StepLimits(
                rows=(sizes.chunk_size or WHOLE_PROMPT) + sizes.max_running,
                sequences=sizes.max_running,
                logits=max(MOST_LOGITS, sizes.max_running),
                graph_rows=sizes.graph_rows,
            ),
            kernels=options.kernels,
            weights=options.weights,
            tree_attention=options.tree_attention,
            torch_prompts=options.debug.torch_prompts,
            screened_head=options.screened_head,
            context_length=options.context_length,
            communicator=communicator,
            adapters=adapters,
        )
    if options.context_length is not None:
        if options.context_length > runner.context_length:
            raise ParameterError(
                f"context_length={options.context_length} is more than the {runner.context_length} tokens "
                f"{source.name} was made for; write at most that"
            )
        runner.context_length = options.context_length
    return runner
