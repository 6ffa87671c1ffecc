"""Looks at a controller and its store from outside, while both work: how much is used, and whether both agree."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from mmcache import http_call
from mmcache.store.launch import memory

SAMPLE_S: Final = 0.5
LOOK_S: Final = 0.1
PATIENCE_S: Final = 60.0
_TIMEOUT_S: Final = 10.0
_MOST_BYTES: Final = 64 << 20
_PAGE: Final = 1000


class Sample(NamedTuple):
    """The store at one moment, in bytes."""

    at: float
    capacity: int
    master_used: int
    """As its master says: the objects' own bytes."""
    used: int
    """As the controller says: what the objects take of their segment, which is up to an eighth more."""


class Difference(NamedTuple):
    """What the directory and the store do not agree about."""

    false: set[str]
    """Entries of which there are no bytes."""
    unknown: set[str]
    """Objects of this lineage that are no entries."""

    def __bool__(self) -> bool:
        return bool(self.false or self.unknown)


class Outside:
    """A controller's admin API, at a URL without a token, and its store's master, at its HTTP port."""

    def __init__(self, admin: str, metrics: str) -> None:
        self._admin = admin
        self.metrics = metrics

    def figures(self) -> dict[str, int]:
        """What the controller counts. Raises NoAnswer."""
        figures: dict[str, int] = self._ask("/v1/stats")["figures"]
        return figures

    def lineage(self) -> str:
        """The controller's. Raises NoAnswer."""
        return str(self._ask("/v1/stats")["lineage"])

    def entries(self) -> dict[str, float]:
        """When each entry was published, in seconds since 1970, by the store's name of it. Raises NoAnswer."""
        found: dict[str, float] = {}
        page: dict[str, Any] = {"next": ""}
        while (cursor := page["next"]) is not None:
            page = self._ask(f"/v1/entries?limit={_PAGE}" + (f"&cursor={cursor}" if cursor else ""))
            found.update((entry["name"], entry["created"]) for entry in page["entries"])
        return found

    def objects(self) -> set[str]:
        """All names that the store can read. Raises NoAnswer."""
        return objects_of(self.metrics)

    def difference(self) -> Difference:
        """What differs while both change: only what is so before and after the other was asked counts."""
        mine = f"mmc1.{self.lineage()}."
        objects, entries, objects_after = self.objects(), self.entries(), self.objects()
        entries_after = self.entries()
        there = {name for name, created in entries.items() if entries_after.get(name) == created}
        return Difference(
            there - objects_after,
            {name for name in objects & objects_after if name.startswith(mine)} - entries.keys() - entries_after.keys(),
        )

    def _ask(self, path: str) -> dict[str, Any]:
        answer = http_call.call("GET", self._admin + path, timeout=_TIMEOUT_S, most_bytes=_MOST_BYTES)
        if answer.status != 200:
            raise http_call.NoAnswer(f"{path}: status {answer.status}: {answer.body[:200]!r}")
        found: dict[str, Any] = json.loads(answer.body)
        return found


class Watch:
    """Samples how much of a store is used; a context manager."""

    def __init__(self, outside: Outside) -> None:
        self.samples: list[Sample] = []
        self._outside = outside
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capacity-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, began: float, ended: float) -> list[Sample]:
        """Those of that time."""
        return [sample for sample in self.samples if began <= sample.at < ended]

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            with contextlib.suppress(http_call.NoAnswer):  # it is killed now and then
                used = self._outside.figures().get("store_used_bytes")  # it has to ask first, after its start
                store = memory(self._outside.metrics)
                if used is not None and store is not None and store.capacity:
                    self.samples.append(Sample(time.monotonic(), store.capacity, store.used, used))


def objects_of(metrics: str) -> set[str]:
    """All names that the store with the master's HTTP port there can read. Raises NoAnswer."""
    answer = http_call.call("GET", f"http://{metrics}/get_all_keys", timeout=_TIMEOUT_S, most_bytes=_MOST_BYTES)
    return set(answer.body.decode().split())


def seconds_until(condition: Callable[[], object], since: float) -> float:
    """How long after `since` it holds; whoever does not answer does not count. Infinite: not within a minute."""
    while time.monotonic() < since + PATIENCE_S:
        with contextlib.suppress(http_call.NoAnswer):
            if condition():
                return time.monotonic() - since
        time.sleep(LOOK_S)
    return float("inf")
