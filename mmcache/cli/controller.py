"""`mmcache controller`: the controller alone, for as long as the command runs."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmcache.capacity_rules import age_of, quota_of
from mmcache.cli.errors import ClusterError, reported
from mmcache.config import ControllerSettings, Settings, load
from mmcache.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from mmcache.controller.admin.service import AdminService
    from mmcache.controller.mailbox import Mailbox
    from mmcache.controller.reaper.service import Reaper
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

    Ends with Ctrl-C or SIGTERM. Without keys (`mmcache keys new`, controller.client_keys_file) whoever reaches its
    port can speak to it: keep it on loopback or a trusted network then.
    """
    with reported("controller"):
        overrides = {} if bind is None else {"controller.bind": bind}
        settings = load(config, overrides=overrides, overridden_by="--bind")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        _serve(settings)


def _serve(settings: Settings) -> None:
    from mmcache.controller.admission import Admission  # noqa: PLC0415 (`mmcache --help` needs none of it)
    from mmcache.controller.capacity.rules import CapacityRules  # noqa: PLC0415
    from mmcache.controller.limits import MOST_BYTES, ControllerLimits  # noqa: PLC0415
    from mmcache.controller.mailbox import Mailbox  # noqa: PLC0415
    from mmcache.controller.server import begin_term, serve  # noqa: PLC0415
    from mmcache.controller.state.base import StateFull, StateLost, StateUnusable  # noqa: PLC0415

    admission = Admission.of(settings.controller)
    limits = ControllerLimits(
        ttl_ms=_milliseconds(settings.controller.session_ttl),
        claim_ms=_milliseconds(settings.controller.claim_timeout),
        lease_ms=_milliseconds(settings.store.lease),
        max_sessions=settings.controller.max_sessions,
        max_entries=settings.controller.max_entries,
        capacity=CapacityRules(
            policy=settings.controller.eviction,
            high=settings.controller.high_watermark,
            low=settings.controller.low_watermark,
            quotas=tuple(quota_of(text) for text in settings.controller.quotas),
            ages=tuple(age_of(text) for text in settings.controller.max_age),
        ),
        min_embeddings=settings.controller.min_embeddings,
        max_bytes=settings.controller.max_bytes or MOST_BYTES,
        pinned_share=settings.controller.pinned_share,
    )
    if settings.controller.admin is not None:
        _import_admin()
    gc.collect()
    gc.freeze()  # what the imports made lives as long as the process: no collection, and so no pause, is to walk it
    bind = settings.controller.bind
    try:
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(contextlib.closing(_open_state(settings.controller.state)))
            core, recorder = begin_term(store, limits)
            admin = None
            mailbox = Mailbox()
            if settings.controller.admin is not None:
                admin = stack.enter_context(_start_admin(settings, mailbox, store))
            if settings.controller.reaper and (reaper := _start_reaper(settings, mailbox)) is not None:
                stack.enter_context(reaper)
            stack.callback(mailbox.close)

            def tell(address: str) -> None:
                _say_ready(address, settings.controller)
                if admin is not None:
                    typer.echo(f"admin API at {admin.address}")

            serve(bind, core, recorder, admission=admission, mailbox=mailbox, ready=tell)
    except OSError as error:
        if error.filename is None or error.filename not in (bind, settings.controller.admin):  # of the output, say
            raise
        raise ClusterError(f"cannot listen at {error.filename}: {error.strerror}") from error
    except (StateUnusable, StateLost, StateFull) as error:
        raise ClusterError(str(error)) from error


def _open_state(path: str | None) -> StateStore:
    from mmcache.controller.server import volatile_store  # noqa: PLC0415
    from mmcache.controller.state.sqlite import SqliteStateStore  # noqa: PLC0415

    return volatile_store() if path is None else SqliteStateStore.open(Path(path))


def _say_ready(address: str, settings: ControllerSettings) -> None:
    typer.echo(f"controller at {address}")
    if settings.state is None:
        _log.warning("controller.state names no file: entries and invalidations of before this start are forgotten")
    if settings.secret_key_file is None and not _is_loopback(address):
        _log.warning(
            "others can reach %s, and without keys whoever does can read, write and withdraw entries: make keys with "
            "`mmcache keys new`, which says what to put where, or see to it that only clients reach it",
            address,
        )


def _is_loopback(address: str) -> bool:
    """Of an address that is bound: `tcp://IP:PORT`."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]").partition("%")[0]
    return ipaddress.ip_address(host).is_loopback


def _import_admin() -> None:
    try:
        import fastapi  # noqa: F401, PLC0415
        import uvicorn  # noqa: F401, PLC0415
    except ImportError as error:
        raise ConfigError(
            f"controller.admin is set, but {error.name} is not installed: pip install 'mmcache[controller]'"
        ) from error


def _start_admin(settings: Settings, mailbox: Mailbox, store: StateStore) -> AdminService:
    from mmcache.controller.admin.service import AdminService  # noqa: PLC0415 (nobody else needs FastAPI)

    return AdminService(settings, mailbox, store, environ=os.environ)


def _start_reaper(settings: Settings, mailbox: Mailbox) -> Reaper | None:
    """None where there is no Mooncake: a controller may well run without."""
    from mmcache.controller.reaper.service import Reaper  # noqa: PLC0415
    from mmcache.store.launch import mooncake_folder  # noqa: PLC0415

    try:
        mooncake_folder()
    except StoreUnavailable as error:
        _log.warning("bytes of what was invalidated are left to the store's eviction (controller.reaper): %s", error)
        return None
    return Reaper(settings.store, mailbox, settings.controller.reconcile_every)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
