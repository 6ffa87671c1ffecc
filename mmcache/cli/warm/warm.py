"""`mmcache warm`: publish what somebody computed ahead."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from mmcache.cli.entries.keys import Config, Json, Lora, Modality, Model, Tenant, Version
from mmcache.cli.errors import InputError, reported
from mmcache.cli.plurals import counted
from mmcache.cli.signals import orderly_end


def warm(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.safetensors", help="All tensors of each: one entry.")],
    model: Model,
    version: Version,
    lora: Lora = None,
    modality: Modality = "image",
    tenant: Tenant = "default",
    cost_ms: Annotated[
        float, typer.Option(metavar="MS", help="What encoding one of them cost, by which eviction goes.")
    ] = 0.0,
    config: Config = None,
    json: Json = False,
) -> None:
    """Publish safetensors files, each as the entry of one item, but for those that the store has.

    An item's mm_hash is what the file's metadata has as mm_hash, else the file's name without .safetensors. Other
    metadata goes into the entry as by `mmcache put`. That they are current is your word; what is invalidated while it
    runs is not published. Exports may be among them, and are taken as `mmcache import` does.

    A file of no use is named, and the others go on.

    Exits with 0 if every entry can be read now, or was invalidated meanwhile; 1 if not, and says why; 2 for a wrong
    option or setting.
    """
    with reported("warm"), orderly_end():
        from mmcache.config import load  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.key import Scope  # noqa: PLC0415

        scope = Scope(tenant, model, version, lora, modality)
        if not 0.0 <= cost_ms < math.inf:
            raise InputError(f"--cost-ms must be a number from 0 up, not {cost_ms}")
        settings = load(config)

        from mmcache.cli.warm import warming  # noqa: PLC0415
        from mmcache.cli.warm.telling import PUBLISHED, Progress, summary  # noqa: PLC0415

        progress = Progress(*PUBLISHED)
        with summary(progress, f"from {counted(len(files), 'file')}", config=config, as_json=json):
            warming.warm(files, scope, cost_ms, settings, config=config, progress=progress)
