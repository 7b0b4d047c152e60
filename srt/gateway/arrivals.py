"""Messages of peers on their way into the gateway: long new texts are tokenized beside the loop, in order.

A hundred pages take the tokenizer tens of milliseconds. Meanwhile the answers of everybody else would wait, so such a
text is encoded by a thread first, and its tokens are there when the gateway asks for them. Messages of the same peer
that come behind it wait for it: an abort never overtakes its request.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...lang.protocol import GenRequest, Hint, Locate, ScoreRequest, ToBackend
from .front_end import Client
from .gateway import Gateway

log = logging.getLogger("umbel.gateway")


class Arrivals:
    """The way of messages to a gateway, on one loop.

    Args:
        after: is called when messages that had to wait have been received, so that what they led to is sent.
    """

    def __init__(self, gateway: Gateway, after: Callable[[], None]) -> None:
        self._gateway = gateway
        self._after = after
        self._waiting: dict[Client, deque[ToBackend]] = {}  # of peers with a text in the works
        self._tasks: set[asyncio.Task[None]] = set()
        # One thread: more of them would take the cores from the model.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="umbel-tokenizer")
        self.counters: Counter[str] = Counter()

    def receive(self, client: Client, message: ToBackend) -> None:
        """Now, or when what is before it has been received."""
        queue = self._waiting.get(client)
        if queue is not None:
            queue.append(message)
        elif self._gateway.is_long(message):
            self._waiting[client] = deque([message])
            task = asyncio.get_running_loop().create_task(self._work_off(client), name="long prompts of a client")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._gateway.receive(client, message)

    def client_lost(self, client: Client) -> None:
        """What waits of this client is forgotten."""
        self._waiting.pop(client, None)
        self._gateway.client_lost(client)

    async def _work_off(self, client: Client) -> None:
        queue = self._waiting[client]
        while queue:
            await self._prepare(queue[0])
            if self._waiting.get(client) is not queue:  # the client has gone meanwhile
                return
            self._gateway.receive(client, queue.popleft())
            self._after()
        del self._waiting[client]

    async def _prepare(self, message: ToBackend) -> None:
        """Whatever fails here fails again when the gateway receives the message, and is answered there."""
        if not isinstance(message, GenRequest | ScoreRequest | Hint | Locate) or not self._gateway.is_long(message):
            return
        encoder = self._gateway.encoder.salted(message.origin.salt)
        try:
            texts = encoder.new_texts(message.prompt)
            ids = await asyncio.get_running_loop().run_in_executor(self._pool, encoder.encode_texts, texts)
            encoder.learn(texts, ids)
            self.counters["tokenized_beside_the_loop"] += 1
        except Exception as error:
            log.info("a long text was not prepared: %s", type(error).__name__)
