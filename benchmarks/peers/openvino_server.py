"""OpenVINO GenAI's continuous batching behind HTTP; run under the peer's interpreter by `openvino_genai.py`."""

import argparse
import importlib
import json
import threading
from typing import Any

from .completion_server import Request, cut_at_stop, serve, shared_length

genai = importlib.import_module("openvino_genai")  # by name: only the peer's interpreter has it, and it has no types
openvino = importlib.import_module("openvino")

Handle = Any  # openvino_genai.GenerationHandle


class ContinuousBatching:
    """Requests of many threads, one thread that steps the pipeline while there is work."""

    def __init__(self, options: argparse.Namespace) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = options.cache_gigabytes
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = options.concurrency
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = options.prefix_caching
        properties = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": options.precision}
        self._pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._changed = threading.Condition()
        self._running: dict[int, tuple[Handle, threading.Event]] = {}
        self._next_id = 0
        self._broken: Exception | None = None
        threading.Thread(target=self._step_forever, daemon=True).start()

    def generate(self, request: Request) -> str:
        config = genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.apply_chat_template = False
        config.stop_strings = set(request["stop"])
        config.include_stop_str_in_output = True  # cut here, by characters: the engine cuts whole tokens
        config.ignore_eos = request["ignore_eos"]
        if request["temperature"] > 0:
            config.do_sample = True
            config.temperature = request["temperature"]
        if request["regex"] is not None:
            config.structured_output_config = genai.StructuredOutputConfig(regex=request["regex"])
        elif request["json_schema"] is not None:
            schema = json.dumps(request["json_schema"])
            config.structured_output_config = genai.StructuredOutputConfig(json_schema=schema)
        return cut_at_stop(self._tokenizer.decode(self._run(request["prompt"], config).generated_ids), request["stop"])

    def score(self, request: Request) -> int:
        """Choices one beside the other: each is a prompt of its own whose log-probabilities are echoed."""
        prompt, choices = request["prompt"], request["choices"]
        shared = self._token_ids(prompt)
        means = [0.0] * len(choices)

        def one(number: int) -> None:
            means[number] = self._mean_logprob(shared, prompt + choices[number])

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(choices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(range(len(choices)), key=means.__getitem__)

    def _mean_logprob(self, shared: list[int], text: str) -> float:
        """Over the tokens in which `text` differs from the prompt."""
        ids = self._token_ids(text)
        start = shared_length(shared, ids)
        config = genai.GenerationConfig()
        config.max_new_tokens = 1
        config.apply_chat_template = False
        config.echo = True
        config.logprobs = 1
        # Log-probabilities of cached tokens are left out: what is there ends with the prompt's last and the new token.
        scored: list[float] = self._run(text, config).generated_log_probs[:-1][-(len(ids) - start) :]
        return sum(scored) / max(1, len(scored))

    def _token_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).input_ids.data[0].tolist()
        return ids

    def _run(self, prompt: str, config: Any) -> Any:  # a GenerationConfig; the GenerationOutput
        ended = threading.Event()
        with self._changed:
            if self._broken is not None:
                raise self._broken
            self._next_id += 1
            handle = self._pipeline.add_request(self._next_id, prompt, config)
            self._running[self._next_id] = (handle, ended)
            self._changed.notify()
        ended.wait()
        if self._broken is not None:
            raise self._broken
        if handle.get_status() != genai.GenerationStatus.FINISHED:
            raise RuntimeError(f"the request ended as {handle.get_status().name}")
        return handle.read_all()[0]

    def _step_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running)
            try:
                self._pipeline.step()
            except Exception as error:
                self._broken = error
            with self._changed:
                for number, (handle, ended) in list(self._running.items()):
                    if self._broken is not None or handle.get_status() != genai.GenerationStatus.RUNNING:
                        del self._running[number]
                        ended.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--cache-gigabytes", type=int, required=True)
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, required=True)
    options = parser.parse_args()
    serve(ContinuousBatching(options), options.port)


if __name__ == "__main__":
    main()
