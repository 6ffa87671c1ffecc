"""`mmcache lookup`: what the controller's directory knows of an entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from mmcache.cli.entries.keys import Config, HashFile, Json, Lora, MmHash, Modality, Model, Tenant, Version, key_of
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from mmcache.cli.entries.outcome import Outcome
    from mmcache.config import Settings
    from mmcache.key import EmbeddingKey


def lookup(
    model: Model,
    version: Version,
    mm_hash: MmHash = None,
    hash_file: HashFile = None,
    lora: Lora = None,
    modality: Modality = "image",
    tenant: Tenant = "default",
    config: Config = None,
    json: Json = False,
) -> None:
    """Ask the controller what it knows of an entry. Reads and claims nothing.

    An entry that the controller knows may have been evicted from the store meanwhile: `mmcache get` tells.

    Exits with 0 if it is known, 1 if it is not or the controller does not answer, 2 for a wrong option or setting.
    """
    with reported("lookup"), orderly_end():
        from mmcache.cli.defaults import tell_of_defaults  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.cli.entries.outcome import tell  # noqa: PLC0415
        from mmcache.config import load  # noqa: PLC0415

        key = key_of(model, version, mm_hash, hash_file, lora, modality, tenant)
        outcome = _ask(key, load(config))
        tell(outcome, as_json=json)
        if outcome.status != "known":
            if outcome.reason:  # the controller did not answer
                tell_of_defaults(config, store=False)
            raise typer.Exit(1)


def _ask(key: EmbeddingKey, settings: Settings) -> Outcome:
    from mmcache.cli.control_session import open_channel  # noqa: PLC0415
    from mmcache.cli.entries.outcome import Outcome, shapes_of  # noqa: PLC0415
    from mmcache.entry import decode_info  # noqa: PLC0415
    from mmcache.errors import ControllerUnavailable, DeadlineExceeded  # noqa: PLC0415

    try:
        with open_channel(settings) as (channel, deadline):
            [hit] = channel.lookup([key], deadline=deadline)
    except (ControllerUnavailable, DeadlineExceeded) as error:
        return Outcome("unknown", key, reason="not_fresh", detail=str(error))
    if hit is None:
        return Outcome("unknown", key)
    info = decode_info(hit.info)
    return Outcome(
        "known",
        key,
        nbytes=hit.nbytes,
        generation=hit.generation,
        tensors=shapes_of(info.tensors),
        meta=info.meta,
    )
