"""The most that any prefix cache could have saved a run: what an achieved hit rate is compared with.

Every edge of the radix tree of all prompts has to be computed once, and by Theorem 3.1 no more than that is needed.
Two things change the count in a runtime:

* The last token of a prompt is always computed, because its logits choose the next token: a prompt that is cached
  whole has length − 1 cached. So the second of two equal prompts costs one token, not none.
* Tokens that were generated are in the cache too. A prompt that goes on where another's answer ended finds it there.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def optimal_cached_tokens(prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]] = ()) -> int:
    """Prompt tokens that need not be computed, if every prefix that two requests share is computed once.

    It is an upper bound for every order and every cache; prompts are computed in an unlimited cache, each answer
    before the prompts that contain it.

    Args:
        prompts: token ids of every request, repeated ones repeated; of a select the prompt with each of its choices.
        generated: the tokens each of them was answered with, in the same order; empty counts no reuse of answers.

    Divide by the sum of the prompts' lengths for the optimal hit rate.
    """
    assert not generated or len(generated) == len(prompts), "one answer for each prompt"
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    # The key of the last generated token is never computed: nothing is sampled after it.
    answers = [answer[:-1] for answer in generated] if generated else [()] * len(prompts)
    sequences = [np.array([*prompt, *answer], dtype=np.int64) for prompt, answer in zip(prompts, answers, strict=True)]
    ends = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    nodes = np.zeros(len(prompts), dtype=np.int64)  # the tree's node that each sequence has reached
    computed = 0
    for depth in range(int(lengths.max(initial=0))):
        here = np.flatnonzero(ends > depth)
        tokens = np.array([sequences[i][depth] for i in here], dtype=np.int64)
        reached = _edges(nodes[here], tokens)
        nodes[here] = reached
        count = int(reached.max()) + 1
        in_prompt, in_answer, asked = (np.zeros(count, dtype=np.int64) for _ in range(3))
        np.add.at(in_prompt, reached[lengths[here] > depth], 1)
        np.add.at(in_answer, reached[lengths[here] <= depth], 1)
        np.add.at(asked, reached[lengths[here] == depth + 1], 1)  # a prompt's last token: computed for each of them
        once = (in_prompt > 0) & (in_answer == 0)
        computed += int(np.maximum(once, asked).sum())
    return int(lengths.sum()) - computed


def _edges(nodes: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers for the pairs (node, token), equal for equal pairs."""
    _, numbers = np.unique(np.stack([nodes, tokens]), axis=1, return_inverse=True)
    return numbers.reshape(-1)
