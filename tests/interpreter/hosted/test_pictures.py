"""Pictures on hosted models: whatever `image` takes goes out as the provider has it, in its place among the text."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from PIL import Image
from umbel.lang.prompt import Media, Text
from umbel.lang.protocol import Backend
from umbel.testing import FakeAnthropic, FakeOpenAI

from ...test_examples import load


def encoded(colour: str, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), colour).save(buffer, format=form)
    return buffer.getvalue()


@contextmanager
def openai(script: Callable[[str], str] = lambda text: "seen") -> Iterator[tuple[Backend, FakeOpenAI]]:
    with FakeOpenAI(script) as server:
        yield ul.OpenAI("gpt-4o-mini", base_url=server.base_url, api_key=server.api_key, profile="openai"), server


@contextmanager
def anthropic(script: Callable[[str], str] = lambda text: "seen") -> Iterator[tuple[Backend, FakeAnthropic]]:
    with FakeAnthropic(script) as server:
        yield ul.Anthropic("claude-haiku-4-5", base_url=server.base_url, api_key=server.api_key), server


def blocks(body: dict[str, Any]) -> list[tuple[str, bytes] | str]:
    """The content of all turns of a request: texts, and pictures as (type, bytes)."""
    found: list[tuple[str, bytes] | str] = []
    for block in (block for message in body["messages"] for block in message["content"]):
        match block:
            case str():  # of a turn that is text alone
                pass
            case {"type": "text", "text": text}:
                found.append(text)
            case {"type": "image_url", "image_url": {"url": url}}:
                kind, _, data = url.removeprefix("data:").partition(";base64,")
                found.append((kind, base64.b64decode(data)))
            case {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}:
                found.append((kind, base64.b64decode(data)))
            case _:
                raise AssertionError(block)
    return found


@ul.function
def compare(s: ul.State, one: object, other: object) -> None:
    s += ul.user("Here is " + ul.image(one) + " and here " + ul.image(other) + ". Which is red?")
    s += ul.assistant(ul.gen("answer", max_tokens=8))


@pytest.mark.parametrize("hosted", [openai, anthropic])
def test_paths_bytes_and_pictures_travel_in_their_places(hosted: Any, tmp_path: Path) -> None:
    path = tmp_path / "red.jpg"
    path.write_bytes(encoded("red", "JPEG"))
    blue = Image.new("RGB", (4, 3), "blue")
    with hosted() as (backend, server):
        assert compare.run(str(path), encoded("green", "WEBP"), backend=backend)["answer"] == "seen"
        assert compare.run(path, blue, backend=backend)["answer"] == "seen"
        first, second = (blocks(request.body) for request in server.requests)
        assert "Here is <image> and here <image>. Which is red?" in server.requests[0].text
    assert first == [
        "Here is ",
        ("image/jpeg", encoded("red", "JPEG")),
        " and here ",
        ("image/webp", encoded("green", "WEBP")),
        ". Which is red?",
    ]
    kind, data = second[3]
    assert kind == "image/png"
    assert Image.open(io.BytesIO(data)).getpixel((0, 0)) == (0, 0, 255)


def test_echo_is_given_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(encoded("red"))
    echo = ul.Echo(["seen"])
    assert compare.run(path, Image.new("RGB", (4, 3), "red"), backend=echo)["answer"] == "seen"
    parts = echo.requests[-1].prompt
    assert [part.data for part in parts if isinstance(part, Media)] == [encoded("red")] * 2
    assert [part.text for part in parts if isinstance(part, Text) and "here" in part.text] == [" and here "]


@pytest.mark.parametrize("hosted", [openai, anthropic])
@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (ul.image(encoded("red", "BMP")), "PNG, JPEG, GIF and WebP images; convert this one"),
        (ul.image(b"<svg/>"), "PNG, JPEG, GIF and WebP images; convert this one"),
        (ul.video(b"clip", num_frames=2), "takes images and no video; give single frames"),
    ],
)
def test_what_providers_do_not_take_is_refused_before_a_call(hosted: Any, said: Any, problem: str) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += ul.user("What is this? " + said) + ul.assistant(ul.gen("answer"))

    with hosted() as (backend, server):
        with pytest.raises(ul.CapabilityError, match=problem):
            program.run(backend=backend)["answer"]
        assert len(server.requests) == 0


def judge(text: str) -> str:
    """What a model says to the program of figure 2."""
    asked = text.rsplit("<|im_start|>user\n", 1)[1]
    begun = text.rsplit("<|im_start|>assistant\n", 1)[1]
    if "related to the image" in asked:
        return "yes"
    if "dimension:" in asked:
        return f" {asked.split('dimension:')[1].split('.')[0]} is fine. END of it"
    if "JSON" in asked:
        return '{"summary": "A fine essay.", "grade": "A-"}'
    return " a fine essay. And so on" if begun.endswith("In summary,") else " A-"


@pytest.mark.parametrize("hosted", [openai, anthropic])
def test_figure_2_of_the_paper_runs_as_printed(hosted: Any) -> None:
    module = load("multi_dimensional_judge")
    with hosted(judge) as (backend, server):
        state = module.multi_dimensional_judge.run(path=module.PICTURE, essay=module.ESSAYS[0], backend=backend)
        assert state["related"] == "yes"
        assert json.loads(state["output"]) == {"summary": "A fine essay.", "grade": "A-"}
        pictures = [block for block in blocks(server.requests[0].body) if isinstance(block, tuple)]
    assert pictures == [("image/png", module.PICTURE.read_bytes())]
