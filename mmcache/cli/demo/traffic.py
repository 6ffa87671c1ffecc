"""Which requests there are and where each goes next; no I/O, so that what is sent is decided in one place."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from mmcache.cli.demo.photographs import Photograph
from mmcache.cli.demo.protocol import Command, Encode, Failed, Missed, Read, RequestAnswer, Served

SEED: Final = 7


class Request(NamedTuple):
    """One photograph, the encoder that gets it and the prefill process that reads what became of it."""

    photograph: Photograph
    encoder: str
    prefill: str


def make_requests(
    photographs: Sequence[Photograph], count: int, *, encoders: Sequence[str], prefills: Sequence[str]
) -> list[Request]:
    """`count` requests in a fixed random order: every photograph once, as far as they go, and again by popularity.

    The n-th photograph is asked for again with weight 1/n, as popular pictures are, so that requests for one overlap.
    """
    chance = random.Random(SEED)  # noqa: S311  (a repeatable order, no secret)
    wanted = list(photographs[:count])
    weights = [1 / rank for rank in range(1, len(wanted) + 1)]
    wanted += chance.choices(wanted, weights, k=count - len(wanted))
    chance.shuffle(wanted)
    return [Request(photograph, chance.choice(encoders), chance.choice(prefills)) for photograph in wanted]


class Router:
    """Sends each request to its encoder and then to its prefill process, with a bounded number in hand at each.

    An answer that is not `Served` ends its request.
    """

    def __init__(self, requests: Sequence[Request], *, concurrency: int) -> None:
        self._requests = requests
        self._concurrency = concurrency
        self._queues: dict[str, deque[Command]] = {}
        self._in_hand: dict[str, int] = {}
        self._unread: set[int] = set()
        self.open = len(requests)
        self.encoded: list[Served] = []
        self.read: list[Served] = []
        self.unserved: list[Missed | Failed] = []
        for number, request in enumerate(requests):
            photograph = request.photograph
            self._queue(request.encoder, Encode(number, str(photograph.path), photograph.mm_hash))

    def _queue(self, worker: str, command: Command) -> None:
        self._queues.setdefault(worker, deque()).append(command)
        self._in_hand.setdefault(worker, 0)

    def to_send(self) -> list[tuple[str, Command]]:
        """The commands to send now, in order, and to whom."""
        sends: list[tuple[str, Command]] = []
        for worker, waiting in self._queues.items():
            while waiting and self._in_hand[worker] < self._concurrency:
                self._in_hand[worker] += 1
                sends.append((worker, waiting.popleft()))
        return sends

    def answered(self, worker: str, answer: RequestAnswer) -> None:
        """Takes a worker's answer.

        Raises:
            KeyError, IndexError: it was asked nothing of the kind.
        """
        self._in_hand[worker] -= 1
        request = self._requests[answer.request]
        if not isinstance(answer, Served):
            self.unserved.append(answer)
            self.open -= 1
        elif answer.request in self._unread:
            self._unread.remove(answer.request)
            self.read.append(answer)
            self.open -= 1
        else:
            self._unread.add(answer.request)
            self.encoded.append(answer)
            self._queue(request.prefill, Read(answer.request, answer.key))
