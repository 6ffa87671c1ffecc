"""Where the time of a call goes: chosen functions note when they begin and end, in the caller and on I/O threads."""

from __future__ import annotations

import functools
import operator
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from mmcache.client import publish
from mmcache.client.calls import Call, IoThreads
from mmcache.client.publish import Publisher
from mmcache.client.reads import Reader
from mmcache.client.transfers import Transfer
from mmcache.control.channel import ControlChannel
from mmcache.memory.pool import RegisteredPool
from mmcache.store.binding import Binding
from mmcache.store.mooncake import MooncakeStore

REST = "the rest of the call"
TOTAL = "all of it"
HAND_OVER = "to the I/O thread"
HAND_BACK = "back to the caller"
WAIT = "wait"
"""What the caller spends on waiting is `HAND_OVER` until an I/O thread begins, and `HAND_BACK` when it has ended."""


class Watched(NamedTuple):
    """A function that is a stage, or a part of one; its owner is a class or a module."""

    owner: object
    name: str
    stage: str


LOCAL_HIT = (
    Watched(Reader, "wanted", "names of the keys"),
    Watched(RegisteredPool, "find", "local table"),
    Watched(Reader, "_take_local", "tensors"),
)
_HAND_OFF = (Watched(IoThreads, "_enqueue", HAND_OVER), Watched(Call, "wait", WAIT))


def store_read(binding: Binding) -> Sequence[Watched]:
    """The stages of a read that finds nothing local."""
    return (
        Watched(Reader, "wanted", "names of the keys"),
        Watched(RegisteredPool, "allocate_many", "room in the pool"),
        *_HAND_OFF,
        Watched(MooncakeStore, "read_into", "our part of the store client"),
        Watched(type(binding), "batch_get_into", "transfer (raw client)"),
        Watched(Transfer, "_read_and_verify", "verification"),
        Watched(RegisteredPool, "keep_many", "local table"),
        Watched(Reader, "_accept", "tensors"),
    )


def publication(binding: Binding) -> Sequence[Watched]:
    """The stages of a publication."""
    return (
        Watched(Reader, "wanted", "names of the keys"),
        Watched(Publisher, "prepare", "checks and layout"),
        Watched(RegisteredPool, "allocate_many", "room in the pool"),
        Watched(publish, "_fill", "copy, checksum and prefix"),
        *_HAND_OFF,
        Watched(MooncakeStore, "put_from", "our part of the store client"),
        Watched(type(binding), "batch_put_from", "transfer (raw client)"),
        Watched(type(binding), "batch_is_exist", "confirmation (raw client)"),
        Watched(ControlChannel, "commit", "commit to the controller"),
        Watched(Publisher, "_end_put", "local table"),
    )


Event = tuple[int, int, str, bool]
"""When (ns), in which thread, which stage, and whether it began (or ended). Not a class: those cost more to make."""


class Stages:
    """Times the stages of calls. A stage's time is its own, without that of the stages inside it.

    Each look at the clock takes part of a µs, which counts with what is timed.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = watched
        self._events: list[Event] = []

    def median_us(self, call: Callable[[], object], *, runs: int, warm_up: int = 20) -> dict[str, float]:
        """Median µs of each stage, in the order in which they came, and of the whole.

        Medians do not add up exactly. What a run returns is dropped after it is timed.
        """
        taken: dict[str, list[int]] = defaultdict(list)
        with self._watching():
            for run in range(warm_up + runs):
                self._events.clear()
                started = time.perf_counter_ns()
                kept = call()
                ended = time.perf_counter_ns()
                del kept
                if run >= warm_up:
                    for stage, spent in spent_ns(self._events, started, ended).items():
                        taken[stage].append(spent)
        return {stage: statistics.median(values) / 1e3 for stage, values in taken.items()}

    @contextmanager
    def _watching(self) -> Iterator[None]:
        originals = [getattr(owner, name) for owner, name, _ in self._watched]
        for (owner, name, stage), original in zip(self._watched, originals, strict=True):
            setattr(owner, name, self._timed(original, stage))
        try:
            yield
        finally:
            for (owner, name, _), original in zip(self._watched, originals, strict=True):
                setattr(owner, name, original)

    def _timed(self, function: Callable[..., object], stage: str) -> Callable[..., object]:
        note, now, thread = self._events.append, time.perf_counter_ns, threading.get_ident

        @functools.wraps(function)
        def timed(*arguments: object, **named: object) -> object:
            note((now(), thread(), stage, True))
            try:
                return function(*arguments, **named)
            finally:
                note((now(), thread(), stage, False))

        return timed


def spent_ns(events: Sequence[Event], started: int, ended: int) -> dict[str, int]:
    """What each stage of a call took, given what its thread and others noted.

    While another thread is in a stage the caller waits for it, so the time is that stage's.
    """
    caller = threading.get_ident()
    stacks: dict[int, list[str]] = {caller: [REST]}
    spent: dict[str, int] = {}
    handed_over = False
    last = started
    in_order = sorted((event for event in events if event[0] <= ended), key=operator.itemgetter(0))
    for at_ns, thread, stage, begins in [*in_order, (ended, caller, REST, False)]:
        elsewhere = [stack for other, stack in stacks.items() if stack and other != caller]
        at_work = (elsewhere or [stacks[caller]])[0][-1]
        if at_work == WAIT:
            at_work = HAND_BACK if handed_over else HAND_OVER
        spent[at_work] = spent.get(at_work, 0) + at_ns - last
        last = at_ns
        handed_over = handed_over or thread != caller
        stack = stacks.setdefault(thread, [])
        if begins:
            stack.append(stage)
        elif stack:
            stack.pop()
    rest = spent.pop(REST)
    return {**spent, REST: rest, TOTAL: ended - started}
