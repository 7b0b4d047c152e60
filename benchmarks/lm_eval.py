"""lm-evaluation-harness on umbel and on its own model `hf`: the same figures, and how fast.

    python -m benchmarks.lm_eval                     # the default model in float32, three rounds; ten minutes
    python -m benchmarks.lm_eval --rounds 1 --mmlu 8 --hellaswag 0 --zero-shot 0

Items of `workloads/` become three local tasks of the harness: questions of MMLU, one subject after the other, with five
examples; HellaSwag with 20 examples, and with none. Both models read one folder, float32 on both sides, in one process,
with all cores; hf takes `--batch-size 1`, which is its fastest on two cores. A round asks both, umbel with an empty
cache, and turns change. Seconds are those of `loglikelihood`: texts to figures, without loading and metrics. CPU time
counts all processes of this one. Ratios are medians over rounds of neighbours.

It fails where a log-likelihood differs by more than `TIE`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own
import torch
from safetensors.torch import save_file
from umbel.srt.weights import open_model

from .workload import FOLDER

TIE = 1e-2  # between sums of float32 log-probabilities over an ending, whose tokens lie in different places of a batch
LETTERS = [" A", " B", " C", " D"]
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


@dataclass(frozen=True)
class Outcome:
    """One task by one model.

    Attributes:
        logprobs: of each choice of each item, in the items' order.
        figures: acc and acc_norm.
        wall, cpu: seconds.
    """

    logprobs: list[list[float]]
    figures: tuple[float, float]
    wall: float
    cpu: float


# -------------------------------------------------------------------------------------- tasks and model


def items(workload: str, *, examples: bool = True) -> Iterator[dict[str, Any]]:  # Any: JSON
    """Yields the questions of a workload as items of a task; those that begin alike are neighbours."""
    programs = [json.loads(line) for line in (FOLDER / f"{workload}.jsonl").read_text().splitlines()[1:]]
    for program in sorted(programs, key=lambda program: str(program["ops"][0]["text"])):
        shared, question, asked = program["ops"]
        choices = asked.get("choices", LETTERS)
        context = (shared["text"] if examples else "") + question["text"]
        yield {"context": context, "choices": choices, "label": choices.index(asked["answer"])}


def write_tasks(folder: Path, counts: dict[str, int]) -> None:
    """Writes the tasks, each with its first `counts` items."""
    for name, count in counts.items():
        workload = "mmlu_5shot" if name == "mmlu_5shot" else "hellaswag_20shot"
        chosen = list(items(workload, examples=name.endswith(("_5shot", "_20shot"))))[:count]
        file = folder / f"{name}.json"
        file.write_text("\n".join(map(json.dumps, chosen)), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file), encoding="utf-8")


def write_model(model: str, folder: Path) -> None:
    """Writes a model as transformers reads it, in float32."""
    source = open_model(model)
    tensors = {name: tensor.float().contiguous() for name, tensor in source.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**source.config, "torch_dtype": "float32"}))
    (folder / "tokenizer.json").write_bytes(source.documents.tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps(source.documents.read("tokenizer_config.json")))


# -------------------------------------------------------------------------------------- rounds


def cpu_seconds() -> float:
    """CPU seconds of this process and of those below it."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def evaluated(model: Any, task: str, tasks: Any) -> Outcome:  # Any: the harness has no types
    """Runs one task on one model."""
    import lm_eval

    seconds: list[tuple[float, float]] = []
    asked: Callable[..., Any] = type(model).loglikelihood

    def timed(requests: list[Any], **options: Any) -> Any:
        cpu, began = cpu_seconds(), time.perf_counter()
        answers = asked(model, requests, **options)
        seconds.append((time.perf_counter() - began, cpu_seconds() - cpu))
        return answers

    model.loglikelihood = timed
    found = lm_eval.simple_evaluate(model=model, tasks=[task], task_manager=tasks, bootstrap_iters=0)
    results = found["results"][task]
    samples = sorted(found["samples"][task], key=lambda sample: int(sample["doc_id"]))
    ((wall, cpu),) = seconds
    return Outcome(
        [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples],
        (float(results["acc,none"]), float(results["acc_norm,none"])),
        wall,
        cpu,
    )


def row(task: str, rounds: Sequence[tuple[Outcome, Outcome]], reused: float) -> tuple[str, float]:
    """Returns a task's line of the table, and the largest difference. `rounds`: umbel's outcome and that of hf."""
    furthest = max(
        abs(one - other)
        for ours, theirs in rounds
        for left, right in zip(ours.logprobs, theirs.logprobs, strict=True)
        for one, other in zip(left, right, strict=True)
    )
    ours, theirs = rounds[0]
    figures = " = ".join(" / ".join(f"{figure:.3f}" for figure in side.figures) for side in (ours, theirs))
    if any(one.figures != other.figures for one, other in rounds):
        figures = figures.replace("=", "≠")

    def ratio(kind: str) -> str:
        each = [getattr(other, kind) / getattr(one, kind) for one, other in rounds]
        middle = [statistics.median(getattr(side, kind) for side in sides) for sides in zip(*rounds, strict=True)]
        return f"{middle[0]:.1f} / {middle[1]:.1f} | {statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})"

    return (
        f"| {task} | {len(ours.logprobs)} × {len(ours.logprobs[0])} | {furthest:.1e} | {figures} | {reused:.0%} | "
        f"{ratio('wall')} | {ratio('cpu')} |",
        furthest,
    )


def compared(folder: Path, counts: dict[str, int], rounds: int, batch_size: int) -> float:
    """Prints the table. Returns the largest difference of log-likelihoods."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from umbel.compat.lm_eval import UmbelLM

    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    hf = HFLM(str(folder), dtype="float32", device="cpu", batch_size=batch_size)
    umbel = UmbelLM(str(folder), dtype="float32", weights="float32")
    furthest = 0.0
    try:
        for model in (umbel, hf):  # pages of the weights, threads
            model.tok_encode("Once")
            evaluated(model, "warm", tasks)
        print("| task | items | difference | acc / acc_norm, umbel and hf | reused | wall s | ratio | CPU s | ratio |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for task in counts:
            pairs = []
            before = umbel.usage
            for number in range(rounds):
                umbel.runtime.flush_cache()
                found = {model: evaluated(model, task, tasks) for model in ((umbel, hf) if number % 2 else (hf, umbel))}
                pairs.append((found[umbel], found[hf]))
            reused = (umbel.usage.cached_tokens - before.cached_tokens) / (
                umbel.usage.prompt_tokens - before.prompt_tokens
            )
            line, difference = row(task, pairs, reused)
            furthest = max(furthest, difference)
            print(line, flush=True)
    finally:
        umbel.close()
    return furthest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.lm_eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="as of Runtime; default: default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=1, help="of hf; default: 1")
    for name, count in (("mmlu", 8), ("hellaswag", 4), ("zero-shot", 4)):
        parser.add_argument(f"--{name}", type=int, default=count, help=f"items; 0: none; default: {count}")
    options = parser.parse_args(arguments)
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):  # all is here
        os.environ[name] = "1"
    asked = {"mmlu_5shot": options.mmlu, "hellaswag_20shot": options.hellaswag, "hellaswag_0shot": options.zero_shot}
    counts = {name: count for name, count in asked.items() if count}
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, {**counts, "warm": 1})
        write_model(options.model, folder)
        furthest = compared(folder, counts, options.rounds, options.batch_size)
    if furthest > TIE:
        print(f"log-likelihoods differ by {furthest:.3g}, more than {TIE}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
