"""A few figures in about two minutes: start, decode, prefill, and what the prefix cache is worth.

    python benchmarks/quick.py [--model NAME] [--repeat 3]

Medians of repeated runs, cache-on and cache-off runs in turn. Machines are shared and noisy: quote the ratios.
"""

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import umbel as ul

FILLER = "The quick brown fox jumps over the lazy dog while seven wizards box with jokes. "


@ul.function
def write(s: ul.State, prompt: str, tokens: int) -> None:
    s += prompt + ul.gen("text", max_tokens=tokens, temperature=0, ignore_eos=True)


@ul.function
def fan(s: ul.State, seed: int) -> None:
    """Eight branches over one prefix: the pattern that the cache is for."""
    s += f"Report {seed}. " + FILLER * 24
    branches = s.fork(8)
    branches += lambda i: f"\nQuestion {i}: what does it say?\nAnswer:" + ul.gen("answer", max_tokens=8, temperature=0)
    branches.join()


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def median_of(repeat: int, action: Callable[[int], object]) -> float:
    return statistics.median(seconds(partial(action, number)) for number in range(repeat))


def generate(backend: ul.Runtime, prompts: list[str], tokens: int) -> None:
    states = write.run_batch([{"prompt": prompt, "tokens": tokens} for prompt in prompts], backend=backend)
    for state in states:
        state.sync()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as for umbel.Runtime; the default model if left out")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    code = "import time; t = time.perf_counter(); import umbel; print(time.perf_counter() - t)"
    imports = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(options.repeat)]
    print(f"{platform.machine()}, Python {platform.python_version()}, umbel {ul.__version__}")
    print(f"import umbel                      {statistics.median(imports):8.3f} s")
    runtime = ul.Runtime(options.model)
    print(f"start to first token              {seconds(lambda: generate(runtime, ['Hello'], 1)):8.2f} s")
    for batch in (1, 8, 32):
        prompts = [f"{number}. {FILLER}" for number in range(batch)]
        generate(runtime, prompts, 1)  # the prompts are cached now: what follows decodes only
        taken = median_of(options.repeat, lambda _, prompts=prompts: generate(runtime, prompts, 32))
        print(f"decode, batch {batch:<3}                 {batch * 32 / taken:8.1f} tokens/s")
    for length in (512, 2048):
        words = FILLER * (length // 16)
        taken = median_of(options.repeat, lambda number, words=words: generate(runtime, [f"{number} {words}"], 1))
        counted = write.run(f"0 {words}", 0, backend=runtime).get_meta_info("text")["prompt_tokens"]
        print(f"prefill, {counted:>5} tokens             {counted / taken:8.1f} tokens/s")
    with ul.Runtime(options.model, radix_cache=False) as uncached:
        generate(uncached, ["Hello"], 1)
        pairs = [
            (
                seconds(lambda number=number: fan.run(number, backend=runtime).sync()),
                seconds(lambda number=number: fan.run(number, backend=uncached).sync()),
            )
            for number in range(options.repeat)
        ]
    ratio = statistics.median(off / on for on, off in pairs)
    print(f"fork of 8, cache on               {statistics.median(on for on, _ in pairs):8.2f} s")
    print(
        f"fork of 8, cache off              {statistics.median(off for _, off in pairs):8.2f} s   ({ratio:.1f} times)"
    )
    runtime.shutdown()


if __name__ == "__main__":
    main()
