"""`mmcache audit`: what was done, and by whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mmcache.cli.admin.options import Admin, JsonLines, Limit
from mmcache.cli.entries.keys import Config
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from mmcache.cli.admin.layout import Item
    from mmcache.cli.admin.rows import Record

_HEAD: Final = ("id", "at", "action", "outcome", "role", "actor")


def audit(
    action: Annotated[str | None, typer.Option("--action", metavar="WORD", help="Only this, as invalidate.")] = None,
    actor: Annotated[
        str | None, typer.Option("--actor", metavar="NAME", help="Only by the token of this name.")
    ] = None,
    limit: Limit = 100,
    admin: Admin = None,
    config: Config = None,
    json: JsonLines = False,
) -> None:
    """List what was done by the admin API, the newest first.

    It is kept where controller.state is. Asks the admin API (controller.admin), by the token in MMCACHE_TOKEN or the
    file control.token_file where it wants one; any role will do.

    Exits with 0 if it answers, also if there is nothing; 1 if it does not, 2 for a wrong option, setting or token.
    """
    with reported("audit"), orderly_end():
        from mmcache.cli.admin.listing import Listing, show  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.cli.admin.rows import RecordsPage  # noqa: PLC0415

        listing = Listing("/v1/audit", RecordsPage, "before", _HEAD, _item)
        query = {"action": action, "actor": actor}
        show(listing, query, config=config, admin=admin, limit=limit, as_json=json)


def _item(row: Record) -> Item:
    from mmcache.cli.admin.layout import Item  # noqa: PLC0415
    from mmcache.cli.admin.text import when  # noqa: PLC0415

    return Item((str(row.id), when(row.at), row.action, row.outcome, row.role, row.actor), tuple(_parts(row.detail)))


def _parts(detail: Mapping[str, Any]) -> Iterator[str]:
    import msgspec  # noqa: PLC0415

    from mmcache.cli.admin.layout import parts_of  # noqa: PLC0415

    for name, value in detail.items():
        if name == "selector" and isinstance(value, dict):
            yield from parts_of(value)
        else:
            yield f"{name} {msgspec.json.encode(value).decode()}"
