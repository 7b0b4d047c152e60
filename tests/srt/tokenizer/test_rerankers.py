"""Qwen3-Reranker as it is published, and as llama.cpp converts it: found by its name, with the prompt of its card."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import umbel as ul
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from umbel.lang.chat_template import ChatTemplate, Turn
from umbel.lang.prompt import Text
from umbel.srt.in_process import LocalBackend
from umbel.srt.tokenizer.rerankers import answers_of, is_reranker, takes_pairs, with_pairs
from umbel.srt.tokenizer.vocabulary import Vocabulary
from umbel.srt.weights import open_model

from ..weights.tiny import BY_NAME, write_folder, write_gguf

TEXTS = ["the cat", "a longer text about another thing", "x"]
USUAL = "Given a web search query, retrieve relevant passages that answer the query"
CARD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {told}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
EXACT: dict[str, Any] = {"dtype": "float32", "pool_tokens": 2_000}
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokenizer() -> Tokenizer:
    """A tokenizer with the two answers."""
    made = Tokenizer.from_str(BY_NAME["qwen3"].tokenizer().to_str())
    made.add_tokens(["no", "yes"])
    return made


JUDGE = replace(BY_NAME["qwen3"], tokenizer=tokenizer)
NO, YES = (tokenizer().token_to_id(name) for name in ("no", "yes"))


def check(backend: LocalBackend, model: PreTrainedModel, instruction: str | None = None) -> None:
    """Compares relevances with those that the model card computes."""
    for one in ul.rerank("cats?", TEXTS, instruction=instruction, backend=backend):
        prompt = CARD.format(told=instruction or USUAL, query="cats?", document=one.text)
        ids = torch.tensor([tokenizer().encode(prompt, add_special_tokens=False).ids])
        with torch.no_grad():
            expected = model(input_ids=ids).logits[0, -1, [NO, YES]].softmax(0)[1]
        assert abs(one.score - float(expected)) < 1e-4


@pytest.mark.parametrize("named", ["by its folder", "by its card"])
def test_a_folder_as_published_ranks_as_its_card_says(tmp_path: Path, named: str) -> None:
    folder = tmp_path / ("Qwen3-Reranker-0.6B" if named == "by its folder" else "model")
    model = write_folder(folder, JUDGE)
    if named == "by its card":
        (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# Qwen3-Reranker-0.6B\n\n## Highlights\n")
    (folder / "chat_template.jinja").write_text(CHAT)
    backend = LocalBackend(model=str(folder), **EXACT)
    check(backend, model)
    check(backend, model, "Retrieve what rhymes with the query")


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_converted_file_ranks_by_its_two_rows(tmp_path: Path, kernels: str) -> None:
    """llama.cpp's converter keeps the rows of "yes" and "no" of the output head, in this order, and the prompt."""
    path = tmp_path / "tiny.gguf"
    family = replace(
        JUDGE,
        metadata={
            "pooling_type": 4,
            "classifier.output_labels": ["yes", "no"],
            "tokenizer.chat_template.rerank": CARD.replace("{told}", USUAL),
        },
        spelled=lambda name, tensor: (
            [("cls.output.weight", tensor[[YES, NO]])] if name == "lm_head.weight" else [(name, tensor)]
        ),
    )
    model = write_gguf(path, family)
    backend = LocalBackend(model=str(path), kernels=kernels, **EXACT)
    check(backend, model)
    check(backend, model, "Retrieve what rhymes with the query")
    with pytest.raises(ul.CapabilityError, match="makes no embeddings"):
        ul.embed(TEXTS, backend=backend)


@pytest.mark.parametrize(
    ("metadata", "rows", "reason"),
    [
        ({"classifier.output_labels": ["yes"]}, 2, "1 labels for 2 rows"),
        ({"classifier.output_labels": 3}, 2, "should be a list of strings"),
        ({"tokenizer.chat_template.rerank": 3}, 2, "should be a string"),
    ],
    ids=["labels", "kind", "prompt"],
)
def test_damaged_files_are_refused(tmp_path: Path, metadata: dict[str, Any], rows: int, reason: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(
        path,
        replace(
            BY_NAME["qwen3"],
            metadata={"pooling_type": 4, **metadata},
            spelled=lambda name, tensor: (
                [("cls.output.weight", tensor[:rows])] if name == "lm_head.weight" else [(name, tensor)]
            ),
        ),
    )
    with pytest.raises(ul.ModelError, match=reason):
        assert open_model(path, cache=tmp_path).chat_template


@pytest.mark.parametrize(
    ("model_type", "name", "title", "found"),
    [
        ("qwen3", "Qwen/Qwen3-Reranker-0.6B", "", True),
        ("qwen3", "/models/qwen3_reranker-4b.Q8_0.gguf", "", True),
        ("qwen3", "C:\\models\\Qwen3-Reranker-8B\\", "", True),
        ("qwen3", "/hub/models--Qwen--Qwen3-Reranker-0.6B/snapshots/ab12", "", True),
        ("qwen3", "tiny.gguf", "Qwen3 Reranker 0.6B", True),
        ("qwen3", "/qwen3-reranker/Qwen3-4B", "", False),
        ("qwen3", "Qwen/Qwen3-4B", "", False),
        ("qwen2", "Qwen/Qwen3-Reranker-0.6B", "", False),
    ],
    ids=range(8),
)
def test_names_of_rerankers(model_type: str, name: str, title: str, *, found: bool) -> None:
    assert is_reranker({"model_type": model_type}, name, title) is found


def test_a_vocabulary_without_answers_is_refused() -> None:
    assert answers_of(Vocabulary.of([b"a", b"no", b"b", b"yes"])) == (3, 1)
    with pytest.raises(ul.ModelError, match="'yes' and 'no'"):
        answers_of(Vocabulary.of([b"yes", b"yess"]))


def test_other_conversations_stay_as_they_were() -> None:
    before, after = ChatTemplate(CHAT), ChatTemplate(with_pairs(CHAT))
    turns = [Turn("user", "hi")]
    for write in (lambda one: one.open([], "user"), lambda one: one.close(turns)):
        assert write(after) == write(before)
    assert takes_pairs(after.source)
    assert not takes_pairs(CHAT)


def test_a_prompt_of_a_file_is_no_jinja() -> None:
    template = ChatTemplate(with_pairs(None, "{{ 1 + 1 }} {query}|{% raw %}'\"|{document}"))
    written = (Text("{{ 1 + 1 }} ", True), Text("q"), Text("|{% raw %}'\"|", True), Text("d"))
    assert template.pair("q", "d") == written
