"""Embeddings and relevances of checkpoints, through the runtime, against transformers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import umbel as ul
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from transformers import AutoModelForSequenceClassification, Gemma3TextConfig, Gemma3TextModel, PreTrainedModel
from umbel.lang.prompt import Generated, Text
from umbel.lang.protocol import CreateCache, EmbedRequest, GenRequest, floats_of
from umbel.srt.in_process import LocalBackend

from .tiny import BY_NAME, SIZES, gemma_like, write_folder

QWEN = BY_NAME["qwen3"]
BOS, EOS = (QWEN.tokenizer().token_to_id(name) for name in ("<s>", "</s>"))
TEXTS = ["the cat", "a longer text about another thing entirely", "the cat sat", "x"]
PAIR = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}yes? {# query document #}"
# "auto" weights keep bfloat16, and activations stay float32: so do these.
EXACT: dict[str, Any] = {"dtype": "float32", "pool_tokens": 400, "chunk_size": 5}


def rewrite(path: Path, **changes: Any) -> None:  # Any: JSON
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def modules(folder: Path, *kinds: str, **configs: dict[str, Any]) -> None:
    """Writes modules.json with a folder for each module after the model itself."""
    listed = [
        {"idx": place, "name": str(place), "path": f"{place}_{kind}" if place else "", "type": f"a.b.{kind}"}
        for place, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for place, kind in enumerate(kinds):
        if kind in configs:
            (folder / f"{place}_{kind}").mkdir()
            (folder / f"{place}_{kind}" / "config.json").write_text(json.dumps(configs[kind]))


def own_tokenizer() -> Tokenizer:
    """A copy of the model's tokenizer, which may be changed."""
    return Tokenizer.from_str(QWEN.tokenizer().to_str())


def closing(folder: Path, name: str = "</s>") -> None:
    """Lets the tokenizer end texts with a token, as that of Qwen3-Embedding does."""
    tokenizer = own_tokenizer()
    ids = {token: tokenizer.token_to_id(token) for token in ("<s>", name)}
    tokenizer.post_processor = processors.TemplateProcessing(single=f"<s> $A {name}", special_tokens=list(ids.items()))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())


def states(model: PreTrainedModel, text: str) -> torch.Tensor:
    ids = [BOS, *QWEN.tokenizer().encode(text, add_special_tokens=False).ids, EOS]
    with torch.no_grad():
        return model.model(input_ids=torch.tensor([ids])).last_hidden_state[0]


def close(actual: list[list[float]], expected: list[torch.Tensor]) -> bool:
    return all(torch.allclose(torch.tensor(one), other, atol=1e-4) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_embeddings_of_a_bare_checkpoint_are_those_of_transformers(tmp_path: Path, kernels: str) -> None:
    """Names without "model." and no output head, as Qwen3-Embedding; alone, together, again, in chunks."""
    folder = tmp_path / "embedding"
    model = write_folder(folder, QWEN)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in tensors.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors")
    closing(folder)
    modules(folder, "Transformer", "Pooling", "Normalize", Pooling={"pooling_mode_lasttoken": True})
    expected = [torch.nn.functional.normalize(states(model, text)[-1], dim=0) for text in TEXTS]
    backend = LocalBackend(model=str(folder), kernels=kernels, **EXACT)
    together = ul.embed(TEXTS, backend=backend)
    assert close(together, expected)
    assert close([ul.embed([text], backend=backend)[0] for text in TEXTS], [torch.tensor(one) for one in together])
    cut = ul.embed(TEXTS, dimensions=24, backend=backend)
    assert close(cut, [torch.nn.functional.normalize(one[:24], dim=0) for one in expected])
    assert backend.engine.scheduler.counters["cached_tokens"] > 0

    async def as_tokens() -> bytes:
        ids = tuple(QWEN.tokenizer().encode(TEXTS[1], add_special_tokens=False).ids)
        return (await backend.embed(EmbedRequest("a", ((Generated("", ids),),)))).vectors[0]

    assert close([floats_of(asyncio.run(as_tokens()))], [expected[1]])


def test_means_and_dense_maps_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "mean"
    model = write_folder(folder, QWEN)
    closing(folder)
    modules(
        folder,
        *("Transformer", "Pooling", "Dense"),
        Pooling={"pooling_mode": "mean"},
        Dense={"in_features": 64, "out_features": 9, "activation_function": "torch.nn.modules.activation.Tanh"},
    )
    dense = {"linear.weight": torch.randn(9, 64) / 8, "linear.bias": torch.randn(9)}
    save_file(dense, folder / "2_Dense" / "model.safetensors")
    expected = [
        torch.tanh(dense["linear.weight"] @ states(model, text).mean(0) + dense["linear.bias"]) for text in TEXTS
    ]
    backend = LocalBackend(model=str(folder), **EXACT)
    for _ in range(2):  # the second time all keys are cached
        assert close(ul.embed(TEXTS, backend=backend), expected)


WINDOW = 8  # of both sides: a row sees four tokens on either
LONG = "a longer text about another thing entirely, in which windows are shorter than the text"


def embedding_gemma(folder: Path) -> Gemma3TextModel:
    """EmbeddingGemma as it is published: the bare model, seen both ways, a mean and two maps."""
    torch.manual_seed(5)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {
        **SIZES,
        "tie_word_embeddings": True,
        "num_hidden_layers": 3,
        "layer_types": kinds,
        "sliding_window": WINDOW,
    }
    made = Gemma3TextConfig(
        vocab_size=gemma_like().get_vocab_size(),
        use_bidirectional_attention=True,
        attn_implementation="eager",
        **{**sizes, "pad_token_id": 0},
    )
    model = Gemma3TextModel(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter).mul(0.2).bfloat16().float())
    folder.mkdir()
    save_file(
        {name: value.bfloat16() for name, value in model.state_dict().items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = {**made.to_dict(), "architectures": ["Gemma3TextModel"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    (folder / "tokenizer.json").write_text(gemma_like().to_str())
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    identity = "torch.nn.modules.linear.Identity"
    listed = [("", "Transformer"), ("1_P", "Pooling"), ("2_D", "Dense"), ("3_D", "Dense"), ("", "Normalize")]
    (folder / "modules.json").write_text(
        json.dumps([{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in listed])
    )
    configs = {"1_P": {"pooling_mode_mean_tokens": True}}
    for path, inputs, outputs in (("2_D", 64, 96), ("3_D", 96, 64)):
        configs[path] = {"in_features": inputs, "out_features": outputs, "bias": False, "activation_function": identity}
    for path, config in configs.items():
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
        if "in_features" in config:
            weight = torch.randn(config["out_features"], config["in_features"]) / 8
            save_file({"linear.weight": weight}, folder / path / "model.safetensors")
    return model


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_texts_that_are_seen_both_ways_run_whole_and_are_never_cached(tmp_path: Path, kernels: str) -> None:
    folder = tmp_path / "embeddinggemma"
    model = embedding_gemma(folder)
    maps = [load_file(folder / path / "model.safetensors")["linear.weight"] for path in ("2_D", "3_D")]
    texts = [*TEXTS, LONG]
    expected = []
    for text in texts:
        ids = gemma_like().encode(text).ids
        with torch.no_grad():
            pooled = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
        expected.append(torch.nn.functional.normalize(maps[1] @ (maps[0] @ pooled), dim=0))
    assert len(ids) > 4 * WINDOW
    backend = LocalBackend(model=str(folder), kernels=kernels, **EXACT)
    for _ in range(2):
        assert close(ul.embed(texts, backend=backend), expected)
    assert close(ul.embed([LONG], backend=backend), expected[-1:])
    counters = backend.engine.scheduler.counters
    assert counters["cached_tokens"] == counters["retractions"] == 0
    with pytest.raises(ul.CapabilityError, match="sees texts both ways and generates no text"):
        asyncio.run(_generated(backend))
    kept = CreateCache("c", "name", (Text(LONG),), ttl=60.0, minimum=1)
    with pytest.raises(ul.CapabilityError, match="no prefix of one can be kept"):
        asyncio.run(backend.caches(kept))


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_classifier_ranks_as_in_transformers(tmp_path: Path, labels: int, kernels: str) -> None:
    folder = tmp_path / "ranker"
    model = write_folder(folder, QWEN)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    score = torch.randn(labels, 64, generator=torch.Generator().manual_seed(labels)).bfloat16()
    save_file({**tensors, "score.weight": score}, folder / "model.safetensors", metadata={"format": "pt"})
    names = {str(label): f"LABEL_{label}" for label in range(labels)}
    rewrite(folder / "config.json", architectures=["Qwen3ForSequenceClassification"], id2label=names, pad_token_id=0)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(classifier.model.embed_tokens.weight, model.model.embed_tokens.weight)
    backend = LocalBackend(model=str(folder), kernels=kernels, **EXACT)
    ranked = ul.rerank("cats?", TEXTS, template="{query} about {text}.", backend=backend)
    for one in ranked:
        ids = QWEN.tokenizer().encode(f"cats? about {one.text}.", add_special_tokens=False).ids
        with torch.no_grad():
            logits = classifier(input_ids=torch.tensor([ids])).logits[0]
        expected = logits.sigmoid()[0] if labels == 1 else logits.softmax(0)[1]
        assert abs(one.score - float(expected)) < 1e-4
        assert one.text == TEXTS[one.index]
    assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
    assert len({one.score for one in ranked}) == len(TEXTS)
    with pytest.raises(ul.CapabilityError, match="no output head"):
        asyncio.run(_generated(backend))
    with pytest.raises(ul.CapabilityError, match="no embeddings"):
        ul.embed(TEXTS, backend=backend)


async def _generated(backend: LocalBackend) -> None:
    await backend.start()
    async for _ in backend.generate(GenRequest("a", ())):
        pass


def test_a_model_that_answers_yes_or_no_ranks_by_the_odds(tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    model = write_folder(folder, QWEN)
    modules(folder, "Transformer", "LogitScore", LogitScore={"true_token_id": 9, "false_token_id": 7})
    (folder / "chat_template.jinja").write_text(PAIR)
    backend = LocalBackend(model=str(folder), **EXACT)
    ranked = ul.rerank("<s>", TEXTS, top=2, backend=backend)  # a name of a control token is text in a query
    assert len(ranked) == 2
    tokenizer = own_tokenizer()
    tokenizer.encode_special_tokens = True
    for one in ranked:
        plain = tokenizer.encode("query: <s>", add_special_tokens=False).ids
        ending = tokenizer.encode(f"document: {one.text}yes? ", add_special_tokens=False).ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[BOS, *plain, BOS, *ending]])).logits[0, -1]
        assert abs(one.score - float((logits[9] - logits[7]).sigmoid())) < 1e-4


def test_wrong_tensors_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "wrong"
    write_folder(folder, QWEN)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "score.weight": torch.zeros(3, 64)}, folder / "model.safetensors")
    rewrite(folder / "config.json", architectures=["Qwen3ForSequenceClassification"], num_labels=2)
    with pytest.raises(ul.ModelError, match=r"score.weight has shape \[3, 64\]"):
        ul.rerank("a", ["b"], template="{query}{text}", backend=LocalBackend(model=str(folder), **EXACT))
