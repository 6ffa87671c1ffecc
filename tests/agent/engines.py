"""Stand-ins for an engine's scheduler: they ask, encode and drop, with an agent's process or with its service alone."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from cluster import wait_until
from serving import Serving, key_of

from mmcache import EmbeddingKey
from mmcache.agent.freshness import Freshness
from mmcache.agent.link import AgentLink
from mmcache.agent.messages import (
    AgentMessage,
    Ask,
    Drop,
    Encoded,
    EngineMessage,
    Figures,
    Granted,
    Item,
    Missing,
    Published,
    Ready,
    Waiting,
)
from mmcache.agent.service import WAITERS, Service
from mmcache.agent.staging import Staging
from mmcache.metrics import Counters

STAGING_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
SHAPE = (64, 128)
PATIENCE_S = 60.0
"""For what is to happen in any case, on a machine however busy."""

SOON_S = 60.0
"""For what takes a second or two on a machine that has nothing else to do."""

Word = TypeVar("Word", bound=AgentMessage)


def embedding_of(number: int) -> torch.Tensor:
    """What the encoder makes of an item: different for each."""
    return torch.full(SHAPE, float(number)) + torch.arange(SHAPE[1])


class Engine:
    """Asks for items under numbers of its own; each has the block of its number."""

    def __init__(self) -> None:
        name = secrets.token_hex()
        self._worker = Staging.open_as_worker(name, STAGING_BYTES, 0)
        self.staging = Staging.open_as_scheduler(name, STAGING_BYTES)
        self.said: dict[int, deque[AgentMessage]] = {}
        self.figures: dict[str, float] = {}
        self._last = 0

    def item(self, key: EmbeddingKey, **fields: Any) -> Item:
        """An item under the next number."""
        self._last += 1
        named = {
            "offset": (self._last * BLOCK_BYTES) % STAGING_BYTES,
            "nbytes": BLOCK_BYTES,
            "rows": SHAPE[0],
            "widths": [SHAPE[1]],
            "dtype": "float32",
            "claim": True,
            "wait_s": PATIENCE_S,
        }
        return Item(self._last, key, **{**named, **fields})

    def ask_for(self, items: Sequence[Item]) -> None:
        """All in one message, once the agent has read enough of what it was sent before."""
        wait_until(lambda: self.send(Ask(list(items))), timeout=PATIENCE_S, what="room for a message")

    def ask(self, name: int | str, **fields: Any) -> Item:
        """Ask for one item alone."""
        item = self.item(key_of(name), **fields)
        self.ask_for([item])
        return item

    def next(self, item: Item, timeout: float = PATIENCE_S) -> AgentMessage:
        """What the agent says of an item next."""
        deadline = time.monotonic() + timeout
        while not self.said.get(item.number):
            assert time.monotonic() < deadline, f"nothing was said of {item.number}"
            self.pump(0.05)
        return self.said[item.number].popleft()

    def expect(self, item: Item, kind: type[Word]) -> Word:
        """The same, of the kind that it must be."""
        message = self.next(item)
        assert isinstance(message, kind), message
        return message

    def pump(self, seconds: float) -> None:
        """Sort what comes within some seconds, if anything does."""
        for message in self.receive(seconds):
            if isinstance(message, Figures):
                self.figures = dict(message.figures)
            elif number := getattr(message, "number", None):
                self.said.setdefault(number, deque()).append(message)

    def embedding(self, item: Item, ready: Ready) -> torch.Tensor:
        """What is in an item's block."""
        assert self.staging.is_fresh(ready.epoch)
        view = self._worker.block(item.offset, ready.nbytes)
        return torch.frombuffer(view, dtype=getattr(torch, item.dtype)).view(ready.shape).clone()

    def encoded(self, item: Item, tensor: torch.Tensor) -> None:
        """Write an embedding into the block, and say so."""
        nbytes = tensor.numel() * tensor.itemsize
        view = self.staging.block(item.offset, nbytes)
        view[:] = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert self.send(Encoded(item.number, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), 1.5))

    def encode(self, item: Item, tensor: torch.Tensor) -> Published:
        """All that a granted item takes."""
        self.encoded(item, tensor)
        return self.expect(item, Published)

    def drop(self, *items: Item) -> None:
        assert self.send(Drop([item.number for item in items]))

    def ask_and_encode(self, name: int | str, tensor: torch.Tensor) -> Published:
        """Become the one that publishes an entry."""
        shape = tensor.shape
        dtype = str(tensor.dtype).removeprefix("torch.")
        item = self.ask(name, rows=shape[0], widths=[shape[1]], dtype=dtype)
        self.expect(item, Granted)
        return self.encode(item, tensor)

    def missing(self, item: Item) -> str:
        """Why it is missing."""
        return self.expect(item, Missing).reason

    def send(self, message: EngineMessage) -> bool:
        raise NotImplementedError

    def receive(self, seconds: float) -> list[AgentMessage]:
        raise NotImplementedError

    def close(self) -> None:
        self.staging.close()
        self._worker.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ServedEngine(Engine):
    """With the service in this process, on a cache of its own."""

    def __init__(self, serving: Serving, **client: Any) -> None:
        super().__init__()
        self.cache = serving.connect(**client)
        self._posted: deque[AgentMessage] = deque()
        self.freshness = Freshness(self.staging, self.cache._channel)
        self.service = Service(self.cache, self.staging, self.freshness, self._posted.append)

    def send(self, message: EngineMessage) -> bool:
        self.service.receive(message)
        return True

    def receive(self, seconds: float) -> list[AgentMessage]:
        deadline = time.monotonic() + seconds
        while not self._posted and time.monotonic() < deadline:
            time.sleep(0.002)
        return [self._posted.popleft() for _ in range(len(self._posted))]

    def forget_all(self) -> None:
        """Drop all that is under way."""
        table = self.service._table
        for number in list(table._wanted):
            self.send(Drop([number]))
        wait_until(lambda: len(table) == 0, timeout=PATIENCE_S, what="the last words")
        self.receive(0.0)
        self.said.clear()

    def close(self) -> None:
        self.freshness.end()
        self.cache.close()
        super().close()

    def count(self, name: str) -> float:
        """One of the cache's figures."""
        return self.cache.stats().get(name, 0)


class LinkedEngine(Engine):
    """With an agent's process."""

    def __init__(self, config: Path | str, *, start: bool = True) -> None:
        super().__init__()
        self.counters = Counters()
        self.link = AgentLink(self.staging, config, None, self.counters)
        if start:
            assert self.link.start(PATIENCE_S)

    @property
    def pid(self) -> int:
        """Of the agent that serves."""
        agent = self.link._keeper.agent
        assert agent is not None
        return agent.pid

    def send(self, message: EngineMessage) -> bool:
        return self.link.send(message)

    def receive(self, seconds: float) -> list[AgentMessage]:
        self.link.wait(seconds)
        return self.link.receive()

    def wait_for_agent(self) -> None:
        """Until there is one that serves; takes the death of the one before."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.link.agent_lives:
            assert time.monotonic() < deadline, "there is no agent"
            self.pump(0.05)
            self.link.take_death()

    def close(self) -> None:
        self.link.close()
        super().close()


def waits(engine: ServedEngine) -> int:
    """How many threads wait for other engines."""
    return WAITERS - engine.service._may_wait._value


def last_word(engine: Engine, item: Item) -> Ready | Missing:
    while not isinstance(message := engine.next(item), Ready | Missing):
        assert isinstance(message, Granted | Waiting)
    return message
