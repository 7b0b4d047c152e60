"""Hints, aborts, the cache and facts over HTTP."""

from umbel.server.access import Access
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.in_process import LocalBackend

from ..client import AsgiClient
from .test_generate import run

USER, OTHER = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
ADMIN = {"authorization": "Bearer root"}
TEXT = "zyx zyx zyx zyx zyx"  # a token for each character


async def pinned(client: AsgiClient) -> int:
    found = (await client.get("/server_info", **ADMIN)).json["pool_pinned"]
    assert isinstance(found, int)
    return found


def test_a_hint_is_computed_ahead_and_its_pin_belongs_to_its_caller() -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post("/hints", {"text": TEXT, "pin": 60, "id": "x"}, **USER)
        assert (answer.status, answer.json) == (200, {"id": "x"})
        asked = {"text": TEXT + "x", "sampling_params": {"max_new_tokens": 1}}
        meta = (await client.post("/generate", asked, **USER)).json["meta_info"]
        assert meta["cached_tokens"] == 0, "the hint computed it for this caller"
        meta = (await client.post("/generate", asked, **USER)).json["meta_info"]
        assert meta["cached_tokens"] == len(TEXT) + 1
        meta = (await client.post("/generate", asked, **OTHER)).json["meta_info"]
        assert meta["cached_tokens"] == 0, "the cache of another caller"
        assert await pinned(client) == len(TEXT) + 1
        await client.begin("DELETE", "/hints/x", headers=OTHER).ended()
        await client.post("/generate", asked, **OTHER)  # a step later
        assert await pinned(client) == len(TEXT) + 1
        await client.begin("DELETE", "/hints/x", headers=USER).ended()
        await client.post("/generate", asked, **OTHER)
        assert await pinned(client) == 0

    run(scenario, access=Access({"a": "one", "b": "two"}, "root"), backend=LocalBackend(clock=VirtualClock()))


def test_a_wrong_hint_is_refused_although_hints_have_no_answer() -> None:
    async def scenario(client: AsgiClient) -> None:
        for body, param in (
            ({"text": "a", "pin": 0}, "pin"),
            ({"text": "a", "pin": 1e9}, "pin"),
            ({"text": "a", "id": ""}, "id"),
            ({"input_ids": [999]}, "input_ids"),
            ({}, "text"),
        ):
            answer = await client.post("/hints", body)
            assert (answer.status, answer.json["error"]["param"]) == (400, param)

    run(scenario)


def test_the_cache_is_flushed_by_the_administrator_alone() -> None:
    async def scenario(client: AsgiClient) -> None:
        asked = {"text": TEXT, "sampling_params": {"max_new_tokens": 1}}
        await client.post("/generate", asked, **USER)
        assert (await client.begin("POST", "/flush_cache", headers=USER).ended()).status == 403
        answer = await client.begin("POST", "/flush_cache", headers=ADMIN).ended()
        assert (answer.status, answer.json["evicted"]) == (200, len(TEXT) + 1)
        assert (await client.post("/generate", asked, **USER)).json["meta_info"]["cached_tokens"] == 0

    run(scenario, access=Access({"a": "one"}, "root"))


def test_load_and_counters_are_for_the_administrator() -> None:
    """They show what other callers do."""

    async def scenario(client: AsgiClient) -> None:
        mine = (await client.get("/server_info", **USER)).json
        whole = (await client.get("/get_server_info", **ADMIN)).json
        assert (mine["server"], mine["model_path"], mine["context_length"]) == ("umbel", "oracle", 4096)
        assert mine.items() < whole.items()
        assert not [name for name, value in whole.items() if value == 0 and isinstance(value, float)], (
            "counts are whole"
        )
        assert {"running", "waiting", "max_total_tokens", "steps", "prompt_tokens"} <= whole.keys() - mine.keys()

    run(scenario, access=Access({"a": "one"}, "root"))


def test_without_keys_every_caller_is_the_administrator() -> None:
    async def scenario(client: AsgiClient) -> None:
        assert (await client.begin("POST", "/flush_cache").ended()).status == 200
        assert (await client.get("/server_info")).json["running"] == 0

    run(scenario)


def test_the_model_is_described_under_both_names() -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.get("/model_info")
        assert answer.json == (await client.get("/get_model_info")).json
        assert answer.json["model_path"] == "oracle"
        assert answer.json["is_generation"] is True
        assert answer.json["chat_template"] is None
        assert answer.json["template_tokens"] == {"bos_token": "<s>", "eos_token": "</s>"}

    run(scenario)


def test_all_requests_are_not_aborted_at_once() -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post("/abort_request", {"rid": "", "abort_all": True})
        assert (answer.status, answer.json["error"]["param"]) == (400, "abort_all")

    run(scenario)
