"""Recognises Qwen3-Reranker, and writes prompts of rerankers as chat templates.

As it was published, Qwen3-Reranker is a causal model like any other: neither config.json nor the tokenizer says that
it ranks. Its relevance is the probability of "yes" against "no" as the next token of a prompt that its model card
gives. llama.cpp's converter makes a classifier of the two rows of the output head, and puts the prompt into the file.

    <Instruct>: {instruction}      prompts have fields, chat templates roles:    system
    <Query>: {query}                                                             query
    <Document>: {document}                                                       document
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from ...lang.errors import ModelError
from .vocabulary import Vocabulary

RERANK = "rerank"  # the name of such a prompt among the chat templates of a GGUF file
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_FAMILY = "qwen3"
_NAME = re.compile(r"qwen3[-_. ]?reranker", re.IGNORECASE)
_FIELD = re.compile(r"\{(instruction|query|document)\}")
_CONTENT = {
    "instruction": f"(messages | selectattr('role', 'equalto', 'system') | list or [{{'content': '{_INSTRUCTION}'}}])",
    "query": "(messages | selectattr('role', 'equalto', 'query') | list)",
    "document": "(messages | selectattr('role', 'equalto', 'document') | list)",
}


def is_reranker(config: Mapping[str, Any], name: str, title: str) -> bool:  # Any: JSON
    """Returns whether a model is a Qwen3-Reranker, by its names.

    Args:
        config: config.json.
        name: a repository, or the path of a folder or file, also in Hugging Face's cache.
        title: what the makers of the files call it.
    """
    *folders, last = name.replace("\\", "/").rstrip("/").split("/")
    cached = (folder for folder in folders if folder.startswith("models--"))
    return config.get("model_type") == _FAMILY and any(_NAME.search(each) for each in (last, title, *cached))


def answers_of(vocabulary: Vocabulary) -> tuple[int, int]:
    """Returns the tokens of "yes" and "no". Raises ModelError, as a clause, where the vocabulary lacks one."""
    found = {text: token for token, text in enumerate(vocabulary) if text in (b"yes", b"no")}
    if len(found) < 2:
        raise ModelError("it ranks by the tokens 'yes' and 'no', and its vocabulary lacks one")
    return found[b"yes"], found[b"no"]


def takes_pairs(template: str | None) -> bool:
    """Returns whether a chat template names the roles of a pair, as `ChatTemplate.pair` asks for."""
    return template is not None and "query" in template and "document" in template


def with_pairs(template: str | None, prompt: str = _PROMPT) -> str:
    """Returns a chat template that writes pairs by a prompt with fields, and all other conversations as before.

    Args:
        template: Jinja source; None for a model without roles.
        prompt: with the fields {query} and {document}. The usual instruction in it is a field, too.
    """
    pieces = _FIELD.split(prompt.replace(_INSTRUCTION, "{instruction}"))  # text, and names of fields between
    written = "".join(
        f"{{{{ {_CONTENT[piece]}[0].content }}}}" if place % 2 else _literal(piece)
        for place, piece in enumerate(pieces)
        if piece
    )
    if template is None:
        return written
    test = "{%- if messages | selectattr('role', 'equalto', 'query') | list -%}"
    return f"{test}{written}{{%- else %}}{template.removesuffix(chr(10))}{{% endif %}}"


def _literal(text: str) -> str:
    """Writes text as an expression, so that nothing in it is Jinja."""
    return f"{{{{ {json.dumps(text)} }}}}"
