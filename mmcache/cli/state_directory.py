"""A directory that one `mmcache up` at a time works in, and files that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from mmcache.cli.errors import ClusterError
from mmcache.cli.shortage import reason


def default_state_directory(environ: Mapping[str, str]) -> Path:
    """`mmcache` below XDG_STATE_HOME, or below `~/.local/state`."""
    home = environ.get("XDG_STATE_HOME", "")
    base = Path(home) if home.startswith("/") else Path.home() / ".local" / "state"  # relative: to be ignored, XDG says
    return base / "mmcache"


class StateDirectory:
    """Locked within a `with` block; made if it is not there, for this user only.

    The lock is the kernel's: it ends with the process, however that ends, so the file that carries it may lie there.

    Raises:
        ClusterError: on entry, another process has it, or it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))

    def __enter__(self) -> StateDirectory:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise ClusterError(f"state directory {self.path} is not a directory") from error
        except OSError as error:
            raise ClusterError(f"state directory {self.path} cannot be used: {reason(error)}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(self._lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ClusterError(f"state directory {self.path} is in use by another `mmcache up`, pid {owner}") from error
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(self._lock)
            raise ClusterError(f"state directory {self.path} cannot be used: {reason(error)}") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.ftruncate(self._lock, 0)
        os.close(self._lock)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it, or what was there before. Raises ClusterError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            draft.write_text(text)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ClusterError(f"{path} cannot be written: {reason(error)}") from error


def remove(path: Path) -> None:
    """Remove a file, if it is there. Raises ClusterError."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ClusterError(f"{path} cannot be removed: {error.strerror}") from error
