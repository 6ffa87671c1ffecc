"""Where a file may be written; looked at before anything else is done, and without torch."""

from __future__ import annotations

import os
from pathlib import Path

from mmcache.cli.errors import InputError


def check_target(path: Path) -> Path:
    """Where a file is to be written, with links followed. Raises InputError for what could not be."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise InputError(f"--output {path}: is there, and not a file")
    if not target.parent.is_dir():
        raise InputError(f"--output {path}: the directory {target.parent} is not there")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"--output {path}: the directory {target.parent} cannot be written to")
    return target
