"""The work of `mmcache warm`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from mmcache.cli.entries import files
from mmcache.cli.entries.connection import check_answers
from mmcache.cli.entries.metadata import meta_of_file
from mmcache.cli.errors import InputError
from mmcache.cli.warm import embedding_file
from mmcache.cli.warm.embedding_file import Peek
from mmcache.cli.warm.importing import check_lineages, contents_of, since_of
from mmcache.cli.warm.publishing import Contents, Publishing, Source, note_room
from mmcache.cli.warm.stored import Stored
from mmcache.cli.warm.telling import Progress
from mmcache.cli.warm.transfers import Transfers, attached, pool_for
from mmcache.client.results import Mark
from mmcache.config import Settings
from mmcache.errors import ControllerUnavailable, InvalidKey
from mmcache.key import EmbeddingKey, Scope

MM_HASH: Final = "mm_hash"
"""Where a file's metadata may name its item; else its name without `.safetensors` does."""


class _Looked(NamedTuple):
    """A file that can be published, as far as can be told without reading its tensors."""

    path: Path
    key: EmbeddingKey
    peek: Peek


def warm(
    paths: Sequence[Path], scope: Scope, cost_ms: float, settings: Settings, *, config: Path | None, progress: Progress
) -> None:
    """Publish files under keys of one scope; `progress` counts them.

    Files that are no exports are the operator's word that they are current, as of now: what is invalidated from here on
    is not published.

    Raises:
        ConfigError: a setting is of no use.
        StoreUnavailable, ControllerUnavailable, ClusterSilent: somebody does not answer.
    """
    looked = _look(paths, scope, progress)
    if not looked:
        progress.complete = True
        return
    pool_bytes = pool_for(max(one.peek.nbytes for one in looked), settings.client.pool_bytes)
    check_answers(settings)
    with attached(config, pool_bytes, progress.say) as cache, Stored(settings) as stored:
        head = cache.mark()
        if head.number < 0:
            raise ControllerUnavailable("no fresh session with the controller: `mmcache doctor` tells more")
        transfers = Transfers(cache, pool_bytes=pool_bytes)
        note_room(settings, (one.peek.nbytes for one in looked), progress)
        progress.begin(len(looked))
        sources = [_source(one, cost_ms, head) for one in looked if _is_current(one, head, progress)]
        Publishing(cache, transfers, stored, progress).publish(sources)
        progress.complete = True


def _look(paths: Sequence[Path], scope: Scope, progress: Progress) -> list[_Looked]:
    looked: list[_Looked] = []
    first: dict[EmbeddingKey, Path] = {}
    for path in paths:
        try:
            peek = embedding_file.peek(path)
            key = _key(path, peek, scope)
        except InputError as error:
            progress.failed("unreadable", str(error))
            continue
        if key in first:
            progress.failed(
                "same_key", f"{path}: has the mm_hash of {first[key]}, {key.mm_hash!r}: publish one of them"
            )
            continue
        first[key] = path
        looked.append(_Looked(path, key, peek))
    return looked


def _key(path: Path, peek: Peek, scope: Scope) -> EmbeddingKey:
    """Raises InputError."""
    if peek.record is not None:
        key = peek.record.key
        differ = [name for name in Scope.__struct_fields__ if getattr(key, name) != getattr(scope, name)]
        if differ:
            raise InputError(
                f"{path}: is an export of another {', '.join(differ)} than the options say: correct them, or use "
                "`mmcache import`, which needs none"
            )
        return key
    try:
        return EmbeddingKey(mm_hash=peek.metadata.get(MM_HASH, path.stem), **msgspec.structs.asdict(scope))
    except InvalidKey as error:
        raise InputError(f"{path}: {error}") from error


def _is_current(one: _Looked, head: Mark, progress: Progress) -> bool:
    if (record := one.peek.record) is None:
        return True
    try:
        check_lineages(Counter([record.lineage]), {record.lineage: record.generation}, head, None, one.path)
    except InputError as error:
        progress.failed("another_lineage", str(error))
        return False
    return True


def _source(one: _Looked, cost_ms: float, head: Mark) -> Source:
    path, key, (record, _, nbytes) = one
    if record is not None:
        return Source(path, key, since_of(record, head, None), nbytes, functools.partial(contents_of, path, record))
    return Source(path, key, head, nbytes, functools.partial(_contents, path, cost_ms))


def _contents(path: Path, cost_ms: float) -> Contents:
    """Raises InputError."""
    tensors, metadata = files.read(path)
    metadata.pop(MM_HASH, None)
    return Contents(tensors, meta_of_file(metadata, path), cost_ms)
