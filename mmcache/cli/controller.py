"""`mmcache controller`: the controller alone, for as long as the command runs."""

from __future__ import annotations

import contextlib
import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmcache.cli.errors import ClusterError, reported
from mmcache.config import Settings, load

if TYPE_CHECKING:
    from mmcache.controller.state.base import StateStore

_log = logging.getLogger(__name__)


def controller(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="Settings. Default: the file that MMCACHE_CONFIG names, or none."
        ),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Where to listen, such as tcp://127.0.0.1:7710. Default: the setting controller.bind.",
        ),
    ] = None,
) -> None:
    """Run the controller: who computes, what exists, who is there.

    Ends with Ctrl-C or SIGTERM. Whoever reaches its port can speak to it: keep it on loopback or a trusted network.
    """
    with reported("controller"):
        overrides = {} if bind is None else {"controller.bind": bind}
        settings = load(config, overrides=overrides, overridden_by="--bind")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        _serve(settings)


def _serve(settings: Settings) -> None:
    from mmcache.controller.limits import ControllerLimits  # noqa: PLC0415 (`mmcache --help` needs none of it)
    from mmcache.controller.server import begin_term, serve  # noqa: PLC0415
    from mmcache.controller.state.base import StateFull, StateLost, StateUnusable  # noqa: PLC0415

    limits = ControllerLimits(
        ttl_ms=_milliseconds(settings.controller.session_ttl),
        claim_ms=_milliseconds(settings.controller.claim_timeout),
        lease_ms=_milliseconds(settings.store.lease),
        max_sessions=settings.controller.max_sessions,
        max_entries=settings.controller.max_entries,
    )
    gc.collect()
    gc.freeze()  # what the imports made lives as long as the process: no collection, and so no pause, is to walk it
    bind = settings.controller.bind
    try:
        with contextlib.closing(_open_state(settings.controller.state)) as store:
            core, recorder = begin_term(store, limits)
            serve(bind, core, recorder, ready=lambda address: _say_ready(address, settings.controller.state))
    except OSError as error:
        if error.filename != bind:  # of the output, say
            raise
        raise ClusterError(f"cannot listen at {bind}: {error.strerror}") from error
    except (StateUnusable, StateLost, StateFull) as error:
        raise ClusterError(str(error)) from error


def _open_state(path: str | None) -> StateStore:
    from mmcache.controller.server import volatile_store  # noqa: PLC0415
    from mmcache.controller.state.sqlite import SqliteStateStore  # noqa: PLC0415

    return volatile_store() if path is None else SqliteStateStore.open(Path(path))


def _say_ready(address: str, state: str | None) -> None:
    typer.echo(f"controller at {address}")
    if state is None:
        _log.warning("controller.state names no file: entries and invalidations of before this start are forgotten")


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
