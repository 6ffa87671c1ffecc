"""What goes wrong on the command line, and how it is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from mmcache.errors import ConfigError, InvalidEntry, InvalidKey, MMCacheError


class ClusterError(MMCacheError):
    """A cluster cannot start, or cannot go on; the message is for people."""


class PartEnded(ClusterError):
    """One of its processes ended by itself."""


class AdminUnavailable(MMCacheError):
    """The controller's admin API gives no answer that can be used."""


class InputError(MMCacheError):
    """An option, or a file that it names, is of no use; the message says which and what to do."""


_USAGE = (ConfigError, InputError, InvalidEntry, InvalidKey)


@contextlib.contextmanager
def reported(command: str) -> Iterator[None]:
    """End a command with our errors' message on stderr and a status: 2 for wrong settings and input, 1 for the rest."""
    try:
        yield
    except MMCacheError as error:
        typer.echo(f"mmcache {command}: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, _USAGE) else 1) from error
