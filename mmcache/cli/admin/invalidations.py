"""`mmcache invalidations`: what was invalidated, and whom it waits for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mmcache.cli.admin.options import Admin, JsonLines, Limit
from mmcache.cli.entries.keys import Config
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from mmcache.cli.admin.layout import Item
    from mmcache.cli.admin.rows import FollowedInvalidation, Invalidation

_HEAD: Final = ("number", "at", "state", "by")


def invalidations(
    number: Annotated[
        int | None, typer.Argument(min=1, metavar="[NUMBER]", help="Only this one, and whom it waits for.")
    ] = None,
    limit: Limit = 100,
    admin: Admin = None,
    config: Config = None,
    json: JsonLines = False,
) -> None:
    """List invalidations, the newest first: those by this API, by clients and by `mmcache invalidate`.

    Those that count no more, since later ones cover them, are listed for a while.

    Asks the controller's admin API (controller.admin), by the token in MMCACHE_TOKEN or the file control.token_file
    where it wants one; any role will do.

    Exits with 0 if it answers, also if there are none; 1 if it does not, 2 for a wrong option, setting or token, or
    a number that is not known.
    """
    with reported("invalidations"), orderly_end():
        from mmcache.cli.admin.listing import Listing, show  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.cli.admin.rows import InvalidationsPage  # noqa: PLC0415

        if number is not None:
            _show_one(number, config=config, admin=admin, as_json=json)
            return
        listing = Listing("/v1/invalidations", InvalidationsPage, "before", _HEAD, _item)
        show(listing, {}, config=config, admin=admin, limit=limit, as_json=json)


def _show_one(number: int, *, config: Path | None, admin: str | None, as_json: bool) -> None:
    import msgspec  # noqa: PLC0415

    from mmcache.cli.admin.connection import AdminApi  # noqa: PLC0415
    from mmcache.cli.admin.listing import print_items  # noqa: PLC0415
    from mmcache.cli.admin.rows import FollowedInvalidation  # noqa: PLC0415
    from mmcache.config import load  # noqa: PLC0415

    api = AdminApi(load(config), admin, os.environ)
    one = api.get(f"/v1/invalidations/{number}", FollowedInvalidation)
    if as_json:
        typer.echo(msgspec.json.encode(one))
        return
    print_items(_HEAD, [_item(one)])
    _tell_sessions(one)


def _tell_sessions(one: FollowedInvalidation) -> None:
    from mmcache.cli.admin.text import printable  # noqa: PLC0415
    from mmcache.cli.plurals import counted  # noqa: PLC0415

    for session in one.awaited:
        typer.echo(printable(f"waits for {session.name} on {session.host}, {session.most_ms / 1000:.1f} s at most"))
    if (more := one.waiting - len(one.awaited)) > 0 and one.awaited:
        typer.echo(f"and for {more:,} more")
    if one.unbound:
        typer.echo(f"not waited for, as set to serve what may be stale: {counted(one.unbound, 'session')}")


def _item(row: Invalidation) -> Item:
    from mmcache.cli.admin.layout import Item, parts_of  # noqa: PLC0415
    from mmcache.cli.admin.text import when  # noqa: PLC0415
    from mmcache.cli.plurals import counted  # noqa: PLC0415

    state = "complete" if row.complete else f"waits for {counted(row.waiting, 'session')}"
    reason = (f"reason {row.reason}",) if row.reason else ()
    return Item((str(row.number), when(row.at), state, row.actor), (*parts_of(row.selector), *reason))
