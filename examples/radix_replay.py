"""The nine steps of the paper's figure 3, replayed by the real scheduler in a pool of 59 slots.

Two chats, a batch of few-shot questions and a self-consistency sampling share one radix tree; leaves that were not
used for longest make room. Tokens are words here, and the "model" knows its answers by heart."""

from collections.abc import Iterator

import numpy as np
import torch
from umbel.lang.sampling import SamplingParams
from umbel.srt.batch import Batch
from umbel.srt.clock import SystemClock
from umbel.srt.engine_protocol import EngineGenerate
from umbel.srt.scheduler import Scheduler, SchedulerConfig

SYSTEM, SHOTS, END = "You are a helpful assistant. User:", "Q: 1+1 A: 2 Q: 2+2 A: 4 Q:", "<end>"
HELLO, POEM = "Hello! Assistant:", "User: I wrote a poem about the sea. What do you think? Assistant:"
TREE, RADIX = "What is a radix tree? Assistant:", "User: And RadixAttention? Assistant:"
THANKS, CALM = "User: Thank you! Assistant:", "It is calm and clear, and its last line surprises me."
WHOLE = "A prefix tree whose edges carry whole strings."
ANSWERS = {HELLO: ["Hi!"], POEM: [CALM], THANKS: ["Gladly!"], TREE: [WHOLE]}
ANSWERS |= {RADIX: ["It keeps keys of all prompts in such a tree."], "3+4 A:": ["7"], "6+6 A:": ["12"], "8+1 A:": ["9"]}
ANSWERS |= {"5+6 A:": ["11", "It is 11.", "That makes 11.", "Eleven, I think."]}
TEXTS = [SYSTEM, SHOTS, END, *ANSWERS, *(answer for answers in ANSWERS.values() for answer in answers)]
WORDS = sorted(set(" ".join(TEXTS).split()))
STEPS: list[tuple[str, list[str], list[int]]] = [  # what happens, the prompts, seeds (none: the first answer)
    ("the tree is empty", [], []),
    ("a first chat: one edge", [f"{SYSTEM} {HELLO}"], []),
    ("its second turn: a new node", [f"{SYSTEM} {HELLO} Hi! {POEM}"], []),
    ("a second chat: the node splits behind the shared words", [f"{SYSTEM} {TREE}"], []),
    ("its second turn: the first chat's second turn is evicted", [f"{SYSTEM} {TREE} {WHOLE} {RADIX}"], []),
    ("a few-shot question: nothing shared, a new branch", [f"{SHOTS} 3+4 A:"], []),
    ("a batch of them: the branch splits behind the examples", [f"{SHOTS} {q} A:" for q in ("6+6", "8+1", "5+6")], []),
    ("the first chat goes on: the second chat is evicted", [f"{SYSTEM} {HELLO} Hi! {POEM} {CALM} {THANKS}"], []),
    ("more answers to 5+6: the other questions are evicted", [f"{SHOTS} 5+6 A:"] * 3, [1, 7, 15]),
]


class Reciter:
    """A runner whose KV pool holds words: it reads what the slots say, so a wrong reuse would change its answer."""

    vocab_size, context_length, num_slots = len(WORDS), 59, 60

    def __init__(self) -> None:
        self.pool = np.zeros(self.num_slots, dtype=np.int64)

    def clear(self) -> None:
        self.pool[:] = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        self.pool[batch.write_slots] = batch.token_ids
        logits = torch.full((len(batch.logit_rows), self.vocab_size), -30.0)
        for row, slots in zip(logits, batch.slots, strict=True):
            text = " ".join(WORDS[word] for word in self.pool[slots])
            question = max((q for q in ANSWERS if q in text), key=text.rfind)
            said = text.rpartition(question)[2].split()
            answers = [[*answer.split(), END] for answer in ANSWERS[question]]
            row[[WORDS.index(words[len(said)]) for words in answers if words[: len(said)] == said]] = 1.0
        return logits


def replay() -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """After each step: what happened, and the tree as (depth, words)."""
    end, config = frozenset({WORDS.index(END)}), SchedulerConfig(headroom=0)
    scheduler = Scheduler(Reciter(), lambda word: WORDS[word].encode(), end, config, SystemClock())
    for number, (story, prompts, seeds) in enumerate(STEPS):
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(seed=seeds[i], max_tokens=20) if seeds else SamplingParams(temperature=0.0)
            tokens = [WORDS.index(word) for word in prompt.split()]
            scheduler.submit(EngineGenerate(10 * number + i, tokens, sampling, stream=False))
        while not scheduler.idle:
            scheduler.step()
        yield story, [(depth, " ".join(WORDS[w] for w in node.tokens)) for depth, node in scheduler.space.cache.walk()]


if __name__ == "__main__":
    for number, (story, tree) in enumerate(replay(), start=1):
        print(f"({number}) {story}")
        print("".join(f"      {'    ' * depth}└── {words}\n" for depth, words in tree))
