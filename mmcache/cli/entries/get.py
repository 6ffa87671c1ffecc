"""`mmcache get`: read one entry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmcache.cli.entries.keys import Config, HashFile, Json, Lora, MmHash, Modality, Model, Tenant, Version, key_of
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end


def get(
    model: Model,
    version: Version,
    mm_hash: MmHash = None,
    hash_file: HashFile = None,
    lora: Lora = None,
    modality: Modality = "image",
    tenant: Tenant = "default",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.safetensors", help="Write tensors and metadata there."),
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Read one entry: print what it holds, or write it to a safetensors file.

    The file appears whole or not at all, in place of what was there. The entry's metadata is in it as JSON, under
    mmcache.meta; `mmcache put` reads it again.

    Settings come from --config, MMCACHE_CONFIG and the environment (MMCACHE_CLIENT__READ_TIMEOUT=20s).

    Exits with 0 for a hit, 1 for a miss (and says why), 2 for a wrong option or setting.
    """
    with reported("get"), orderly_end():
        key = key_of(model, version, mm_hash, hash_file, lora, modality, tenant)

        from mmcache.cli.defaults import tell_of_defaults  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.cli.entries.connection import UNANSWERED, advice_for  # noqa: PLC0415
        from mmcache.cli.entries.outcome import tell  # noqa: PLC0415
        from mmcache.cli.entries.reading import read  # noqa: PLC0415
        from mmcache.cli.entries.targets import check_target  # noqa: PLC0415
        from mmcache.config import load  # noqa: PLC0415

        target = check_target(output) if output is not None else None
        outcome = read(key, load(config), config, target)
        tell(outcome, advice_for(outcome.reason), as_json=json)
        if outcome.status == "miss":
            if outcome.reason in UNANSWERED:
                tell_of_defaults(config, store=True)
            raise typer.Exit(1)
