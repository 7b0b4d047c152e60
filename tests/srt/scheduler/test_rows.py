"""One row harms itself only: each function of one row is made to raise for one request among others.

What must hold whatever raises, and on every way to run steps: the others get what they get without it, the request
ends once and with the error, the tree stays as it is, and the next request finds what was cached.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from umbel.lang.errors import RequestError
from umbel.lang.sampling import SamplingParams
from umbel.srt.constraints.matcher import ImmediateExecutor, MatcherCache
from umbel.srt.constraints.matcher_factory import VocabularyMatcherFactory, open_vocabulary
from umbel.srt.core.batch import Draws, RowRequests
from umbel.srt.core.messages import EngineAbort, EngineChoose, EngineFailed, Schedule
from umbel.srt.core.vectors import VectorConfig
from umbel.srt.sampling.sampler import SampleRequest, Wanted, draw_key
from umbel.srt.scheduler.request import Generation, Request
from umbel.srt.scheduler.step import PlannedRows
from umbel.srt.testing.oracle import HIDDEN
from umbel.srt.weights.vector_head import LoadedHead

from ..engine_harness import Engine
from ..toy_constraint import TOKENIZER, ToyState, encode, texts, toy_shelf

SEED, TOP = 666, 7  # of the request for which functions raise, and of no other
KEYS = frozenset(draw_key(SEED, position) for position in range(200))
PREFIX = [256, *encode("all of them begin like this and go on ")]
FORM = ("one of the things", "one in the end", "not any of them")

SETTINGS: dict[str, dict[str, object]] = {
    "logits of every row": {"partial_logits": False},
    "logits for picks": {},
    "tokens for picks": {"picks_tokens": True},
    "steps overlap": {"overlap": True},
    "steps overlap, tokens for picks": {"overlap": True, "picks_tokens": True},
    "small steps": {"max_step_tokens": 9, "max_running": 4, "picks_tokens": True},
}
FEW_SETTINGS = ["logits of every row", "logits for picks", "steps overlap", "small steps"]

PLAIN = SamplingParams(max_tokens=5, temperature=1.0, seed=SEED, ignore_eos=True)
LIMITED = msgspec.structs.replace(PLAIN, top_k=9, top_p=0.9, min_p=0.01)
GREEDY = msgspec.structs.replace(PLAIN, temperature=0.0)
RICH = msgspec.structs.replace(
    PLAIN,
    min_tokens=2,
    stop=("never said",),
    stop_regex=("x{90}",),
    stop_token_ids=(5,),
    frequency_penalty=0.5,
    presence_penalty=0.5,
    repetition_penalty=1.5,
    logit_bias={65: 2.0},
    top_logprobs=TOP,
    prompt_logprobs_from=1,
)
DESCRIBED = msgspec.structs.replace(PLAIN, top_logprobs=TOP)
NEIGHBOURS = [
    SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.8, seed=1, ignore_eos=True, top_k=20, min_p=0.01),
    SamplingParams(max_tokens=5, temperature=0.8, seed=2, ignore_eos=True, top_p=0.9, logprobs=True, top_logprobs=2),
    SamplingParams(
        max_tokens=5, temperature=0.8, seed=3, ignore_eos=True, repetition_penalty=1.3, logit_bias={70: 1.0}
    ),
]


def engine(*, searches: bool = False, **settings: object) -> Engine:
    shelf = toy_shelf()
    if searches:
        shelf = MatcherCache(
            lambda: VocabularyMatcherFactory(open_vocabulary(lambda: TOKENIZER, None, TOKENIZER.vocab_size), None),
            ImmediateExecutor(),
            ImmediateExecutor(),
            entries=4,
        )
    picks_tokens = bool(settings.pop("picks_tokens", False))
    machine = Engine(
        pool=900,
        context=150,
        vocabulary=TOKENIZER.vocab_size,
        token_bytes=TOKENIZER.token_bytes,
        eos_ids=TOKENIZER.eos_ids,
        constraints=shelf,
        vectors=LoadedHead(VectorConfig(HIDDEN, every_row=True, normalized=False)),
        **settings,  # type: ignore[arg-type]
    )
    machine.runner.picks_tokens = picks_tokens
    return machine


def neighbours(machine: Engine) -> list[int]:
    ids = [machine.generate([*PREFIX, 65 + i], sampling, stream=i == 1) for i, sampling in enumerate(NEIGHBOURS)]
    ids.append(machine.score([[*PREFIX, 80, 81], [*PREFIX, 82, 83, 84]], len(PREFIX)))
    return ids


def answers(machine: Engine, ids: Iterable[int]) -> list[object]:
    """Endings, without what depends on who came first to the cache, and all tokens."""
    found: list[object] = []
    for message_id in ids:
        ending = msgspec.structs.asdict(machine.endings[message_id])
        ending.pop("cached_tokens", None)
        found.append((ending, machine.streamed.get(message_id)))
    return found


# --------------------------------------------------------------------------------------------------- who asks


Ask = Callable[[Engine], int]


def generates(sampling: SamplingParams, **schedule: object) -> Ask:
    return lambda machine: machine.generate([*PREFIX, 90], sampling, **schedule)


def constrained(machine: Engine, **changes: Any) -> int:
    sampling = msgspec.structs.replace(PLAIN, **{"max_tokens": 40, "ignore_eos": False, **changes})
    return machine.constrain([*PREFIX, 90], texts(*FORM), sampling)


def hurried(machine: Engine) -> int:
    """Its max_tokens leave room for the shortest text only."""
    shortest = min(len(encode(text)) for text in FORM)
    return constrained(machine, max_tokens=shortest + 1)


def healed(machine: Engine) -> int:
    """The prompt's last token may be "th" or "the" as well."""
    sampling = msgspec.structs.replace(PLAIN, max_tokens=40, ignore_eos=False)
    return machine.constrain([*PREFIX, *encode("t")], texts("he thing", "he end"), sampling, heal=True)


def embeds(machine: Engine) -> int:
    return machine.embed([*PREFIX, 90])


def empty(machine: Engine) -> int:
    """The text is complete before its first token."""
    return machine.constrain([*PREFIX, 90], texts(""), msgspec.structs.replace(PLAIN, ignore_eos=False))


def forbids_ends(machine: Engine) -> int:
    return constrained(machine, min_tokens=3)


def scores(machine: Engine) -> int:
    return machine.score([[*PREFIX, 90, 91], [*PREFIX, 90, 92]], len(PREFIX))


def searches(machine: Engine) -> int:
    message_id = machine._id()
    choices = [encode(choice) for choice in ("in the thing", "a thing")]
    machine.scheduler.handle_message(
        EngineChoose(message_id, [*PREFIX, 90], choices, len(PREFIX) + 1, False, True, Schedule())
    )
    return message_id


def aborts(machine: Engine) -> int:
    message_id = machine.generate([*PREFIX, 90], PLAIN)
    machine.step()
    machine.scheduler.handle_message(EngineAbort(message_id))
    return message_id


# --------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    """A function of rows: `module:name`, where it is looked up, and who makes the engine call it."""

    function: str
    ask: Ask
    where: str = ""  # module:name in which it is replaced; "": where it is defined

    @property
    def target(self) -> str:
        return self.where or self.function


RICH_ONE, PLAIN_ONE, LIMITED_ONE = generates(RICH), generates(PLAIN), generates(LIMITED)
DESCRIBED_ONE = generates(DESCRIBED)
ROWS = [
    # what is asked of a row
    Row("scheduler.step:_choice_of", PLAIN_ONE),
    Row("scheduler.step:_choice_of", generates(GREEDY)),
    Row("scheduler.step:needs_only_token", PLAIN_ONE),
    Row("scheduler.step:_needs_of", PLAIN_ONE),
    Row("sampling.sampler:changes_logits", RICH_ONE, "scheduler.step:changes_logits"),
    Row("sampling.sampler:Penalties.applies", RICH_ONE),
    Row("scheduler.step:forbidden_ends", RICH_ONE),
    Row("scheduler.step:forbidden_ends", RICH_ONE, "scheduler.commit:forbidden_ends"),
    Row("scheduler.step:allowed_of", constrained),
    Row("scheduler.step:allowed_of", forbids_ends),
    Row("scheduler.step:allowed_of", constrained, "scheduler.commit:allowed_of"),
    Row("sampling.sampler:bits_of", constrained),
    Row("sampling.sampler:bits_of", constrained, "scheduler.commit:bits_of"),
    Row("sampling.sampler:draws_of", PLAIN_ONE, "scheduler.commit:draws_of"),
    Row("sampling.sampler:draws_of", PLAIN_ONE, "testing.launched_oracle:draws_of"),
    Row("sampling.sampler:choose_few", constrained, "testing.oracle:choose_few"),
    Row("sampling.sampler:Limits.of", LIMITED_ONE),
    Row("sampling.sampler:inverse_temperature", PLAIN_ONE),
    # what the logits say
    Row("scheduler.commit:_Reading._known_tokens", scores),
    Row("scheduler.commit:_Reading._known_tokens", RICH_ONE),
    Row("scheduler.commit:_Reading._forced_tokens", lambda machine: constrained(machine, top_logprobs=TOP)),
    Row("scheduler.commit:_Reading._tokens", RICH_ONE),
    Row("scheduler.commit:_Reading._describe_all", RICH_ONE),
    Row("scheduler.commit:_Reading._describe_all", scores),
    Row("scheduler.commit:_Reading._pick", PLAIN_ONE),
    Row("scheduler.commit:_Reading._wanted", DESCRIBED_ONE),
    Row("scheduler.commit:_Reading._sample_request", RICH_ONE),
    Row("scheduler.commit:_Reading._questions", searches),
    Row("scheduler.commit:_Reading._look_up", searches),
    Row("scheduler.commit:_settled", PLAIN_ONE),
    Row("scheduler.commit:_settled", constrained),
    Row("scheduler.commit:_top", DESCRIBED_ONE),
    Row("sampling.sampler:Penalties.process", RICH_ONE),
    Row("sampling.sampler:apply_penalties", RICH_ONE),
    Row("sampling.sampler:_of_row", RICH_ONE),
    Row("sampling.sampler:_require_finite", RICH_ONE),
    Row("sampling.sampler:Sampler.sample", RICH_ONE),
    Row("sampling.sampler:Sampler.choose", RICH_ONE),
    Row("sampling.sampler:Sampler.choose", PLAIN_ONE),
    Row("sampling.sampler:stack_draws", RICH_ONE),
    Row("sampling.sampler:gumbel", LIMITED_ONE),
    Row("sampling.sampler:gumbel", generates(msgspec.structs.replace(PLAIN, top_k=9)), "testing.oracle:gumbel"),
    Row("sampling.sampler:TorchSampling.choose", PLAIN_ONE),
    Row("sampling.sampler:TorchSampling.summarise", DESCRIBED_ONE),
    Row("sampling.sampler:describe", RICH_ONE, "scheduler.commit:describe"),
    Row("sampling.sampler:describe", DESCRIBED_ONE, "scheduler.commit:describe"),
    Row("sampling.sampler:look_up", searches, "scheduler.commit:look_up"),
    # what follows from a token
    Row("scheduler.request:accept", PLAIN_ONE, "scheduler.request_table:accept"),
    Row("scheduler.request_table:SchedulerContext.append_token", PLAIN_ONE),
    Row("scheduler.request_table:SchedulerContext.append_token", constrained),
    Row("scheduler.request:_feed", RICH_ONE),
    Row("scheduler.request:constraint_end", constrained),
    Row("scheduler.request:constraint_end", empty, "scheduler.constrained:constraint_end"),
    Row("scheduler.request_table:RequestTable._ended", PLAIN_ONE),
    Row("scheduler.request_table:RequestTable.end_text", PLAIN_ONE),
    Row("scheduler.request_table:RequestTable.finish_text", PLAIN_ONE),
    Row("scheduler.request_table:RequestTable._ended", aborts),
    Row("scheduler.request_table:score_ended", scores, "scheduler.commit:score_ended"),
    Row("scheduler.request_table:RequestTable.aborted", aborts),
    Row("scheduler.request_table:Timing.committed", PLAIN_ONE),
    Row("scheduler.request_table:Timing.of", PLAIN_ONE),
    Row("scheduler.commit:Commit._commit_request", scores),
    Row("scheduler.commit:Commit._commit_known", scores),
    Row("scheduler.commit:Commit._commit_known", generates(RICH)),
    Row("scheduler.commit:Commit._commit_token", PLAIN_ONE),
    Row("scheduler.commit:Commit._commit_plain", PLAIN_ONE),
    Row("scheduler.request:accept", PLAIN_ONE, "scheduler.commit:accept"),
    Row("scheduler.commit:Commit._stream", generates(PLAIN, stream=True)),
    Row("scheduler.commit:Commit._keep_marks", PLAIN_ONE),
    Row("scheduler.commit:Commit.finish", scores),
    # vectors
    Row("scheduler.commit:_Reading._states", embeds),
    Row("scheduler.request:Embedding.add", embeds),
    Row("scheduler.commit:Commit._embedded", embeds),
    # constraints
    Row("constraints.matcher:Matcher.settle", constrained),
    Row("constraints.matcher:Matcher.prepare", constrained),
    Row("constraints.matcher:Matcher._settle", constrained),
    Row("constraints.matcher:Matcher._settle_boundary", healed),
    Row("constraints.matcher:Matcher._fits", constrained),
    Row("constraints.matcher:Matcher._look_ahead", constrained),
    Row("scheduler.constrained:ConstrainedTexts._open", constrained),
    Row("scheduler.constrained:ConstrainedTexts._spend", constrained),
    Row("scheduler.constrained:ConstrainedTexts.commit", constrained),
    Row("scheduler.constrained:ConstrainedTexts._jump", constrained),
    Row("scheduler.constrained:ConstrainedTexts._append", constrained),
    Row("scheduler.constrained:_check_budget", constrained),
    Row("scheduler.constrained:_replaceable", healed),
    # searches
    Row("scheduler.choice_search:questions", searches, "scheduler.commit:questions"),
    Row("scheduler.choice_search:ChoiceSearches._begin", searches),
    Row("scheduler.choice_search:ChoiceSearches.take", searches),
    Row("scheduler.choice_search:ChoiceSearches.finish", searches),
    Row("scheduler.choice_search:ChoiceSearches._add", searches),
    Row("scheduler.choice_search:_ended", searches),
]
MODULES = [
    "constraints.matcher",
    "sampling.sampler",
    "scheduler.choice_search",
    "scheduler.commit",
    "scheduler.constrained",
    "scheduler.request",
    "scheduler.request_table",
    "scheduler.step",
]
NOT_OF_ONE_ROW = {  # function, or Class.* for all of its methods → why it is not in the table
    "sampling.sampler:_nothing": "does nothing",
    "sampling.sampler:_scaled": "arithmetic of tensors, within apply_penalties",
    "sampling.sampler:_saturated": "arithmetic of tensors, within apply_penalties",
    "scheduler.choice_search:ChoiceSearches.hold": "when a message arrives: it is refused",
    "scheduler.choice_search:ChoiceSearches.begin_step": "of all searches: `_begin` is that of one",
    "scheduler.choice_search:ChoiceSearches._grows": "within `_begin`, for prompts that may be healed",
    "scheduler.commit:_Reading.states": "of all rows: `_states` is that of one",
    "scheduler.commit:Commit.begin": "counts the rows of a plan",
    "scheduler.commit:Commit.commit": "of all rows: `_commit_request` is that of one",
    "scheduler.constrained:ConstrainedTexts.hold": "when a message arrives: it is refused",
    "scheduler.constrained:ConstrainedTexts.count": "counters",
    "scheduler.constrained:ConstrainedTexts.begin_step": "of all that are held: `_open` is that of one",
    "scheduler.constrained:ConstrainedTexts.ready": "within it `_spend` and `_jump` raise",
    "constraints.matcher:Boundary.begin": "within `_settle_boundary`",
    "constraints.matcher:Matcher._close": "within `Matcher._settle`",
    "constraints.matcher:Matcher._may_stay": "within `Matcher._settle`",
    "constraints.matcher:Matcher._is_ending": "within `Matcher._settle`",
    "constraints.matcher:_holds": "within `Matcher._settle`",
    "constraints.matcher:_refused": "words of an error",
    "sampling.sampler:draw_key": "the definition: arithmetic of integers",
    "sampling.sampler:draw_keys": "the definition: arithmetic of integers",
    "sampling.sampler:token_hash": "within gumbel",
    "sampling.sampler:_mix": "the definition: arithmetic of integers",
    "sampling.sampler:_mix_all": "the definition: arithmetic of integers",
    "sampling.sampler:_best": "of many rows, within TorchSampling",
    "sampling.sampler:_may_win": "of many rows, within TorchSampling",
    "sampling.sampler:_leading_hash_bits": "of many rows, within TorchSampling",
    "sampling.sampler:_mixed": "of many rows, within TorchSampling",
    "sampling.sampler:_kth_largest": "of many rows, within TorchSampling",
    "sampling.sampler:_nucleus_end": "of many rows, within TorchSampling",
    "sampling.sampler:_mass": "of many rows, within TorchSampling",
    "sampling.sampler:_allowed": "of many rows, within TorchSampling",
    "sampling.sampler:_rows": "of many rows, within TorchSampling",
    "sampling.sampler:_forbid": "of many rows, within TorchSampling",
    "sampling.sampler:_require_numbers": "of many rows, within TorchSampling",
    "sampling.sampler:_first_largest": "of many rows, within TorchSampling",
    "sampling.sampler:_top": "of many rows, within TorchSampling",
    "sampling.sampler:TorchSampling._best": "of many rows",
    "sampling.sampler:TorchSampling._race": "of many rows",
    "sampling.sampler:TorchSampling._floors": "of many rows",
    "sampling.sampler:TorchSampling._nucleus_ends": "of many rows",
    "sampling.sampler:TorchSampling._weigh": "of many rows",
    "constraints.matcher:MatcherCache.*": "when a message arrives: it is refused",
    "constraints.matcher:ImmediateExecutor.*": "when a message arrives: it is refused",
    "constraints.matcher:_size": "when a message arrives: it is refused",
    "scheduler.request_table:failure": "words of an error",
    "scheduler.request_table:Durations.add": "arithmetic, within Timing",
    "scheduler.request_table:Durations._put": "arithmetic, within Timing",
    "scheduler.request_table:Durations.counters": "of all requests",
    "scheduler.request_table:Timing.reset": "of all requests",
    "scheduler.request_table:Timing.admitted": "arithmetic, while a request moves between tables",
    "scheduler.request_table:RequestTable.add": "moves requests between tables",
    "scheduler.request_table:RequestTable.extend": "moves requests between tables",
    "scheduler.request_table:RequestTable.hold": "moves requests between tables",
    "scheduler.request_table:RequestTable.queue": "moves requests between tables",
    "scheduler.request_table:RequestTable.admit": "moves requests between tables",
    "scheduler.request_table:RequestTable.wait_for_load": "moves requests between phases",
    "scheduler.request_table:RequestTable.loaded": "moves requests between phases",
    "scheduler.request_table:RequestTable.retract": "moves requests between tables",
    "scheduler.request_table:RequestTable.retract_all": "moves requests between tables",
    "scheduler.request_table:RequestTable._wait_again": "moves requests between tables",
    "scheduler.request_table:RequestTable.release": "moves requests between tables",
    "scheduler.request_table:RequestTable.end": "moves requests between tables",
    "scheduler.request_table:RequestTable.fail": "moves requests between tables",
    "scheduler.request_table:RequestTable.drop": "moves requests between tables",
    "scheduler.request_table:RequestTable.take_events": "moves requests between tables",
    "scheduler.request_table:RequestTable.check": "of all requests",
    "scheduler.commit:read_step_result": "of all rows",
    "scheduler.commit:_Reading.known": "of all rows",
    "scheduler.commit:_Reading.forced": "of all rows",
    "scheduler.commit:_Reading.sampled": "of all rows",
    "scheduler.commit:_Reading.asked": "of all rows",
    "scheduler.commit:_Reading._described": "of all rows: `_wanted` is that of one",
    "scheduler.commit:_Reading._sample": "of all rows: `_draw` is that of one",
    "scheduler.commit:_Reading._settle": "of all rows: `_settled` is that of one",
    "scheduler.commit:_Reading._describe": "of all rows: `_describe_all` is the batched part",
    "scheduler.commit:_Reading._going": "tables of the reading itself",
    "scheduler.commit:_Reading._together": "tables of the reading itself",
    "scheduler.commit:_Reading._one_by_one": "tables of the reading itself",
    "scheduler.commit:_Reading._sorted": "tables of the reading itself",
    "scheduler.commit:_place": "an index; its error is that of a runner",
    "scheduler.commit:_no_answer": "words of an error",
    "scheduler.commit:_wants_logprobs": "a look at two fields, over all rows",
    "scheduler.commit:_sound": "a look at a row that has failed",
    "scheduler.commit:Commit.verify": "of all rows: `commit` is that of one",
    "scheduler.commit:Commit._following": "a look at tokens; a mask that fails ends its request in `ready`",
    "scheduler.constrained:ConstrainedTexts.allowed_after": "within `Guesser._possible`, which takes no guess instead",
    "constraints.matcher:Matcher.ahead": "within `ConstrainedTexts.allowed_after`",
    "scheduler.request:Rate.add": "arithmetic",
    "scheduler.step:_allowed_after": "an index",
    "scheduler.step:takes_all_logits": "a look at a few fields, over all rows",
    "scheduler.request:Request.*": "the record of a sequence: what reads it is in the table",
    "scheduler.request_table:RequestFactory.*": "when a message arrives: it is refused",
    "scheduler.request_table:_checked_marks": "when a message arrives: it is refused",
    "scheduler.step:StepPlan.*": "of all rows",
    "scheduler.step:FinishedStep.*": "of all rows",
    "scheduler.step:FailedStep.*": "of all rows",
    "scheduler.step:InFlightStep.*": "of all rows",
    "scheduler.step:delays_too_many": "of numbers",
    "scheduler.step:pending_tokens": "of all rows",
    "scheduler.step:_sources": "of all rows, within `StepPlan.build`",
    "scheduler.step:_single_rows": "of all rows, within `StepPlan.build`",
    "scheduler.step:_ranges_of_rows": "of all rows, within `StepPlan.build`",
    "scheduler.step:_ranges": "of all rows, within `StepPlan.build`",
    "scheduler.step:_generated": "of all rows, within `StepPlan.build`",
    "scheduler.step:_pictures": "of all rows, within `StepPlan.build`",
    "scheduler.step:_spans": "of all rows, within `StepPlan.build`",
    "scheduler.step:_hidden_rows": "of all rows, within `StepPlan.build`",
    "scheduler.step:_window_slots": "of all rows, within `StepPlan.build`",
    "scheduler.step:_window_write_slots": "of all rows, within `StepPlan.build`",
    "scheduler.step:_rope_positions": "of all rows, within `StepPlan.build`",
    "scheduler.step:_write_draws": "of all rows, within `build_row_requests`",
    "scheduler.step:build_row_requests": "of all rows: `_choice_of` is that of one",
    "scheduler.step:_taken_as_chosen": "of all rows, within `InFlightStep.launched`",
}


def functions_of(module: str) -> set[str]:
    """Functions and methods that a module defines, without protocols, properties and what Python makes."""
    found = set()
    loaded = importlib.import_module(f"umbel.srt.{module}")
    for name, thing in vars(loaded).items():
        if getattr(thing, "__module__", None) != loaded.__name__:
            continue
        if inspect.isfunction(thing):
            found.add(f"{module}:{name}")
        elif inspect.isclass(thing) and not getattr(thing, "_is_protocol", False):
            for method, value in vars(thing).items():
                made = isinstance(value, classmethod) or (inspect.isfunction(value) and not method.startswith("__"))
                if made and not method.startswith(("_make", "_replace", "_asdict", "_generate")):
                    found.add(f"{module}:{name}.{method}")
    return found


def test_the_table_has_every_function_of_the_modules_that_work_on_rows() -> None:
    defined = set().union(*map(functions_of, MODULES))
    whole = {name for name in NOT_OF_ONE_ROW if name.endswith(".*")}
    assert whole <= {function.rpartition(".")[0] + ".*" for function in defined}, "no longer there"
    defined = {function for function in defined if function.rpartition(".")[0] + ".*" not in whole}
    exempt = NOT_OF_ONE_ROW.keys() - whole
    known = {row.function for row in ROWS if row.function.split(":")[0] in MODULES}
    assert defined - known - exempt == set(), "say in the table how each of them is called for one row"
    assert (known | exempt) - defined == set(), "no longer there"
    assert known & exempt == set()


# --------------------------------------------------------------------------------------------------- the fault


def concerns(thing: object, guilty: int) -> bool:
    """Whether an argument belongs to the guilty request, or has something of it."""
    match thing:
        case Request():
            return thing.message_id == guilty
        case PlannedRows():
            return thing.request.message_id == guilty
        case Generation():
            return thing.seed == SEED
        case SamplingParams() | SampleRequest():
            return thing.seed == SEED
        case Draws() | RowRequests():
            return bool(KEYS & set(thing.keys.tolist()))
        case Wanted():
            return thing.top == TOP
        case np.uint64():
            return int(thing) in KEYS
        case np.ndarray():
            return thing.dtype == np.uint64 and bool(KEYS & set(thing.ravel().tolist()))
        case list() | tuple():
            return any(concerns(entry, guilty) for entry in thing)
        case _:
            return False


# Called for the guilty request alone, or told by an argument that is nothing of a request.
ALWAYS = {
    *(f"constraints.matcher:Matcher.{name}" for name in ("settle", "prepare", "_settle", "_fits", "_look_ahead")),
    *("constraints.matcher:Matcher._settle_boundary", "scheduler.constrained:ConstrainedTexts._open"),
    *("scheduler.constrained:ConstrainedTexts._spend", "sampling.sampler:choose_few"),
    *(
        "scheduler.commit:_Reading._look_up",
        "sampling.sampler:look_up",
        "scheduler.request:Embedding.add",
        "scheduler.choice_search:_ended",
        "scheduler.choice_search:ChoiceSearches._begin",
    ),
}


class Broken(RequestError):
    """What a replaced function raises."""


def break_for(monkeypatch: pytest.MonkeyPatch, row: Row, guilty: list[int]) -> list[str]:
    """Replaces the function; the list that is returned gets an entry when it raises."""
    module, name = row.target.split(":")
    owner: Any = importlib.import_module(f"umbel.srt.{module}")
    *classes, attribute = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    is_class_method = isinstance(inspect.getattr_static(owner, attribute), classmethod)
    original = getattr(owner, attribute)
    raised: list[str] = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        about = [*args, *kwargs.values()]
        mine = row.function in ALWAYS or any(concerns(arg, guilty[0]) for arg in about)
        if row.function.endswith(".summarise"):
            mine = args[-1] == TOP
        if row.function == "sampling.sampler:draws_of":
            mine = concerns(args[0].keys[args[1]], guilty[0])
        if row.function == "sampling.sampler:inverse_temperature":
            mine = args[0] == PLAIN.temperature
        if row.function in ("sampling.sampler:bits_of", "scheduler.request:constraint_end"):
            mine = args[0] is not None  # nobody else has a constraint
        if row.function == "scheduler.request_table:score_ended":
            mine = args[0] == guilty[0]
        if row.function == "scheduler.commit:_Reading._describe_all" and row.ask is scores:
            mine = {want.token for own in args[1] for want in own} & {90, 91, 92} != set()
        if mine and guilty[0]:
            raised.append(row.target)
            raise Broken("broken on purpose")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, staticmethod(broken) if is_class_method else broken)
    return raised


_alone: dict[tuple[str, bool], list[object]] = {}


def without_fault(name: str, *, searches: bool) -> list[object]:
    """The neighbours' answers when nobody else is there."""
    if (name, searches) not in _alone:
        machine = engine(searches=searches, **SETTINGS[name])
        ids = neighbours(machine)
        machine.run()
        _alone[name, searches] = answers(machine, ids)
    return _alone[name, searches]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("names", [FEW_SETTINGS, pytest.param(list(SETTINGS), marks=pytest.mark.nightly)], ids=len)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.target}-{ROWS.index(row)}")
def test_a_function_that_raises_for_one_row_ends_its_request_and_nothing_else(
    row: Row, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        without_fault(name, searches=row.ask is searches)
    guilty = [0]
    raised = break_for(monkeypatch, row, guilty)
    times = []
    for name in names:
        raised.clear()
        machine = engine(searches=row.ask is searches, **SETTINGS[name])
        ids = neighbours(machine)
        guilty[0] = machine._next_id + 1
        bad = row.ask(machine)
        machine.run()
        assert answers(machine, ids) == without_fault(name, searches=row.ask is searches), name
        assert machine.count("pool_rebuilds") == machine.count("failed_steps") == 0, name
        times.append(len(raised))
        if raised:
            ending = machine.endings[bad]
            assert isinstance(ending, EngineFailed)
            assert (ending.kind, ending.message) == ("RequestError", "broken on purpose")
            assert machine.count("failed") == 1
        guilty[0] = 0
        after = msgspec.structs.replace(GREEDY, seed=0, max_tokens=1)
        later = machine.generate([*PREFIX, 90], after)
        machine.run()
        assert machine.cached(later) >= len(PREFIX), name
        machine.assert_equals_reference(later, [*PREFIX, 90], after)
    assert any(times), f"{row.target} was never called for the request"


MATCHER = ["mask", "few", "accepting", "finished", "prepare", "advance", "rollback", "forced_tokens", "closing_tokens"]
MATCHER += ["closing_bound"]


@pytest.mark.parametrize("name", MATCHER)
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.sampled(4)
def test_a_matcher_that_fails_ends_its_text_only(name: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any exception: a constraint's engine may be a library."""
    original = inspect.getattr_static(ToyState, name)
    calls = 0

    def broken(self: ToyState, *args: int) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            raise IndexError("of a library")
        return original.fget(self) if isinstance(original, property) else original(self, *args)

    monkeypatch.setattr(ToyState, name, property(broken) if isinstance(original, property) else broken)
    for setting in ("small steps", "steps overlap"):
        calls = 0
        machine = engine(**SETTINGS[setting])
        ids = neighbours(machine)
        bad = hurried(machine) if name in ("rollback", "closing_tokens") else constrained(machine)
        machine.run()
        assert answers(machine, ids) == without_fault(setting, searches=False)
        assert machine.count("pool_rebuilds") == machine.count("failed_steps") == 0
        if calls >= call:
            ending = machine.endings[bad]
            assert isinstance(ending, EngineFailed)
            assert "IndexError" in ending.message
    assert calls or name in ("mask", "rollback", "closing_tokens")
