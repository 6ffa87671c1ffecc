"""`mmcache invalidate`: have no entry served any more that matches."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mmcache.cli.admin.options import Admin
from mmcache.cli.admin.selecting import Lora, MmHash, Modality, Model, NoLora, Tenant, Version, fields_of
from mmcache.cli.engine_caches import NOT_CLEARED_STATUS, Engine, Engines, clear_all, tell, urls_of
from mmcache.cli.entries.keys import Config, Json
from mmcache.cli.errors import InputError, reported
from mmcache.cli.plurals import counted
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from mmcache.client.invalidate import Invalidation
    from mmcache.config import Settings
    from mmcache.engines import ClearedEngine
    from mmcache.selector import Selector

_LOOK_SECONDS = 1.0
_LONGEST_COUNT_S = 300.0


def invalidate(
    model: Model = None,
    version: Version = None,
    lora: Lora = None,
    no_lora: NoLora = False,
    modality: Modality = None,
    mm_hash: MmHash = None,
    tenant: Tenant = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything there is; asks first.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="For people; kept with it.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return once it is complete.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="With --wait or --dry-run.")
    ] = 30.0,
    engine: Engine = None,
    engines: Engines = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the known entries that match, by the admin API.")
    ] = False,
    admin: Admin = None,
    config: Config = None,
    json_output: Json = False,
) -> None:
    """Have no entry served any more that matches all that is given. Their bytes become unreachable at once.

    Once it is complete, no get that starts afterwards returns such an entry, on any client: within milliseconds, or the
    time to live of sessions (controller.session_ttl) where a client is silent.

    What an engine holds of its own is not reached by it. With --engine URL or --engines, vLLM engines are told to clear
    their caches of embeddings, processed media and prefixes, once the invalidation is complete: earlier they would fill
    up again from what is stale. They serve that with VLLM_SERVER_DEV_MODE=1, and a prefix cache only when no request
    uses it: pause its traffic. Each engine has engines.timeout, and whatever becomes of it the invalidation stands.

    --dry-run asks the controller's admin API (controller.admin), by an operator's token in MMCACHE_TOKEN or the file
    control.token_file where it wants one.

    Exits with 0 if it is made, and with --wait complete; 1 if it is not, or the controller does not answer; 2 for a
    wrong option, setting or token; 3 if it is complete, but an engine was not cleared.
    """
    with reported("invalidate"), orderly_end():
        from mmcache.cli.defaults import tell_of_defaults  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.config import load  # noqa: PLC0415
        from mmcache.engines import not_cleared, token_of  # noqa: PLC0415
        from mmcache.errors import ControllerUnavailable  # noqa: PLC0415
        from mmcache.selector import Selector  # noqa: PLC0415

        selector = Selector(**fields_of(model, version, lora, no_lora, modality, mm_hash, tenant))
        if not selector.fields() and not everything:
            raise InputError("say what: --model M, --version V, --mm-hash H, … or --all for everything there is")
        if selector.fields() and everything:
            raise InputError(f"--all is everything there is, and not only {selector}")
        given = "--engine" if engine else "--engines" if engines else ""
        if dry_run and (wait or given):
            what = f"clear engines for ({given})" if given else "wait for (--wait)"
            raise InputError(f"--dry-run makes nothing to {what}")
        if given and not wait:
            raise InputError(f"{given} needs --wait: engines are cleared once the invalidation is complete")
        settings = load(config)
        urls = urls_of(engine, engines, settings.engines)
        token = token_of(settings.engines) if urls else None
        if dry_run:
            _count(selector, settings, admin=admin, timeout=timeout, as_json=json_output)
            return
        if everything and not yes:
            _ask_first(settings.control.address)
        try:
            outcome = _carry_out(selector, settings, reason=reason, wait_s=timeout if wait else None, quiet=json_output)
        except ControllerUnavailable:
            tell_of_defaults(config, store=False)
            raise
        cleared: list[ClearedEngine] = []
        if urls and outcome.complete:
            cleared = clear_all(urls, token, settings.engines, quiet=json_output)
        elif urls:
            cleared = not_cleared(urls, "the invalidation is not complete; make it again")
        _tell(outcome, selector, cleared, waited=wait, as_json=json_output)
        if wait and not outcome.complete:
            raise typer.Exit(1)
        if not all(one.ok for one in cleared):
            raise typer.Exit(NOT_CLEARED_STATUS)


def _count(selector: Selector, settings: Settings, *, admin: str | None, timeout: float, as_json: bool) -> None:
    """Tell how many known entries match."""
    from mmcache.cli.admin.connection import PATIENCE_S, AdminApi  # noqa: PLC0415
    from mmcache.cli.admin.rows import Matches  # noqa: PLC0415

    timeout = min(timeout, _LONGEST_COUNT_S)
    body = {"selector": selector.fields(), "all": not selector.fields(), "dry_run": True, "timeout": timeout}
    api = AdminApi(settings, admin, os.environ)
    found = api.post("/v1/invalidations", Matches, body, timeout=timeout + PATIENCE_S)
    if as_json:
        told = {"dry_run": True, "matches": found.matches, "counted_all": found.counted_all}
        typer.echo(json.dumps({**told, "selector": selector.fields()}))
        return
    least = "" if found.counted_all else "at least "
    known = counted(found.matches, "known entry", "known entries")
    typer.echo(f"{selector}: {least}{known}; nothing was invalidated")


def _ask_first(address: str) -> None:
    if not sys.stdin.isatty():
        raise InputError("--all asks first, and there is nobody to ask: add --yes if it is meant")
    if not typer.confirm(f"Invalidate all entries that the controller at {address} knows of?", err=True):
        raise typer.Exit(1)


def _carry_out(
    selector: Selector, settings: Settings, *, reason: str, wait_s: float | None, quiet: bool
) -> Invalidation:
    from mmcache.cli.control_session import open_channel  # noqa: PLC0415
    from mmcache.client.invalidate import follow  # noqa: PLC0415
    from mmcache.client.invalidate import invalidate as make  # noqa: PLC0415
    from mmcache.errors import ControllerUnavailable, DeadlineExceeded  # noqa: PLC0415

    with open_channel(settings) as (channel, deadline):
        made = make(channel, selector, reason=reason, everything=True, deadline=deadline)
        ends = time.monotonic() + (wait_s or 0.0)
        with _stands(made.number), _progress(quiet) as show:
            while wait_s is not None and not made.complete and (left := ends - time.monotonic()) > 0:
                with contextlib.suppress(ControllerUnavailable, DeadlineExceeded):  # it is made: that is told
                    made = follow(channel, made, deadline=time.monotonic() + min(left, _LOOK_SECONDS))
                    show(made)
        return made


@contextlib.contextmanager
def _stands(number: int) -> Iterator[None]:
    """Whoever interrupts the wait must know that it takes nothing back."""
    try:
        yield
    except SystemExit:
        typer.echo(f"invalidation {number} is in force, and was not waited for any longer", err=True)
        raise


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Invalidation], None]]:
    from rich.console import Console  # noqa: PLC0415

    with Console(stderr=True, quiet=quiet).status("waiting for all sessions") as status:
        yield lambda made: status.update(f"waiting for {counted(made.waiting, 'session')}{_names(made)}")


def _names(made: Invalidation) -> str:
    if not made.awaited:
        return ""
    longest = max(one.most_ms for one in made.awaited) / 1000
    return f", {longest:.1f} s at most: " + ", ".join(f"{one.name} on {one.host}" for one in made.awaited[:3])


def _tell(
    made: Invalidation, selector: Selector, engines: Sequence[ClearedEngine], *, waited: bool, as_json: bool
) -> None:
    if as_json:
        import msgspec  # noqa: PLC0415

        told = made._replace(awaited=())._asdict()
        told |= {
            "selector": selector.fields(),
            "awaited": [{"name": one.name, "host": one.host, "most_ms": one.most_ms} for one in made.awaited],
            "engines": msgspec.to_builtins(engines),
        }
        typer.echo(json.dumps(told))
        return
    text = f"invalidation {made.number}: {selector}"
    if not waited:
        typer.echo(f"{text}; in force, and complete once all sessions have heard of it (--wait)")
    elif made.complete:
        typer.echo(f"{text}; complete")
    elif not made.waiting:
        typer.echo(f"{text}; in force, but the controller did not say in time whether it is complete")
    else:
        sessions = counted(made.waiting, "session")
        typer.echo(f"{text}; in force, but not complete: {sessions} may serve it still{_names(made)}")
    if made.unbound:
        typer.echo(f"not waited for, as set to serve what may be stale: {counted(made.unbound, 'session')}")
    tell(engines)
