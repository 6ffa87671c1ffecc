"""`mmcache pins`: what is kept from eviction, and until when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mmcache.cli.admin.options import Admin, JsonLines, Limit
from mmcache.cli.entries.keys import Config
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from mmcache.cli.admin.layout import Item
    from mmcache.cli.admin.rows import Pin

_HEAD: Final = ("id", "until", "by")


def pins(limit: Limit = 100, admin: Admin = None, config: Config = None, json: JsonLines = False) -> None:
    """List pins, the newest first: those by the admin API, by clients and by `mmcache pin`.

    Asks the controller's admin API (controller.admin), by the token in MMCACHE_TOKEN or the file control.token_file
    where it wants one; any role will do.

    Exits with 0 if it answers, also if there are none; 1 if it does not, 2 for a wrong option, setting or token.
    """
    with reported("pins"), orderly_end():
        from mmcache.cli.admin.listing import Listing, show  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.cli.admin.rows import PinsPage  # noqa: PLC0415

        listing = Listing("/v1/pins", PinsPage, "before", _HEAD, _item)
        show(listing, {}, config=config, admin=admin, limit=limit, as_json=json)


def _item(row: Pin) -> Item:
    from mmcache.cli.admin.layout import Item, parts_of  # noqa: PLC0415
    from mmcache.cli.admin.text import when  # noqa: PLC0415

    reason = (f"reason {row.reason}",) if row.reason else ()
    return Item((str(row.id), when(row.until), row.actor), (*parts_of(row.selector), *reason))
