"""What the machine has run out of, for messages: the parts of a cluster say it in words of their own, or not at all."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Final

import psutil

_LITTLE_BYTES: Final = 64 << 10
"""With less than that on the file system, a part cannot write its log."""
_LITTLE_MEMORY_BYTES: Final = 64 << 20
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def shortages(directory: Path) -> list[str]:
    """What may have ended a part that works in `directory`, each with what to do about it."""
    found = []
    filesystem = os.statvfs(directory)
    left = filesystem.f_bavail * filesystem.f_frsize
    if left < _LITTLE_BYTES:
        found.append(f"the file system of {directory} is full ({left >> 10} KiB left): {_MAKE_ROOM}")
    if filesystem.f_files and not filesystem.f_favail:
        found.append(f"the file system of {directory} has no inode left: {_MAKE_ROOM}")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        found.append(
            f"a process may have {limit >> 20:,} MiB of addresses only (ulimit -v): each part takes some GiB of them, "
            "and the owner --segment more; raise the limit"
        )
    available = psutil.virtual_memory().available
    if available < _LITTLE_MEMORY_BYTES:
        found.append(
            f"this machine has {available >> 20} MiB of memory left: end something, or ask for less (--segment)"
        )
    return found


def reason(error: OSError) -> str:
    """What the system says is wrong with a file and, when its file system is full, what to do."""
    return f"{error.strerror}; {_MAKE_ROOM}" if error.errno in _FULL else str(error.strerror)


_MAKE_ROOM: Final = "remove something there, or choose another place (--state-dir, --ready-file)"
