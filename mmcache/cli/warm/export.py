"""`mmcache export`: the entries that matter most, in files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from mmcache.cli.admin.options import Admin
from mmcache.cli.admin.selecting import Lora, MmHash, Modality, Model, NoLora, Tenant, Version, fields_of, query_of
from mmcache.cli.entries.keys import Config, Json
from mmcache.cli.errors import InputError, reported
from mmcache.cli.signals import orderly_end


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Made if it is not there.")],
    order: Annotated[
        str,
        typer.Option(metavar="hottest|newest", help="What comes first: most encode time spared, or published last."),
    ] = "hottest",
    limit_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="As many of the first as take 10GiB, say. Default: all.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, metavar="N", help="At most so many; 0: all of them.")] = 0,
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
    admin: Admin = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Write entries of the running cluster to a directory, for `mmcache import`: a safetensors file each.

    A file appears whole or not at all, and is not written again where it is there: so an export that ended early is
    run again, and one into the same directory adds what is new.

    Entries are listed by the controller's admin API (controller.admin; the token is in MMCACHE_TOKEN or the file
    control.token_file) and read as any client reads them.

    Exits with 0 if all is there that was chosen and can still be read; 1 if not, and says why; 2 for a wrong option,
    setting or token, or a directory of no use.
    """
    with reported("export"), orderly_end():
        from mmcache.cli.warm.choosing import ORDERS, Order  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.config import load  # noqa: PLC0415
        from mmcache.setting_kinds import BadValue, parse_size  # noqa: PLC0415

        if order not in ORDERS:
            raise InputError(f"--order must be hottest or newest, not {order[:80]!r}")
        try:
            most_bytes = None if limit_bytes is None else parse_size(limit_bytes)
        except BadValue as error:
            raise InputError(f"--limit-bytes {error}") from error
        fields = fields_of(model, version, lora, no_lora, modality, mm_hash, tenant)
        query = query_of(fields, no_lora, producer, since, until)
        settings = load(config)

        from mmcache.cli.warm import exporting  # noqa: PLC0415
        from mmcache.cli.warm.telling import Progress, summary  # noqa: PLC0415

        words = {
            "there_already": "were there already",
            "gone": "were evicted or invalidated before they were read",
            "left_out": "were left out by a limit",
        }
        progress = Progress("exported", words)
        wanted = exporting.Wanted(query, cast(Order, order), limit, most_bytes)
        with summary(progress, f"to {directory}", config=config, as_json=json):
            exporting.export(directory, wanted, settings, config=config, admin=admin, progress=progress)
