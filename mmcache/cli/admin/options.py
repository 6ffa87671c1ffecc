"""Options of the commands that ask the admin API."""

from __future__ import annotations

from typing import Annotated

import typer

Admin = Annotated[
    str | None,
    typer.Option("--admin", metavar="URL", help="The admin API. Default: control.admin, else controller.admin."),
]
Limit = Annotated[int, typer.Option("--limit", min=0, metavar="N", help="At most so many; 0: all of them.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print a JSON object a line, and nothing else on stdout.")]
