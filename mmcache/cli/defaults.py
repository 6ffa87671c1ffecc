"""What a command that got no answer says where nobody said whom to ask."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from mmcache.config import CONFIG_VARIABLE, Settings


def tell_of_defaults(config: Path | None, *, store: bool) -> None:
    """Say on stderr which addresses are defaults, and how to give others, if nobody gave any.

    Args:
        config: the value of --config.
        store: whether the store is asked, besides the controller.
    """
    if config is not None or os.environ.get(CONFIG_VARIABLE):
        return
    defaults = Settings()
    asked = []
    if "MMCACHE_CONTROL__ADDRESS" not in os.environ:
        asked.append(f"the controller at {defaults.control.address}")
    if store and "MMCACHE_STORE__MASTER" not in os.environ:
        asked.append(f"the store's master at {defaults.store.master}")
    if asked:
        typer.echo(
            f"No configuration was given, so this asked the default: {' and '.join(asked)}. "
            f"Give one by --config FILE or {CONFIG_VARIABLE}=FILE; `mmcache up` writes one and says where.",
            err=True,
        )
