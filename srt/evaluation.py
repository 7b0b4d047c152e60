"""Measures weight formats of a model on a text: perplexity, and divergence from the exact weights (`umbel weights`).

The text is cut into windows, and every window runs twice, token by token of the text (teacher-forced): with exact
weights in float32, and in the format. Two models are in memory at a time. A step computes as many rows as fit into 64
MiB of logits, so memory does not grow with the text.

    KL            mean over tokens of Σ p log(p / q): p with exact weights, q in the format; 0 for equal models
    same token    share of the positions at which both find the same token most probable
    bits/weight   memory of the model's weights, each counted once, over their number
    MB            memory of everything the model keeps: copies of weights in another order, and tables, too
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ..lang.errors import ModelError, ParameterError, shown
from ..lang.runtime_options import DType, Kernels, Weights
from .core.batch import Batch, Runner
from .core.cards import chosen_device, unused_for
from .kernels.cpu.head import Head
from .kernels.cpu.linear import PackedMatrix
from .layers.checkpoint import BlockTensor, BlockTensors, Checkpoint, Tensors
from .layers.quantized import QuantizedSource, QuantizedTensor
from .layers.rope import Rope
from .models.cpu_decoder import Angles
from .models.cpu_side import EmbeddingRows
from .models.decoder_config import DecoderConfig
from .models.sharding import VocabParallelEmbedding
from .runners.build import build_runner
from .weights import open_model
from .weights.packed_tensors import dense_view

if TYPE_CHECKING:
    from .weights import ModelSource

LOGIT_BYTES = 64 << 20  # of one step
MOST_ROWS = 256  # of one step
CONTEXT = 512  # tokens of a window
TOKENS = 4096  # of the text that are read unless more are asked for


@dataclass(frozen=True, slots=True)
class FormatResult:
    """The figures of one weight format on a text."""

    weights: str
    perplexity: float
    kl: float  # mean, in nats
    kl_99: float  # 99 of 100 tokens have less
    same_token: float  # 0 to 1
    tokens: int  # that were predicted
    load_seconds: float
    tokens_per_second: float  # of the forward passes
    bits_per_weight: float
    resident_bytes: int
    kernels: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Says how formats are measured; see the options of `umbel weights`."""

    reference: Weights = "float32"
    dtype: DType = "auto"
    kernels: Kernels = "auto"
    device: str = "cpu"
    context: int = CONTEXT
    tokens: int = TOKENS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `umbel weights`. Returns the exit status; errors of umbel go to the caller."""
    options = parser().parse_args(arguments)
    formats = _formats(options.weights)
    settings = EvaluationSettings(
        reference=options.reference,
        dtype=options.dtype,
        kernels=options.kernels,
        device=chosen_device(options.device),
        context=options.context,
        tokens=options.tokens,
    )
    text = read_text(options.text)
    if (reason := unused_for(options.device, "write --device cpu")) is not None:
        print(reason, file=sys.stderr)
    source = open_model(options.model)
    results = evaluate(source, formats, text, settings)
    if options.json:
        print(_json(source.name, settings, results))
    else:
        _print_table(source.name, settings, results)
    return 0


def evaluate(
    source: "ModelSource", formats: Sequence[Weights], text: str, settings: EvaluationSettings
) -> list[FormatResult]:
    """Measures every format, one after the other.

    Raises:
        ModelError: the model cannot be used.
        ParameterError: the text is too short, the context too long, or a format does not run here.
    """
    tokenizer = source.tokenizer()
    ids = tokenizer.encode(text, first=True)[: settings.tokens]
    if len(ids) < 2:
        raise ParameterError("the text has fewer than 2 tokens; give a longer one, some thousand words")
    weights = count_weights(dense_view(source.config, source.tensors)[1])
    reference = _runner(source, settings.reference, "float32", settings)
    if settings.context > reference.context_length:
        raise ParameterError(
            f"context={settings.context} is more than the {reference.context_length} tokens of {source.name}; write "
            "at most that"
        )
    windows = list(_windows(ids, tokenizer.bos_id, settings.context))
    results = []
    for name in formats:
        began = time.perf_counter()
        candidate = _runner(source, name, settings.dtype, settings)
        loaded = time.perf_counter() - began
        figures = _compare(reference, candidate, windows)
        results.append(
            FormatResult(
                weights=name,
                perplexity=math.exp(figures.loss / figures.count),
                kl=float(np.mean(figures.kl)),
                kl_99=float(np.quantile(figures.kl, 0.99)),
                same_token=figures.same / figures.count,
                tokens=figures.count,
                load_seconds=loaded,
                tokens_per_second=sum(map(len, windows)) / figures.seconds,
                bits_per_weight=8 * weight_bytes(candidate.model) / weights,
                resident_bytes=memory_of(candidate.model),
                kernels=str(candidate.facts()["kernels"]),
            )
        )
        del candidate  # before the next one is loaded
    return results


def read_text(path: Path) -> str:
    """Reads a text file. Raises ParameterError for one that cannot be read or is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ParameterError(f"--text {shown(str(path))}: {reason}; write the path of a text file") from None


def count_weights(tensors: Tensors) -> int:
    """Returns how many weights a checkpoint has, however they are stored. Nothing is dequantised."""
    count = 0
    for name in tensors:
        stored: BlockTensor | QuantizedTensor | None = None
        if isinstance(tensors, BlockTensors):
            stored = tensors.block(name)
        elif isinstance(tensors, QuantizedSource):
            stored = tensors.quantized(name)
        count += tensors[name].numel() if stored is None else math.prod(stored.shape)
    return count


# Any: as below.
def weight_bytes(model: Any) -> int:
    """Returns the bytes of a model's weights, each counted once.

    Tables of angles and the copy that a head screens are left out, and so is the embedding where the head multiplies
    the same weights: it reads them from the file, or from a copy in another order.
    """
    config, head = getattr(model, "config", None), getattr(model, "head", None)
    without: tuple[type, ...] = (Angles, Rope)
    if isinstance(config, DecoderConfig) and config.tied:
        without += (EmbeddingRows, VocabParallelEmbedding)
    return memory_of(model, without) - (head.bytes if isinstance(head, Head) else 0)


# Any: models of every kind, whose attributes are walked.
def memory_of(model: Any, without: tuple[type, ...] = ()) -> int:
    """Returns the bytes of all tensors and packed matrices that an object reaches; memory that two share counts once.

    Pages of a mapped file count as the part of it that a tensor covers.

    Args:
        without: classes of parts that do not count.
    """
    sizes: dict[int, int] = {}  # address → bytes
    seen: set[int] = set()
    left: list[Any] = [model]
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, (str, bytes, int, float, type, ModuleType, Checkpoint, *without)):
            continue  # a checkpoint refers to files, not to what the model keeps of them; kernels may be a module
        seen.add(id(part))
        if isinstance(part, torch.Tensor) and part.is_mkldnn:  # laid out for oneDNN: no pointer to its memory
            sizes[id(part)] = part.numel() * part.element_size()
        elif isinstance(part, torch.Tensor):
            sizes[part.data_ptr()] = max(part.nbytes, sizes.get(part.data_ptr(), 0))
        elif isinstance(part, np.ndarray):
            sizes[part.ctypes.data] = max(part.nbytes, sizes.get(part.ctypes.data, 0))
        elif isinstance(part, PackedMatrix):
            sizes[part.handle] = part.bytes
        elif isinstance(part, BlockTensor):
            left.append(part.data)
        elif isinstance(part, dict):
            left.extend(part.values())
        elif isinstance(part, (list, tuple, set, frozenset)):
            left.extend(part)
        else:
            if isinstance(part, Head):
                sizes[part.handle] = part.bytes
            left.extend(_attributes(part))
    return sum(sizes.values())


# ------------------------------------------------------------------------------------------ how


# Any: a runner of any kind; the protocol does not name its model.
def _runner(source: "ModelSource", weights: Weights, dtype: DType, settings: EvaluationSettings) -> Any:
    with source.named_in_errors():
        return build_runner(
            source.config,
            source.tensors,
            num_slots=settings.context + 1,
            window_slots=0,
            dtype=dtype,
            device=settings.device,
            kernels=settings.kernels,
            weights=weights,
            cuda_graphs=False,
        )


def _windows(ids: Sequence[int], bos_id: int | None, context: int) -> Iterator[NDArray[np.int64]]:
    """Cuts a text into windows of at most `context` tokens, each with the model's first token and one to predict."""
    head = [] if bos_id is None else [bos_id]
    body = context - len(head)
    for first in range(0, len(ids), body):
        window = np.array([*head, *ids[first : first + body]], dtype=np.int64)
        if len(window) > 1:
            yield window


@dataclass(slots=True)
class _Sums:
    """Sums over the positions of all windows."""

    kl: list[float]
    loss: float = 0.0
    same: int = 0
    seconds: float = 0.0  # of the candidate's forward passes

    @property
    def count(self) -> int:
        return len(self.kl)


def _compare(reference: Runner, candidate: Runner, windows: Sequence[NDArray[np.int64]]) -> _Sums:
    sums = _Sums([])
    rows = max(1, min(MOST_ROWS, LOGIT_BYTES // (4 * candidate.vocab_size)))
    for window in windows:
        for first in range(0, len(window), rows):
            step = _step(window, first, min(first + rows, len(window)))
            exact = reference.forward(step).values
            began = time.perf_counter()
            values = candidate.forward(step).values
            targets = torch.from_numpy(window[first + 1 : first + 1 + len(values)]).to(values.device)
            log_q = values[: len(targets)].log_softmax(-1)
            _require_numbers(log_q)  # waits for the device, too
            sums.seconds += time.perf_counter() - began
            log_p = exact[: len(targets)].log_softmax(-1)
            sums.kl += (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0).tolist()
            sums.loss -= float(log_q.gather(1, targets[:, None]).double().sum())
            sums.same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    return sums


def _require_numbers(log_probabilities: torch.Tensor) -> None:
    if not bool(log_probabilities.isfinite().all()):
        raise ModelError("the model's logits are not numbers; its files are damaged, or need another dtype")


def _step(window: NDArray[np.int64], first: int, end: int) -> Batch:
    """Builds the step of tokens [first, end) of a window, whose token i has slot i + 1. All rows want their logits."""
    return Batch(
        token_ids=window[first:end],
        positions=np.arange(first, end, dtype=np.int64),
        write_slots=np.arange(first + 1, end + 1, dtype=np.int64),
        query_lengths=np.array([end - first], dtype=np.int32),
        prefix_lengths=np.array([first], dtype=np.int32),
        slots=(np.arange(1, end + 1, dtype=np.int32),),
        logit_rows=np.arange(end - first, dtype=np.int64),
    )


def _attributes(part: object) -> Iterator[object]:
    yield from getattr(part, "__dict__", {}).values()
    for kind in type(part).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(part, name, None)


# ------------------------------------------------------------------------------------------ the command


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel weights",
        description="Measure weight formats of a model on a text: perplexity, and the divergence (KL) from the model "
        "with exact weights in float32.",
    )
    made.add_argument("model", help="a name (org/repo, ollama:NAME), a folder or a GGUF file")
    made.add_argument("--text", type=Path, required=True, metavar="FILE", help="the text, UTF-8")
    made.add_argument("--weights", default="auto", metavar="LIST", help=f"of {', '.join(get_args(Weights))}; auto")
    made.add_argument(
        "--reference",
        choices=get_args(Weights),
        default="float32",
        help="format of the exact model; bf16 takes half the memory, and is exact where the checkpoint has bfloat16",
    )
    made.add_argument("--dtype", choices=get_args(DType), default="auto", help="of the formats' KV cache; auto")
    made.add_argument("--kernels", choices=get_args(Kernels), default="auto", help="that compute; auto")
    made.add_argument("--device", default="auto", help='"cpu", "cuda", "cuda:1"; auto takes a GPU when there is one')
    made.add_argument("--context", type=_count, default=CONTEXT, help=f"tokens of a window; {CONTEXT}")
    made.add_argument("--tokens", type=_count, default=TOKENS, help=f"of the text, at most; {TOKENS}")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def _formats(given: str) -> list[Weights]:
    known: tuple[Weights, ...] = get_args(Weights)
    formats: list[Weights] = []
    for name in given.split(","):
        found = next((known_name for known_name in known if known_name == name.strip()), None)
        if found is None:
            raise ParameterError(f"--weights {shown(name)}: no such format; write some of {', '.join(known)}")
        if found not in formats:
            formats.append(found)
    return formats


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 2 <= int(text[:12]) <= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of tokens; write a number of 2 or more")
    return int(text)


def _json(model: str, settings: EvaluationSettings, results: Sequence[FormatResult]) -> str:
    content = {"model": model, **asdict(settings), "formats": [asdict(result) for result in results]}
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def _print_table(model: str, settings: EvaluationSettings, results: Sequence[FormatResult]) -> None:
    import rich.console
    import rich.table

    first = results[0]
    console = rich.console.Console(highlight=False)
    console.print(f"{model}, {first.kernels}: {first.tokens} tokens in windows of {settings.context};", end=" ")
    console.print(f"KL and same token against {settings.reference} weights, computed in float32")
    table = rich.table.Table("weights", box=None, header_style="bold")
    for name in ("perplexity", "KL", "same token", "tokens/s", "bits/weight", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.weights,
            f"{result.perplexity:.3f}",
            f"{result.kl:.6f}",
            f"{100 * result.same_token:.2f} %",
            f"{result.tokens_per_second:.0f}",
            f"{result.bits_per_weight:.2f}",
            f"{result.resident_bytes / 1e6:.0f}",
        )
    console.print(table)
