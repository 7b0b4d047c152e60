"""A gateway with a scripted engine: what it sends is recorded, what the engine says is up to the test."""

from functools import partial

from umbel.lang.prompt import Text
from umbel.lang.protocol import ConstraintSpec, FinishReason, GenRequest, Origin, ToBackend
from umbel.lang.sampling import SamplingParams
from umbel.srt.constraints.compiler import CompiledCache
from umbel.srt.core.config import GatewayLimits
from umbel.srt.core.instruments import FaultHook, VirtualClock, no_faults
from umbel.srt.core.messages import Ended, EngineAbort, EngineGenerate, EngineScore, ToEngine
from umbel.srt.gateway.calls import Answer, Client
from umbel.srt.gateway.gateway import Gateway
from umbel.srt.tokenizer.tokenizer import ByteTokenizer, Tokenizer

CLIENT = b"client"
CONTEXT = 100


class FakeFrontEnd:
    """A front end that keeps what its clients are told."""

    def __init__(self) -> None:
        self.delivered: list[tuple[bytes, Answer]] = []

    def deliver(self, identity: bytes, message: Answer) -> None:
        self.delivered.append((identity, message))

    def client(self, identity: bytes = CLIENT) -> Client:
        return Client(self, identity)

    def answers(self, identity: bytes = CLIENT) -> list[Answer]:
        return [message for owner, message in self.delivered if owner == identity]


class Harness:
    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None = None,
        limits: GatewayLimits = GatewayLimits(),  # noqa: B008  # frozen
        faults: FaultHook = no_faults,
        ready: bool = True,
        constraints: CompiledCache | None = None,
        replicas: int = 1,
        placement: str = "added-delay",
    ) -> None:
        """`replicas`: engines; `to_engine` has what all are sent, `to` what each is."""
        self.clock = VirtualClock()
        self.to_engine: list[ToEngine] = []
        self.to: list[list[ToEngine]] = [[] for _ in range(replicas)]
        self.front_end = FakeFrontEnd()
        self.gateway = Gateway(
            tokenizer or ByteTokenizer(),
            model="toy",
            to_engines=[partial(self._sent, index) for index in range(replicas)],
            clock=self.clock,
            limits=limits,
            faults=faults,
            seed=7,
            constraints=constraints,
            placement=placement,
        )
        if ready:
            for index in range(replicas):
                self.gateway.engine_ready(CONTEXT, index)

    def _sent(self, replica: int, message: ToEngine) -> None:
        self.to_engine.append(message)
        self.to[replica].append(message)

    def send(self, message: ToBackend, client: bytes = CLIENT) -> None:
        self.gateway.receive(self.front_end.client(client), message)

    def lose(self, client: bytes = CLIENT) -> None:
        self.gateway.client_lost(self.front_end.client(client))

    def generates(self) -> list[EngineGenerate]:
        return [message for message in self.to_engine if isinstance(message, EngineGenerate)]

    def scores(self) -> list[EngineScore]:
        return [message for message in self.to_engine if isinstance(message, EngineScore)]

    def aborts(self) -> list[int]:
        return [message.id for message in self.to_engine if isinstance(message, EngineAbort)]

    def answers(self, client: bytes = CLIENT) -> list[Answer]:
        return self.front_end.answers(client)


def generate(
    label: str = "a",
    text: str = "hello",
    *,
    stream: bool = False,
    timeout: float | None = None,
    constraint: ConstraintSpec | None = None,
    token_healing: bool | None = None,
    **options: object,
) -> GenRequest:
    sampling = SamplingParams(**options)  # type: ignore[arg-type]  # validated by it
    return GenRequest(label, (Text(text),), sampling, stream, Origin(timeout=timeout), constraint, token_healing)


def ended(
    request_id: int,
    token_ids: list[int],
    *,
    reason: FinishReason = FinishReason.LENGTH,
    matched: str | int | None = None,
    text_bytes: int | None = None,
    cached: int = 0,
) -> Ended:
    length = len(token_ids) if text_bytes is None else text_bytes
    return Ended(request_id, token_ids, reason, matched, length, 6, cached, len(token_ids))
