"""Chooses how much one step computes at most, by the class of the device, where options leave it open.

Three things bound a step, reckoned for a model of 8 billion parameters in 16 bits (16 GFLOP a row; 0.1 MB of
activations a row, most of them gate and up of the MLP, 2 x 14,336 numbers) and a vocabulary of 262,144:

    time      of a whole chunk, at half of a card's peak: every other request waits so long for its next token
    memory    rows x 0.1 MB of activations, and logits of 4 bytes, 256 rows x 262,144 = 0.27 GB, three times: of this
              step, of the one before it that is still read, and of the graphs
    launches  some 300 kernels take 25 ms on the host (runners/cuda/graphs.py): steps that the device computes longer
              than that gain nothing as a graph, and each graph takes time and memory to capture

    class              chunk x 16 GFLOP              memory            where a step without a graph takes 25 ms
    H100, A100 80 GB    8,192: 0.13 PFLOP, 0.26 s     0.8 + 0.8 GB      780 rows at 500 TFLOP/s → 1,024
    L4, A10, 3090       2,048: 33 TFLOP, 0.5 s        0.2 + 0.8 GB       95 rows at 60 TFLOP/s → 512 for smaller models
    RTX 3060, T4        1,024: 16 TFLOP, 0.6 s        0.1 + 0.8 GB       40 rows at 25 TFLOP/s → 256 for smaller models

vLLM's server takes chunks of 8,192 from 70 GiB on and of 2,048 below; SGLang takes 8,192 on 80 GB, and 2,048 to 4,096
below 60 GiB. More running requests share each read of the weights, as far as the KV pool has room: 256 of 1,000 tokens
are 34 GB (131 kB a token), 128 of 300 tokens 5 GB, which is what 24 GB leave, and 64 of 300 tokens 2.5 GB.

Memory alone does not make a fast card: one of 128 GB with 48 multiprocessors (GB10) would compute 8,192 rows for two
seconds. So a class asks for multiprocessors, too.
"""

from dataclasses import dataclass

from ...lang.runtime_options import RuntimeOptions

GiB = 1 << 30


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The size of the largest step.

    Attributes:
        chunk_size: most tokens of prompts; None: whole prompts.
        max_running: most requests.
        graph_rows: most rows of a step that runs as a captured graph, on CUDA devices.
    """

    chunk_size: int | None
    max_running: int
    graph_rows: int

    def under(self, options: RuntimeOptions) -> "StepSizes":
        """Returns the same with the sizes that options name in place of these."""
        chunk = self.chunk_size if options.chunk_size == "auto" else options.chunk_size
        running = self.max_running if options.max_running == "auto" else options.max_running
        return StepSizes(chunk, running, self.graph_rows)


CPU_SIZES = StepSizes(512, 64, 1024)

# Least bytes of memory, least multiprocessors → sizes; the first row that fits counts. A card of 24 GB reports 22 GiB.
CUDA_SIZES = (
    (60 * GiB, 100, StepSizes(8192, 256, 1024)),
    (20 * GiB, 40, StepSizes(2048, 128, 512)),
    (0, 0, StepSizes(1024, 64, 256)),
)


def cuda_sizes(memory: int, processors: int) -> StepSizes:
    """Returns the sizes for a CUDA device.

    Args:
        memory: bytes that the runtime may take of it.
        processors: its streaming multiprocessors.
    """
    return next(sizes for least, fewest, sizes in CUDA_SIZES if memory >= least and processors >= fewest)
