"""Hugging Face transformers: `generate` on static batches, without a cache between calls.

    pip install "transformers>=5,<6" "torch==2.13.0"

Any interpreter with both will do, also umbel's own (its `runtime` extra has them). A batch begins with all requests
that wait, which is more than a loop over prompts gets out of it and less than continuous batching; transformers'
own `generate_batch` is slower than this on a CPU.
"""

import subprocess
from typing import ClassVar

from .peer import CONCURRENCY
from .served import OwnServerPeer


class Peer(OwnServerPeer):
    name: ClassVar[str] = "transformers_generate"
    module: ClassVar[str] = "transformers_server"

    @property
    def version(self) -> str:
        code = "import importlib.metadata as m; print(m.version('transformers'), 'torch', m.version('torch'))"
        return subprocess.check_output([str(self.options.python), "-c", code], text=True).strip()

    def server_arguments(self) -> list[str]:
        options = self.options
        return [
            *("--dtype", self.dtype),
            *("--threads", str(options.threads)),
            *("--concurrency", str(CONCURRENCY)),
        ]
