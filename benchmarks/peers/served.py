"""What all peers have in common: a server process, a client to it, and their life."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .http_client import Json, JsonClient
from .peer import CONCURRENCY, PeerError, PeerOptions
from .process import ServerProcess, free_port


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16. Emulated, it is slower than float32: half as fast in transformers."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


class ServedPeer(ABC):
    """A subclass says which command starts the server, and translates the two requests into the server's own."""

    name: ClassVar[str]
    ready_path: ClassVar[str] = "/health"  # answers 200 as soon as requests are taken
    start_seconds: ClassVar[float] = 120
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")

    def __init__(self, options: PeerOptions) -> None:
        if options.dtype is not None and options.dtype not in self.dtypes:
            remedy = f"write one of {', '.join(self.dtypes)}" if self.dtypes else "the model file decides, leave it out"
            raise PeerError(f"{self.name}: dtype {options.dtype!r}; {remedy}")
        self.options = options
        self._running: tuple[ServerProcess, JsonClient] | None = None

    @property
    def dtype(self) -> str:
        """What the peer computes in: as the options say, else bfloat16 where the processor has instructions for it."""
        if self.options.dtype is not None:
            return self.options.dtype
        return "bfloat16" if has_bfloat16() else "float32"

    @property
    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def command(self, port: int) -> list[str]: ...

    def environment(self) -> dict[str, str]:
        """Added to the process's environment."""
        return {}

    def folder(self) -> Path | None:
        """The server's working folder; this process's if None."""
        return None

    def start(self) -> None:
        if self._running is not None:
            raise PeerError(f"{self.name} is started already; call stop() first")
        port = free_port()
        server = ServerProcess(
            self.command(port), environment=self.environment(), folder=self.folder(), log=self.options.log
        )
        client = JsonClient(port, connections=CONCURRENCY)
        self._running = server, client
        try:
            server.wait_until(lambda: client.answers(self.ready_path), seconds=self.start_seconds)
        except BaseException:  # also an interrupt: nothing is left running
            self.stop()
            raise

    def stop(self) -> None:
        if self._running is not None:
            server, client = self._running
            self._running = None
            client.close()
            server.stop()

    @property
    def base_url(self) -> str:
        """Where a client of OpenAI's dialect finds the server, while it runs."""
        if self._running is None:
            raise PeerError(f"{self.name} is not started; call start() first")
        return f"http://127.0.0.1:{self._running[1].port}/v1"

    def resident_bytes(self) -> int:
        return 0 if self._running is None else self._running[0].resident_bytes()

    async def post(self, path: str, body: Mapping[str, Json]) -> Json:
        if self._running is None:
            raise PeerError(f"{self.name} is not started; call start() first")
        return await self._running[1].post(path, body)


class OwnServerPeer(ServedPeer):
    """A peer behind our `completion_server.py`, run as a module under the peer's interpreter."""

    module: ClassVar[str]  # of this package

    def command(self, port: int) -> list[str]:
        package = __package__ or ""
        return [
            *(str(self.options.python), "-m", f"{package.rpartition('.')[2]}.{self.module}"),
            *(str(self.options.model.resolve()), "--port", str(port), *self.server_arguments()),
            *self.options.arguments,
        ]

    def folder(self) -> Path:
        """Where this package is found without what lies beside `benchmarks/`."""
        return Path(__file__).resolve().parent.parent

    @abstractmethod
    def server_arguments(self) -> list[str]: ...

    async def generate(
        self,
        prompt: str,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        ignore_eos: bool = False,
        regex: str | None = None,
        json_schema: Mapping[str, Any] | None = None,  # Any: a JSON Schema is whatever JSON it is
    ) -> str:
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stop": list(stop),
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            "regex": regex,
            "json_schema": json_schema,
        }
        text: str = (await self.post("/generate", body))["text"]
        return text

    async def score(self, prompt: str, choices: Sequence[str]) -> int:
        best: int = (await self.post("/score", {"prompt": prompt, "choices": list(choices)}))["best"]
        return best
