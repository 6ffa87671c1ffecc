"""A directory of exports: each file in it is whole, and one export at a time writes there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

from mmcache.cli.doctor.machine import size
from mmcache.cli.errors import InputError
from mmcache.cli.warm import embedding_file
from mmcache.cli.warm.embedding_file import SUFFIX
from mmcache.errors import MMCacheError
from mmcache.key import store_name

_DRAFT: Final = ".draft"
_MARGIN_BYTES: Final = 1 << 20
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class NotWritten(MMCacheError):
    """A file could not be written, and is not there; the message says why, and what to do."""


class ExportDirectory:
    """For one export, as a context manager. Safe to use from several threads.

    Args:
        path: made if it is not there.

    Raises:
        InputError: it cannot be used; the message says why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(exist_ok=True)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"{path}: cannot be used as a directory: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_drafts()
        except OSError as error:
            os.close(self._descriptor)
            if isinstance(error, BlockingIOError):
                raise InputError(f"{path}: another export is writing there") from error
            raise InputError(f"{path}: cannot be written to: {error.strerror}") from error

    def __enter__(self) -> ExportDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # each file was made durable by itself; their names are now
            os.fsync(self._descriptor)
        os.close(self._descriptor)

    def check_lineage(self, lineage: str) -> None:
        """Raise InputError if there are files from the world of another controller."""
        for path in files_in(self.path):
            if not path.name.startswith(f"mmc1.{lineage}."):
                raise InputError(
                    f"{self.path}: {path.name} is there, which is no entry of this controller (lineage {lineage}). "
                    "Give a directory that is empty, or holds exports of this controller alone"
                )

    def holds(self, name: str) -> bool:
        """Whether there is a whole file of the entry that the store knows by this name."""
        try:
            found = embedding_file.peek(self.path / f"{name}{SUFFIX}").record
        except InputError:
            return False
        return found is not None and name == store_name(found.key, lineage=found.lineage, generation=found.generation)

    def add(self, name: str, content: bytes) -> None:
        """Write a file, in place of one of the same name, so that others see all of it or none.

        Raises:
            NotWritten: there is no room, or the file system fails.
        """
        filesystem = os.statvfs(self._descriptor)
        left = filesystem.f_bavail * filesystem.f_frsize
        if left < len(content) + _MARGIN_BYTES:
            raise NotWritten(
                f"the file system of {self.path} has {size(left)} left, too little for the next entry of "
                f"{size(len(content))}; {_what_to_do(self.path)}"
            )
        draft = self.path / f".{name}{_DRAFT}"
        try:
            try:
                with draft.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(self.path / f"{name}{SUFFIX}")
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            advice = _what_to_do(self.path) if error.errno in _NO_ROOM else "what is there already stays"
            raise NotWritten(f"{self.path}: an entry cannot be written: {error.strerror}; {advice}") from error

    def _remove_drafts(self) -> None:
        """Of an export that was killed: nobody else has the lock."""
        with os.scandir(self.path) as found:
            drafts = [one.path for one in found if one.name.startswith(".mmc1.") and one.name.endswith(_DRAFT)]
        for draft in drafts:
            os.unlink(draft)


def files_in(path: Path) -> Iterator[Path]:
    """The safetensors files of a directory, in no order. Raises InputError if it cannot be read."""
    try:
        with os.scandir(path) as found:
            for one in found:
                if one.name.endswith(SUFFIX) and not one.name.startswith("."):
                    yield Path(one.path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read as a directory: {error.strerror}") from error


def _what_to_do(path: Path) -> str:
    return (
        "what is there already stays. Make room, or export less (--limit-bytes), "
        f"and run it again: it goes on where it ended. `df {path}` and `ulimit -f` tell"
    )
