"""The model `umbel` of lm-evaluation-harness: its tasks run on a runtime, which computes a shared context once.

    python -m umbel.compat.lm_eval --model umbel --model_args pretrained=default --tasks hellaswag
    import umbel.compat.lm_eval; lm_eval.simple_evaluate(model="umbel", tasks=["hellaswag"])

    requests of a task ─► token ids, split as the harness's `hf` splits them ─► all together, sorted
                       ─► runtime: radix cache ─► (log-probability, greedy?)

The harness knows no plugins: importing this module registers the model, and the module run as a program is the
harness's own command line with it.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from ..interpreter import loop
from ..interpreter.backends.runtime import Runtime
from ..lang import checks
from ..lang.errors import BackendError, MissingExtraError, ParameterError, shown
from ..lang.prompt import Generated, Text
from ..lang.protocol import Final, GenRequest, Origin, Tokenize, Usage
from ..lang.sampling import SamplingParams

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
except ImportError as error:
    raise MissingExtraError(error.name or "lm_eval", "lm-eval") from None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Item = TypeVar("Item")
Answer = TypeVar("Answer")
TokenPair = tuple[Sequence[int], Sequence[int]]  # a context, not empty, and what goes on after it
Score = tuple[float, bool]  # log-probability of a continuation, and whether it is the greedy one

AT_ONCE = 256  # requests under way together
_MOST_STOPS = 16  # that the runtime takes; the rest are cut off afterwards
# Options of the harness that say how `hf` computes: the runtime batches and places requests itself.
_OTHERS = ("batch_size", "max_batch_size", "device")


@register_model("umbel")
class UmbelLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A model of the harness on a `Runtime`. Closed with the process, or by `close`.

    Args:
        pretrained: the model, as of `Runtime(model)`: a name, a folder or a GGUF file.
        max_length: tokens of a context and its continuation; longer ones lose their beginning. None: the model's.
        max_gen_toks: tokens that are generated at most, where a task says nothing.
        options: as of `Runtime`: `dtype`, `weights`, `threads`, `device`, ... `batch_size` and `max_batch_size` of the
            harness are taken and do nothing: all requests are handed over together.

    Attributes:
        usage: tokens of all requests so far; its `cached_tokens` were not computed again.

    Raises:
        ParameterError: an option that the runtime does not have.
    """

    def __init__(
        self,
        pretrained: str = "default",
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        **options: Any,  # each is an option of the runtime
    ) -> None:
        super().__init__()
        self.max_gen_toks = checks.integer("max_gen_toks", max_gen_toks, 1, 1 << 20)
        given = {name: value for name, value in options.items() if name not in _OTHERS}
        if options.get("device") not in (None, "", "auto"):
            given["device"] = options["device"]
        self.runtime = Runtime(str(pretrained), **given).wait_ready()
        longest = self.runtime.capabilities.max_context or 1 << 20
        self.max_length = longest if max_length is None else checks.integer("max_length", max_length, 2, longest)
        self.usage = Usage()
        self._numbers = itertools.count()

    def close(self) -> None:
        """Ends the runtime."""
        self.runtime.shutdown()

    # -------------------------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.runtime.vocabulary.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: BOS, or the end of a text where the model has none."""
        bos = self.runtime.vocabulary.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """The model's name, by which the harness tells its caches of requests apart."""
        return self.runtime.capabilities.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Returns the token ids of a text, after BOS unless `add_special_tokens` is False."""
        ids = loop.streams.run(self._encoded(string))
        bos = self.runtime.vocabulary.bos_id
        return ids[1:] if add_special_tokens is False and bos is not None and ids[:1] == [bos] else ids

    async def _encoded(self, text: str) -> list[int]:
        question = Tokenize(f"lm-eval-{next(self._numbers)}", (Text(text, control=True),) if text else ())
        return list((await self.runtime.tokenize(question)).token_ids)

    # -------------------------------------------------------------------------------- what the harness asks

    def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[Score]:
        """Returns the log-probability of each continuation after its context, and whether it is the greedy one."""
        asked = [request.args for request in requests]
        pairs = self._token_pairs(asked)
        scores = self._loglikelihood_tokens(
            [(texts, context, continuation) for texts, (context, continuation) in zip(asked, pairs, strict=True)]
        )
        for texts, score in zip(asked, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, Sequence[int], Sequence[int]]], **_: object
    ) -> list[Score]:
        pairs = [self._fitted(context, continuation) for _, context, continuation in requests]
        return loop.streams.run(_together(pairs, self._score, key=lambda pair: [*pair[0], *pair[1]]))

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, in windows of `max_length` tokens where it is longer."""
        texts = [request.args[0] for request in requests]
        windows: list[tuple[int, Sequence[int], Sequence[int]]] = []
        for number, ids in enumerate(self._all_encoded(texts)):
            found = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows.extend((number, *utils.make_disjoint_window(window)) for window in found)
        sums = [0.0] * len(texts)
        for (number, _, _), (logprob, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += logprob
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """Returns a text for each context, up to the first of its stops."""
        asked = [request.args for request in requests]
        contexts = self._all_encoded([context for context, _ in asked])
        work = [(ids, options) for ids, (_, options) in zip(contexts, asked, strict=True)]
        texts = loop.streams.run(_together(work, self._generate, key=lambda item: item[0]))
        for texts_and_options, text in zip(asked, texts, strict=True):
            self.cache_hook.add_partial("generate_until", texts_and_options, text)
        return texts

    # -------------------------------------------------------------------------------- how

    def _all_encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts, equal ones once."""
        different = list(dict.fromkeys(texts))
        ids = dict(zip(different, loop.streams.run(_together(different, self._encoded)), strict=True))
        return [ids[text] for text in texts]

    def _token_pairs(self, asked: Sequence[tuple[str, str]]) -> list[TokenPair]:
        """Splits texts into tokens where the harness's `hf` does.

        Blanks at the end of a context belong to what follows, and the tokens of both together are cut after as many as
        the context alone has.
        """
        parted = []
        for context, continuation in asked:
            stripped = context.rstrip()
            parted.append((stripped, context[len(stripped) :] + continuation) if context else (context, continuation))
        encoded = self._all_encoded([text for context, rest in parted for text in (context, context + rest)])
        pairs: list[TokenPair] = []
        for number in range(len(parted)):
            before, whole = encoded[2 * number], encoded[2 * number + 1]
            if not parted[number][0]:
                before = [self.prefix_token_id]
                whole = whole if whole[:1] == before else before + whole
            pairs.append((whole[: len(before)], whole[len(before) :]))
        return pairs

    def _fitted(self, context: Sequence[int], continuation: Sequence[int]) -> TokenPair:
        """Cuts the beginning off what is longer than `max_length`."""
        if not continuation or len(continuation) >= self.max_length:
            raise ParameterError(
                f"a continuation of {len(continuation)} tokens has to have at least 1, and fewer than "
                f"max_length={self.max_length}"
            )
        return context[-(self.max_length - len(continuation)) :], continuation

    async def _score(self, pair: TokenPair) -> Score:
        context, continuation = pair
        ids = (*context, *continuation)
        sampling = SamplingParams(max_tokens=0, top_logprobs=1, prompt_logprobs_from=len(context))
        known = (await self._final(ids, sampling)).prompt_logprobs
        if len(known) != len(continuation):
            raise BackendError(f"{len(known)} log-probabilities came for {len(continuation)} tokens")
        return sum(token.logprob for token in known), all(token.logprob >= token.top[0][2] for token in known)

    async def _generate(self, item: tuple[Sequence[int], Mapping[str, Any]]) -> str:
        ids, given = item
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), self.max_gen_toks))
        stops = options.pop("until") or []
        most = options.pop("max_gen_toks")
        sampled = options.pop("do_sample", None)
        if most >= self.max_length:
            raise ParameterError(f"max_gen_toks={most} must be less than max_length={self.max_length}")
        taken = {name: options.pop(name) for name in ("temperature", "top_p", "top_k") if name in options}
        if sampled is False or (sampled is None and "temperature" not in taken):
            taken["temperature"] = 0.0  # a task that says nothing is greedy
        if options:
            raise ParameterError(
                f"generation options {shown(sorted(options))} of the task have no counterpart here; leave them out of "
                "its generation_kwargs"
            )
        stop = tuple(text for text in stops if text)[:_MOST_STOPS]
        final = await self._final(ids[-(self.max_length - most) :], SamplingParams(max_tokens=most, stop=stop, **taken))
        return str(postprocess_generated_text(final.completions[0].text, stops, None))

    async def _final(self, ids: Sequence[int], sampling: SamplingParams) -> Final:
        prompt = (Generated("", tuple(ids)),)
        request = GenRequest(f"lm-eval-{next(self._numbers)}", prompt, sampling, origin=Origin("lm-eval"))
        async with aclosing(self.runtime.generate(request)) as events:
            async for event in events:
                if isinstance(event, Final):
                    self.usage += event.usage
                    return event
        raise BackendError("the request ended without an answer")


async def _together(
    items: Sequence[Item], ask: Callable[[Item], Awaitable[Answer]], key: Callable[[Item], Any] | None = None
) -> list[Answer]:
    """Asks for all items, at most `AT_ONCE` together → the answers, in the order of the items.

    A failure cancels the others.

    Args:
        key: by which they are asked for in turn, so that those that share a beginning are neighbours.
    """
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(place: int) -> tuple[int, Answer]:
        async with slots:
            return place, await ask(items[place])

    places = list(range(len(items)))
    if key is not None:
        places.sort(key=lambda place: key(items[place]))
    tasks = [asyncio.ensure_future(one(place)) for place in places]
    try:
        answers = dict(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
    return [answers[place] for place in range(len(items))]


def main() -> None:
    """Runs the harness's command line with the model `umbel` registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
