"""Transfers of a command: so many at once, so many bytes under way, and an end for all of them on every path."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from mmcache.cli.entries.connection import FAILURES, word_for
from mmcache.cli.logs import only_errors_from
from mmcache.errors import MMCacheError

if TYPE_CHECKING:
    from mmcache.client.cache import MMCache

Result = TypeVar("Result")

AT_ONCE: Final = 4
PATIENCE_S: Final = 30.0
"""How long a cluster may be silent in the middle of a command."""
_TRIES: Final = 3
_PAUSE_S: Final = 0.25
_TICK_S: Final = 0.5
_MAY_PASS: Final = frozenset({"unavailable", "uncommitted", "not_fresh"})
_LEAST_TIMEOUT_S: Final = 10.0
_SLOWEST_BYTES_PER_S: Final = 50e6
_POOL_MARGIN: Final = 1 << 20


class ClusterSilent(MMCacheError):
    """The cluster does not answer any more; what was done so far stays."""


class Job(NamedTuple):
    """One transfer, and the bytes that it may hold in memory."""

    nbytes: int
    work: Callable[[], None]


class Transfers:
    """Runs transfers through one cache."""

    def __init__(self, cache: MMCache, *, pool_bytes: int) -> None:
        self._cache = cache
        self._most_bytes = pool_bytes // 2
        self.stopping = threading.Event()
        """Set once they are being ended: nobody waits for a silent cluster any more."""

    def carry_out(self, jobs: Iterable[Job], tick: Callable[[], None]) -> None:
        """Do them all; what one raises ends the rest, once those that run have ended, and so does an interruption.

        Args:
            jobs: taken as they are needed.
            tick: called in this thread now and then.
        """
        executor = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="mmcache-transfer")
        under_way: dict[Future[None], int] = {}

        def end_some() -> None:
            done, _ = wait(under_way, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            for one in done:
                del under_way[one]
                one.result()
            tick()

        try:
            for job in jobs:
                while under_way and (
                    len(under_way) >= AT_ONCE or sum(under_way.values()) + job.nbytes > self._most_bytes
                ):
                    end_some()
                under_way[executor.submit(job.work)] = job.nbytes
            while under_way:
                end_some()
        finally:
            self.stopping.set()
            executor.shutdown(wait=True, cancel_futures=True)

    def patiently(self, attempt: Callable[[], Result]) -> Result:
        """What a call of the cache returns; while the cluster is silent it is made again.

        Raises:
            ClusterSilent: that lasts too long, or the command is being ended.
            MMCacheError: what else went wrong; it is about this entry alone.
        """
        until = time.monotonic() + PATIENCE_S
        tries = 0
        while True:
            try:
                return attempt()
            except FAILURES as error:
                tries += 1
                silent = self._is_silent()
                if not silent and (tries >= _TRIES or word_for(error) not in _MAY_PASS):
                    raise
                if time.monotonic() >= until or self.stopping.wait(_PAUSE_S):
                    raise ClusterSilent(
                        f"the cluster does not answer any more: {error}. `mmcache doctor` tells more. "
                        "Run it again when it does: it goes on where it ended"
                    ) from error

    def _is_silent(self) -> bool:
        stats = self._cache.stats()
        return bool(
            stats["store.open"]
            or stats["controller.in_doubt"]
            or not stats["store.attached"]
            or not stats["session.fresh"]
        )


def timeout_for(nbytes: int) -> float:
    """Seconds for a transfer: no request waits for it."""
    return _LEAST_TIMEOUT_S + nbytes / _SLOWEST_BYTES_PER_S


def pool_for(largest: int, configured: int) -> int:
    """Bytes of a pool in which the largest entry finds room while others are under way."""
    return max(configured, 2 * largest + _POOL_MARGIN)


@contextlib.contextmanager
def attached(config: Path | None, pool_bytes: int, say: Callable[[str], None]) -> Iterator[MMCache]:
    """A strict cache, connected, that keeps nothing and never serves stale.

    Args:
        config: as `MMCache.connect` takes it.
        pool_bytes: of its pool.
        say: told what is being done.

    Raises:
        StoreUnavailable, ControllerUnavailable: it cannot serve.
    """
    from mmcache.client.cache import MMCache  # noqa: PLC0415 (torch: seconds, and what fails early needs it not)

    with only_errors_from("mmcache.client"):
        say("connecting")
        own = {"strict": True, "on_stale": "miss", "local_entries": False, "tell_uses": False, "pool_bytes": pool_bytes}
        with contextlib.closing(MMCache.connect(config, **own)) as cache:
            yield cache
            say("disconnecting")
