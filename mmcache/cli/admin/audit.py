"""`mmcache audit`: what was done, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mmcache.cli.admin.options import Admin, JsonLines, Limit
from mmcache.cli.entries.keys import Config
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from rich.table import Table

    from mmcache.cli.admin.rows import Record


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

        listing = Listing("/v1/audit", RecordsPage, "before", _table)
        query = {"action": action, "actor": actor}
        show(listing, query, config=config, admin=admin, limit=limit, as_json=json)


def _table(rows: Sequence[Record]) -> Table:
    import msgspec  # noqa: PLC0415

    from mmcache.cli.admin.rows import table_of  # noqa: PLC0415
    from mmcache.cli.admin.text import when  # noqa: PLC0415

    return table_of(
        ("id", "at", "actor", "role", "action", "outcome", "detail"),
        [
            (
                str(row.id),
                when(row.at),
                row.actor,
                row.role,
                row.action,
                row.outcome,
                msgspec.json.encode(row.detail).decode(),
            )
            for row in rows
        ],
    )
