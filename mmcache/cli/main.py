"""The `mmcache` command. Only light imports at the top: `--help` must answer at once."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from mmcache.cli.admin.audit import audit
from mmcache.cli.admin.entries import entries
from mmcache.cli.admin.invalidations import invalidations
from mmcache.cli.admin.pins import pins
from mmcache.cli.admin.sessions import sessions
from mmcache.cli.controller import controller
from mmcache.cli.demo.command import demo
from mmcache.cli.doctor.command import doctor
from mmcache.cli.entries.get import get
from mmcache.cli.entries.lookup import lookup
from mmcache.cli.entries.put import put
from mmcache.cli.invalidate import invalidate
from mmcache.cli.keys import keys
from mmcache.cli.pins import pin, unpin
from mmcache.cli.stats.command import stats
from mmcache.cli.top.command import top
from mmcache.cli.up import up
from mmcache.cli.warm.export import export
from mmcache.cli.warm.import_ import import_
from mmcache.cli.warm.warm import warm

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # in 80 columns its tables leave the text a third of the line
)
app.command()(up)
app.command()(controller)
app.command()(demo)
app.command()(put)
app.command()(get)
app.command()(lookup)
app.command()(invalidate)
app.command()(pin)
app.command()(unpin)
app.command()(sessions)
app.command()(entries)
app.command()(invalidations)
app.command()(pins)
app.command()(audit)
app.command()(export)
app.command("import")(import_)
app.command()(warm)
app.command()(stats)
app.command()(top)
app.command()(doctor)
app.add_typer(keys, name="keys")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mmcache {importlib.metadata.version('mmcache')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A shared cache of multimodal embeddings for disaggregated serving, on Mooncake Store."""
