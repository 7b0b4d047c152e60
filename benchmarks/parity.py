"""Does the runtime say what the model says? Greedy texts against transformers' `generate`, and against itself.

    python -m benchmarks.parity --workload no_reuse [--prompts 32] [--tokens 32] [--dtype float32]

The runtime answers the same prompts with its cache on and off, chunks of 16, 128 and whole prompts, one and
sixteen requests at a time, and with each optimisation off. Two runs part where two tokens have nearly the same logit:
at every first difference the gap between the two candidates is computed by transformers on the common text before it
and printed.
"""

import argparse
import asyncio
import gc
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from umbel.lang.prompt import Text
from umbel.lang.protocol import Final, GenRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.in_process import LocalBackend
from umbel.srt.weights import open_model

from .workload import FOLDER, available

# What may differ between correct float implementations: logits of this model span about ±30.
TIE = {"float32": 1e-3, "bfloat16": 0.5}
SETTINGS: dict[str, dict[str, object]] = {
    "as shipped": {},
    "cache off": {"radix_cache": False},
    "in-step sharing off": {"in_step_sharing": False},
    "chunks of 16": {"chunk_size": 16},
    "chunks of 128": {"chunk_size": 128},
    "whole prompts": {"chunk_size": None},
    "batch 1": {"max_running": 1},
    "batch 16": {"max_running": 16},
    "tree attention off": {"tree_attention": False},
    "screened head off": {"screened_head": False},
    "kernels of torch": {"kernels": "torch"},
}
ON_DEVICES: dict[str, dict[str, object]] = {"overlap off": {"overlap": False}, "graphs off": {"cuda_graphs": False}}


@dataclass(frozen=True)
class Answer:
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


def read_prompts(path: Path, count: int) -> list[str]:
    """The text before the first gen of each program."""
    prompts = []
    for line in path.read_text().splitlines()[1 : count + 1]:
        text = ""
        for op in json.loads(line)["ops"]:
            if op["op"] == "gen":
                break
            text += op.get("text", "")
        prompts.append(text)
    return prompts


async def by_runtime(prompts: list[str], tokens: int, dtype: str, options: dict[str, object]) -> list[tuple[int, ...]]:
    backend = LocalBackend("default", dtype=dtype, pool_tokens=32_768, **options)

    async def one(index: int) -> tuple[int, ...]:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        request = GenRequest(str(index), (Text(prompts[index]),), sampling)
        async for event in backend.generate(request):
            if isinstance(event, Final):
                return event.completions[0].token_ids
        raise AssertionError("a request without an end")

    answers = await asyncio.gather(*(one(index) for index in range(len(prompts))))
    await backend.close()
    return list(answers)


def by_transformers(model: torch.nn.Module, prompt_ids: list[int], tokens: int) -> tuple[int, ...]:
    inputs = torch.tensor([prompt_ids])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=tokens,
        do_sample=False,
    )
    return tuple(output[0, len(prompt_ids) :].tolist())


@torch.inference_mode()
def gap(model: torch.nn.Module, ids: list[int], one: int, other: int) -> float:
    """How far apart the two candidates' logits are after `ids`, by transformers."""
    logits = model(torch.tensor([ids])).logits[0, -1].float()
    return abs(float(logits[one] - logits[other]))


def compare(
    model: torch.nn.Module, prompts: list[list[int]], left: list[tuple[int, ...]], right: list[tuple[int, ...]]
) -> list[tuple[int, int, float]]:
    """(prompt, first differing token, logit gap there) of every pair that differs."""
    differences = []
    for number, (prompt, a, b) in enumerate(zip(prompts, left, right, strict=True)):
        if a == b:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        differences.append((number, at, gap(model, [*prompt, *a[:at]], a[at], b[at])))
    return differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=available(), default="no_reuse")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=sorted(TIE))
    options = parser.parse_args()

    from transformers import AutoConfig, AutoModelForCausalLM
    from umbel.srt.tokenizer.prompt import PromptEncoder

    source = open_model("default")
    encoder = PromptEncoder(source.tokenizer())
    prompts = read_prompts(FOLDER / f"{options.workload}.jsonl", options.prompts)
    prompt_ids = [encoder.encode((Text(prompt),)) for prompt in prompts]
    config = AutoConfig.for_model(**source.config)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
    model.load_state_dict(dict(source.tensors), strict=not config.tie_word_embeddings)
    model.generation_config.eos_token_id = None  # texts go on, as with ignore_eos
    reference = [by_transformers(model, ids, options.tokens) for ids in prompt_ids]
    print(
        f"{len(prompts)} prompts, {options.tokens} greedy tokens each, {options.dtype}, tie below {TIE[options.dtype]}"
    )
    print(f"{'runtime':<22} {'against':<14} {'equal':>6} {'part at ties':>13} {'wrong':>6}")
    wrong = 0
    shipped: list[tuple[int, ...]] | None = None
    for name, setting in (SETTINGS | (ON_DEVICES if torch.cuda.is_available() else {})).items():
        gc.collect()  # weights and pool of the setting before this one
        answers = asyncio.run(by_runtime(prompts, options.tokens, options.dtype, setting))
        for against, other in (("transformers", reference), ("as shipped", shipped)):
            if other is None:
                continue
            differences = compare(model, prompt_ids, other, answers)
            ties = [d for d in differences if d[2] <= TIE[options.dtype]]
            wrong += len(differences) - len(ties)
            equal = len(prompts) - len(differences)
            print(f"{name:<22} {against:<14} {equal:>6} {len(ties):>13} {len(differences) - len(ties):>6}", flush=True)
            for number, at, distance in differences:
                print(f"    prompt {number}, token {at}: the candidates' logits are {distance:.2g} apart")
        shipped = shipped or answers
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
