"""`mmcache invalidate`: have no entry served any more that matches."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmcache.cli.entries.keys import Config, Json
from mmcache.cli.errors import InputError, reported
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from mmcache.client.invalidate import Invalidation
    from mmcache.config import Settings
    from mmcache.selector import Selector

_LOOK_SECONDS = 1.0


def invalidate(
    model: Annotated[str | None, typer.Option("--model", metavar="M", help="Only of this encoder.")] = None,
    version: Annotated[str | None, typer.Option("--version", metavar="V", help="Only of this version.")] = None,
    lora: Annotated[
        str | None,
        typer.Option("--lora", metavar="D", help="Only with the adapter of this digest."),
    ] = None,
    no_lora: Annotated[bool, typer.Option("--no-lora", help="Only without an adapter.")] = False,
    modality: Annotated[str | None, typer.Option("--modality", metavar="WORD", help="image, video, audio, …")] = None,
    mm_hash: Annotated[str | None, typer.Option("--mm-hash", metavar="H", help="Only of this item.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="T", help="Only of this tenant.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything there is; asks first.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="For people; kept with it.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return once it is complete.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="With --wait.")] = 30.0,
    config: Config = None,
    json_output: Json = False,
) -> None:
    """Have no entry served any more that matches all that is given. Their bytes become unreachable at once.

    Once it is complete, no get that starts afterwards returns such an entry, on any client: within milliseconds, or the
    time to live of sessions (controller.session_ttl) where a client is silent. An engine's own caches are not emptied.

    Exits with 0 if it is made, and with --wait complete; 1 if it is not, or the controller does not answer; 2 for a
    wrong option or setting.
    """
    with reported("invalidate"), orderly_end():
        from mmcache.config import load  # noqa: PLC0415 (`mmcache --help` needs none of it)
        from mmcache.selector import Selector  # noqa: PLC0415

        given = {"tenant": tenant, "model": model, "version": version, "modality": modality, "mm_hash": mm_hash}
        fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if lora is not None and no_lora:
            raise InputError("give either --lora D or --no-lora")
        if lora is not None or no_lora:
            fields["lora"] = lora
        selector = Selector(**fields)
        if not fields and not everything:
            raise InputError("say what: --model M, --version V, --mm-hash H, … or --all for everything there is")
        if fields and everything:
            raise InputError(f"--all is everything there is, and not only {selector}")
        settings = load(config)
        if everything and not yes:
            _ask_first(settings.control.address)
        outcome = _carry_out(selector, settings, reason=reason, wait_s=timeout if wait else None, quiet=json_output)
        _tell(outcome, selector, waited=wait, as_json=json_output)
        if wait and not outcome.complete:
            raise typer.Exit(1)


def _ask_first(address: str) -> None:
    if not sys.stdin.isatty():
        raise InputError("--all asks first, and there is nobody to ask: add --yes if it is meant")
    if not typer.confirm(f"Invalidate all entries that the controller at {address} knows of?", err=True):
        raise typer.Exit(1)


def _carry_out(
    selector: Selector, settings: Settings, *, reason: str, wait_s: float | None, quiet: bool
) -> Invalidation:
    from mmcache.cli.sessions import open_channel  # noqa: PLC0415
    from mmcache.client.invalidate import follow  # noqa: PLC0415
    from mmcache.client.invalidate import invalidate as make  # noqa: PLC0415
    from mmcache.errors import ControllerUnavailable, DeadlineExceeded  # noqa: PLC0415

    with open_channel(settings) as (channel, deadline):
        made = make(channel, selector, reason=reason, everything=True, deadline=deadline)
        ends = time.monotonic() + (wait_s or 0.0)
        with _progress(quiet) as show:
            while wait_s is not None and not made.complete and (left := ends - time.monotonic()) > 0:
                # The controller may be restarted meanwhile: it is made all the same, and what was heard last is told.
                with contextlib.suppress(ControllerUnavailable, DeadlineExceeded):
                    made = follow(channel, made, deadline=time.monotonic() + min(left, _LOOK_SECONDS))
                show(made)
        return made


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Invalidation], None]]:
    from rich.console import Console  # noqa: PLC0415

    with Console(stderr=True, quiet=quiet).status("waiting for all sessions") as status:
        yield lambda made: status.update(f"waiting for {made.waiting} sessions{_names(made)}")


def _names(made: Invalidation) -> str:
    if not made.awaited:
        return ""
    longest = max(one.most_ms for one in made.awaited) / 1000
    return f", {longest:.1f} s at most: " + ", ".join(f"{one.name} on {one.host}" for one in made.awaited[:3])


def _tell(made: Invalidation, selector: Selector, *, waited: bool, as_json: bool) -> None:
    if as_json:
        told = made._replace(awaited=())._asdict()
        told |= {
            "selector": selector.fields(),
            "awaited": [{"name": one.name, "host": one.host, "most_ms": one.most_ms} for one in made.awaited],
        }
        typer.echo(json.dumps(told))
        return
    text = f"invalidation {made.number}: {selector}"
    if not waited:
        typer.echo(f"{text}; in force, and complete once all sessions have heard of it (--wait)")
    elif made.complete:
        typer.echo(f"{text}; complete")
    elif made.waiting:
        typer.echo(f"{text}; in force, but not complete: {made.waiting} sessions may serve it still{_names(made)}")
    else:
        typer.echo(f"{text}; in force, but nothing was heard of its completion in time")
    if made.unbound:
        typer.echo(f"{made.unbound} sessions are set to serve what may be stale, and are not waited for")
