"""What libraries log is for engines; a command says the same in its own words."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def only_errors_from(name: str) -> Iterator[None]:
    """Within the block, the logger `name` and those below it log errors alone."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
