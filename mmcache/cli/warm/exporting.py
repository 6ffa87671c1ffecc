"""The work of `mmcache export`.

The number that goes with an entry is what keeps it from coming back after it was invalidated, so it has to be right
whatever happens meanwhile. The controller's list names an entry's generation; the client takes a mark, and then reads.
Where the mark is not behind the generation, what is read was published under it, or under a later one. In both cases
the generation is a number after which every invalidation of the key makes the file worthless.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mmcache.cli.admin.connection import AdminApi
from mmcache.cli.entries.connection import FAILURES, check_answers, word_for
from mmcache.cli.errors import AdminUnavailable
from mmcache.cli.warm import embedding_file
from mmcache.cli.warm.choosing import MOST_ENTRIES, Choice, Listed, Order, amount, listed
from mmcache.cli.warm.directory import ExportDirectory
from mmcache.cli.warm.embedding_file import MAX_FILE_BYTES, Record
from mmcache.cli.warm.telling import Progress
from mmcache.cli.warm.transfers import Job, Transfers, attached, pool_for, timeout_for
from mmcache.config import Settings
from mmcache.errors import ControllerUnavailable, InvalidEntry
from mmcache.key import store_name

if TYPE_CHECKING:
    from mmcache.client.cache import MMCache

_CHOOSING_TICK = 5_000


class Wanted(NamedTuple):
    """What is to be exported: `query` is the admin API's for entries, `most` 0 for all."""

    query: Mapping[str, object]
    order: Order
    most: int
    most_bytes: int | None


class Elsewhere(AdminUnavailable):
    """The admin API and the control port are not of one controller."""


def export(
    directory: Path, wanted: Wanted, settings: Settings, *, config: Path | None, admin: str | None, progress: Progress
) -> None:
    """Write what is wanted, as far as it is not there; `progress` counts it.

    Raises:
        InputError, ConfigError: the directory, a setting or the token is of no use.
        AdminUnavailable, StoreUnavailable, ControllerUnavailable, ClusterSilent: somebody does not answer.
        NotWritten: the directory has no room.
    """
    api = AdminApi(settings, admin, os.environ)
    with ExportDirectory(directory) as target:
        chosen = _choose(api, wanted, progress)
        if chosen.left_out:
            progress.count("left_out", chosen.left_out)
        if not len(chosen):
            progress.complete = True
            return
        pool_bytes = pool_for(min(chosen.largest, MAX_FILE_BYTES), settings.client.pool_bytes)
        check_answers(settings)
        with attached(config, pool_bytes, progress.say) as cache:
            transfers = Transfers(cache, pool_bytes=pool_bytes)
            one = _Export(cache, transfers, target, progress)
            target.check_lineage(transfers.patiently(one.lineage))
            progress.begin(len(chosen))
            transfers.carry_out(one.jobs(chosen), progress.tick)
            progress.complete = True


def _choose(api: AdminApi, wanted: Wanted, progress: Progress) -> Choice:
    most = min(wanted.most, MOST_ENTRIES) if wanted.most else MOST_ENTRIES
    choice = Choice(wanted.order, most_entries=most, most_bytes=wanted.most_bytes)
    progress.say("listing entries")
    for number, entry in enumerate(listed(api, wanted.query), start=1):
        choice.offer(entry)
        if number % _CHOOSING_TICK == 0:
            progress.say(f"listing entries: {number:,} so far")
    return choice


class _Export:
    """Carries entries from the cluster to a directory, each by itself."""

    def __init__(self, cache: MMCache, transfers: Transfers, target: ExportDirectory, progress: Progress) -> None:
        self._cache = cache
        self._transfers = transfers
        self._target = target
        self._progress = progress

    def lineage(self) -> str:
        """Of the controller that the client has a session with. Raises ControllerUnavailable."""
        return self._mark()[0]

    def jobs(self, chosen: Choice) -> Iterator[Job]:
        """One for each entry."""
        for entry in chosen.in_order():
            yield Job(entry.nbytes, functools.partial(self._carry, entry))

    def _carry(self, entry: Listed) -> None:
        try:
            self._transfers.patiently(functools.partial(self._export, entry))
        except FAILURES as error:
            self._progress.failed(word_for(error), f"{entry.name}: {error}")
        except InvalidEntry as error:
            self._progress.failed("unwritable", f"{entry.name}: {error}")

    def _export(self, entry: Listed) -> None:
        lineage, head = self._mark()
        name = store_name(entry.key, lineage=lineage, generation=entry.generation)
        if name != entry.name:
            raise Elsewhere(
                f"the admin API lists {entry.name}, which is not of the controller at control.address (lineage "
                f"{lineage}): --admin or control.admin is another one's, or it lost its state meanwhile. "
                "Correct it, or run it again"
            )
        if self._target.holds(name):
            self._progress.count("there_already")
            return
        if entry.nbytes > MAX_FILE_BYTES:
            self._progress.failed("too_large", f"{name}: has {entry.nbytes:,} bytes; {MAX_FILE_BYTES:,} are exported")
            return
        found = self._cache.get(entry.key, timeout=timeout_for(entry.nbytes)) if head >= entry.generation else None
        if found is None or self._mark()[0] != lineage:
            self._progress.count("gone")
            return
        record = Record(
            format=1,
            key=entry.key,
            lineage=lineage,
            generation=entry.generation,
            tensors=tuple(found.tensors),
            cost_ms=amount(entry.cost_ms),
            created=amount(entry.created),
            uses=amount(entry.uses),
            meta=embedding_file.packed(found.meta),
        )
        self._target.add(name, embedding_file.encode(record, found.tensors))
        self._progress.done(entry.nbytes)

    def _mark(self) -> tuple[str, int]:
        mark = self._cache.mark()
        if mark.number < 0:
            raise ControllerUnavailable("no fresh session with the controller")
        return mark.lineage, mark.number
