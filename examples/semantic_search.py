"""Semantic search: the texts nearest to a question by their embeddings, then in the order of a reranker.

    python examples/semantic_search.py Qwen/Qwen3-Embedding-0.6B path/of/a/reranker

Without arguments the default model embeds. It was trained to continue texts, so what it finds is poor.
"""

import sys

import umbel as ul

NOTES = [
    "The boiler is serviced every October; the last report is in the blue folder.",
    "Rain water runs into the cellar when the drain behind the shed is blocked.",
    "The cat eats at seven and at six, half a tin each time.",
    "Fuses are in the hall cupboard. The oven has one of its own, of 32 amperes.",
    "Tomatoes are watered in the morning, never on their leaves.",
    "The spare key hangs under the third flower pot from the left.",
]
QUESTION = "Why is the basement wet?"
# Qwen3-Embedding reads the task before a question; texts stand alone.
TASK = "Instruct: Find the note that answers the question.\nQuery: "
# The prompt of the reranker. None, where its chat template has the roles query and document.
PROMPT = "Question: {query}\nNote: {text}\nDoes the note answer the question?"


def nearest(question: str, texts: list[str], embedder: ul.Runtime | None, count: int = 3) -> list[str]:
    """Returns the texts whose vectors point most nearly where that of the question does, the nearest first."""
    asked, *vectors = ul.embed([TASK + question, *texts], backend=embedder)  # of length 1: a product is the cosine
    likeness = [sum(a * b for a, b in zip(asked, vector, strict=True)) for vector in vectors]
    return [texts[index] for index in sorted(range(len(texts)), key=lambda index: -likeness[index])[:count]]


def main(embedder: ul.Runtime | None = None, reranker: ul.Runtime | None = None) -> None:
    found = nearest(QUESTION, NOTES, embedder)
    if embedder is None:
        print("The default model is none for embeddings: it finds little. Name one that is.", file=sys.stderr)
    print(QUESTION)
    for text in found:
        print("  near:", text)
    if reranker is not None:
        for ranked in ul.rerank(QUESTION, found, template=PROMPT, backend=reranker):
            print(f"  {ranked.score:.3f}  {ranked.text}")


if __name__ == "__main__":
    main(*map(ul.Runtime, sys.argv[1:3]))
