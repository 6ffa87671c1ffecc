"""Options that select entries by any fields of their keys."""

from __future__ import annotations

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
