"""`mmcache put`: publish the tensors of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmcache.cli.entries.keys import Config, HashFile, Json, Lora, MmHash, Modality, Model, Tenant, Version, key_of
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end


def put(
    file: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="All its tensors become one entry.")],
    model: Model,
    version: Version,
    mm_hash: MmHash = None,
    hash_file: HashFile = None,
    lora: Lora = None,
    modality: Modality = "image",
    tenant: Tenant = "default",
    meta: Annotated[
        list[str] | None, typer.Option(metavar="NAME=JSON", help="Metadata of the entry; may be given again.")
    ] = None,
    file_metadata: Annotated[
        bool, typer.Option(help="Keep the file's own metadata, as meta['safetensors']. Some 2 KiB fit.")
    ] = True,
    config: Config = None,
    json: Json = False,
) -> None:
    """Publish the tensors of a safetensors file as one entry.

    The tensors keep their names, dtypes and shapes. Metadata that `mmcache get` wrote into the file is the entry's
    again; --meta overrides it. What is there already is not replaced (duplicate).

    Settings come from --config, MMCACHE_CONFIG and the environment (MMCACHE_CLIENT__PUBLISH_TIMEOUT=20s); the pool is
    made large enough for the file.

    Exits with 0 if every process can read the entry now, 1 if it was dropped (and says why), 2 for a wrong option,
    setting or file.
    """
    with reported("put"), orderly_end():
        from mmcache.cli.entries.metadata import parse_options  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.config import load  # noqa: PLC0415

        key = key_of(model, version, mm_hash, hash_file, lora, modality, tenant)
        given = parse_options(meta or [])
        settings = load(config)

        from mmcache.cli.defaults import tell_of_defaults  # noqa: PLC0415
        from mmcache.cli.entries.connection import UNANSWERED, advice_for  # noqa: PLC0415
        from mmcache.cli.entries.outcome import tell  # noqa: PLC0415
        from mmcache.cli.entries.publication import publish  # noqa: PLC0415

        outcome = publish(file, key, given, settings, config, file_metadata=file_metadata)
        tell(outcome, advice_for(outcome.reason or outcome.status), as_json=json)
        if outcome.status == "dropped":
            if outcome.reason in UNANSWERED:
                tell_of_defaults(config, store=True)
            raise typer.Exit(1)
