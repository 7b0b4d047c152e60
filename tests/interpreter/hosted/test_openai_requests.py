"""What goes out to servers of the OpenAI dialect, by what they are."""

from dataclasses import replace

import pytest
import umbel as ul
from umbel.interpreter.backends.hosted.conversation import CONTINUE_TEXT, CONTINUE_TURN
from umbel.interpreter.backends.hosted.openai import profiles
from umbel.interpreter.backends.hosted.openai.profiles import SERVERS, of_model, of_owner
from umbel.interpreter.backends.hosted.openai.requests import OpenAIPlanner
from umbel.interpreter.backends.hosted.places import Places
from umbel.lang.errors import CapabilityError, ParameterError, RequestError
from umbel.lang.prompt import Generated, Media, Private, Text
from umbel.lang.protocol import ConstraintSpec, Origin

from .wired import asking, conversation

GPT = of_model("gpt-4o")
PNG = Media("image", "0" * 64, b"\x89PNG\r\n\x1a\n...")


def planner(profile: profiles.Profile = GPT, mode: str = "chat", **extra: object) -> OpenAIPlanner:
    return OpenAIPlanner("openai m", "m", profile, mode, extra, Places())  # type: ignore[arg-type]  # one of the two modes


def body(profile: profiles.Profile = GPT, mode: str = "chat", **request: object) -> dict[str, object]:
    return planner(profile, mode).plan(asking(**request)).body  # type: ignore[arg-type]  # of all types


def test_turns_go_out_in_the_order_of_the_program():
    parts = (Text("<|im_start|>system\n", True), Text("Be brief."), Text("<|im_end|>\n", True), *conversation("Hi"))
    assert body(prompt=parts, temperature=0.0, max_tokens=5) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 5,
        "temperature": 0.0,
    }


def test_an_answer_that_has_begun_is_asked_to_go_on():
    assert body(prompt=conversation("Who?", "Name: "))["messages"] == [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Name: "},
        {"role": "user", "content": CONTINUE_TURN},
    ]


POINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def test_what_a_cache_point_keeps_ends_with_a_breakpoint():
    turns = (Text("<|im_start|>system\n", True), Text("Rules."), Text("<|im_end|>\n<|im_start|>user\n", True))
    whole = (*turns, Text("The document. One?"), Text("<|im_end|>\n<|im_start|>assistant\n", True), Text("Well, yes"))
    plan = planner()
    plain = plan.plan(asking(whole)).body["messages"]
    for end, part in ((2, None), (3, Text("The document. ")), (5, Text("Well, "))):
        plan.keep((*whole[:end], part) if part else whole[:end])
    system, user, *answer = plan.plan(asking(whole)).body["messages"]
    assert system == {"role": "system", "content": [{"type": "text", "text": "Rules.", **POINT}]}
    first, second = {"type": "text", "text": "The document. ", **POINT}, {"type": "text", "text": "One?"}
    assert user == {"role": "user", "content": [first, second]}
    assert answer == plain[2:], "an answer has none"
    other = (*turns[:1], Text("Other rules."), *whole[2:])
    assert all(isinstance(message["content"], str) for message in plan.plan(asking(other)).body["messages"])


def test_the_last_four_cache_points_of_a_prompt_count():
    plan, text = planner(), (Text("<|im_start|>user\n", True),)
    for number in range(6):
        text = (*text, Text(f"Part {number}. "))
        plan.keep(text)
    plan.keep((*text, PNG))
    (message,) = plan.plan(asking((*text, PNG, Text("Why?"), *conversation()[2:]))).body["messages"]
    assert [("prompt_cache_breakpoint" in part) for part in message["content"]] == [False] * 3 + [True] * 4 + [False]


@pytest.mark.parametrize(
    ("model", "takes"),
    [
        ("gpt-35-turbo", False),
        ("gpt-5", False),
        ("gpt-5.5", False),
        ("o3", False),
        ("gpt-5.6", True),
        ("gpt-5.10-mini-2027-01-01", True),
        ("ft:gpt-6-mini:me", True),
        ("gpt-10", True),
    ],
)
def test_recent_models_have_breakpoints(model: str, takes: bool):
    profile = of_model(model)
    assert profile.breakpoints == takes
    assert profiles.capabilities_of("x", model, profile, "chat", None).hint == takes


def test_a_server_that_can_goes_on_with_an_answer_itself():
    sent = body(SERVERS["vllm"], prompt=conversation("Who?", "Name: "))
    assert sent["messages"][-1] == {"role": "assistant", "content": "Name: "}
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in body(SERVERS["vllm"])


def test_a_chat_model_is_asked_to_continue_a_text():
    plan = planner().plan(asking((Text("Once upon a time"),)))
    assert plan.continues_text
    assert plan.body["messages"] == [
        {"role": "system", "content": CONTINUE_TEXT},
        {"role": "user", "content": "Once upon a time"},
    ]


def test_a_completion_model_gets_the_text_as_it_is():
    plan = planner(mode="completion").plan(asking((Text("a", True), Generated("b", (1,)), Text("c"))))
    assert plan.body == {"model": "m", "prompt": "abc", "max_tokens": 128}
    assert not plan.continues_text


def test_images_become_data_urls_among_the_text():
    parts = (Text("<|im_start|>user\n", True), Text("What is "), PNG, Text("?"), *conversation()[2:])
    assert body(prompt=parts)["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is "},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgouLi4="}},
                {"type": "text", "text": "?"},
            ],
        }
    ]


@pytest.mark.parametrize(
    ("profile", "mode", "request_", "what"),
    [
        (GPT, "chat", {"top_k": 5}, "does not take top_k=5; leave it out"),
        (GPT, "chat", {"min_p": 0.1}, "min_p=0.1"),
        (GPT, "chat", {"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        (GPT, "chat", {"stop_token_ids": (1,)}, r"stop_token_ids=\(1,\)"),
        (GPT, "chat", {"ignore_eos": True}, "ignore_eos=True"),
        (GPT, "chat", {"min_tokens": 2}, "min_tokens=2"),
        (GPT, "chat", {"stop_regex": ("a",)}, "stop_regex="),
        (GPT, "chat", {"prompt_logprobs_from": 0}, "prompt_logprobs_from=0"),
        (of_model("o3"), "chat", {"temperature": 0.0}, "temperature=0.0"),
        (of_model("o3"), "chat", {"logprobs": True}, "it gives at most 0"),
        (of_model("gpt-3.5-turbo-instruct"), "completion", {"top_logprobs": 9}, "it gives at most 5"),
        (SERVERS["llama.cpp"], "chat", {"n": 2}, "n=2; fork the program"),
        (GPT, "chat", {"origin": Origin(salt="s")}, "salt='s'"),
        (GPT, "chat", {"prompt": (*conversation()[:1], Private("a"), *conversation()[1:])}, r"private\(\)"),
        (SERVERS["llama.cpp"], "chat", {"prompt": (*conversation()[:1], PNG, *conversation()[1:])}, "takes no images"),
        (SERVERS["vllm"], "completion", {"prompt": (PNG,)}, "completion mode takes no images"),
        (GPT, "chat", {"prompt": ()}, r"the prompt is empty; write user\("),
        (GPT, "chat", {"prompt": (Text("<|im_start|>assistant\n", True),)}, r"there is none yet; write user\("),
        (GPT, "chat", {"prompt": (Text("<|im_start|>tool\n<|im_end|>\n", True), *conversation())}, r"tool\(\.\.\.\)"),
        (GPT, "chat", {"constraint": ConstraintSpec("lark", "start: A")}, "does not enforce this lark"),
        (
            GPT,
            "chat",
            {"constraint": ConstraintSpec("regex", "a"), "logprobs": True},
            "log-probabilities of a constrain",
        ),
    ],
)
def test_what_would_be_dropped_is_refused(profile, mode, request_, what):
    with pytest.raises(CapabilityError, match=f"openai m.*{what}"):
        body(profile, mode, **request_)


@pytest.mark.parametrize(
    ("backend", "profile", "helps"),
    [("openai m", SERVERS["compatible"], True), ("openai m", GPT, False), ("gemini m", SERVERS["compatible"], False)],
)
def test_a_profile_is_the_remedy_for_another_server_of_openais_dialect_alone(backend, profile, helps):
    asked = replace(planner(profile), backend=backend)
    with pytest.raises(CapabilityError, match="does not take min_p") as found:
        asked.plan(asking(min_p=0.1))
    assert ("profile=Profile(...)" in str(found.value)) is helps


def test_half_a_character_cannot_be_sent():
    with pytest.raises(RequestError, match=r"half of a character.*errors='replace'"):
        body(prompt=conversation("a\udc80b"))


def test_parameters_go_out_under_their_names():
    sent = body(
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        logit_bias={5: 1.0},
        seed=7,
        n=2,
        stop=("\n",),
        top_logprobs=3,
    )
    del sent["messages"]
    assert sent == {
        "model": "m",
        "max_completion_tokens": 128,
        "temperature": 0.5,
        "top_p": 0.9,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "logit_bias": {"5": 1.0},
        "seed": 7,
        "n": 2,
        "stop": ["\n"],
        "logprobs": True,
        "top_logprobs": 3,
    }


def test_servers_with_defaults_of_their_own_are_told_ours():
    sent = body(SERVERS["vllm"], stop_token_ids=(3,))
    assert {k: sent[k] for k in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids")} == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [3],
    }
    assert body(SERVERS["llama.cpp"])["top_k"] == 0


def test_log_probabilities_of_the_completion_api_are_a_number():
    assert body(SERVERS["vllm"], "completion", top_logprobs=2)["logprobs"] == 2
    assert body(SERVERS["vllm"], "completion", logprobs=True)["logprobs"] == 0


def test_a_salt_keeps_the_prefix_cache_apart_where_there_is_one():
    assert body(SERVERS["vllm"], origin=Origin(salt="s"))["cache_salt"] == "s"
    private = (*conversation()[:1], Private("a"), *conversation()[1:])
    told = body(SERVERS["vllm"], origin=Origin(salt="s"), prompt=private)
    assert told == {**body(SERVERS["vllm"], prompt=conversation()), "cache_salt": "s/a"}


@pytest.mark.parametrize(
    ("profile", "stops", "constraint", "sent", "here"),
    [
        (GPT, ("a", "b"), None, ["a", "b"], ()),
        (GPT, ("a", "b", "c", "d", "e"), None, None, ("a", "b", "c", "d", "e")),
        (of_model("o3"), ("a",), None, None, ("a",)),
        (GPT, ("a",), ConstraintSpec("regex", "a+b"), None, ("a",)),
        (SERVERS["vllm"], ("a",), ConstraintSpec("regex", "a+b"), ["a"], ()),
        (SERVERS["sglang"], ("a",), ConstraintSpec("regex", "a+b"), None, ("a",)),
    ],
)
def test_stops_are_sent_or_looked_for_here(profile, stops, constraint, sent, here):
    plan = planner(profile).plan(asking(stop=stops, constraint=constraint))
    assert plan.body.get("stop") == sent
    assert plan.cuts == here
    assert plan.streams == bool(here)


def test_streams_ask_what_they_cost():
    assert body(stream=True)["stream_options"] == {"include_usage": True}
    assert "stream" not in body()


def test_fields_of_the_user_are_added():
    assert planner(service_tier="flex").plan(asking()).body["service_tier"] == "flex"


# -------------------------------------------------------------------------------------------- who is what


@pytest.mark.parametrize(
    ("model", "name", "field", "value"),
    [
        ("gpt-4o-2024-08-06", "openai structured chat", "schemas", "strict"),
        ("ft:gpt-4o-mini-2024-07-18:us::x", "openai structured chat", "regexes", "pattern"),
        ("gpt-4.1-nano", "openai structured chat", "max_context", 1_000_000),
        ("gpt-4", "openai chat", "schemas", ""),
        ("gpt-3.5-turbo", "openai chat", "max_tokens", "max_tokens"),
        ("gpt-3.5-turbo-instruct", "openai completion", "chat", False),
        ("o4-mini", "openai reasoning", "stops", 0),
        ("gpt-5.1", "openai reasoning", "sampling", frozenset()),
        ("gpt-5-chat-latest", "openai chat", "stops", 4),
        ("of-tomorrow", "openai chat of unknown kind", "max_tokens", "max_completion_tokens"),
    ],
)
def test_models_of_openai_are_known_by_name(model, name, field, value):
    profile = of_model(model)
    assert profile.name == name
    assert getattr(profile, field) == value


@pytest.mark.parametrize(
    ("owner", "server", "name"),
    [
        ("vllm", "uvicorn", "vllm"),
        ("sglang", "", "sglang"),
        ("llamacpp", "", "llama.cpp"),
        ("me", "", "llama-cpp-python"),
        ("anyone", "llama.cpp", "llama.cpp"),
        ("system", "", "openai structured chat"),
        ("library", "", "compatible"),
    ],
)
def test_servers_are_known_by_what_they_say(owner, server, name):
    assert of_owner(owner, "gpt-4o", server).name == name


def test_profiles_have_names():
    assert profiles.named("vllm", "m") is SERVERS["vllm"]
    assert profiles.named("openai", "gpt-4o") is of_model("gpt-4o")
    with pytest.raises(ParameterError, match="did you mean 'vllm'"):
        profiles.named("vlm", "m")
    with pytest.raises(ParameterError, match="write a Profile"):
        profiles.named(5, "m")  # type: ignore[arg-type]


def test_a_profile_is_public():
    assert ul.Profile is profiles.Profile
