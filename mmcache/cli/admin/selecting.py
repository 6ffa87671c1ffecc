"""Options that select entries by any fields of their keys."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from mmcache.cli.errors import InputError

Model = Annotated[str | None, typer.Option("--model", metavar="M", help="Only of this encoder.")]
Version = Annotated[str | None, typer.Option("--version", metavar="V", help="Only of this version.")]
Lora = Annotated[str | None, typer.Option("--lora", metavar="D", help="Only with the adapter of this digest.")]
NoLora = Annotated[bool, typer.Option("--no-lora", help="Only without an adapter.")]
Modality = Annotated[str | None, typer.Option("--modality", metavar="WORD", help="image, video, audio, …")]
MmHash = Annotated[str | None, typer.Option("--mm-hash", metavar="H", help="Only of this item.")]
Tenant = Annotated[str | None, typer.Option("--tenant", metavar="T", help="Only of this tenant.")]


def fields_of(
    model: str | None,
    version: str | None,
    lora: str | None,
    no_lora: bool,
    modality: str | None,
    mm_hash: str | None,
    tenant: str | None,
) -> dict[str, Any]:
    """A `Selector`'s fields. Raises InputError."""
    given = {"tenant": tenant, "model": model, "version": version, "modality": modality, "mm_hash": mm_hash}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if lora is not None and no_lora:
        raise InputError("give either --lora D or --no-lora")
    if lora is not None or no_lora:
        fields["lora"] = lora
    return fields


def query_of(
    fields: dict[str, Any], no_lora: bool, producer: str | None, since: str | None, until: str | None
) -> dict[str, Any]:
    """What `GET /v1/entries` takes of these options. Raises InputError for a time, InvalidKey for a field."""
    from mmcache.cli.admin.text import moment  # noqa: PLC0415 (`mmcache --help` needs none of it)
    from mmcache.selector import Selector  # noqa: PLC0415

    query: dict[str, Any] = dict(Selector(**fields).fields())
    if no_lora:
        query = {name: value for name, value in query.items() if name != "lora"} | {"no_lora": "true"}
    now = time.time()
    times = {"created_from": moment("--since", since, now), "created_until": moment("--until", until, now)}
    return query | {"producer": producer} | times
