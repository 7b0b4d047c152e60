"""The gateway and the constraints of its requests: compiled while the prompt is computed, in nobody's way."""

import gc

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from umbel.lang.errors import ConstraintError
from umbel.lang.prompt import Generated, Part, Text
from umbel.lang.protocol import (
    Abort,
    Chunk,
    ConstraintSpec,
    Failure,
    Final,
    FinishReason,
    GenRequest,
    Origin,
    ScoreRequest,
)
from umbel.lang.sampling import SamplingParams
from umbel.srt.constraints.compiler import CompiledCache
from umbel.srt.core.messages import (
    EngineChoose,
    EngineGenerate,
    EnginePrefill,
    EngineRelease,
    ToEngine,
    TokenRun,
    Tokens,
)
from umbel.srt.gateway.calls import GenCall
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..gateway_harness import CONTEXT, Harness, ended, generate
from ..patient_compiler import PatientCompiler

YES = ConstraintSpec("regex", "yes|no")


class Patience:
    """A gateway whose constraints are compiled when the test says so."""

    def __init__(self, *, ready: bool = True, entries: int = 8) -> None:
        self.compiler = PatientCompiler()
        library = CompiledCache(self.compiler, "fsm", entries=entries, most_bytes=1 << 20)
        self.gateway = Harness(ready=ready, constraints=library)

    def hints(self) -> list[int]:
        """Prompts to be computed meanwhile, by the engine's ids, but those that it was told to drop."""
        messages = self.gateway.to_engine
        dropped = {message.id for message in messages if isinstance(message, EngineRelease)}
        return [each.id for each in messages if isinstance(each, EnginePrefill) and each.id not in dropped]

    def failure(self) -> Failure:
        (answer,) = self.gateway.answers()
        assert isinstance(answer, Failure), answer
        return answer


def test_the_prompt_is_computed_while_the_constraint_is_compiled() -> None:
    here = Patience()
    here.gateway.send(generate("a", constraint=YES, seed=1))
    (hint,) = here.gateway.to_engine
    assert isinstance(hint, EnginePrefill)
    here.compiler.work()
    (message,) = here.gateway.generates()
    assert message.token_ids == hint.token_ids
    assert message.constraint is not None
    assert message.constraint.engine == "fsm"


def test_a_known_constraint_goes_straight_to_the_engine() -> None:
    here = Patience()
    here.gateway.send(generate("a", constraint=YES))
    here.compiler.work()
    here.gateway.send(generate("b", constraint=YES))
    assert len(here.gateway.generates()) == 2
    assert sum(isinstance(message, EnginePrefill) for message in here.gateway.to_engine) == 1


def test_continuations_share_one_constraint() -> None:
    here = Patience()
    here.gateway.send(generate("a", constraint=YES, n=3))
    here.compiler.work()
    messages = here.gateway.generates()
    assert len(messages) == 3
    assert len({message.constraint.digest for message in messages if message.constraint}) == 1
    assert len(here.compiler.asked) == 1


def test_other_requests_do_not_wait_for_a_compilation() -> None:
    here = Patience()
    here.gateway.send(generate("a", constraint=YES))
    here.gateway.send(generate("b"))
    assert len(here.gateway.generates()) == 1


def test_an_abort_while_compiling_ends_the_request_and_its_work() -> None:
    here = Patience()
    here.gateway.send(generate("a", constraint=YES))
    here.gateway.send(Abort("a"))
    assert here.failure().kind == "CancelledError"
    here.compiler.work()
    assert not here.compiler.asked
    assert not here.gateway.generates()


@pytest.mark.parametrize("ending", ["abort", "lose", "deadline", "refuse", "answer"])
def test_the_hint_of_a_prompt_ends_with_its_call(ending: str) -> None:
    here = Patience()
    spec = ConstraintSpec("regex", "a(") if ending == "refuse" else YES
    here.gateway.send(generate("a", constraint=spec, timeout=1.0))
    here.gateway.send(generate("a", constraint=ConstraintSpec("regex", "other"), timeout=9.0), client=b"another")
    _, others = here.hints()
    match ending:
        case "abort":
            here.gateway.send(Abort("a"))
        case "lose":
            here.gateway.lose()
        case "deadline":
            here.gateway.clock.advance(1.5)
            here.gateway.gateway.tick()
        case "refuse":
            here.compiler.work()
        case _:
            here.compiler.work()
            message, _ = here.gateway.generates()
            here.gateway.gateway.engine_event(ended(message.id, [*b"yes"]))
    assert here.hints() == [others]


def test_an_abort_after_compiling_ends_a_hint_that_still_waits() -> None:
    here = Patience()
    here.gateway.send(generate("a", constraint=YES))
    here.compiler.work()
    assert len(here.hints()) == 1, "its keys are wanted while the engine opens the constraint"
    here.gateway.send(Abort("a"))
    assert not here.hints()


def test_a_lost_peer_is_forgotten_while_compiling() -> None:
    here = Patience()
    here.gateway.send(generate("a", constraint=YES))
    here.gateway.lose()
    here.compiler.work()
    assert not here.gateway.answers()
    assert not here.gateway.generates()
    assert here.gateway.gateway.in_flight == 0


def test_a_call_that_has_ended_is_gone_without_a_collection_of_garbage() -> None:
    """Calls that refer to themselves would pile up with their prompts until Python's collector runs."""
    gc.collect()
    gc.disable()
    try:
        here = Patience()
        wrong = ConstraintSpec("regex", "a(")
        for label, constraint in (("compiled", YES), ("refused", wrong)):
            here.gateway.send(generate(label, constraint=constraint))
        here.compiler.work()
        slow = ConstraintSpec("regex", "b")
        for label, constraint in (("known", YES), ("known to be refused", wrong), ("aborted", slow)):
            here.gateway.send(generate(label, constraint=constraint))
        for label in ("compiled", "known", "aborted"):
            here.gateway.send(Abort(label))
        for message in here.gateway.generates():
            here.gateway.gateway.engine_event(ended(message.id, [1]))
        assert here.gateway.gateway.in_flight == 0
        here.compiler.work()
        here.gateway.to_engine.clear()
        assert not [each for each in gc.get_objects() if type(each) is GenCall]
    finally:
        gc.enable()


def test_a_deadline_passes_while_compiling() -> None:
    here = Patience()
    here.gateway.send(generate("a", constraint=YES, timeout=1.0))
    here.gateway.clock.advance(1.5)
    here.gateway.gateway.tick()
    assert here.failure().kind == "DeadlineError"
    assert "constraint to be compiled" in here.failure().message
    here.compiler.work()
    assert not here.gateway.generates()


def test_a_refusal_ends_its_requests_only() -> None:
    here = Patience()
    here.gateway.send(generate("a", constraint=ConstraintSpec("regex", "a(")))
    here.gateway.send(generate("b", constraint=YES))
    here.compiler.work()
    assert here.failure().kind == "ConstraintError"
    assert "regex" in here.failure().message
    assert len(here.gateway.generates()) == 1


def test_a_compiler_that_died_ends_those_who_waited_for_it() -> None:
    here = Patience()
    for label in "abc":
        here.gateway.send(generate(label, constraint=YES))
    here.compiler.work(ConstraintError("killed"))
    assert [answer.kind for answer in here.gateway.answers() if isinstance(answer, Failure)] == ["ConstraintError"] * 3
    here.gateway.send(generate("d", constraint=YES))
    here.compiler.work()
    assert len(here.gateway.generates()) == 1, "a failure of the work is not kept as an answer"


def test_what_was_compiled_before_the_engine_is_ready_waits_for_it() -> None:
    here = Patience(ready=False)
    here.gateway.send(generate("a", constraint=YES))
    here.gateway.send(generate("b", constraint=ConstraintSpec("regex", "later")))
    assert not here.gateway.to_engine
    here.compiler.work()
    here.gateway.send(generate("c", constraint=ConstraintSpec("regex", "last")))
    here.gateway.gateway.engine_ready(CONTEXT)
    assert len(here.gateway.generates()) == 2
    here.compiler.work()
    assert len(here.gateway.generates()) == 3


def test_an_engine_lost_while_compiling_costs_nothing() -> None:
    here = Patience()
    here.gateway.send(generate("a", constraint=YES))
    here.gateway.gateway.engine_lost("killed")
    here.compiler.work()
    assert not here.gateway.answers()
    here.gateway.gateway.engine_ready(CONTEXT)
    assert len(here.gateway.generates()) == 1


def test_whether_a_text_fits_is_for_the_engine_to_say() -> None:
    """The gateway has no vocabulary: a longer text may have fewer tokens than the shortest one."""
    here = Patience()
    here.gateway.send(generate("a", constraint=ConstraintSpec("regex", "abcdef+"), max_tokens=5))
    here.compiler.work()
    assert len(here.gateway.generates()) == 1


def test_the_gateway_tokenizes_no_text_of_a_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, encoded = ByteTokenizer.encode, list[str]()

    def noted(self: ByteTokenizer, text: str, *, first: bool) -> list[int]:
        encoded.append(text)
        return encode(self, text, first=first)

    monkeypatch.setattr(ByteTokenizer, "encode", noted)
    here = Patience()
    for label in "abc":
        here.gateway.send(generate(label, constraint=ConstraintSpec("regex", "yes{900}")))
    here.compiler.work()
    assert len(here.gateway.generates()) == 3
    assert encoded  # the prompts
    assert not any("ss" in text for text in encoded)


def test_the_answer_says_what_was_enforced_and_forced() -> None:
    here = Patience()
    here.gateway.send(generate("a", constraint=YES, stream=True))
    here.compiler.work()
    (message,) = here.gateway.generates()
    end = ended(message.id, list(b"yes"), reason=FinishReason.STOP)
    here.gateway.gateway.engine_event(type(end)(**{**_fields(end), "forced_tokens": 2, "enforced": True}))
    *_, final = here.gateway.answers()
    assert isinstance(final, Final)
    (completion,) = final.completions
    assert (completion.text, completion.kept, completion.tail) == ("yes", 3, "")
    assert (completion.forced_tokens, completion.guarantee, completion.unenforced) == (2, "enforced", ())


def test_the_answer_says_which_characters_were_forced_and_guessed() -> None:
    here = Harness()
    here.send(generate("a"))
    (message,) = here.generates()
    end = ended(message.id, list("yés!".encode()), reason=FinishReason.STOP)
    runs = [TokenRun("guessed", 0, 1), TokenRun("forced", 1, 3), TokenRun("guessed", 4, 5)]
    here.gateway.engine_event(type(end)(**{**_fields(end), "runs": runs}))
    *_, final = here.answers()
    assert isinstance(final, Final)
    (completion,) = final.completions
    assert completion.spans == (("guessed", 0, 1), ("forced", 1, 2), ("guessed", 3, 4))
    assert completion.guessed_tokens == 2


def test_a_replaced_token_of_the_prompt_is_not_shown_again() -> None:
    here = Patience()
    here.gateway.send(generate("a", text="it is in ", constraint=ConstraintSpec("regex", "the end"), stream=True))
    here.compiler.work()
    (message,) = here.gateway.generates()
    assert message.heal
    the = 260  # " the"
    here.gateway.gateway.engine_event(Tokens(message.id, [the], healed=1))
    end = ended(message.id, list(b" end"), reason=FinishReason.STOP, text_bytes=7)
    here.gateway.gateway.engine_event(type(end)(**{**_fields(end), "enforced": True, "healed": 1}))
    *chunks, final = here.gateway.answers()
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk)) == "the end"
    assert isinstance(final, Final)
    (completion,) = final.completions
    assert (completion.text, completion.kept, completion.tail) == ("the end", 0, "the end")


@pytest.mark.parametrize(
    ("request_", "heals"),
    [
        (generate(constraint=YES), True),
        (generate(constraint=YES, token_healing=False), False),
        (generate(constraint=YES, token_healing=True), True),
        (generate(), False),
    ],
)
def test_the_end_of_a_plain_prompt_may_be_replaced(request_: GenRequest, heals: bool) -> None:
    here = Patience()
    here.gateway.send(request_)
    here.compiler.work()
    assert [message.heal for message in here.gateway.generates()] == [heals]


def sent(*parts: Part) -> list[ToEngine]:
    """Returns the engine messages for a constrained text and for a search over choices after this prompt."""
    harness = Harness()
    harness.send(GenRequest("a", parts, SamplingParams(seed=1), False, Origin(), YES))
    harness.send(ScoreRequest("b", parts, ("the", "no"), probability="exact"))
    return harness.to_engine


# Also pieces of the names, and names that begin like others.
PIECES = ("<", "s", ">", "/", "</", "|im_start|", "<|im_", "<s", " ", "in ", "é", "☂", "\n")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_a_completion_without_control_tokens_is_plain_text(text: str) -> None:
    """Its names of control tokens are read; without any, all is as if they were not."""
    assume(not any(name in text for name in ByteTokenizer().special_ids))
    assert sent(Text(text, control=True)) == sent(Text(text))
    assert sent(Text("<s>" + text, control=True)) == sent(Text(text)), "BOS comes once"


@pytest.mark.parametrize(
    "parts",
    [
        (Text("<|im_start|>user\nhello", control=True),),
        (Text("hello</s>", control=True),),
        (Text("USER: ", control=True), Text("hello"), Text("\nASSISTANT:", control=True)),
        (Text("<s>", control=True),),
        (Text("", control=True),),
    ],
)
def test_text_of_a_template_is_not_replaced(parts: tuple[Part, ...]) -> None:
    generate_, choose = sent(*parts)
    assert isinstance(generate_, EngineGenerate)
    assert isinstance(choose, EngineChoose)
    assert not generate_.heal
    assert not choose.heal


@pytest.mark.parametrize("end", [Text("<|im_start|>", control=True), Generated("es", (100, 101))])
def test_what_a_template_or_the_model_wrote_is_not_replaced(end: Text | Generated) -> None:
    here = Patience()
    here.gateway.send(GenRequest("a", (Text("hello"), end), SamplingParams(), False, Origin(), YES))
    here.compiler.work()
    (message,) = here.gateway.generates()
    assert isinstance(message, EngineGenerate)
    assert not message.heal


def test_healing_without_a_constraint_is_refused() -> None:
    here = Patience()
    here.gateway.send(generate(token_healing=True))
    assert here.failure().kind == "ParameterError"


def test_the_facts_count_compilations() -> None:
    here = Patience()
    for label in "ab":
        here.gateway.send(generate(label, constraint=YES))
    here.compiler.work()
    facts = here.gateway.gateway.info()
    assert (facts["gateway_constraint_compiles"], facts["gateway_constraint_cache_hits"]) == (1, 1)


def _fields(end: object) -> dict[str, object]:
    return {name: getattr(end, name) for name in end.__struct_fields__}  # type: ignore[attr-defined]
