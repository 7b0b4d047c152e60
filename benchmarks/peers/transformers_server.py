"""transformers' `generate` behind HTTP, waiting requests taken together; run by `transformers_generate.py`.

What a user of plain transformers would write: a static batch, padded on the left, and nothing kept between calls.
Requests that wait when a batch begins are in it together if they sample alike; a batch runs until its last sequence
has ended.
"""

import argparse
import importlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from .completion_server import Request, cut_at_stop, serve, shared_length

torch = importlib.import_module("torch")  # by name: only the peer's interpreter has them
transformers = importlib.import_module("transformers")

Tensor = Any  # torch.Tensor
GATHER_SECONDS = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    prompt: str
    max_tokens: int
    stop: tuple[str, ...]
    temperature: float
    ignore_eos: bool
    answer: Future[str]


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    prompt: str
    choices: tuple[str, ...]
    answer: Future[int]


class StaticBatches:
    """One thread owns the model; requests wait in arrival order."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        self._concurrency = options.concurrency
        self._tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=f"{options.model}/tokenizer.json", pad_token="<pad>"
        )
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        ).eval()
        self._eos: int = self._model.generation_config.eos_token_id
        self._waiting: list[Generation | Scoring] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run_forever, daemon=True).start()

    def generate(self, request: Request) -> str:
        if request["regex"] is not None or request["json_schema"] is not None:
            raise ValueError("transformers has no constrained decoding of its own")
        fields = {key: request[key] for key in ("prompt", "max_tokens", "temperature", "ignore_eos")}
        answer: Future[str] = Future()
        self._submit(Generation(**fields, stop=tuple(request["stop"]), answer=answer))
        return answer.result()

    def score(self, request: Request) -> int:
        answer: Future[int] = Future()
        self._submit(Scoring(request["prompt"], tuple(request["choices"]), answer))
        return answer.result()

    def _submit(self, call: Generation | Scoring) -> None:
        with self._changed:
            self._waiting.append(call)
            self._changed.notify()

    def _run_forever(self) -> None:
        while True:
            batch = self._next_batch()
            try:
                with torch.inference_mode():
                    if isinstance(batch, Scoring):
                        batch.answer.set_result(self._best_choice(batch))
                    else:
                        for generation, text in zip(batch, self._texts(batch), strict=True):
                            generation.answer.set_result(text)
            except Exception as error:
                for call in [batch] if isinstance(batch, Scoring) else batch:
                    call.answer.set_exception(error)

    def _next_batch(self) -> Scoring | list[Generation]:
        """The oldest call, and with a generation all that can run beside it."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            waiting = 0
            while waiting < len(self._waiting):  # calls that were sent together arrive one after the other
                waiting = len(self._waiting)
                self._changed.wait(GATHER_SECONDS)
            first = self._waiting[0]
            if isinstance(first, Scoring):
                self._waiting.remove(first)
                return first
            batch = [
                call for call in self._waiting if isinstance(call, Generation) and call.temperature == first.temperature
            ][: self._concurrency]
            self._waiting = [call for call in self._waiting if call not in batch]
            return batch

    def _texts(self, batch: Sequence[Generation]) -> list[str]:
        encoded = self._tokenizer(
            [call.prompt for call in batch], return_tensors="pt", padding=True, padding_side="left"
        )
        width = encoded.input_ids.shape[1]
        temperature = batch[0].temperature
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        output = self._model.generate(
            input_ids=encoded.input_ids,
            attention_mask=encoded.attention_mask,
            max_new_tokens=max(call.max_tokens for call in batch),
            eos_token_id=None,  # which rows stop there is said by `_ended`
            pad_token_id=self._tokenizer.pad_token_id,
            stopping_criteria=transformers.StoppingCriteriaList(
                [
                    lambda ids, scores: torch.tensor(
                        [self._ended(call, row[width:]) for call, row in zip(batch, ids, strict=True)]
                    )
                ]
            ),
            **sampling,
        )
        return [self._text(call, row[width:]) for call, row in zip(batch, output, strict=True)]

    def _ended(self, call: Generation, ids: Tensor) -> bool:
        return (
            len(ids) >= call.max_tokens
            or (not call.ignore_eos and self._eos in ids)
            or (bool(call.stop) and any(stop in self._tokenizer.decode(ids) for stop in call.stop))
        )

    def _text(self, call: Generation, ids: Tensor) -> str:
        """What the row said before it ended; it may have run on while others had not."""
        kept = ids[: call.max_tokens].tolist()
        if not call.ignore_eos and self._eos in kept:
            kept = kept[: kept.index(self._eos)]
        return cut_at_stop(self._tokenizer.decode(kept, skip_special_tokens=True), list(call.stop))

    def _best_choice(self, call: Scoring) -> int:
        """By the mean log-probability of a choice's tokens; the head runs on their rows only."""
        shared = self._tokenizer.encode(call.prompt)
        texts = [call.prompt + choice for choice in call.choices]
        encoded = self._tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        hidden = self._model.model(**encoded).last_hidden_state  # [choices, tokens, hidden]
        means = []
        for ids, length, rows in zip(encoded.input_ids, encoded.attention_mask.sum(1), hidden, strict=True):
            start = shared_length(shared, ids[:length].tolist())
            logprobs = self._model.lm_head(rows[start - 1 : length - 1]).float().log_softmax(-1)
            means.append(logprobs.gather(1, ids[start:length, None]).mean().item())
        return max(range(len(means)), key=means.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    options = parser.parse_args()
    serve(StaticBatches(options), options.port)


if __name__ == "__main__":
    main()
