"""Shapes of the programs that SGLang publishes: its language tests, examples and documentation, re-created.

A shape runs on whatever default backend is set, and asserts what holds for any model. Those that write roles say so.
"""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import umbel.compat.sglang as sgl
from umbel.compat.sglang.lang.chat_template import get_chat_template
from umbel.compat.sglang.lang.choices import greedy_token_selection, unconditional_likelihood_normalized
from umbel.compat.sglang.lang.interpreter import ProgramState
from umbel.compat.sglang.lang.ir import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR

PICTURE = Path(__file__).resolve().parents[2] / "examples" / "shapes.png"
OCTET = r"(25[0-5]|2[0-4]\d|[01]?\d\d?)"


@dataclass(frozen=True)
class Shape:
    """A program and how it is run. `roles`: it writes roles."""

    name: str
    run: Callable[[], None]
    roles: bool


SHAPES: list[Shape] = []


def shape(*, roles: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def keep(run: Callable[[], None]) -> Callable[[], None]:
        SHAPES.append(Shape(run.__name__, run, roles))
        return run

    return keep


# ------------------------------------------------------------------------------------------- language tests


@sgl.function
def few_shot(s, question):
    s += "Questions with answers.\n\nQ: What is the capital of Spain?\nA: Madrid\n"
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", max_tokens=16, stop="\n", temperature=0)


@shape()
def few_shot_qa():
    one = few_shot.run(question="What is the capital of Chile?")
    assert one["answer"] in one.text()
    batch = few_shot.run_batch([{"question": "Of Peru?"}, {"question": "Of Cuba?"}, {"question": "Of Fiji?"}])
    assert all("\n" not in state["answer"] for state in batch)


@shape(roles=True)
def multi_turn_chat():
    @sgl.function
    def answer(s, first, second):
        s += sgl.system("You are a helpful assistant.")
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("one", max_tokens=8))
        with s.user():
            s += second
        with s.assistant():
            s += sgl.gen("two", max_tokens=8)

    for argument in (["Plan a trip.", "Make it shorter."], ["Write a poem.", "Now in prose."]):
        state = answer.run(first=argument[0], second=argument[1], temperature=0.1)
        assert [message["role"] for message in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
        assert state.messages()[2]["content"].strip() == state["one"].strip()


@shape(roles=True)
def roles_by_begin_and_end():
    @sgl.function
    def program(s):
        s += sgl.system_begin() + "Short answers." + sgl.system_end()
        s += sgl.user_begin() + "Hi" + sgl.user_end()
        s += sgl.assistant_begin() + sgl.gen("x", max_tokens=4) + sgl.assistant_end()

    assert len(program.run().messages()) == 3


@shape(roles=True)
def a_system_turn_without_text():
    @sgl.function
    def program(s):
        s += sgl.system()
        s += sgl.user("Hi") + sgl.assistant(sgl.gen("x", max_tokens=4))

    state = program.run()
    assert state.messages()[0] == {"role": "system", "content": ""}
    assert state["x"] in state.text()


@shape()
def select_among_labels():
    @sgl.function
    def judge(s, statement):
        s += "Statement: " + statement + "\nThe statement is"
        s += sgl.select("label", [" true", " false", " unknown"]) + "."

    assert judge.run("Gold is heavier than water.")["label"] in (" true", " false", " unknown")


@shape()
def select_by_each_method():
    @sgl.function
    def judge(s, method):
        s += "The colour of the sky is" + sgl.select("pick", [" blue", " green"], choices_method=method)
        s += sgl.gen("again", choices=[" yes", " no"], choices_method=sgl.token_length_normalized)

    for method in (sgl.token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized):
        assert judge.run(method)["pick"] in (" blue", " green")


@shape()
def choices_with_max_tokens():
    @sgl.function
    def program(s):
        s += "Which tool?" + sgl.gen("tool", max_tokens=8, stop="\n", choices=[" calculator", " search"], temperature=0)
        s += " It is" + sgl.gen("why", max_tokens=4)

    assert program.run()["tool"] in (" calculator", " search")


@shape()
def decode_int():
    @sgl.function
    def hours(s):
        s += "A day has " + sgl.gen_int("hours", max_tokens=24) + " hours.\n"
        s += "A year has " + sgl.gen("days", dtype="int", max_tokens=24) + " days.\n"

    state = hours.run(temperature=0)
    assert str(int(state["hours"])) == state["hours"].lstrip()
    assert str(int(state["days"])) == state["days"].lstrip()


@shape()
def decode_json_by_regex():
    @sgl.function
    def character(s):
        s += "A character as JSON: "
        with s.var_scope("json_output"):
            s += "{\n"
            s += '  "name": ' + sgl.gen("name", max_tokens=16, regex=r'"[a-z ]{1,8}"') + ",\n"
            s += '  "age": ' + sgl.gen("age", max_tokens=24, regex="[0-9]{1,3}") + "\n"
            s += "}"

    made = json.loads(character.run(temperature=0)["json_output"])
    assert (type(made["name"]), type(made["age"])) == (str, int)


@shape()
def decode_json_by_types():
    @sgl.function
    def character(s):
        s += "A character as JSON: "
        with s.var_scope("json_output"):
            s += '{"age": ' + sgl.gen_int("age", max_tokens=24) + ', "weight": ' + sgl.gen("w", 40, dtype=float) + "}"

    numbers = re.fullmatch(r'\{"age": (\S+), "weight": (\S+)\}', character.run(temperature=0)["json_output"])
    assert numbers is not None
    assert float(numbers[1]) == int(numbers[1])


@shape()
def types_of_gen():
    @sgl.function
    def program(s):
        s += "int " + sgl.gen("a", dtype=int, max_tokens=24) + "\nfloat " + sgl.gen("b", dtype=float, max_tokens=40)
        s += "\nstr " + sgl.gen("c", dtype=str, max_tokens=12) + "\nbool " + sgl.gen("d", dtype=bool, max_tokens=8)

    state = program.run()
    assert isinstance(int(state["a"]), int)
    assert isinstance(float(state["b"]), float)
    assert state["c"].startswith('"')
    assert state["d"] in ("True", "False")


@shape()
def regex_of_an_address():
    @sgl.function
    def address(s):
        s += "Q: What is the address of the name server?\nA: "
        s += sgl.gen("address", max_tokens=32, temperature=0, regex=rf"({OCTET}\.){{3}}{OCTET}")

    assert re.fullmatch(rf"({OCTET}\.){{3}}{OCTET}", address.run()["address"])


@shape()
def regex_from_the_patterns_of_ir():
    @sgl.function
    def program(s):
        s += "Truth: " + sgl.gen("truth", max_tokens=8, regex=REGEX_BOOL) + "\nQuoted: "
        s += sgl.gen("quoted", max_tokens=12, regex=REGEX_STR) + "\nCount: "
        s += sgl.gen("count", max_tokens=24, regex="n=" + REGEX_INT) + "\nShare: "
        s += sgl.gen("share", max_tokens=40, regex=REGEX_FLOAT)

    state = program.run()
    assert state["truth"] in ("True", "False")
    assert re.fullmatch("n=" + REGEX_INT, state["count"])
    assert float(state["share"]) is not None


@shape()
def regex_with_other_scripts():
    @sgl.function
    def program(s):
        s += "姓名：" + sgl.gen("name", max_tokens=24, regex="[\u4e00-\u9fff]{2,4}") + "。"

    assert 2 <= len(program.run()["name"]) <= 4


@shape()
def expert_answer():
    @sgl.function
    def expert(s, question):
        s += "Question: " + question + "\nA good expert for this question is" + sgl.gen("expert", 12, stop=[".", "\n"])
        s += "\n" + s["expert"].strip() + " answers:" + sgl.gen("answer", max_tokens=12, stop=".")

    state = expert.run(question="Why is the sky blue?", temperature=0.1)
    assert state.text().count(state["expert"].strip()) >= 1


@shape()
def tool_use_with_python_between():
    @sgl.function
    def multiply(s, a, b):
        s += f"To compute {a} * {b} I call a function.\ncall: "
        s += sgl.gen("operation", choices=["multiply", "add"])
        s += f"({a}, {b}) = " + str(a * b) + ".\nSo the answer is" + sgl.gen("answer", max_tokens=8, stop=".")

    assert "(257, 983) = 252631.\nSo the answer is" in multiply.run(a=257, b=983, temperature=0).text()


@shape()
def react():
    @sgl.function
    def agent(s, question):
        s += "Question: " + question + "\n"
        for step in range(1, 4):
            s += (
                f"Thought {step}:" + sgl.gen("thought", max_tokens=8, stop=["\n", "Observation"]) + f"\nAction {step}: "
            )
            s += sgl.select("action", ["Search", "Finish"])
            if s["action"] == "Finish":
                s += sgl.gen("final", max_tokens=4)
                break
            s += f"\nObservation {step}: nothing was found.\n"

    assert "Action 1:" in agent.run(question="Where is Timbuktu?").text()


@shape()
def parallel_decoding():
    @sgl.function
    def write(s, topic):
        s += f"An article on {topic} in 3 parts:\n"
        forks = s.fork(3)
        forks += lambda i: f"Part {i + 1}:" + sgl.gen("part", max_tokens=8, stop="\n") + "\n"
        forks.join()
        s += "".join(s["part"]) + "\nIn short:" + sgl.gen("summary", max_tokens=8)

    state = write.run(topic="tea", temperature=0.3)
    assert len(state["part"]) == 3


@shape()
def parallel_encoding():
    @sgl.function
    def program(s, question):
        s += "Statements about France.\n"
        facts = ["It has a capital.", "It has rivers.", "It has a president."]
        forks = s.fork(3)
        forks += lambda i: f"Statement {i + 1}: " + facts[i] + "\n"
        forks.join(mode="concate_and_append")
        s += "Q: " + question + "\nA:" + sgl.gen("answer", max_tokens=8, stop="\n")

    state = program.run(question="Has it rivers?")
    assert re.search("Statement 1:.*\nStatement 2:.*\nStatement 3:", state.text())


@shape(roles=True)
def image_question():
    @sgl.function
    def ask(s, path, question):
        s += sgl.user(sgl.image(path) + question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=4))

    assert ask.run(path=str(PICTURE), question="What shapes are there?")["answer"] is not None


@shape()
def stream_text_and_variable():
    state = few_shot.run(question="Of Kenya?", stream=True)
    assert "".join(state.text_iter()) == state.text()
    state = few_shot.run(question="Of Kenya?", stream=True)
    assert "".join(state.text_iter(var_name="answer")) == state["answer"]

    async def read() -> str:
        state = few_shot.run(question="Of Kenya?", stream=True)
        return "".join([piece async for piece in state.text_async_iter(var_name="answer")])

    assert asyncio.run(read()) == state["answer"]


@shape()
def speculation_on_a_completion_model():
    @sgl.function(num_api_spec_tokens=32)
    def character(s, name):
        s += "Construct a character.\n" + name + " has an age of" + sgl.gen("age", max_tokens=8, stop=",")
        s += ", and the job of" + sgl.gen("job", max_tokens=8, stop=".") + ".\n"

    state = character.run("Merlin", temperature=0)
    assert "," not in state["age"]
    assert "." not in state["job"]


@shape(roles=True)
def speculation_on_a_chat_model():
    @sgl.function(num_api_spec_tokens=64)
    def character(s, name):
        s += sgl.system("You write short profiles.") + sgl.user("A profile of " + name)
        s += sgl.assistant("Name:" + sgl.gen("name", 8, stop="\n") + "\nJob:" + sgl.gen("job", 8, stop="\n") + "\n")

    assert "\n" not in character.run("Merlin", temperature=0)["name"]


@shape()
def select_the_best_ending():
    @sgl.function
    def best(s, context, endings):
        s += context + sgl.select("ending", choices=endings)

    questions = [{"context": f"Number {i} is", "endings": [" even.", " odd.", " prime."]} for i in range(4)]
    states = best.run_batch(questions, temperature=0, num_threads=4, progress_bar=False)
    assert all(state["ending"] in (" even.", " odd.", " prime.") for state in states)


@shape()
def at_least_so_many_tokens():
    @sgl.function
    def program(s):
        s += "Tell a story:" + sgl.gen("story", min_tokens=6, max_tokens=12)

    meta = program.run().get_meta_info("story")
    assert 6 <= meta["completion_tokens"] <= 12


@shape()
def several_continuations():
    @sgl.function
    def program(s):
        s += "A short name:" + sgl.gen("names", n=3, max_tokens=4, temperature=0.8)

    assert len(program.run()["names"]) == 3


@shape()
def samples_by_forks():
    @sgl.function
    def program(s, question, number):
        s += "Q: " + question + "\nA:"
        forks = s.fork(number)
        forks += sgl.gen("answer", max_tokens=6, temperature=0.9)
        s["answers"] = [fork["answer"] for fork in forks]

    assert len(program.run("1 + 1?", 4)["answers"]) == 4


@shape()
def forks_in_stages():
    @sgl.function
    def program(s):
        s += "Pick a colour:"
        stages = []
        for fork in s.fork(2):
            fork += sgl.gen("colour", max_tokens=3)
            for inner in fork.fork(2):
                inner += " and a shape:" + sgl.gen("shape", max_tokens=3)
                stages.append(inner)
        s += " | ".join(each["shape"] for each in stages)

    assert program.run().text().count(" | ") == 3


@shape()
def branches_as_contexts_and_copies():
    @sgl.function
    def program(s):
        s += "Tips: "
        with s.fork(2) as branches:
            branches[0] += "A" + sgl.gen("tip", max_tokens=2)
            branches[1] += "B" + sgl.gen("tip", max_tokens=2)
        copied = s.copy()
        copied += "elsewhere"
        s += s["tip"][0] + s["tip"][1] + sgl.gen("summary", max_tokens=2)

    assert "elsewhere" not in program.run().text()


@shape()
def log_probabilities_of_choices():
    @sgl.function
    def program(s):
        s += "The capital of Japan is" + sgl.gen("city", choices=[" Tokyo", " Kyoto"])

    meta = program.run().get_meta_info("city")
    assert len(meta["normalized_prompt_logprobs"]) == 2
    assert all(len(token) == 3 for choice in meta["input_token_logprobs"] for token in choice)


@shape()
def chains_of_thought_by_log_probabilities():
    @sgl.function
    def begin(s, question):
        s += "Q: " + question + "\nA:"
        s += sgl.gen(
            "first", max_tokens=1, temperature=0, return_logprob=True, top_logprobs_num=3, return_text_in_logprobs=True
        )

    @sgl.function
    def follow(s, text, token):
        s += text + token + sgl.gen("rest", max_tokens=4, temperature=0, return_logprob=True, top_logprobs_num=2)

    state = begin.run("Which is more, 2 or 3?")
    (tops,) = state.get_meta_info("first")["output_top_logprobs"]
    for logprob, _, token in tops:
        meta = follow.run("Q: ...\nA:", token).get_meta_info("rest")
        assert logprob <= 1e-6
        assert all(value <= 1e-6 for value, *_ in meta["output_token_logprobs"])


@shape()
def log_probabilities_of_a_prompt():
    @sgl.function
    def program(s):
        s += "The quick brown fox"
        s += sgl.gen("nothing", max_tokens=0, return_logprob=True, logprob_start_len=0)

    state = program.run()
    tokens = state.get_meta_info("nothing")["input_token_logprobs"]
    assert "".join(text for *_, text in tokens).endswith("The quick brown fox")
    assert state["nothing"] == ""


@shape()
def json_schema_as_text():
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }

    @sgl.function
    def program(s):
        s += "As JSON: " + sgl.gen("made", max_tokens=64, json_schema=json.dumps(schema))

    assert set(json.loads(program.run()["made"])) == {"name", "ok"}


@shape()
def a_grammar_in_gbnf():
    @sgl.function
    def program(s):
        s += "Is it so?" + sgl.gen("said", max_tokens=16, ebnf='root ::= answer "."\nanswer ::= " yes" | " no"')

    assert program.run()["said"] in (" yes.", " no.")


@shape()
def many_regexes_at_once():
    @sgl.function
    def program(s, expression):
        s += "Match: " + sgl.gen("found", max_tokens=24, regex=expression)

    expressions = [r"[0-9]{3}-[a-z]{2}", r"(ab|cd){2}", r"x(yz){1,2}", r"[A-F0-9]{4}"] * 2
    states = program.run_batch([{"expression": each} for each in expressions], temperature=0, num_threads=8)
    assert all(re.fullmatch(each, state["found"]) for each, state in zip(expressions, states, strict=True))


@shape()
def thinking_is_parted_from_the_answer():
    @sgl.function
    def program(s):
        s += "Think: " + sgl.separate_reasoning(sgl.gen("answer", max_tokens=8), model_type="qwen3")

    state = program.run()
    assert state["answer_reasoning_content"] is not None
    assert "</think>" not in state["answer"]


# ------------------------------------------------------------------------------------------- programs of programs


@shape()
def trace_a_program():
    listed = few_shot.trace().last_node.print_graph_dfs()
    assert "Gen answer" in listed


@shape()
def bind_and_cache_a_prompt():
    @sgl.function
    def answer(s, prompt, question):
        s += prompt + "Q: " + question + "\nA:" + sgl.gen("answer", max_tokens=4, stop="\n")

    bound = answer.bind(prompt="Answer each of the following questions in a few plain words, please.\n\n" * 2)
    assert "Gen answer" in bound.trace().last_node.print_graph_dfs()
    bound.cache()
    bound.pin()
    assert bound.run(question="Why?")["answer"] is not None
    bound.unpin()


@shape()
def compile_a_program_that_calls_another():
    @sgl.function
    def expand(s, tip):
        s += "Expand: " + tip + "\n" + sgl.gen("detail", max_tokens=4)

    @sgl.function
    def tips(s, topic):
        s += (
            "Two tips for "
            + topic
            + ".\n1."
            + sgl.gen("one", 4, stop="\n")
            + "\n2."
            + sgl.gen("two", 4, stop="\n")
            + "\n"
        )
        first, second = expand(tip=s["one"]), expand(tip=s["two"])
        s += first["detail"] + second["detail"] + "In short" + sgl.gen("short", max_tokens=4)

    compiled = tips.compile()
    assert compiled.run(topic="sleep")["short"] is not None
    assert len(compiled.run_batch([{"topic": "tea"}, {"topic": "rest"}], temperature=0)) == 2


@shape(roles=True)
def compile_roles_for_a_backend():
    @sgl.function
    def chat(s):
        s += sgl.user("Who are you?") + sgl.assistant(sgl.gen("one", max_tokens=4))
        s += sgl.user("Since when?") + sgl.assistant(sgl.gen("two", max_tokens=4))

    assert get_chat_template("llama-2-chat").name == "llama-2-chat"
    compiled = chat.compile(backend=sgl.global_config.default_backend)
    assert isinstance(compiled.run(), ProgramState)


@shape()
def states_are_looked_into():
    state = few_shot.run(question="Of Oman?", use_thread=False, return_text_in_logprobs=True)
    assert str(state) == f"ProgramState({state.text()})"
    assert state.stream_executor.variables["answer"] == state["answer"]
    assert few_shot.func.__name__ == "few_shot"
    assert state.error() is None


@shape()
def a_branch_that_depends_on_an_answer():
    @sgl.function
    def program(s, question):
        s += "To answer: " + question + ". I need a " + sgl.gen("tool", choices=["calculator", "search engine"]) + ". "
        if s["tool"] == "calculator":
            s += "The expression is" + sgl.gen("expression", max_tokens=4)
        elif s["tool"] == "search engine":
            s += "The word to look up is" + sgl.gen("word", max_tokens=4)

    state = program.run(question="1 + 1")
    assert ("expression" in state) != ("word" in state)


@shape()
def batches_as_they_come():
    states = few_shot.run_batch([{"question": f"Of {i}?"} for i in range(5)], generator_style=True, num_threads=2)
    assert len([state["answer"] for state in states]) == 5


@shape()
def a_document_shared_by_questions():
    @sgl.function
    def qa(s, document, questions):
        s += "Document: " + document + "\n"
        forks = s.fork(len(questions))
        forks += [f"Q: {question}\nA:" + sgl.gen("answer", max_tokens=4, stop="\n") for question in questions]
        return [fork["answer"] for fork in forks]

    assert len(qa.run("Tea is old. " * 10, ["What?", "Since when?"]).ret_value) == 2


@shape()
def cache_and_facts_of_the_server():
    assert sgl.get_server_info()
    few_shot.run(question="Of Mali?").sync()
    sgl.flush_cache()
