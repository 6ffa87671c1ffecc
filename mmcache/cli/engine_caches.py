"""Caches that engines hold of their own, cleared after an invalidation: options, and what is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mmcache.cli.errors import InputError
from mmcache.cli.plurals import counted

if TYPE_CHECKING:
    from mmcache.config import EnginesSettings
    from mmcache.engines import ClearedEngine

NOT_CLEARED_STATUS = 3
"""Of a command whose invalidation is complete, but not every engine's caches were cleared."""

Engine = Annotated[
    list[str] | None,
    typer.Option(
        "--engine", metavar="URL", help="With --wait: then clear the caches of this engine (may be repeated)."
    ),
]
Engines = Annotated[bool, typer.Option("--engines", help="With --wait: then clear those of all of engines.urls.")]


def urls_of(given: Sequence[str] | None, configured: bool, settings: EnginesSettings) -> tuple[str, ...]:
    """The engines that the options name, each once. Raises InputError."""
    from mmcache.setting_kinds import BadValue, Urls  # noqa: PLC0415 (`mmcache --help` needs none of it)

    if configured and not settings.urls:
        raise InputError("--engines: the setting engines.urls names none; set it, or give each by --engine URL")
    kind = Urls()
    try:
        urls = kind.check([*(given or ()), *(settings.urls if configured else ())])
    except BadValue as error:
        raise InputError(f"--engine {error}") from error
    assert isinstance(urls, tuple)  # noqa: S101 (for the type)
    return urls


def clear_all(urls: Sequence[str], token: str | None, settings: EnginesSettings, *, quiet: bool) -> list[ClearedEngine]:
    """Clear them, and tell of progress on stderr."""
    from rich.console import Console  # noqa: PLC0415

    from mmcache.engines import clear  # noqa: PLC0415

    with Console(stderr=True, quiet=quiet).status(f"clearing the caches of {counted(len(urls), 'engine')}"):
        return clear(urls, timeout=settings.timeout, token=token)


def tell(engines: Sequence[ClearedEngine]) -> None:
    """A line for each engine, and one for each cache that was not cleared."""
    for engine in engines:
        typer.echo(f"engine {engine.url}: {'cleared' if engine.ok else 'not cleared'}")
        for result in engine.results:
            if not result.ok:
                typer.echo(f"  {result.endpoint}: {result.detail}")
