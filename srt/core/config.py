"""Limits of the runtime, in one place, each with its reason.

Every number is pinned by tests/srt/gateway and tests/srt/multimodal/test_decode.py: changing one is a decision, not an
accident.
"""

from dataclasses import dataclass

from ...lang.checks import LONGEST_SALT
from ...lang.ops import MAX_CHOICE_LENGTH, MAX_CHOICES
from ...lang.programs import MAX_GRAPH_BYTES
from ...lang.protocol import MAX_PRIORITY


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits of one gateway, in sizes and in time."""

    request_timeout: float = 600.0  # seconds; no request outlives it
    max_queue: int = 1024  # calls in flight; the next one is refused at once
    max_choices: int = MAX_CHOICES
    max_choice_length: int = MAX_CHOICE_LENGTH  # characters
    max_prompt_parts: int = 100_000
    max_clients: int = 1024  # client sockets
    max_pins: int = 1024  # of all clients together; a hint beyond them pins nothing
    longest_pin: float = 86_400.0  # seconds, also of explicit caching
    max_caches: int = 4096  # prefixes kept by explicit caching; beyond them nothing is created
    max_salt_caches: int = 512  # of one salt; as many names
    max_cache_records: int = 64 << 20  # bytes of all records together
    max_label_length: int = 256  # characters of ids, programs and fork groups
    max_salt_length: int = LONGEST_SALT
    max_priority: int = MAX_PRIORITY  # either side of 0
    # A request is given up this long after its deadline, should the engine not have ended it by itself.
    deadline_grace: float = 1.0
    # Seconds of silence after which the gateway probes a client. If the probe cannot be delivered, the client is gone
    # and its requests are aborted. A client that is stopped or busy keeps them.
    client_silence: float = 60.0
    max_programs: int = 256  # at once: each is some tasks of the gateway's loop; more wait at their client
    program_timeout: float = 86_400.0  # seconds; each of its calls ends by request_timeout
    # Of the places in max_queue, this part is for the calls of programs: they never shut out those of clients.
    program_share: float = 0.5
    max_argument_bytes: int = 256 << 20  # of all programs in flight; one frame holds at most 32 MiB
    max_graph_bytes: int = MAX_GRAPH_BYTES
    kept_graphs: int = 128  # read, checked and planned; the least recently used goes first
    kept_graph_bytes: int = 32 << 20  # of their files; in memory a graph takes some ten times as much
    long_graph: int = 8_192  # bytes; reading more takes above 5 ms, so a thread does it


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """Times after which an engine counts as dead, and the back-off of its restarts."""

    heartbeat_period: float = 0.5  # seconds between heartbeats; after two the process is sampled
    # Seconds without a heartbeat in which the process could have given one: see `TimeSpent` of
    # lang/transport/process_life.py. Health must be right within 5 s.
    heartbeat_silence: float = 2.5
    longest_stop: float = 1.5  # seconds of a process that is stopped: no load of the machine does that
    longest_step: float = 300.0  # seconds of computing in one step: hung. A long prefill is none
    longest_idle_step: float = 120.0  # seconds of one step without computing: a deadlock. The oracle may sleep for 60
    longest_disk_wait: float = 300.0  # seconds of one step: pages of a model on a slow disk
    start_timeout: float = 900.0  # seconds of wall time; the gateway's is the startup_timeout of its runtime
    back_off: tuple[float, ...] = (0.0, 0.5, 2.0)  # seconds before the 1st, 2nd, 3rd restart in a row
    stable_life: float = 60.0  # seconds; an engine that lived so long is restarted without waiting
    max_start_failures: int = 3  # in a row; then the gateway gives up and reports the cause
    tick: float = 0.05  # seconds between looks at deadlines that pass
    look: float = 0.5  # seconds between looks when nothing is due


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Times after which a worker process of the gateway counts as lost. Its jobs are limited in CPU time and memory.

    On a busy machine a process waits seconds for a core: that ends no job. A process that sleeps or is stopped
    uses no CPU time however long it is given.
    """

    look: float = 0.25  # seconds between looks at a process that owes an answer
    idle_seconds: float = 4.0  # at a stretch, stopped or asleep without an answer; then the job is tried again
    overtime: float = 0.5  # seconds of CPU time beyond a job's own limit, for libraries that do not hear its timer
    wall_seconds: float = 120.0  # of one job, without the time in which it waited for a core
    starved_seconds: float = 600.0  # in which it waited for a core: as long as any request lives
    start_seconds: float = 300.0  # of its own start, which counts against no job
    more_tries: int = 1  # after a process that was killed, stopped or did not start


@dataclass(frozen=True, slots=True)
class CompilerLimits:
    """Limits of the process that compiles constraints. The slowest of 300 real schemas takes a fraction of a second."""

    cpu_seconds: float = 2.0  # of one constraint; then it is refused
    quick_seconds: float = 0.3  # of CPU time; a longer job begins anew in a process for slow ones
    memory: int = 256 << 20  # bytes of address space beyond what the process has when its libraries are loaded
    niceness: int = 10  # the model goes first
    most_waiting: int = 256  # constraints; more are refused with OverloadedError
    kept_bytes: int = 64 << 20  # of compiled constraints, see CompiledCache


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Limits of pictures and clips of prompts, checked before anything is decoded where that is possible.

    A picture of 16.8 megapixels has 67 MB decoded, and is in memory twice while it is turned or its alpha taken away.
    """

    most_media: int = 8  # pictures and clips of one prompt
    most_bytes: int = 20 << 20  # of all media of one prompt, as they are sent; a frame from a client holds 32 MiB
    most_pixels: int = 16_800_000  # of one picture
    clip_pixels: int = 6_000_000  # of a frame of a clip, whose decoder keeps up to sixteen of them
    longest_ratio: int = 200  # of a picture's sides; a strip that is longer shows a model nothing
    most_frames: int = 64  # of all clips of one prompt
    frame_bytes: int = 40 << 20  # of those frames as the model sees them: they are decoded into memory together
    most_packets: int = 1 << 17  # frames that a clip may have: more than an hour
    picture_seconds: float = 5.0  # of CPU time; a photo of 16.8 megapixels takes a part of a second
    clip_seconds: float = 20.0  # of CPU time
    library_seconds: float = 5.0  # of CPU time in which the library for clips is loaded, for the first of them
    memory: int = 176 << 20  # bytes of address space beyond what the process has when its libraries are loaded
    niceness: int = 10  # the model goes first
    waiting_bytes: int = 512 << 20  # of media that wait to be decoded, all clients together
    cache_bytes: int = 64 << 20  # of decoded pictures that the gateway keeps
    cache_sources: int = 4096  # pictures and clips whose bytes are known again, also where they were refused
    cache_numbers: int = 1 << 16  # pictures whose number is known again, so that their keys are found
    held_bytes: int = 1 << 30  # of decoded pictures that requests in flight hold, here or at the engine


MAX_ENGINE_FRAME = 256 * 2**20  # bytes; a select repeats its prompt for every choice
MAX_PULSE_FRAME = 2**20  # bytes; a heartbeat holds some counters
