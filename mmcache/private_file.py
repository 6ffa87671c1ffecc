"""Files with secrets in them, which nobody but their owner may read, or that say who may do what; and tokens."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mmcache.errors import ConfigError

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{1,512}", re.ASCII)
"""What a bearer token may be made of (RFC 6750)."""
_MAX_TOKEN_FILE_BYTES: Final = 4096


def read_private(path: Path, most_bytes: int, where: str = "") -> str:
    """The text of a file that nobody else may read. Raises ConfigError, as `read_guarded` does."""
    return read_guarded(path, most_bytes, 0o077, "others can read it or write to it; chmod 600", where)


def read_guarded(path: Path, most_bytes: int, forbidden: int, otherwise: str, where: str = "") -> str:
    """The text of a file whose mode has none of the forbidden bits.

    Raises ConfigError, which begins with `where` (or the path): it cannot be read, is open to others (then `otherwise`,
    which ends in a command for the path), is too large, or not UTF-8.
    """
    where = where or str(path)
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{where}: is no file")
            if stat.S_IMODE(status.st_mode) & forbidden:
                raise ConfigError(f"{where}: {otherwise} {path}")
            text = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from error
    if len(text) > most_bytes:
        raise ConfigError(f"{where}: larger than {most_bytes:,} bytes")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8") from error


def version_of(path: Path) -> Sequence[int] | None:
    """What changes with a file, however it is replaced; None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)


def _without_waiting(path: str, flags: int) -> int:
    """Opens what is no file, a pipe without a writer, say, as well."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_token(path: Path) -> str:
    """The token that is a file's only line. Raises ConfigError, without the token in its message."""
    return checked_token(read_private(path, _MAX_TOKEN_FILE_BYTES).strip(), str(path))


def checked_token(text: str, where: str) -> str:
    """A bearer token. Raises ConfigError, without the token in its message."""
    if not _TOKEN.fullmatch(text):
        raise ConfigError(f"{where}: must hold one token, of 1 to 512 of A-Z a-z 0-9 . _ ~ + / = -")
    return text
