"""The process that decodes: that it answers, what ends it, and what that costs."""

import asyncio
import os
import signal
import subprocess
import sys

import msgspec
import psutil
import pytest
from umbel.lang.errors import RequestError
from umbel.srt.core.config import PictureLimits, WorkerLimits
from umbel.srt.core.environment import worker_environment
from umbel.srt.multimodal.decode import (
    Answer,
    Decoded,
    DecodeJob,
    DecoderProcess,
    RefusedMedia,
    decode_media,
    explained,
    too_long,
    too_much_memory,
)
from umbel.srt.multimodal.decode_worker import decode_within
from umbel.srt.processes.child import HEADER
from umbel.srt.processes.worker import Cause, Trouble

from .samples import FORM, bomb, clip, noise, saved

LIMITS = PictureLimits()


def job(data: bytes, frames: int = 0, limits: PictureLimits = LIMITS) -> DecodeJob:
    return DecodeJob("video" if frames else "image", data, frames, FORM, limits)


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(HEADER, "little") + content


def ask(decoder: DecoderProcess, *jobs: DecodeJob) -> "list[asyncio.Future[Answer | None]]":
    futures = []
    for each in jobs:
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        decoder.decode(each, future.set_result, lambda: True)
        futures.append(future)
    return futures


def test_time_ends_a_picture() -> None:
    large = job(saved(noise(800, 800)))
    answer = decode_within(large, 1e-6)
    assert isinstance(answer, RefusedMedia)
    assert (answer.kind, "takes more than 5 s to decode" in answer.message) == ("RequestError", True)
    assert decode_within(large, 60.0) == decode_media(large)


@pytest.mark.processes
def test_the_process_answers_and_stays() -> None:
    async def run() -> None:
        flushed: list[None] = []
        decoder = DecoderProcess(LIMITS, lambda: flushed.append(None))
        picture, broken = job(saved(noise(30, 20))), job(b"nothing")
        first, refused = await asyncio.gather(*ask(decoder, picture, broken))
        assert first == decode_media(picture)
        assert refused == decode_media(broken)
        process = decoder.process_id
        pytest.importorskip("av", reason="clips need PyAV (the video extra)")
        moving = job(clip(9), 3)
        (frames,) = await asyncio.gather(*ask(decoder, moving))
        assert frames == decode_media(moving)
        assert decoder.process_id == process
        assert decoder.counters == {"picture_processes": 1, "picture_kills": 0}
        await decoder.close()
        assert len(flushed) == 3

    asyncio.run(run())


@pytest.mark.processes
def test_a_killed_process_costs_no_picture() -> None:
    async def run() -> None:
        decoder = DecoderProcess(LIMITS, lambda: None)
        await asyncio.gather(*ask(decoder, job(saved(noise(8, 8)))))
        assert decoder.process_id is not None
        os.kill(decoder.process_id, signal.SIGSTOP)
        waiting = ask(decoder, job(saved(noise(9, 9))), job(saved(noise(10, 10))))
        await asyncio.sleep(0)
        os.kill(decoder.process_id, signal.SIGKILL)
        assert all(isinstance(answer, Decoded) for answer in await asyncio.gather(*waiting))
        assert decoder.counters == {"picture_processes": 2, "picture_kills": 1}
        await decoder.close()

    asyncio.run(run())


@pytest.mark.processes
def test_a_stopped_process_costs_no_picture() -> None:
    async def run() -> None:
        decoder = DecoderProcess(LIMITS, lambda: None, WorkerLimits(look=0.01, idle_seconds=0.1))
        await asyncio.gather(*ask(decoder, job(saved(noise(8, 8)))))
        assert decoder.process_id is not None
        os.kill(decoder.process_id, signal.SIGSTOP)
        (answer,) = await asyncio.gather(*ask(decoder, job(saved(noise(9, 9)))))
        assert isinstance(answer, Decoded)
        assert decoder.counters == {"picture_processes": 2, "picture_kills": 1}
        await decoder.close()

    asyncio.run(run())


@pytest.mark.parametrize("cause", Cause)
def test_a_picture_is_blamed_for_what_it_used_up_and_for_nothing_else(cause: Cause) -> None:
    asked = job(saved(noise(8, 8)))
    error = explained(Trouble(cause, "it was seen", 1.5, 90.0), "image", too_long(asked), too_much_memory(asked))
    its_fault = cause in (Cause.CPU, Cause.MEMORY, Cause.CRASHED)
    assert isinstance(error, RequestError) == its_fault
    assert its_fault or cause is Cause.UNREADABLE or "the image is not the cause" in str(error)


@pytest.mark.processes
@pytest.mark.nightly
def test_the_largest_pictures_fit_into_its_memory_and_a_bomb_takes_none() -> None:
    """Under its limit of address space, the resident memory cannot rise by more either."""
    arguments = [sys.executable, "-P", "-m", "umbel.srt.multimodal.decode_worker", str(os.getpid())]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=worker_environment()) as worker:
        assert worker.stdout is not None
        assert worker.stdout.read(HEADER) == bytes(HEADER), "it is ready"

        def answer(data: bytes) -> Decoded | RefusedMedia:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(framed(msgspec.msgpack.encode(job(data))))
            worker.stdin.flush()
            size = int.from_bytes(worker.stdout.read(HEADER), "little")
            return msgspec.msgpack.decode(worker.stdout.read(size), type=Decoded | RefusedMedia)

        exif = noise(2, 2).getexif()
        exif[0x0112] = 6
        assert isinstance(answer(saved(noise(8, 8))), Decoded)
        before = psutil.Process(worker.pid).memory_info().rss
        clear = saved(noise(64, 64).resize((4098, 4098)).convert("RGBA"), "PNG", compress_level=1, exif=exif.tobytes())
        assert isinstance(answer(clear), Decoded)  # turned, and laid on white
        assert isinstance(answer(bomb()), RefusedMedia)
        assert psutil.Process(worker.pid).memory_info().rss - before < 200e6
        greedy = answer(saved(noise(8, 8)))
        assert isinstance(greedy, Decoded)  # it has lived through all of them
        assert worker.stdin is not None
        worker.stdin.close()
        assert worker.wait(timeout=30) == 0
