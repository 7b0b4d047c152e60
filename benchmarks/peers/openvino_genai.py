"""OpenVINO GenAI: its continuous batching with prefix caching. The pip packages have no HTTP server; ours stands in.

    python -m venv VENV
    VENV/bin/pip install openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0
    export UMBEL_PEER_OPENVINO_GENAI_PYTHON=VENV/bin/python UMBEL_PEER_OPENVINO_GENAI_MODEL=FOLDER

The model is exported once, in another environment, because optimum-intel refuses transformers 5 for Gemma 3:

    EXPORT/bin/pip install "optimum-intel[openvino]==2.2.0" "transformers==4.57.*" "torch==2.13.0"
    EXPORT/bin/pip uninstall torchvision
    EXPORT/bin/optimum-cli export openvino -m MODEL --task text-generation-with-past --weight-format fp16 FOLDER

`dtype` is the precision of the computation (`INFERENCE_PRECISION_HINT`); the weights are as exported.
"""

import json
import subprocess
from typing import ClassVar

from .peer import CACHE_GIGABYTES, CONCURRENCY
from .served import OwnServerPeer

PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}


class Peer(OwnServerPeer):
    name: ClassVar[str] = "openvino_genai"
    module: ClassVar[str] = "openvino_server"

    @property
    def version(self) -> str:
        code = "import importlib.metadata as m, json; print(json.dumps(m.version('openvino-genai')))"
        version: str = json.loads(subprocess.check_output([str(self.options.python), "-c", code]))
        return version

    def server_arguments(self) -> list[str]:
        options = self.options
        return [
            *("--precision", PRECISIONS[self.dtype]),
            *("--threads", str(options.threads)),
            *("--concurrency", str(CONCURRENCY)),
            *("--cache-gigabytes", str(CACHE_GIGABYTES)),
            "--prefix-caching" if options.prefix_caching else "--no-prefix-caching",
        ]
