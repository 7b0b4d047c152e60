"""Programs that use adapters: each call is computed with its own, and shares keys with calls of the same one only."""

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import umbel as ul
from safetensors.torch import save_file
from umbel.lang.prompt import Text
from umbel.lang.protocol import CreateCache, GenRequest, Hint, Origin, ScoreRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.in_process import LocalBackend
from umbel.srt.launch import LoadedModel
from umbel.srt.testing.oracle import OracleRunner, histories
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from .test_in_process import GREEDY, final_of, request, run
from .weights.test_adapters import CONFIG
from .weights.tiny import BY_NAME, write_folder

TWO = {"sql": "of the oracle", "law": "of the oracle"}
PROMPT = "select the best of all umbels, and say why it is better than the others: "
LENGTH = 59  # tokens of it that are found again: its last one is computed for its logits


@pytest.fixture
def backend() -> LocalBackend:
    return LocalBackend(adapters=TWO)


def texts(backend: LocalBackend, **options: Any) -> dict[str, Any]:
    @ul.function
    def program(s: ul.State) -> None:
        s += PROMPT
        for name, chosen in (("base", {}), ("sql", {"adapter": "sql"}), ("law", {"adapter": "law"})):
            fork = s.fork(1)[0]
            fork += ul.gen("text", max_tokens=8, temperature=0, **chosen)
            s[name] = fork["text"]
        fork = s.fork(1)[0]
        fork += ul.select("one", ["umbel", "anise", "fennel"], adapter="sql")
        s["selected"] = fork["one"]

    state = program.run(backend=backend, **options)
    return {name: state[name] for name in ("base", "sql", "law", "selected")}


def test_each_call_is_computed_with_its_adapter_and_the_programs_default(backend: LocalBackend) -> None:
    found = texts(backend)
    assert len({found[name] for name in ("base", "sql", "law")}) == 3
    assert texts(backend, adapter="law") == {**found, "base": found["law"]}


def test_calls_share_keys_with_calls_of_the_same_adapter_only() -> None:
    backend = LocalBackend(adapters=TWO)

    async def scenario() -> None:
        for label, adapter, cached in (("a", "", 0), ("b", "sql", 0), ("c", "law", 0), ("d", "sql", 1), ("e", "", 1)):
            sampling = SamplingParams(max_tokens=4, temperature=0.0, adapter=adapter)
            final = await final_of(backend, request(label, PROMPT, sampling))
            assert final.usage.cached_tokens == (LENGTH if cached else 0), label

    run(backend, scenario)


def test_hints_scores_and_caches_are_of_the_adapter_of_their_origin() -> None:
    backend = LocalBackend(adapters=TWO)
    of_sql = Origin(adapter="sql", salt="s")

    async def scored(origin: Origin, **more: Any) -> Any:
        asked = ScoreRequest("score", (Text(PROMPT),), ("a", "b"), origin=origin, **more)
        return (await backend.score(asked)).choices

    async def scenario() -> None:
        backend.hint(Hint("hint", (Text(PROMPT),), of_sql))
        while not (await backend.survey(text=0)).nodes:
            await asyncio.sleep(0)
        same = SamplingParams(max_tokens=4, temperature=0.0, adapter="sql")
        for name, cached in (("a", 0), ("b", LENGTH)):  # the hint computed it for the first
            asked = GenRequest(name, (Text(PROMPT),), same, origin=Origin(salt="s"))
            assert (await final_of(backend, asked)).usage.cached_tokens == cached
        assert backend.engine.scheduler.counters["computed_prompt_tokens"] == LENGTH + 3, "and the last token of each"
        plain, adapted = await scored(Origin()), await scored(of_sql, unconditional=True)
        assert [choice.logprobs for choice in plain] != [choice.logprobs for choice in adapted]
        assert adapted[0].unconditional != (await scored(Origin(), unconditional=True))[0].unconditional
        exact, of_base = [(await scored(origin, probability="exact"))[0].lower for origin in (of_sql, Origin())]
        assert exact != of_base
        kept = await backend.caches(CreateCache("c", "named", (Text(PROMPT),), minimum=1, origin=of_sql))
        assert kept.caches[0].tokens == 53  # the last word may go on

    run(backend, scenario)


def test_the_beginning_of_a_fork_is_hinted_for_the_adapter_of_its_calls() -> None:
    backend = ul.Echo()

    @ul.function(adapter="law")
    def program(s: ul.State) -> None:
        s += PROMPT
        for branch in s.fork(2):
            branch += ul.gen("text", max_tokens=2, adapter="sql")
            branch += "and"
            for leaf in branch.fork(2):
                leaf += ul.gen("leaf", max_tokens=2)
                assert leaf["leaf"]

    program.run(backend=backend)
    hints = [request.origin.adapter for request in backend.requests if isinstance(request, Hint)]
    assert hints == ["law", "sql", "sql"]
    asked = [request.origin.adapter for request in backend.requests if isinstance(request, GenRequest)]
    assert sorted(asked) == ["law"] * 4 + ["sql"] * 2


def test_an_explanation_names_the_adapter_that_had_cached_nothing(backend: LocalBackend) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += PROMPT + ul.gen("base", max_tokens=2, temperature=0)
        s += ul.gen("sql", max_tokens=2, temperature=0, adapter="sql")

    report = program.run(backend=backend, salt="s").explain_cache()
    assert "cached under another salt or adapter" in str(report)
    assert "newly cached, salt 's', adapter 'sql')" in str(report)


def test_a_compiled_program_says_the_same_and_its_file_keeps_the_adapters(backend: LocalBackend) -> None:
    @ul.function(adapter="law")
    def program(s: ul.State, topic: str) -> None:
        s += PROMPT + topic
        s += ul.gen("sql", max_tokens=6, temperature=0, adapter="sql")
        s += ul.gen("law", max_tokens=6, temperature=0)
        s += ul.select("one", ["umbel", "anise"], adapter="")

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "program.umbel.json")
        program.trace().save(path)
        again = ul.load(path)
    plain, loaded = program.run(topic="x", backend=backend), again.run(topic="x", backend=backend)
    for name in ("sql", "law", "one"):
        assert loaded[name] == plain[name]


def test_unknown_adapters_are_refused_with_those_that_there_are(backend: LocalBackend) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "Hello" + ul.gen("text", max_tokens=2, adapter="poems")

    with pytest.raises(ul.CapabilityError, match="has no adapter 'poems'; write one of sql, law"):
        program.run(backend=backend)["text"]
    with pytest.raises(ul.CapabilityError, match=r"no adapter 'poems'; leave it out, or name it in Runtime\(adapters="):
        program.run(backend=LocalBackend())["text"]
    with pytest.raises(ul.ParameterError, match=r"adapter='a/b'; write the name of an adapter"):
        ul.gen("x", adapter="a/b")
    with pytest.raises(ul.ParameterError, match=r"adapter='\.\.'"):
        ul.select("x", ["a"], adapter="..")
    with pytest.raises(ul.ParameterError, match="adapter=array"):
        ul.select("x", ["a"], adapter=np.zeros(2))  # type: ignore[arg-type]

    async def scenario() -> None:
        with pytest.raises(ul.ParameterError, match="adapter='poems' is not loaded; write one of sql, law"):
            await backend.score(ScoreRequest("s", (Text("a"),), ("b",), origin=Origin(adapter="poems")))

    run(backend, scenario)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"adapters": ["sql"]}, "adapters must be a dict such as"),
        ({"adapters": {"a b": "x"}}, "a name in adapters='a b'"),
        ({"overlap": np.zeros(2)}, "overlap=array"),
        ({"adapters": {"sql": 3}}, r"adapters\['sql'\]"),
        ({"adapters": {"sql": "x"}, "tensor_parallel": 2}, "adapters are not cut into ranks"),
    ],
)
def test_options_that_are_none_are_refused(options: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ul.ParameterError, match=says):
        ul.Runtime("somewhere", **options)


def test_a_model_in_memory_has_its_adapters_already() -> None:
    loaded = LoadedModel("toy", ByteTokenizer(), OracleRunner())

    async def start() -> None:
        await LocalBackend(loaded=loaded, adapters=TWO).start()

    with pytest.raises(ul.ParameterError, match="adapters are read for a model on disk"):
        asyncio.run(start())


def write_adapter(folder: Path, hidden: int, queries: int, scale: float) -> str:
    generator = torch.Generator().manual_seed(0)
    module = "base_model.model.model.layers.1.self_attn.q_proj"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({**CONFIG, "r": 4, "lora_alpha": 4 * scale, "target_modules": "all-linear"})
    )
    tensors = {
        f"{module}.lora_A.weight": torch.randn(4, hidden, generator=generator),
        f"{module}.lora_B.weight": torch.randn(queries, 4, generator=generator),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def test_a_model_on_disk_generates_with_its_adapters(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", BY_NAME["llama"])
    paths = {"one": tmp_path / "one", "zero": tmp_path / "zero"}
    write_adapter(paths["one"], 64, 128, 4.0)
    write_adapter(paths["zero"], 64, 128, 1e-30)
    backend = LocalBackend(str(tmp_path / "model"), adapters=paths, pool_tokens=512, dtype="float32")

    async def scenario() -> None:
        found = {}
        for name in ("", *paths):
            sampling = SamplingParams(max_tokens=12, temperature=0.0, adapter=name, ignore_eos=True)
            found[name] = (
                (await final_of(backend, request(f"of-{name}", "hello you", sampling))).completions[0].token_ids
            )
        assert found[""] == found["zero"] != found["one"]

    run(backend, scenario)


def test_an_adapter_of_another_model_ends_the_start(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", BY_NAME["llama"])
    path = write_adapter(tmp_path / "other", 48, 128, 1.0)
    backend = LocalBackend(str(tmp_path / "model"), adapters={"other": path}, pool_tokens=64)
    with pytest.raises(ul.ModelError, match=r"adapter 'other'.*is that of rank 4 for this model"):
        asyncio.run(backend.start())


def test_fingerprints_of_two_adapters_differ() -> None:
    ids = np.arange(4)
    assert len({tuple(histories(ids, adapter=adapter)) for adapter in (-1, 0, 1)}) == 3
    assert GREEDY.adapter == ""
