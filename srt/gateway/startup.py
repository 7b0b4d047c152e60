"""What clients are told while the runtime comes up: phases, then "ready" or why not.

Ready needs both halves: the gateway's tokenizer and an engine that has made a token. They come in any
order, the engine may go and come again, and a client may ask at any moment; each is answered once.
"""

from ...lang.transport.link import FromGateway, Progress, StartFailed, Welcome
from ..core.config import Limits
from ..core.wire import EngineReady
from ..tokenizer.tokenizer import Tokenizer
from .clients import Clients, Connection
from .supervisor import StartFailure


class Startup:
    """The state of the start, and the clients that wait for its end."""

    def __init__(self, clients: Clients, limits: Limits) -> None:
        self._clients = clients
        self._limits = limits
        self._phase = "starting the engine"
        self._model = ""
        self._tokenizer: Tokenizer | None = None
        self._image_tokens = 0
        self.engine: EngineReady | None = None  # the living one's
        self.failure: StartFailure | None = None  # why there will be no engine

    def greet(self, connection: Connection) -> None:
        """A client asks whether the runtime is ready."""
        connection.waits_for_welcome = True
        self._clients.deliver(connection.client.identity, Progress(self._phase))
        self._answer()

    def enter(self, phase: str) -> None:
        """The start has come to another phase."""
        self._phase = phase
        for connection in self._clients.waiting():
            self._clients.deliver(connection.client.identity, Progress(phase))

    def tokenizer_loaded(self, model: str, tokenizer: Tokenizer, image_tokens: int) -> None:
        """`image_tokens`: of a picture at most; 0 for a model that reads text only."""
        self._model, self._tokenizer, self._image_tokens = model, tokenizer, image_tokens
        self._answer()

    def engine_ready(self, ready: EngineReady) -> None:
        self.engine = ready
        self._answer()

    def engine_gone(self) -> None:
        self.engine = None
        self.enter("starting the engine again")

    def fail(self, failure: StartFailure) -> None:
        """Nothing more will be tried."""
        self.failure = failure
        self._answer()

    def _answer(self) -> None:
        """Whoever waits is told once: ready, or why not."""
        answer: FromGateway
        if self.failure is not None:
            answer = StartFailed(self.failure.kind, self.failure.message)
        elif self.engine is not None and self._tokenizer is not None:
            answer = Welcome(
                model=self._model,
                context_length=self.engine.context_length,
                vocab_size=self.engine.vocab_size,
                pool_tokens=self.engine.pool_tokens,
                max_queue=self._limits.max_queue,
                request_timeout=self._limits.request_timeout,
                chat_template=self._tokenizer.chat_template,
                template_tokens=self._tokenizer.template_tokens,
                max_programs=self._limits.max_programs,
                image_tokens=self._image_tokens,
            )
        else:
            return
        for connection in self._clients.waiting():
            connection.waits_for_welcome = False
            self._clients.deliver(connection.client.identity, answer)
