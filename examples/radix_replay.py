"""The nine steps of the paper's figure 3, replayed by the real scheduler in a pool of 59 slots.

Tokens are words here, and the "model" knows its answers by heart. Leaves that were not used for longest make room."""

from collections.abc import Iterator

import torch
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Batch, Logits
from umbel.srt.core.instruments import SystemClock
from umbel.srt.core.messages import EngineGenerate
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig

SYSTEM, SHOTS, END = "You are a helpful assistant. User:", "Q: 1+1 A: 2 Q: 2+2 A: 4 Q:", "<end>"
HELLO, POEM = "Hello! Assistant:", "User: I wrote a poem about the sea. What do you think? Assistant:"
TREE, RADIX = "What is a radix tree? Assistant:", "User: And RadixAttention? Assistant:"
THANKS, CALM = "User: Thank you! Assistant:", "It is calm and clear, and its last line surprises me."
WHOLE = "A prefix tree whose edges carry whole strings."
ANSWERS = {HELLO: ["Hi!"], POEM: [CALM], THANKS: ["Gladly!"], TREE: [WHOLE]}
ANSWERS |= {RADIX: ["It keeps keys of all prompts in such a tree."], "3+4 A:": ["7"], "6+6 A:": ["12"], "8+1 A:": ["9"]}
ANSWERS |= {"5+6 A:": ["11", "It is 11.", "That makes 11.", "Eleven, I think."]}
WORDS = sorted(set(" ".join([SYSTEM, SHOTS, END, *ANSWERS, *(" ".join(a) for a in ANSWERS.values())]).split()))
STEPS: list[tuple[str, list[str], list[int]]] = [  # what happens, the prompts, seeds (none: the first answer)
    ("the tree is empty", [], []),
    ("a first chat: one edge", [f"{SYSTEM} {HELLO}"], []),
    ("its second turn: a new node", [f"{SYSTEM} {HELLO} Hi! {POEM}"], []),
    ("a second chat: the node splits after the shared words", [f"{SYSTEM} {TREE}"], []),
    ("its second turn: the first chat's second turn is evicted", [f"{SYSTEM} {TREE} {WHOLE} {RADIX}"], []),
    ("a few-shot question: nothing shared, a new branch", [f"{SHOTS} 3+4 A:"], []),
    ("a batch of them: the branch splits after the examples", [f"{SHOTS} {q} A:" for q in ("6+6", "8+1", "5+6")], []),
    ("the first chat goes on: the second chat is evicted", [f"{SYSTEM} {HELLO} Hi! {POEM} {CALM} {THANKS}"], []),
    ("more answers to 5+6: the other questions are evicted", [f"{SHOTS} 5+6 A:"] * 3, [1, 3, 5]),
]


class Reciter:
    """A runner whose KV pool holds words: it reads what the slots say, so a wrong reuse would change its answer."""

    vocab_size, context_length, num_slots, num_states = len(WORDS), 59, 60, 0
    window_pool, chooser, trie_walk, pictures = [None] * 4

    def clear(self) -> None:
        self.pool: dict[int, str] = {}

    __init__ = clear

    def forward(self, batch: Batch) -> Logits:
        self.pool |= {slot: WORDS[word] for slot, word in zip(batch.write_slots, batch.token_ids, strict=True)}
        logits = torch.full((len(batch.logit_rows), self.vocab_size), -30.0)
        for row, slots in zip(logits, batch.slots, strict=True):
            text = " ".join(self.pool[slot] for slot in slots)
            question = max((q for q in ANSWERS if q in text), key=text.rfind)
            said = text.rpartition(question)[2].split()
            answers = [[*answer.split(), END] for answer in ANSWERS[question]]
            row[[WORDS.index(words[len(said)]) for words in answers if words[: len(said)] == said]] = 1.0
        return Logits.complete(logits)


def replay() -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """After each step: what happened, and the tree as (depth, words)."""
    end = frozenset({WORDS.index(END)})
    scheduler = Scheduler(Reciter(), lambda word: b"", end, SchedulerConfig(headroom=0), SystemClock())
    for number, (story, prompts, seeds) in enumerate(STEPS):
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(seed=seeds[i], max_tokens=20) if seeds else SamplingParams(temperature=0.0)
            tokens = [WORDS.index(word) for word in prompt.split()]
            scheduler.handle_message(EngineGenerate(10 * number + i, tokens, sampling, stream=False))
        while not scheduler.idle:
            scheduler.step()
        yield story, [(depth, " ".join(WORDS[w] for w in node.tokens)) for depth, node in scheduler.kv.cache.walk()]


def main() -> None:
    for number, (story, tree) in enumerate(replay(), start=1):
        print(f"({number}) {story}", *(f"      {'    ' * depth}└── {words}" for depth, words in tree), "", sep="\n")


if __name__ == "__main__":
    main()
