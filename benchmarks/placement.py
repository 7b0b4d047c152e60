"""CPU time of a placement: `python -m benchmarks.placement`, at 64 replicas and 1,000,000 tokens in the meta-tree.

The tree has prompts of three levels, as chats do: a template that all share, a document of a few thousand tokens that
some replicas hold, and a dialogue of a few turns. Calls are placed, begin and end, with half of them in flight.
"""

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator

from umbel.srt.core.messages import NodeAdded
from umbel.srt.placement.meta_tree import packed
from umbel.srt.placement.placement import Placement
from umbel.srt.placement.policies import POLICIES, Placing

TEMPLATE, DOCUMENT, TURN = 40, 2000, 150  # tokens


class Corpus:
    """Documents, and dialogues about them."""

    def __init__(self, documents: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.template = self._tokens(TEMPLATE)
        self.documents = [self._tokens(DOCUMENT) for _ in range(documents)]

    def _tokens(self, count: int) -> bytes:
        return packed(self._random.randrange(1 << 18) for _ in range(count))

    def turns(self) -> list[bytes]:
        return [self._tokens(TURN) for _ in range(self._random.randint(1, 4))]

    def call(self, known: list[tuple[int, list[bytes]]]) -> Placing:
        """Returns a call: half of them go on with a dialogue that is cached somewhere."""
        document, turns = self._random.choice(known)
        if self._random.random() < 0.5:
            turns = []
        text = b"".join([self.template, self.documents[document], *turns, self._tokens(TURN)])
        return Placing(text, group=f"fork {self._random.randrange(50)}" if self._random.random() < 0.2 else "", work=64)


def fill(placement: Placement, corpus: Corpus, replicas: int, tokens: int) -> list[tuple[int, list[bytes]]]:
    """Tells the events of engines until the tree has as many tokens; returns documents and turns that are cached."""
    chosen = random.Random(1)
    known: list[tuple[int, list[bytes]]] = []
    held: list[dict[int, int]] = [{} for _ in range(replicas)]  # replica → document → its node
    numbers = [1] * replicas
    for replica in range(replicas):
        placement.apply(replica, [NodeAdded(1, 0, "", corpus.template)])

    def add(replica: int, parent: int, text: bytes) -> int:
        numbers[replica] += 1
        placement.apply(replica, [NodeAdded(numbers[replica], parent, "", text)])
        return numbers[replica]

    total = TEMPLATE
    seen: set[int] = set()
    while total < tokens:
        replica, document = chosen.randrange(replicas), chosen.randrange(len(corpus.documents))
        if document not in held[replica]:
            held[replica][document] = add(replica, 1, corpus.documents[document])
            total += 0 if document in seen else DOCUMENT
            seen.add(document)
        node, turns = held[replica][document], corpus.turns()
        for turn in turns:
            node = add(replica, node, turn)
            total += TURN
        known.append((document, turns))
    return known


def measure(policy: str, replicas: int, tokens: int, calls: int) -> Iterator[float]:
    """Yields the CPU time of each placement with its beginning and its end, in microseconds."""
    placement = Placement(policy, range(replicas))
    corpus = Corpus(max(1, tokens // 4 // DOCUMENT))
    known = fill(placement, corpus, replicas, tokens)
    waiting = [corpus.call(known) for _ in range(calls)]
    running: deque[int] = deque()
    for index, call in enumerate(waiting):
        started = time.thread_time_ns()
        placed = placement.place(call, float(index))
        assert placed is not None
        taken = time.thread_time_ns() - started
        running.append(placed.number)
        if len(running) > 4 * replicas:
            number = running.popleft()
            started = time.thread_time_ns()
            placement.began(number, float(index))
            placement.ended(number, float(index), 64)
            taken += time.thread_time_ns() - started
        if index % 16 == 0:  # events come in between, and settle what has ended
            for replica in range(replicas):
                placement.apply(replica, ())
        yield taken / 1000
    placement.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="in the tree")
    parser.add_argument("--calls", type=int, default=3000)
    chosen = parser.parse_args()
    print(f"{chosen.replicas} replicas, {chosen.tokens} tokens in the tree; CPU µs of a placement, beginning and end:")
    for policy in POLICIES:
        runs = sorted(measure(policy, chosen.replicas, chosen.tokens, chosen.calls))
        late = runs[int(0.99 * len(runs))]
        print(
            f"  {policy:20} median {statistics.median(runs):6.1f}, mean {statistics.fmean(runs):6.1f}, p99 {late:6.1f}"
        )


if __name__ == "__main__":
    main()
