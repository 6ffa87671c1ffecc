"""The work of `mmcache import`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from mmcache.cli.entries.connection import check_answers
from mmcache.cli.errors import InputError
from mmcache.cli.plurals import counted
from mmcache.cli.warm import embedding_file
from mmcache.cli.warm.choosing import Rank, hotness
from mmcache.cli.warm.directory import files_in
from mmcache.cli.warm.embedding_file import Record
from mmcache.cli.warm.publishing import Contents, Publishing, Source, note_room
from mmcache.cli.warm.stored import Stored
from mmcache.cli.warm.telling import Progress
from mmcache.cli.warm.transfers import Transfers, attached, pool_for
from mmcache.client.results import Mark
from mmcache.config import Settings
from mmcache.errors import ControllerUnavailable

MOST_FILES: Final = 1_000_000
_TICK: Final = 1_000


class _Found(NamedTuple):
    """One file; little, since there may be a million."""

    rank: Rank
    name: str
    nbytes: int


class _Directory(NamedTuple):
    """What was found in one: the files, how many of them are of each lineage, and the last number of each."""

    files: list[_Found]
    lineages: Counter[str]
    last: dict[str, int]


def import_files(
    directory: Path, settings: Settings, *, config: Path | None, trusted: str | None, progress: Progress
) -> None:
    """Publish the exports of a directory, the hottest first; `progress` counts them.

    Args:
        trusted: a lineage whose entries are current, as the operator says, unless they were invalidated in this one.

    Raises:
        InputError, ConfigError: nothing is there, a setting is of no use, or entries are of another lineage.
        StoreUnavailable, ControllerUnavailable, ClusterSilent: somebody does not answer.
    """
    found = _look(directory, progress)
    if not found.files:
        if not progress.any_failed:  # a first start finds nothing yet, and a volume that is not mounted neither
            progress.note(f"{directory}: there are no exports here")
        progress.complete = True
        return
    pool_bytes = pool_for(max(one.nbytes for one in found.files), settings.client.pool_bytes)
    check_answers(settings)
    with attached(config, pool_bytes, progress.say) as cache, Stored(settings) as stored:
        transfers = Transfers(cache, pool_bytes=pool_bytes)
        head = cache.mark()
        if head.number < 0:
            raise ControllerUnavailable("no fresh session with the controller: `mmcache doctor` tells more")
        check_lineages(found.lineages, found.last, head, trusted, directory)
        note_room(settings, (one.nbytes for one in found.files), progress)
        progress.begin(len(found.files))
        Publishing(cache, transfers, stored, progress).publish(
            _sources(directory, found.files, head, trusted, progress)
        )
        progress.complete = True


def check_lineages(
    lineages: Counter[str], last: dict[str, int], head: Mark, trusted: str | None, where: object
) -> None:
    """Raise InputError if nobody can know what of these entries was invalidated meanwhile.

    Args:
        lineages: how many entries are of each.
        last: the largest number that an entry of each goes with.
        head: where the controller's sequence is now.
        trusted: the operator's word, see `import_files`.
        where: the entries are, for the message.
    """
    foreign = sorted(lineages.keys() - {head.lineage, trusted})
    if foreign:
        listed = ", ".join(f"{counted(lineages[one], 'entry', 'entries')} of lineage {one}" for one in foreign[:5])
        raise InputError(
            f"{where}: {listed}, while this controller's is {head.lineage}: another one's, or it lost its state. What "
            "was invalidated since, nobody knows, so nothing was published. If you know that these entries are current "
            "(the same weights, nothing withdrawn), say so by `mmcache import --trust-lineage "
            f"{foreign[0]}`; else remove them"
        )
    if last.get(head.lineage, 0) > head.number:
        raise InputError(
            f"{where}: entries go with number {last[head.lineage]} of lineage {head.lineage}, and the controller has "
            f"given only {head.number}: its state is older than the export. Do not restore an older copy of "
            "controller.state: move it away, and see docs/operations.md"
        )


def since_of(record: Record, head: Mark, trusted: str | None) -> Mark:
    """Up to which an entry is known to be current; one of a lineage that is trusted, unless this one invalidated it."""
    if record.lineage != head.lineage and record.lineage == trusted:
        return Mark(head.lineage, 0)
    return Mark(record.lineage, record.generation)


def contents_of(path: Path, record: Record) -> Contents:
    """What is published of an export that was looked at before. Raises InputError."""
    file = embedding_file.read(path, record)
    return Contents(file.tensors, file.meta, record.cost_ms)


def _look(directory: Path, progress: Progress) -> _Directory:
    files: list[_Found] = []
    lineages: Counter[str] = Counter()
    last: dict[str, int] = {}
    for number, path in enumerate(files_in(directory)):
        if number >= MOST_FILES:
            raise InputError(f"{directory}: has more than {MOST_FILES:,} files; import parts of it")
        if number % _TICK == 0:
            progress.say(f"looking at files: {number:,} so far")
        try:
            record, _, nbytes = embedding_file.peek(path)
        except InputError as error:
            progress.failed("unreadable", str(error))
            continue
        if record is None:
            progress.failed("no_export", f"{path}: is no export: `mmcache warm` and `mmcache put` take such files")
            continue
        files.append(_Found(hotness(record.cost_ms, record.uses, record.created), path.name, nbytes))
        lineages[record.lineage] += 1
        last[record.lineage] = max(last.get(record.lineage, 0), record.generation)
    files.sort(reverse=True)
    return _Directory(files, lineages, last)


def _sources(
    directory: Path, files: list[_Found], head: Mark, trusted: str | None, progress: Progress
) -> Iterator[Source]:
    """Looks at each file once more: what was kept of them all is little."""
    for one in files:
        path = directory / one.name
        try:
            record = embedding_file.peek(path).record
        except InputError as error:
            progress.failed("unreadable", str(error))
            continue
        if record is None:
            progress.failed("unreadable", f"{path}: was replaced meanwhile: run it again")
            continue
        read = functools.partial(contents_of, path, record)
        yield Source(path, record.key, since_of(record, head, trusted), one.nbytes, read)
