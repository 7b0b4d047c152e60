"""A thousand mutated pictures, bombs and extremes through a whole runtime: who dies, and how much memory it takes.

    python -m tests.srt.multimodal.hostile

Prints how the requests ended, and by how much the resident memory of each process rose at most.
"""

import asyncio
import random
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import psutil
from PIL import Image
from umbel.interpreter.backends.runtime import Runtime
from umbel.lang.errors import UmbelError
from umbel.lang.prompt import Text
from umbel.lang.protocol import Final, GenRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.multimodal.stills import FORMATS

from .samples import bomb, media, noise, saved

MUTATED = 1000
PROCESSES = ("umbel.srt.gateway", "umbel.srt.engine.process", "decode_worker")


def mutated(seed: int) -> list[bytes]:
    """Pictures of 1200 × 900 with some bytes changed, half of them near the beginning."""
    dice = random.Random(seed)
    whole = [saved(noise(200, 150, index).resize((1200, 900)), form) for index, form in enumerate(FORMATS)]
    found = []
    for turn in range(MUTATED):
        data = bytearray(whole[turn % len(whole)])
        for _ in range(dice.choice((1, 2, 8))):
            place = dice.randrange(min(len(data), dice.choice((64, 512, 1 << 24))))
            data[place : place + 4] = dice.randbytes(4)
        found.append(bytes(data))
    return found


def extremes() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    large = noise(64, 64).resize((4098, 4098))
    return {
        "a bomb of 13,000 x 13,000": bomb(),
        "a bomb of 20,000 x 20,000": bomb(20_000),
        "1 x 1": saved(noise(1, 1)),
        "1 x 1,000": saved(noise(1, 1000)),
        "1,000 x 1": saved(noise(1000, 1)),
        "nothing": b"",
        "SVG": b"<svg/>",
        "16.8 megapixels, turned and transparent": saved(
            large.convert("RGBA"), "PNG", compress_level=1, exif=exif.tobytes()
        ),
        "16.8 megapixels, progressive": saved(large, "JPEG", progressive=True, subsampling=0),
        "57,800 x 289": saved(noise(64, 64).resize((57_800, 289)), "PNG", compress_level=1),
    }


async def ending(runtime: Runtime, label: str, data: bytes) -> str:
    request = GenRequest(label, (Text("x"), media(data)), SamplingParams(max_tokens=1, temperature=0.0))
    try:
        async with aclosing(runtime.generate(request)) as events:
            async for event in events:
                if isinstance(event, Final):
                    return "answered"
    except UmbelError as error:
        return type(error).__name__
    return "without an ending"


def children() -> dict[str, psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return {name: process for name in PROCESSES for process in found if name in " ".join(process.cmdline())}


def highest(process: psutil.Process) -> int:
    """Bytes of resident memory, at the worst moment of its life."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


async def main() -> None:
    runtime = Runtime("oracle", progress=False)
    await ending(runtime, "first", saved(noise(8, 8)))
    before = {name: (process.pid, process.memory_info().rss) for name, process in children().items()}
    ends = Counter([await ending(runtime, f"mutated-{index}", data) for index, data in enumerate(mutated(1))])
    print(f"{MUTATED} mutated pictures: {dict(ends)}")
    for name, data in extremes().items():
        print(f"{name}: {await ending(runtime, name, data)}")
    for name, process in children().items():
        number, taken = before[name]
        lived = "lives" if process.pid == number else "has died"
        print(f"{name} {lived}; its memory rose by {(highest(process) - taken) / 1e6:.0f} MB at most")
    facts = (await runtime.control("info")).result
    print({name: count for name, count in facts.items() if "picture" in name})
    await runtime.close()


if __name__ == "__main__":
    asyncio.run(main())
