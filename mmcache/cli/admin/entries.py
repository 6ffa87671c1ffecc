"""`mmcache entries`: what the controller knows of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from mmcache.cli.admin.options import Admin, JsonLines, Limit
from mmcache.cli.admin.selecting import Lora, MmHash, Modality, Model, NoLora, Tenant, Version, fields_of, query_of
from mmcache.cli.entries.keys import Config
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from mmcache.cli.admin.layout import Item
    from mmcache.cli.admin.rows import Entry

_HEAD: Final = ("published", "size", "encoded in", "modality")


def entries(
    model: Model = None,
    version: Version = None,
    lora: Lora = None,
    no_lora: NoLora = False,
    modality: Modality = None,
    mm_hash: MmHash = None,
    tenant: Tenant = None,
    producer: Annotated[
        str | None, typer.Option("--producer", metavar="NAME", help="Only by this client (client.name).")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only published since 2026-12-31T08:00Z, or 2h ago.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Only published until then.")] = None,
    limit: Limit = 100,
    admin: Admin = None,
    config: Config = None,
    json: JsonLines = False,
) -> None:
    """List entries that match all that is given. The store may have evicted one meanwhile: `mmcache get` tells.

    Times are in ISO 8601, of UTC unless they say otherwise (2026-12-31T08:00+01:00), or how long ago (90s, 5min, 2h).

    Asks the controller's admin API (controller.admin), by the token in MMCACHE_TOKEN or the file control.token_file
    where it wants one; any role will do.

    Exits with 0 if it answers, also if nothing matches; 1 if it does not, 2 for a wrong option, setting or token.
    """
    with reported("entries"), orderly_end():
        from mmcache.cli.admin.listing import Listing, show  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.cli.admin.rows import EntriesPage  # noqa: PLC0415

        fields = fields_of(model, version, lora, no_lora, modality, mm_hash, tenant)
        query = query_of(fields, no_lora, producer, since, until)
        listing = Listing("/v1/entries", EntriesPage, "cursor", _HEAD, _item)
        show(listing, query, config=config, admin=admin, limit=limit, as_json=json)


def _item(row: Entry) -> Item:
    from mmcache.cli.admin.layout import Item  # noqa: PLC0415
    from mmcache.cli.admin.text import when  # noqa: PLC0415
    from mmcache.cli.doctor.machine import size  # noqa: PLC0415

    key = row.key
    lora = () if key.lora is None else (f"lora {key.lora}",)
    return Item(
        (when(row.created), size(row.nbytes), f"{row.cost_ms:.1f} ms", key.modality),
        (
            f"model {key.model}",
            f"tenant {key.tenant}",
            *lora,
            f"by {row.producer}",
            f"version {key.version}",
            f"mm_hash {key.mm_hash}",
        ),
    )
