"""`mmcache sessions`: who is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmcache.cli.admin.options import Admin, JsonLines, Limit
from mmcache.cli.entries.keys import Config
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from rich.table import Table

    from mmcache.cli.admin.rows import Session


def sessions(admin: Admin = None, limit: Limit = 0, config: Config = None, json: JsonLines = False) -> None:
    """List clients' sessions: also those that have ended, but whose clients may not know yet.

    Asks the controller's admin API (controller.admin), by the token in MMCACHE_TOKEN or the file control.token_file
    where it wants one; any role will do.

    Exits with 0 if it answers, also if there are none; 1 if it does not, 2 for a wrong option, setting or token.
    """
    with reported("sessions"), orderly_end():
        from mmcache.cli.admin.listing import Listing, show  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.cli.admin.rows import SessionsPage  # noqa: PLC0415

        listing = Listing("/v1/sessions", SessionsPage, "after", _table)
        show(listing, {}, config=config, admin=admin, limit=limit, as_json=json)


def _table(rows: Sequence[Session]) -> Table:
    from mmcache.cli.admin.rows import table_of  # noqa: PLC0415

    return table_of(
        ("client", "host", "pid", "session", "state", "heeds", "heard", "trusted for"),
        [
            (
                row.name,
                row.host,
                str(row.pid),
                row.session,
                ("serves what may be stale" if row.serves_stale else "live") if row.live else "ended",
                str(row.acknowledged),
                f"{row.heard_s_ago:.1f} s ago",
                f"{row.trusted_for_s:.1f} s",
            )
            for row in rows
        ],
    )
