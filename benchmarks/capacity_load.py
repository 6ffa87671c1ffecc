"""Processes that ask for, or publish, more than a store can hold; each embedding names its key, and each is looked at.

The requests are those of the policy study (`benchmarks.policy_traces`: half of them for items seen once, the others by
Zipf's law), scaled down so that the items that are asked for have so many bytes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from benchmarks.crew import Wire
from benchmarks.policy_replay import replay
from benchmarks.policy_traces import PREFIX_BYTES, Kind, Trace, synthetic
from mmcache import EmbeddingKey, MMCache
from mmcache.config import load as load_settings
from mmcache.store.allocation import allocated
from mmcache.store.base import Outcome
from mmcache.store.mooncake import MooncakeStore

PROCESSES: Final = 4
POOL_BYTES: Final = 48 << 20
ELEMENT_BYTES: Final = 4
FOUND: Final = -1.0
"""In place of what a computation took."""


class Load(NamedTuple):
    """What is asked for, by all processes together."""

    footprint: int
    """Bytes of all items that are asked for in the first `seconds`."""
    seconds: float
    more_seconds: float
    """How long it goes on after that."""
    rate: float
    """Requests a second."""
    ranks: int
    """Items that are asked for again and again."""
    kind: Kind
    cost_scale: float
    """An encode time, to that of the study."""
    seed: int

    @property
    def trace(self) -> Trace:
        """All requests, in the order in which they are due."""
        requests = round(self.rate * (self.seconds + self.more_seconds))
        whole = synthetic(self.kind, drifting=False, seed=self.seed, requests=requests, ranks=self.ranks)
        items = np.unique(whole.requests[: round(self.rate * self.seconds)])
        scale = (self.footprint - PREFIX_BYTES * len(items)) / (whole.nbytes[items] - PREFIX_BYTES).sum()
        elements = ((whole.nbytes - PREFIX_BYTES) * scale / ELEMENT_BYTES).astype(np.int64).clip(1)
        return whole._replace(nbytes=elements * ELEMENT_BYTES + PREFIX_BYTES, cost_ms=whole.cost_ms * self.cost_scale)


class Request(NamedTuple):
    """One that was answered; times are `time.monotonic()`, in seconds."""

    began: float
    ended: float
    item: int
    cost_ms: float
    """What it took to compute, or FOUND."""


def key_of(item: int) -> EmbeddingKey:
    return EmbeddingKey("benchmark", "capacity", f"item-{item}")


def embedding_of(item: int, nbytes: int) -> torch.Tensor:
    """Of an object of so many bytes: each of its elements is the number of its item."""
    return torch.full(((nbytes - PREFIX_BYTES) // ELEMENT_BYTES,), item, dtype=torch.int32)


def is_of(tensor: torch.Tensor, item: int, nbytes: int) -> bool:
    """Whether it is what this item's must be."""
    elements = (nbytes - PREFIX_BYTES) // ELEMENT_BYTES
    return tensor.dtype == torch.int32 and tensor.numel() == elements and bool((tensor == item).all())


def _end_when_told(wire: Wire, ended: threading.Event) -> None:
    wire.hear()
    ended.set()


def ask(wire: Wire, number: int, config: str, fields: Sequence[Any]) -> None:
    """A process of the load: every PROCESSES-th request when it is due, or late, until it is told to end.

    Says how late it is once it has made those of the first `seconds`.
    """
    load = Load(*fields)
    trace = load.trace
    requests: list[Request] = []
    wrong: list[str] = []
    errors: list[str] = []
    with MMCache.connect(config, local_entries=False, pool_bytes=POOL_BYTES, name=f"capacity-{number}") as cache:
        wire.tell(ready=True)
        began = wire.hear()["began"]
        ended = threading.Event()
        threading.Thread(target=_end_when_told, args=(wire, ended), daemon=True).start()
        told = False
        for place in range(number, len(trace.requests), PROCESSES):
            if not told and place >= load.rate * load.seconds:
                told = True
                wire.tell(late=max(0.0, time.monotonic() - began - load.seconds))
            if ended.wait(max(0.0, began + place / load.rate - time.monotonic())):
                break
            item = int(trace.requests[place])
            encoder = _Encoder(item, int(trace.nbytes[item]), float(trace.cost_ms[item]))
            started = time.monotonic()
            try:
                embedding = cache.get_or_compute(key_of(item), encoder)
            except Exception as error:  # noqa: BLE001 - what may not happen: it is reported, and the load goes on
                errors.append(repr(error))
                continue
            if embedding.source != "computed":
                encoder.cost_ms = FOUND
            requests.append(Request(started, time.monotonic(), item, encoder.cost_ms))
            if not is_of(embedding.tensor, item, encoder.nbytes):
                wrong.append(f"item {item}: {embedding}, {embedding.tensor.flatten()[:4].tolist()}")
        ended.wait()
        wire.tell(requests=requests, wrong=wrong, errors=errors, counts=dict(cache.stats()))


class _Encoder:
    """Stands for an encoder: sleeps for as long as it would take."""

    def __init__(self, item: int, nbytes: int, cost_ms: float) -> None:
        self.nbytes = nbytes
        self.cost_ms = cost_ms
        self._item = item

    def __call__(self) -> torch.Tensor:
        began = time.perf_counter()
        time.sleep(self.cost_ms / 1e3)
        embedding = embedding_of(self._item, self.nbytes)
        self.cost_ms = (time.perf_counter() - began) * 1e3  # what the client sees, too
        return embedding


def publish(wire: Wire, number: int, config: str, fields: Sequence[Any]) -> None:
    """A process that publishes what nobody had: so many bytes as soon as possible, then so many a second."""
    load = Load(*fields)
    nbytes = load.trace.nbytes.tolist()
    with MMCache.connect(config, local_entries=False, pool_bytes=POOL_BYTES, name=f"capacity-{number}") as cache:
        items = iter(range(number, len(nbytes), PROCESSES))

        def put() -> Iterator[int]:
            for item in items:
                result = cache.put(key_of(item), embedding_of(item, nbytes[item]))
                counts[result.reason or result.status] += 1
                yield nbytes[item]

        counts: Counter[str] = Counter()
        wire.tell(ready=True)
        while (heard := wire.hear()).get("nbytes"):
            counts.clear()
            began, spent = time.monotonic(), 0
            for one in put():
                spent += one
                if spent >= heard["nbytes"]:
                    break
                if heard["seconds"]:
                    time.sleep(max(0.0, began + heard["seconds"] * spent / heard["nbytes"] - time.monotonic()))
            wire.tell(counts=counts, seconds=time.monotonic() - began, nbytes=spent)


def remove_behind(wire: Wire, _: int, config: str) -> None:
    """A process that removes objects without telling the controller."""
    store = MooncakeStore.from_settings(load_settings(config).store, region_bytes=1 << 16, timeout=10.0)
    wire.tell(ready=True)
    while names := wire.hear().get("names"):
        outcomes = store.remove(names, deadline=time.monotonic() + 5.0)
        wire.tell(removed=[name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.OK])
    store.close()


def simulated(load: Load, requests: Sequence[Request], policy: str, capacity: float) -> float:
    """The share of these requests, in the order in which they were answered, that hit in a cache of so many bytes.

    An entry counts for what it takes of a segment, and its encode time is what it was when it was computed.
    """
    trace = load.trace
    cost_ms = trace.cost_ms.copy()
    for one in requests:
        if one.cost_ms >= 0.0:
            cost_ms[one.item] = one.cost_ms
    asked = np.array([one.item for one in sorted(requests, key=lambda one: one.ended)], dtype=np.int64)
    nbytes = np.array([allocated(one) for one in trace.nbytes.tolist()], dtype=np.int64)
    return (
        1.0 - replay(trace._replace(requests=asked, nbytes=nbytes, cost_ms=cost_ms), policy, int(capacity)).miss_ratio
    )


def hit_ratio(requests: Sequence[Request]) -> float:
    """The share of them that was found."""
    return sum(one.cost_ms < 0.0 for one in requests) / len(requests)


def served_from_before(requests: Sequence[Request], when: float) -> list[int]:
    """Items that were found by a request that began after `when`, though nobody computed them after that."""
    computed: dict[int, float] = {}
    for one in requests:
        if one.cost_ms >= 0.0 and one.ended > when:
            computed[one.item] = min(one.began, computed.get(one.item, one.began))
    return [
        one.item
        for one in requests
        if one.cost_ms < 0.0 and one.began > when and computed.get(one.item, math.inf) > one.ended
    ]
