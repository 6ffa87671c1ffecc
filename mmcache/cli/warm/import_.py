"""`mmcache import`: publish what was exported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmcache.cli.entries.keys import Config, Json
from mmcache.cli.errors import reported
from mmcache.cli.signals import orderly_end


def import_(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Of `mmcache export`.")],
    trust_lineage: Annotated[
        str | None,
        typer.Option(metavar="LINEAGE", help="Entries of this lineage are current, though the controller cannot know."),
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Publish the entries of a directory, the hottest first, but for those that the store has.

    What was invalidated since it was published is not published again. Entries of another lineage (another
    controller's, or from before it lost its state) are refused: what was invalidated since then, nobody knows.
    --trust-lineage is your word that these are current; those that were invalidated in the lineage of today are left
    out even so.

    One that ended early is run again, and goes on where it ended.

    Exits with 0 if every entry can be read now, or was invalidated; 1 if not, and says why; 2 for a wrong option or
    setting, a directory of no use, or entries of another lineage, and then nothing was published.
    """
    with reported("import"), orderly_end():
        from mmcache.config import load  # noqa: PLC0415 (`mmcache --help` needs none of it)

        settings = load(config)

        from mmcache.cli.warm import importing  # noqa: PLC0415
        from mmcache.cli.warm.telling import PUBLISHED, Progress, summary  # noqa: PLC0415

        progress = Progress(*PUBLISHED)
        with summary(progress, f"from {directory}", config=config, as_json=json):
            importing.import_files(directory, settings, config=config, trusted=trust_lineage, progress=progress)
