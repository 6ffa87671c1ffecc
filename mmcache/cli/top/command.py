"""`mmcache top` on the command line."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from mmcache.cli.admin.options import Admin, JsonLines
from mmcache.cli.entries.keys import Config
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from mmcache.cli.admin.connection import AdminApi
    from mmcache.cli.top.report import Report


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one interval and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=86_400.0, metavar="SECONDS", help="Look again so often.")
    ] = 1.0,
    admin: Admin = None,
    config: Config = None,
    json: JsonLines = False,
) -> None:
    """Show what the cache holds and what it saves, again every second, until Ctrl-C.

    Hit ratios of the last interval and since the controller's start; entries and bytes by state, tenant and model;
    evictions; what is under way. docs/operations.md says what each of them counts. Clients tell of their hits a
    quarter of controller.session_ttl late at most. Where the output is no terminal, each interval is printed below the
    one before.

    Asks the controller's admin API (controller.admin), by the token in MMCACHE_TOKEN or the file control.token_file
    where it wants one; any role will do. A controller that does not answer for a while is waited for.

    Exits with 1 if it does not answer at first, 2 for a wrong option, setting or token.
    """
    with reported("top"), orderly_end():
        from mmcache.cli.admin.connection import AdminApi  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.config import load  # noqa: PLC0415

        api = AdminApi(load(config), admin, os.environ)
        for report in _reports(api, interval, once=once):
            _print(report, api.url, as_json=json)


def _reports(api: AdminApi, interval: float, *, once: bool) -> Iterator[Report]:
    """One after the other, or the one of the first interval."""
    from mmcache.cli.errors import AdminUnavailable, InputError  # noqa: PLC0415
    from mmcache.cli.top.looks import look  # noqa: PLC0415
    from mmcache.cli.top.report import report, unanswered  # noqa: PLC0415

    before = look(api)
    last = report(before, None)
    if not once:
        yield last
    while True:
        time.sleep(interval)
        try:
            now = look(api)
        except (AdminUnavailable, InputError) as error:  # it is restarted, or has other tokens for a while
            if once:
                raise
            last = unanswered(last, time.time(), str(error))
        else:
            last, before = report(now, before, restarts=last.restarts), now
        yield last
        if once:
            return


def _print(report: Report, url: str, *, as_json: bool) -> None:
    import shutil  # noqa: PLC0415
    import sys  # noqa: PLC0415

    import msgspec  # noqa: PLC0415

    if as_json:
        typer.echo(msgspec.json.encode(report))
        return

    from mmcache.cli.top.screen import redrawn, rows_in, told  # noqa: PLC0415

    columns, height = shutil.get_terminal_size()
    if sys.stdout.isatty():
        typer.echo(redrawn(told(report, url, columns, most_rows=rows_in(height)), height), nl=False)
    else:
        typer.echo("\n".join([*told(report, url, columns), ""]))
