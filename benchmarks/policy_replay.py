"""A trace through a cache of so many bytes: our policies, and libcachesim's implementations of the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from benchmarks.policy_traces import Trace
from mmcache.controller.eviction import POLICIES, Policy

REFERENCES: Final = {"lru": "LRU", "s3fifo": "S3FIFO"}
"""Of our policies those that libcachesim has as well, by the name of its class."""


class Outcome(NamedTuple):
    """What a cache did."""

    miss_ratio: float
    """Of all requests, first uses included."""
    lost_ms: float
    """Encode time of all misses but the first use of each item."""


def has_reference() -> bool:
    """Whether libcachesim is installed."""
    return importlib.util.find_spec("libcachesim") is not None


def replay(trace: Trace, contender: str, capacity: int) -> Outcome:
    """Run a trace through `lru`, `s3fifo`, `s3cost`, or libcachesim's (`libcachesim lru`)."""
    library, _, name = contender.rpartition(" ")
    misses = _replay_reference if library else _replay_ours
    seen = bytearray(len(trace.nbytes))
    costs = trace.cost_ms.tolist()
    count, lost_ms = 0, 0.0

    def missed(item: int) -> None:
        nonlocal count, lost_ms
        count += 1
        if seen[item]:
            lost_ms += costs[item]
        seen[item] = True

    misses(trace, name, capacity, missed)
    return Outcome(count / len(trace.requests), lost_ms)


def _replay_ours(trace: Trace, name: str, capacity: int, missed: Callable[[int], None]) -> None:
    policy: Policy = POLICIES[name]()  # type: ignore[index]
    names = [item.to_bytes(64, "big") for item in range(len(trace.nbytes))]
    sizes, costs = trace.nbytes.tolist(), trace.cost_ms.tolist()
    here = bytearray(len(names))
    for item in trace.requests.tolist():
        if here[item]:
            policy.access(names[item])
            continue
        missed(item)
        nbytes = sizes[item]
        if nbytes > capacity:
            continue
        while policy.nbytes + nbytes > capacity and (victim := policy.choose()) is not None:
            policy.remove(victim)
            here[int.from_bytes(victim, "big")] = False
        policy.insert(names[item], nbytes, costs[item])
        here[item] = True


def _replay_reference(trace: Trace, name: str, capacity: int, missed: Callable[[int], None]) -> None:
    import libcachesim  # noqa: PLC0415 - only where it is installed

    cache: Any = getattr(libcachesim, REFERENCES[name])(cache_size=capacity, hashpower=18)
    request = libcachesim.Request()
    sizes = trace.nbytes.tolist()
    for item in trace.requests.tolist():
        request.obj_id = item
        request.obj_size = sizes[item]
        if not cache.get(request):
            missed(item)
