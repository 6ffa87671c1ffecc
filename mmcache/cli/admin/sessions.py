"""`mmcache sessions`: who is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mmcache.cli.admin.options import Admin, JsonLines, Limit
from mmcache.cli.entries.keys import Config
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from mmcache.cli.admin.layout import Item
    from mmcache.cli.admin.rows import Session

_HEAD: Final = ("state", "heard", "trusted for", "heeds", "client")


def sessions(admin: Admin = None, limit: Limit = 0, config: Config = None, json: JsonLines = False) -> None:
    """List clients' sessions: also those that have ended, but whose clients may not know yet.

    Asks the controller's admin API (controller.admin), by the token in MMCACHE_TOKEN or the file control.token_file
    where it wants one; any role will do.

    Exits with 0 if it answers, also if there are none; 1 if it does not, 2 for a wrong option, setting or token.
    """
    with reported("sessions"), orderly_end():
        from mmcache.cli.admin.listing import Listing, show  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.cli.admin.rows import SessionsPage  # noqa: PLC0415

        listing = Listing("/v1/sessions", SessionsPage, "after", _HEAD, _item)
        show(listing, {}, config=config, admin=admin, limit=limit, as_json=json)


def _item(row: Session) -> Item:
    from mmcache.cli.admin.layout import Item  # noqa: PLC0415

    state = ("serves what may be stale" if row.serves_stale else "live") if row.live else "ended"
    return Item(
        (state, f"{row.heard_s_ago:.1f} s ago", f"{row.trusted_for_s:.1f} s", str(row.acknowledged), row.name),
        (f"host {row.host}", f"pid {row.pid}", f"session {row.session}"),
    )
