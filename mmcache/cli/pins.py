"""`mmcache pin` and `mmcache unpin`: keep entries from eviction for a time, and keep them no longer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmcache.cli.admin.selecting import Lora, MmHash, Modality, Model, NoLora, Tenant, Version, fields_of
from mmcache.cli.entries.keys import Config, Json
from mmcache.cli.errors import InputError, reported
from mmcache.cli.plurals import counted
from mmcache.cli.signals import orderly_end

if TYPE_CHECKING:
    from mmcache.client.pins import Pinned
    from mmcache.control.channel import ControlChannel
    from mmcache.selector import Selector


def pin(
    ttl: Annotated[
        str, typer.Option("--ttl", metavar="TIME", help="For so long, such as 90s, 30min or 12h; at most 720h.")
    ],
    model: Model = None,
    version: Version = None,
    lora: Lora = None,
    no_lora: NoLora = False,
    modality: Modality = None,
    mm_hash: MmHash = None,
    tenant: Tenant = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="For people; kept with it.")] = "",
    config: Config = None,
    json_output: Json = False,
) -> None:
    """Keep what matches all that is given from eviction for a time, and what is published meanwhile.

    All that is pinned may take a share of the store (controller.pinned_share); a pin of more is refused, and what is
    published when it is used up is not kept. The same pinned again lasts until later. An invalidation goes before a
    pin. `mmcache pins` lists them.

    Exits with 0 if it is pinned; 1 if it is refused, or the controller does not answer; 2 for a wrong option or
    setting.
    """
    with reported("pin"), orderly_end():
        from mmcache.client.pins import pin as ask  # noqa: PLC0415 (`mmcache --help` needs none of it)

        seconds = _seconds(ttl)
        selector = _selector(model, version, lora, no_lora, modality, mm_hash, tenant)
        if not selector.fields():
            raise InputError("say what: --model M, --version V, --mm-hash H, …; to pin everything is to pin nothing")
        with _channel(config) as (channel, deadline):
            made = ask(channel, selector, ttl=seconds, reason=reason, deadline=deadline)
        _tell(made, selector, as_json=json_output)


def unpin(
    ids: Annotated[
        list[int] | None, typer.Argument(min=1, metavar="[ID]...", help="As `mmcache pins` lists them.")
    ] = None,
    model: Model = None,
    version: Version = None,
    lora: Lora = None,
    no_lora: NoLora = False,
    modality: Modality = None,
    mm_hash: MmHash = None,
    tenant: Tenant = None,
    config: Config = None,
    json_output: Json = False,
) -> None:
    """End pins, by their ids, or the one of exactly what was pinned. What they kept can be evicted again.

    Exits with 0 if any ended; 1 if there was none, or the controller does not answer; 2 for a wrong option or setting.
    """
    with reported("unpin"), orderly_end():
        from mmcache.client.pins import unpin as ask  # noqa: PLC0415

        selector = _selector(model, version, lora, no_lora, modality, mm_hash, tenant)
        if bool(ids) is bool(selector.fields()):
            raise InputError("say which: either their ids, or all the options with which it was pinned")
        with _channel(config) as (channel, deadline):
            ended = ask(channel, ids or selector, deadline=deadline)
        typer.echo(json.dumps({"ended": ended}) if json_output else f"{counted(ended, 'pin')} ended")
        if not ended:
            typer.echo("mmcache unpin: there is no such pin, or its time is over: `mmcache pins` lists them", err=True)
            raise typer.Exit(1)


def _selector(
    model: str | None,
    version: str | None,
    lora: str | None,
    no_lora: bool,
    modality: str | None,
    mm_hash: str | None,
    tenant: str | None,
) -> Selector:
    from mmcache.selector import Selector  # noqa: PLC0415

    return Selector(**fields_of(model, version, lora, no_lora, modality, mm_hash, tenant))


def _seconds(ttl: str) -> float:
    """What --ttl says. Raises InputError."""
    from mmcache.client.pins import milliseconds_of  # noqa: PLC0415
    from mmcache.setting_kinds import BadValue, parse_duration  # noqa: PLC0415

    try:
        seconds = parse_duration(ttl)
    except BadValue as error:
        raise InputError("--ttl must be a duration such as 90s, 30min or 12h") from error
    try:
        milliseconds_of(seconds)
    except ValueError as error:
        raise InputError(f"--{error}") from error
    return seconds


@contextlib.contextmanager
def _channel(config: Path | None) -> Iterator[tuple[ControlChannel, float]]:
    """See `open_channel`. Who got no answer hears which address was asked by default."""
    from mmcache.cli.control_session import open_channel  # noqa: PLC0415
    from mmcache.cli.defaults import tell_of_defaults  # noqa: PLC0415
    from mmcache.config import load  # noqa: PLC0415
    from mmcache.errors import ControllerUnavailable  # noqa: PLC0415

    try:
        with open_channel(load(config)) as opened:
            yield opened
    except ControllerUnavailable:
        tell_of_defaults(config, store=False)
        raise


def _tell(made: Pinned, selector: Selector, *, as_json: bool) -> None:
    from mmcache.cli.admin.text import when  # noqa: PLC0415

    if as_json:
        [number] = made.ids
        told = {"id": number, "entries": made.entries, "nbytes": made.nbytes, "until": made.until}
        typer.echo(json.dumps({**told, "selector": selector.fields()}))
        return
    known = counted(made.entries, "known entry", "known entries")
    typer.echo(f"pin {made.ids[0]}: {selector}; {known}, {made.nbytes:,} bytes, until {when(made.until)}")
