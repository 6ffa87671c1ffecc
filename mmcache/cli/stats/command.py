"""`mmcache stats` on the command line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmcache.cli.entries.keys import Config
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from mmcache.cli.stats.observer import Observation


def stats(
    config: Config = None,
    watch: Annotated[
        float | None, typer.Option(min=0.1, max=86_400.0, metavar="SECONDS", help="Look again so often, until Ctrl-C.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each look, and nothing else.")] = False,
) -> None:
    """Show the controller's tables and counters, the store's segments, and whether a client here could serve.

    Opens a session and attaches to the store, as an engine would. What the figures count is in docs/architecture.md.
    Of segments it can tell where the setting store.metrics names the master's HTTP port; `mmcache up` writes it.

    Exits with 0 if a client could serve, 1 if not (and says why), 2 for a wrong option or setting.
    """
    with reported("stats"), orderly_end():
        serves = True
        for observation in _looks(config, watch):
            serves = observation.serves
            _print(observation, as_json=json, again=watch is not None)
        if not serves:
            from mmcache.cli.defaults import tell_of_defaults  # noqa: PLC0415 (`mmcache --help` needs none of it)

            tell_of_defaults(config, store=True)
            raise typer.Exit(1)


def _looks(config: Path | None, watch: float | None) -> Iterator[Observation]:
    from rich.console import Console  # noqa: PLC0415 (`mmcache --help` needs none of it)

    from mmcache.cli.stats.observer import Observer  # noqa: PLC0415
    from mmcache.config import load  # noqa: PLC0415

    settings = load(config)
    status = Console(stderr=True).status("connecting")
    with Observer(settings) as observer:
        while True:
            with status:
                observation = observer.look()
            yield observation
            if watch is None:
                return
            time.sleep(watch)


def _print(observation: Observation, *, as_json: bool, again: bool) -> None:
    import msgspec  # noqa: PLC0415

    if as_json:
        typer.echo(msgspec.json.encode(observation))
        return

    from rich.console import Console  # noqa: PLC0415

    from mmcache.cli.stats.tables import tables  # noqa: PLC0415

    console = Console()
    if again and console.is_terminal:
        console.clear()
    for table in tables(observation):
        console.print(table, soft_wrap=isinstance(table, str), highlight=False)
