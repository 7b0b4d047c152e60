"""`/score`, `/tokenize` and `/detokenize` on the oracle."""

from typing import Any

import pytest
from umbel.lang.prompt import Text
from umbel.lang.protocol import ScoreRequest

from ..client import AsgiClient
from .test_generate import run


def test_scores_are_those_of_the_runtime() -> None:
    async def scenario(client: AsgiClient) -> None:
        direct = await client.app.front.backend.score(ScoreRequest("s", (Text("is it "),), ("yes", "no"), True))
        body = {"text": "is it ", "choices": ["yes", "no"], "unconditional": True}
        answer = (await client.post("/score", body)).json
        for mine, its in zip(answer["choices"], direct.choices, strict=True):
            assert tuple(mine["token_ids"]) == its.token_ids
            assert mine["logprobs"] == pytest.approx(its.logprobs)
            assert mine["unconditional"] == pytest.approx(its.unconditional)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == direct.usage.prompt_tokens
        assert (usage["completion_tokens"], answer["evaluations"]) == (0, 0)

    run(scenario)


def test_probabilities_of_choices_have_bounds() -> None:
    async def scenario(client: AsgiClient) -> None:
        body = {"input_ids": [104, 101], "choices": ["a", "b"], "probability": "exact"}
        answer = (await client.post("/score", body)).json
        assert answer["evaluations"] > 0
        assert all(each["lower"] <= each["upper"] + 1e-9 < 1e-6 for each in answer["choices"])

    run(scenario)


BOS = 256
TOKENIZED: list[tuple[dict[str, Any], Any, Any]] = [
    ({"prompt": "hi"}, [BOS, 104, 105], 3),
    ({"prompt": "hi", "add_special_tokens": False}, [104, 105], 2),
    ({"prompt": "<s>hi", "add_special_tokens": False}, [BOS, 104, 105], 3),
    ({"prompt": "<|im_start|>"}, [BOS, 258], 2),
    ({"prompt": ["a", "bc"]}, [[BOS, 97], [BOS, 98, 99]], [2, 3]),
    ({"prompt": ["a"]}, [[BOS, 97]], [2]),
    ({"prompt": "", "add_special_tokens": False}, [], 0),
    ({"parts": [["t", "<s>"], ["g", "", [7]]]}, [BOS, *b"<s>", 7], 5),
    ({"parts": [["g", "", [BOS, 7]]], "add_special_tokens": False}, [BOS, 7], 2),
]


@pytest.mark.parametrize(("body", "tokens", "count"), TOKENIZED, ids=[str(row[0]) for row in TOKENIZED])
def test_texts_have_ids(body: dict[str, Any], tokens: Any, count: Any) -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post("/tokenize", body)
        assert answer.json == {"tokens": tokens, "count": count, "max_model_len": 4096}

    run(scenario)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"tokens": [BOS, 104, 105]}, "hi"),
        ({"tokens": [BOS, 104], "skip_special_tokens": False}, "<s>h"),
        ({"tokens": [[104], []]}, ["h", ""]),
        ({"tokens": []}, ""),
        ({"tokens": [0xC3, 0xA9, 0xC3]}, "é\ufffd"),
    ],
    ids=str,
)
def test_ids_have_a_text(body: dict[str, Any], text: Any) -> None:
    async def scenario(client: AsgiClient) -> None:
        assert (await client.post("/detokenize", body)).json == {"text": text, "prompt": text}
        placed = await client.post("/detokenize", {**body, "umbel": {"program": "p"}})
        assert placed.headers["umbel-warning"].startswith("umbel: ")
        assert "umbel-warning" not in (await client.post("/detokenize", {**body, "umbel": {}})).headers

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text": "a", "choices": []}, "choices"),
        ("/score", {"text": "a", "choices": [""]}, "choices[0]"),
        ("/score", {"text": "a", "choices": ["b"] * 1_025}, "choices"),
        ("/score", {"text": "a", "choices": ["b" * 16_385]}, "choices"),
        ("/score", {"text": "a"}, "choices"),
        ("/score", {"choices": ["a"]}, "text"),
        ("/score", {"text": "a", "choices": ["b"], "probability": "perhaps"}, "probability"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "parts": []}, "parts"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": [[1], [999]]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, [1]]}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
    ],
    ids=lambda part: str(part)[:80],
)
def test_a_wrong_question_is_refused_by_its_field(path: str, body: dict[str, Any], param: str) -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post(path, body)
        assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.json

    run(scenario)


def test_pictures_have_no_ids() -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post("/tokenize", {"parts": [["m", "image", "0" * 64, ""]]})
        assert answer.status == 400
        assert "pictures have no token ids" in answer.json["error"]["message"]

    run(scenario)
