"""Lists of the admin API, read page by page, and printed so: for people, or as a JSON object a line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import msgspec
import typer

from mmcache.cli.admin.connection import AdminApi
from mmcache.cli.admin.layout import Item, lines
from mmcache.cli.errors import AdminUnavailable
from mmcache.config import load

PAGE: Final = 500

Row = TypeVar("Row", bound=msgspec.Struct)
Row_co = TypeVar("Row_co", bound=msgspec.Struct, covariant=True)


class Page(Protocol[Row_co]):
    """One answer: some rows, and where the next ones begin; None: there are none."""

    @property
    def rows(self) -> Sequence[Row_co]:
        """In their order."""

    @property
    def next(self) -> str | int | None:
        """The cursor."""


class Listing(msgspec.Struct, Generic[Row]):
    """One list. `cursor` is the parameter that takes a page's `next`; `item` tells a row to people, under `head`."""

    path: str
    page: type[Page[Row]]
    cursor: str
    head: tuple[str, ...]
    item: Callable[[Row], Item]


def show(
    listing: Listing[Row],
    query: Mapping[str, object],
    *,
    config: Path | None,
    admin: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Print what there is, up to `limit` where it is not 0; says on stderr if there is more."""
    api = AdminApi(load(config), admin, os.environ)
    cursor: str | int | None = None
    shown = 0
    while True:
        most = min(PAGE, limit - shown) if limit else PAGE
        page = api.get(listing.path, listing.page, {**query, "limit": most, listing.cursor: cursor})
        rows = page.rows[:most]
        shown += len(rows)
        if as_json:
            for row in rows:
                typer.echo(msgspec.json.encode(row))
        elif rows:
            print_items(listing.head, [listing.item(row) for row in rows])
        if page.next is None:
            break
        if page.next == cursor:
            raise AdminUnavailable(f"the admin API at {api.url} goes round in circles: it gives the same page again")
        cursor = page.next
        if limit and shown >= limit:
            typer.echo(f"There may be more than {shown:,}: --limit N, or 0 for all of them.", err=True)
            break
    if not shown:
        typer.echo("There are none.", err=True)


def print_items(head: Sequence[str], items: Sequence[Item]) -> None:
    """Print them as wide as the terminal is, or COLUMNS says."""
    typer.echo("\n".join(lines(head, items, shutil.get_terminal_size().columns)))
