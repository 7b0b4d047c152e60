"""Programs that speculate: what is called, what is taken, what is dropped, and what is told of it."""

import asyncio

import msgspec
import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo, FailCall, Gate
from umbel.lang.protocol import Speculation

from ..conftest import PATIENCE
from .models import ASKED, BLIND, FREE, PAID, Follower, follower

FORM = "Name: Harry\nJob: wizard\nAge: 11\nThe end."
VALUES = {"name": " Harry", "job": " wizard", "age": " 11"}


@ul.function(temperature=0, stop="\n")
def character(s):
    s += "Name:" + ul.gen("name") + "\nJob:" + ul.gen("job") + "\nAge:" + ul.gen("age")


@ul.function(temperature=0, stop="\n")
def by_statements(s):
    s += "Name:" + ul.gen("name")
    s += "\nJob:" + ul.gen("job")
    s += "\nAge:" + ul.gen("age")


def ran(program, backend, **options):
    options = {"num_api_spec_tokens": 64, "timeout": PATIENCE, **options}
    state = program.run(backend=backend, **options)
    state.sync()
    return state


def values(state):
    return {name: state[name] for name in state.variables()}


# ------------------------------------------------------------------------------------------ hits


@pytest.mark.parametrize("program", [character, by_statements])
@pytest.mark.parametrize("capabilities", [PAID, BLIND])
def test_three_fields_take_one_call(program, capabilities):
    backend = follower(FORM, capabilities)
    state = ran(program, backend)
    assert values(state) == VALUES
    assert backend.calls == state.usage.calls == 1
    request = backend.requests[0]
    assert request.sampling.stop == ()
    assert request.sampling.max_tokens == 128 + 64
    assert state.text() == "Name: Harry\nJob: wizard\nAge: 11"


def test_what_is_told_of_saved_and_wasted_tokens():
    plain = ran(character, follower(FORM), num_api_spec_tokens=0)
    state = ran(character, follower(FORM))
    # Harry|\n Job|:| wizard|\n Age|:| 11|\n The| end|.    of which name, job and age take two each
    assert state.cost.speculation == Speculation(
        calls_saved=2, input_tokens_saved=16, output_tokens_wasted=7, tokens_speculated=11, hits=2
    )
    saved = plain.usage.prompt_tokens - state.usage.prompt_tokens
    assert saved == state.cost.speculation.input_tokens_saved
    assert plain.usage.completion_tokens + 7 == state.usage.completion_tokens
    name, job = state.meta("name"), state.meta("job")
    assert (name["speculated"], name["prompt_tokens"], name["completion_tokens"]) == (False, 2, 2)
    assert (job["speculated"], job["prompt_tokens"], job["completion_tokens"]) == (True, 0, 2)
    assert (job["finish_reason"], job["matched_stop"], job["id"]) == ("stop", "\n", name["id"])


def test_a_field_without_a_stop_ends_with_the_model():
    @ul.function(temperature=0)
    def program(s):
        s += "Name:" + ul.gen("name", stop="\n") + "\nJob:" + ul.gen("job")

    backend = follower("Name: Harry\nJob: wizard")
    assert values(ran(program, backend)) == {"name": " Harry", "job": " wizard"}
    assert backend.calls == 1


def test_a_field_ends_at_max_tokens_where_tokens_are_known():
    @ul.function(temperature=0)
    def program(s):
        s += "Name:" + ul.gen("name", stop="\n") + "\nMotto:" + ul.gen("motto", max_tokens=2)

    text = "Name: Harry\nMotto: never tickle a dragon"
    for capabilities, calls in ((PAID, 1), (BLIND, 2)):
        backend = follower(text, capabilities)
        assert ran(program, backend)["motto"] == " never tickle"
        assert backend.calls == calls


def test_selects_and_constraints_are_fields_too():
    @ul.function(temperature=0)
    def program(s):
        s += "Name: " + ul.gen("name", stop="\n") + "\nHouse: " + ul.select("house", ["Gryffindor", "Slytherin"])
        s += "\nBorn: " + ul.gen("born", regex="[0-9]{4}") + ", pets: " + ul.gen("pets", dtype=list[str]) + "\nAge: "
        s += ul.gen("age", dtype=int) + "\n"

    text = 'Name: Harry\nHouse: Gryffindor\nBorn: 1980, pets: ["owl", "rat"]\nAge: 11\n'
    backend = follower(text)
    state = ran(program, backend)
    assert backend.calls == 1
    assert (state["house"], state["born"]) == ("Gryffindor", "1980")
    assert (state.value("pets"), state.value("age")) == (["owl", "rat"], 11)
    assert state.meta("house")["choices_method"] == "generated"
    assert state.meta("born")["guarantee"] == "validated"
    assert state.meta("born")["tries"] == 0


def test_a_field_whose_constraint_the_provider_enforces_needs_a_text_that_cannot_go_on():
    capabilities = msgspec.structs.replace(PAID, constraints=("regex",))

    @ul.function(temperature=0)
    def program(s, pattern):
        s += "Name: " + ul.gen("name", stop="\n") + "\nAge: " + ul.gen("age", regex=pattern) + "\n"

    for pattern, calls in (("[0-9]{2}", 1), ("[0-9]{1,2}|x", 1), ("[0-9]{1,3}", 2)):
        said = {"Name: ": "Harry\nAge: 11\n", "Age: ": "11"}
        backend = Echo(said, capabilities=capabilities)
        assert ran(program, backend, pattern=pattern)["age"] == "11"
        assert backend.calls == calls
    assert backend.requests[1].constraint is not None, "the plain call is as it always is"


# ------------------------------------------------------------------------------------------ misses


def test_another_text_than_the_programs_is_dropped_and_asked_for():
    said = {"Name:": " Harry\nWork: wizard\n", "\nJob:": " wizard\nAge: 11\n"}
    backend = Echo(said, capabilities=PAID)
    state = ran(character, backend)
    assert values(state) == VALUES
    assert backend.calls == 2  # the second is asked for more again, and answers the third
    assert state.cost.speculation.misses == state.cost.speculation.hits == 1


def test_a_text_that_is_cut_off_is_asked_for():
    backend = follower(FORM)
    state = ran(character, backend, num_api_spec_tokens=3, max_tokens=3)  # " Harry\nJob: wizard\n"
    assert values(state) == VALUES
    assert (backend.calls, state.cost.speculation.misses) == (2, 1)


def test_a_gen_whose_own_end_is_not_certain_is_asked_for_again():
    backend = follower("Name: Harry of Hogwarts\nJob: wizard\n", BLIND)
    state = ran(by_statements, backend, max_tokens=6)
    assert state["name"] == " Harry of Hogwarts"
    assert state.meta("name")["speculated"] is False
    assert state.cost.speculation.calls_saved == -1
    assert backend.requests[1].sampling.stop == ("\n",)


def test_a_text_that_a_call_of_its_own_confirms_is_gone_on_with():
    @ul.function(temperature=0, stop="\n")
    def program(s):
        s += (
            "Name:" + ul.gen("name", max_tokens=6) + "\nJob:" + ul.gen("job") + "\nMood:" + ul.gen("mood", max_tokens=9)
        )
        s += "\nAge:" + ul.gen("age")

    text = "Name: Harry of Hogwarts\nJob: wizard\nMood: always in a hurry\nAge: 11\n"
    backend = follower(text, BLIND)
    state = ran(program, backend)
    assert values(state) == values(ran(program, follower(text, FREE)))
    assert [state.meta(name)["speculated"] for name in state.variables()] == [False, True, False, True]
    assert backend.calls == 3  # for name and mood it is not certain that their texts are within max_tokens
    cost = state.cost.speculation
    assert (cost.calls_saved, cost.hits, cost.misses) == (1, 2, 2)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"top_k": 5, "temperature": 0.5}, {"n": 2}, {"min_tokens": 1}, {"stop_token_ids": [5]},
     {"presence_penalty": 1.0}, {"return_logprob": True}, {"ignore_eos": True, "max_tokens": 3}],
)  # fmt: skip
def test_a_gen_that_is_chosen_in_another_way_has_a_call_of_its_own(options):
    @ul.function(temperature=0, stop="\n")
    def program(s):
        s += "Name:" + ul.gen("name") + "\nJob:" + ul.gen("job", **options) + "\nAge:" + ul.gen("age")

    backend = follower(FORM)
    state = ran(program, backend)
    assert backend.requests[1].sampling == ran(program, follower(FORM, FREE))._sink.run.backend.requests[1].sampling
    assert state.meta("age")["speculated"] is False
    assert backend.requests[0].sampling.stop == ("\n",), "what follows is known not to fit"


def test_draws_from_a_seed_are_left_alone():
    backend = follower(FORM)
    ran(character, backend, temperature=0.7, seed=3)
    assert backend.calls == 3
    backend = follower(FORM)
    ran(character, backend, temperature=0.7)
    assert backend.calls == 1


def test_thinking_is_left_alone():
    @ul.function(temperature=0, stop="\n")
    def program(s):
        s += "Name:" + ul.separate_reasoning(ul.gen("name")) + "\nJob:" + ul.gen("job")

    backend = follower(FORM)
    assert ran(program, backend)["job"] == " wizard"
    assert backend.calls == 2


def test_an_image_between_gens_drops_what_is_in_hand(tmp_path):
    picture = tmp_path / "owl.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(32))
    backend = follower(FORM, msgspec.structs.replace(PAID, images=True))

    @ul.function(temperature=0, stop="\n")
    def program(s):
        s += "Name:" + ul.gen("name")
        s.sync()
        s += ul.image(str(picture)) + "\nJob:" + ul.gen("job")

    assert ran(program, backend)["job"] == " wizard"
    assert backend.calls == 2


# ------------------------------------------------------------------------------------------ no reason to ask for more


@pytest.mark.parametrize(
    "said",
    [
        lambda: "Name:" + ul.gen("name") + "\n",
        lambda: "Name:" + ul.gen("name") + "Job:" + ul.gen("job"),  # behind the stop stands the stop
        lambda: ul.user("Who?") + ul.assistant("Name:" + ul.gen("name")) + ul.assistant("Job:" + ul.gen("job")),
        lambda: "Name:" + ul.gen("name", stop=None) + ul.user("?"),
    ],
)
def test_where_nothing_can_follow_nothing_more_is_asked_for(said):
    @ul.function(temperature=0, stop="\n")
    def program(s):
        s += said()

    backend = follower(FORM)
    state = ran(program, backend)
    assert [request.sampling.stop for request in backend.requests] == [("\n",)] * backend.calls
    assert state.cost.speculation == Speculation()


def test_a_gen_without_stop_and_constraint_is_asked_for_as_it_is():
    @ul.function(temperature=0)
    def program(s):
        s += "Name:" + ul.gen("name") + "\nJob:" + ul.gen("job")

    backend = follower(FORM)
    ran(program, backend)
    assert [request.sampling.max_tokens for request in backend.requests] == [128, 128]


def test_a_program_that_reads_before_it_goes_on_may_still_go_on():
    @ul.function(temperature=0, stop="\n")
    def program(s):
        s += "Name:" + ul.gen("name")
        if "Harry" in s["name"]:
            s += "\nJob:" + ul.gen("job")

    backend = follower(FORM)
    assert ran(program, backend)["job"] == " wizard"
    assert backend.calls == 1


def test_backends_whose_calls_are_not_paid_one_by_one_are_asked_as_always():
    backend = follower(FORM, FREE)
    state = ran(character, backend)
    assert (backend.calls, state.cost.speculation) == (3, Speculation())
    assert "speculated" not in state.meta("job")


# ------------------------------------------------------------------------------------------ chats


@ul.function(temperature=0, stop="\n")
def chat(s):
    s += ul.user("Describe Harry.")
    s += ul.assistant("Name:" + ul.gen("name") + "\nJob:" + ul.gen("job") + "\nAge:" + ul.gen("age"))
    s += ul.user("And Ron.")
    s += ul.assistant("Name:" + ul.gen("ron"))


def test_a_turn_takes_one_call_and_what_is_left_is_dropped_at_its_end():
    backend = follower(FORM)
    state = ran(chat, backend)
    assert backend.calls == 2
    assert state.cost.speculation.hits == 2
    assert state.cost.speculation.misses == 0
    assert state.meta("ron")["speculated"] is False


def test_a_model_that_cannot_continue_a_turn_is_asked_for_all_of_it():
    backend = follower("assistant\n" + FORM, ASKED)
    state = ran(chat, backend)
    assert {name: state[name] for name in VALUES} == VALUES
    assert backend.calls == 2
    assert backend.requests[0].prompt[-1].text.endswith("<|im_start|>assistant\n")


def test_a_reply_that_begins_otherwise_is_dropped_and_the_turn_continued():
    backend = Echo({"assistant\n": "Sure! Name: Harry\n", "Name:": " Harry\n", "Job:": " wizard\n", "Age:": " 11\n"},
                   capabilities=ASKED)  # fmt: skip
    state = ran(chat, backend)
    assert {name: state[name] for name in VALUES} == VALUES
    cost = state.cost.speculation
    assert (cost.calls_saved, cost.hits) == (-1, 0)
    assert cost.output_tokens_wasted >= 6


TRIMMING = (
    "{% for message in messages %}<{{ message['role'] }}>\n{{ message['content'] | trim }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


@pytest.mark.parametrize("capabilities", [PAID, ASKED])
def test_templates_that_trim_leave_what_is_compared_as_it_is_written(capabilities):
    @ul.function(temperature=0, stop="\n")
    def program(s):
        s += ul.user("Who?") + ul.assistant("  Name: " + ul.gen("name") + "\n" + "Job: " + ul.gen("job") + " \n")
        s += ul.user("And?") + ul.assistant("Name: " + ul.gen("again"))

    backend = Echo(
        Follower("<assistant>\nName: Harry\nJob: wizard\n"),
        capabilities=capabilities,
        chat_template=ul.ChatTemplate(TRIMMING, name="trimming"),
    )
    state = ran(program, backend)
    assert values(state) == {"name": "Harry", "job": "wizard", "again": "Harry"}
    assert backend.calls == 2
    assert state.text().startswith("<user>\nWho?</>\n<assistant>\nName: Harry\nJob: wizard</>\n<user>\n")


# ------------------------------------------------------------------------------------------ streams, forks, batches


@ul.function(temperature=0, stop="\n")
def forks(s):
    s += "Name:" + ul.gen("name")
    branches = s.fork(2)
    branches += "\nJob:" + ul.gen("job") + "\nAge:" + ul.gen("age")
    s += "\nJob:" + ul.gen("own")
    branches.join()


def test_branches_begin_with_nothing_in_hand_and_go_on_by_themselves():
    backend = follower(FORM)
    state = ran(forks, backend)
    assert (state["job"], state["age"], state["own"]) == ([" wizard"] * 2, [" 11"] * 2, " wizard")
    assert backend.calls == 3  # the parent's, which answers "own", and one for each branch
    assert state.cost.speculation.hits == 3


def test_readers_of_pieces_get_what_is_part_of_a_variable():
    state = character.run(backend=follower(FORM), num_api_spec_tokens=64, stream=True, timeout=PATIENCE)
    assert list(state.text_iter("name")) == [" Harry"]
    assert "".join(state.text_iter("job")) == " wizard"
    assert "".join(state.text_iter()) == "Name: Harry\nJob: wizard\nAge: 11"


def test_a_reader_has_a_text_before_what_is_behind_it_has_come():
    gate = Gate()
    backend = Echo(Follower(FORM), capabilities=PAID, gate=gate)
    state = character.run(backend=backend, num_api_spec_tokens=64, stream=True, timeout=PATIENCE)
    pieces = state.text_iter("name")
    gate.step(3)  # the call, " Harry" and the stop
    assert next(pieces) == " Harry"
    gate.open()
    assert list(pieces) == []


def test_many_threads_say_what_one_says():
    @ul.function(temperature=0, stop="\n", num_api_spec_tokens=64)
    def program(s, name):
        s += f"Name: {name}\nJob:" + ul.gen("job") + "\nAge:" + ul.gen("age") + "\nPet:" + ul.gen("pet")

    def model(prompt):
        name = prompt.split("\n")[0]
        text = f"{name}\nJob: job of {name}\nAge: {len(name)}\n" + ("Pet: owl\n" if "3" in name else "No pet.\n")
        return text[len(prompt) :] if text.startswith(prompt) else " none\n"

    arguments = [{"name": f"n{index}"} for index in range(64)]
    found = []
    for threads in (1, 64):
        backend = Echo(model, capabilities=PAID)
        states = program.run_batch(arguments, backend=backend, num_threads=threads)
        found.append([values(state) for state in states])
        hits = sum((state.cost.speculation for state in states), Speculation())
        assert hits.hits + backend.calls == 3 * 64
    assert found[0] == found[1]
    plain = program.run_batch(arguments, backend=Echo(model, capabilities=FREE))
    assert found[0] == [values(state) for state in plain]


def test_async_programs():
    @ul.function(temperature=0, stop="\n", num_api_spec_tokens=64)
    async def program(s):
        s += "Name:" + ul.gen("name")
        s += "\nJob:" + ul.gen("job")
        return await s["name"] + await s["job"]

    backend = follower(FORM)
    state = asyncio.run(program.run_async(backend=backend))
    assert state.ret_value == " Harry wizard"
    assert backend.calls == 1


# ------------------------------------------------------------------------------------------ options


def test_options_of_the_program_are_kept_by_bind_and_by_methods_and_a_run_has_the_last_word():
    @ul.function(temperature=0, stop="\n", num_api_spec_tokens=64)
    def program(s, label):
        s += "Name:" + ul.gen("name") + f"\n{label}:" + ul.gen("job")

    class Writer:
        describe = program

        @ul.function(temperature=0, stop="\n", num_api_spec_tokens=32)
        def write(self, s):
            s += "Name:" + ul.gen("name") + "\nJob:" + ul.gen("job")

    def calls(function, **options):
        backend = follower(FORM)
        function.run(backend=backend, **options).sync()
        return backend.calls

    assert calls(program.bind(label="Job")) == 1
    assert calls(Writer().write) == 1
    assert calls(program, label="Job", num_api_spec_tokens=0) == 2
    assert calls(character) == 3
    assert calls(character, sampling={"num_api_spec_tokens": 8}) == 1


def test_wrong_options_of_a_run():
    with pytest.raises(ul.ParameterError, match="two answers"):
        character.run(backend=follower(FORM), num_api_spec_tokens=8, speculate="auto")
    with pytest.raises(ul.ParameterError, match="out of range"):
        character.run(backend=follower(FORM), num_api_spec_tokens=-8)


def test_the_planner_asks_for_more_where_the_prompt_is_long_and_learns():
    @ul.function(temperature=0, stop="\n", speculate="auto", max_tokens=16)
    def program(s, before):
        s += before + "Name:" + ul.gen("name") + "\nJob:" + ul.gen("job") + "\nAge:" + ul.gen("age") + "\n"

    def calls(before, said):
        backend = Echo(said, capabilities=PAID)
        program.run(backend=backend, before=before).sync()
        return backend.calls, backend.requests[0].sampling.max_tokens

    long = "Once upon a time. " * 100
    assert calls("", Follower(FORM)) == (3, 16)
    assert calls(long, Follower(FORM))[0] == 1
    first = calls(long, Follower(FORM))[1]
    assert first < 16 + 16, "texts were short: less is asked for"
    for _ in range(30):
        calls(long, {"Name:": " Harry\nWork", "Job:": " wizard\n", "Age:": " 11\n"})
    assert calls("Once upon a time. " * 10, Follower(FORM)) == (3, 16)


# ------------------------------------------------------------------------------------------ what goes wrong


def test_a_budget_makes_it_ask_for_less():
    backend = follower(FORM)
    state = ran(character, backend, budget=ul.Budget(tokens=30), max_tokens=4)
    assert values(state) == VALUES
    assert backend.requests[0].sampling.max_tokens < 4 + 64
    assert state.usage.total_tokens <= 30


def test_a_small_context_makes_it_ask_for_less():
    backend = follower(FORM, msgspec.structs.replace(PAID, max_context=150))
    ran(character, backend)
    assert backend.requests[0].sampling.max_tokens == 148  # the prompt has two tokens


def test_a_provider_that_refuses_is_asked_as_always():
    class Strict(Echo):
        def generate(self, request):
            if request.sampling.max_tokens > 128:
                raise ul.RequestError("max_tokens is too large")
            return super().generate(request)

    program = ul.function(temperature=0, stop="\n", num_api_spec_tokens=64)(character._body.function)
    for _ in range(3):
        backend = Strict(Follower(FORM), capabilities=PAID)
        assert values(ran(program, backend)) == VALUES
        assert backend.calls == 3
    assert program._body.planner.refuses(PAID.name, "more tokens")


def test_a_provider_without_the_log_probabilities_it_promised_is_asked_without():
    class Silent(Echo):
        def generate(self, request):
            if request.sampling.logprobs:
                raise ul.CapabilityError("no logprobs")
            return super().generate(request)

    backend = Silent(Follower(FORM), capabilities=PAID)
    assert values(ran(character, backend)) == VALUES
    assert backend.calls == 1


def test_a_failed_call_fails_the_stream_as_always():
    faults = FailCall(1, ul.ConnectionLostError("gone"))
    backend = Echo(Follower(FORM), capabilities=PAID, faults=faults)
    with pytest.raises(ul.ConnectionLostError, match="gone"):
        ran(character, backend)


def test_a_deadline_ends_a_long_call():
    backend = Echo(Follower(FORM), capabilities=PAID, gate=Gate())
    with pytest.raises(ul.DeadlineError):
        ran(character, backend, timeout=0.05)


def test_a_cancelled_run_leaves_its_long_call():
    gate = Gate()
    backend = Echo(Follower(FORM), capabilities=PAID, gate=gate)
    state = character.run(backend=backend, num_api_spec_tokens=64, timeout=PATIENCE)
    gate.wait_for(1)
    state.cancel()
    with pytest.raises(ul.CancelledError):
        state.sync()
    assert len(backend.aborted) == 1
