"""Publishes files: what the store does not have yet, and nothing that was invalidated since it was exported."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from mmcache.cli.doctor.machine import size
from mmcache.cli.entries.connection import FAILURES, advice_for, word_for
from mmcache.cli.errors import InputError
from mmcache.cli.warm.stored import Stored
from mmcache.cli.warm.telling import Progress
from mmcache.cli.warm.transfers import Job, Transfers, timeout_for
from mmcache.client.results import Mark
from mmcache.config import Settings
from mmcache.control.messages import INVALIDATED
from mmcache.errors import EntryDropped, InvalidEntry
from mmcache.key import EmbeddingKey, store_name
from mmcache.store import launch
from mmcache.store.allocation import allocated

if TYPE_CHECKING:
    from mmcache.client.cache import MMCache

_TOGETHER: Final = 64
"""Of these the controller is asked at once what it knows."""


class Contents(NamedTuple):
    """What is published of a file."""

    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, object]
    cost_ms: float


class Source(NamedTuple):
    """A file to be published.

    Args:
        key: under which.
        since: up to which its entry is known to be current.
        nbytes: its size.
        read: reads it; raises InputError, which names the file.
    """

    path: Path
    key: EmbeddingKey
    since: Mark
    nbytes: int
    read: Callable[[], Contents]


def note_room(settings: Settings, sizes: Iterable[int], progress: Progress) -> None:
    """Say so where entries of these sizes are more than the store has room for; where that is not known, nothing."""
    memory = None if settings.store.metrics is None else launch.memory(settings.store.metrics)
    needed = sum(allocated(nbytes) for nbytes in sizes)
    if memory is not None and needed > memory.capacity:
        progress.note(
            f"these need {size(needed)}, and the store has {size(memory.capacity)}: what comes last finds no room as "
            "long as what came first is leased, or takes its place. Publish less, or lend the store more memory"
        )


class Publishing:
    """Carries files to the cluster, each by itself."""

    def __init__(self, cache: MMCache, transfers: Transfers, stored: Stored, progress: Progress) -> None:
        self._cache = cache
        self._transfers = transfers
        self._stored = stored
        self._progress = progress

    def publish(self, sources: Iterable[Source]) -> None:
        """Publish those that are not there; counted as `published`, `there_already`, `invalidated` or failed.

        Raises:
            ClusterSilent: the cluster does not answer any more.
        """
        self._transfers.carry_out(self._jobs(iter(sources)), self._progress.tick)

    def _jobs(self, sources: Iterator[Source]) -> Iterator[Job]:
        while some := list(itertools.islice(sources, _TOGETHER)):
            there = self._there([source.key for source in some])
            for source in some:
                if source.key in there:
                    self._progress.count("there_already")
                else:
                    yield Job(source.nbytes, functools.partial(self._carry, source))

    def _there(self, keys: list[EmbeddingKey]) -> set[EmbeddingKey]:
        """Which the controller knows and the store has. What it knew in vain is published again."""
        known = self._transfers.patiently(lambda: self._cache.lookup(keys))
        lineage = self._cache.mark().lineage
        if not lineage:
            return set()
        found = [one for one in known if one is not None]
        sizes = self._stored.sizes([store_name(one.key, lineage=lineage, generation=one.generation) for one in found])
        return {one.key for one, nbytes in zip(found, sizes, strict=True) if nbytes == one.nbytes}

    def _carry(self, source: Source) -> None:
        try:
            contents = source.read()
            self._transfers.patiently(
                lambda: self._cache.put(
                    source.key,
                    (contents.tensors, contents.meta),
                    cost_ms=contents.cost_ms,
                    since=source.since,
                    timeout=timeout_for(source.nbytes),
                )
            )
        except InputError as error:
            self._progress.failed("unreadable", str(error))
        except InvalidEntry as error:
            self._progress.failed("invalid", f"{source.path}: {error}")
        except FAILURES as error:
            reason = word_for(error)
            if isinstance(error, EntryDropped) and reason == INVALIDATED:
                self._progress.count(INVALIDATED)
            else:
                self._progress.failed(reason, f"{source.path}: {error}. {advice_for(reason)}".strip())
        else:
            self._progress.done(source.nbytes)
